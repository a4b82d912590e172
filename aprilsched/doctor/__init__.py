"""Probes of a live SGLang server: what it can do, and which known hazards it has.

A check asks for experiments on the server and judges what they show. An experiment starts only
short generations of its own, is bounded in time, and pauses a server only while no request of
others is on it. An action that kills or changes a server is never tried: what the server says of
itself is judged, and hazards that only a trial would show have no line.
"""

from aprilsched.doctor.checks import examine
from aprilsched.doctor.findings import Finding, Status

__all__ = ["Finding", "Status", "examine"]
