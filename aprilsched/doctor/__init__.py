"""Probes of a live SGLang server: what it can do, and which known hazards it has.

Scenarios act on the server and note what they saw; checks are pure functions over these notes. A
scenario starts only short generations of its own, is bounded in time, and pauses a server only
while no request of others is on it. An action that kills or changes a server is never tried: its
line is derived from the version, the arguments or the schema. A line that is not tried passes only
if the scheduler avoids the hazard on every server; if it depends on the server, it warns.
"""

from aprilsched.doctor.checks import Finding, Status
from aprilsched.doctor.scenarios import examine

__all__ = ["Finding", "Status", "examine"]
