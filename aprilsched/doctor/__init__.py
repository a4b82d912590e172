"""Probes of a live SGLang server: what it can do, and which known hazards it has.

A check asks for experiments on the server and judges what they show. An experiment starts only
short generations of its own, is bounded in time, and pauses a server only while no request of
others is on it. An action that kills or changes a server is never tried: its line is derived from
the version, the arguments or the schema. A line that is not tried passes only if the scheduler
avoids the hazard on every server; if it depends on the server, it warns.
"""

from aprilsched.doctor.checks import examine
from aprilsched.doctor.findings import Finding, Status

__all__ = ["Finding", "Status", "examine"]
