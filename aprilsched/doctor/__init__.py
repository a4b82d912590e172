"""Probes of a live SGLang server: what it can do, and which of its hazards are there.

Scenarios act on the server and note what was seen; checks are pure functions over these notes. A
scenario starts only short generations of its own, is bounded in time, and pauses a server only
while nobody else's request is on it. What kills or changes a server is never tried: it is reported
from the version, the arguments or the schema. What is not tried passes only where the scheduler
keeps it from a run on every server; where it depends on the server, it warns.
"""

from aprilsched.doctor.examine import examine
from aprilsched.doctor.findings import Finding, Status

__all__ = ["Finding", "Status", "examine"]
