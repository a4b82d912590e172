"""Faults on demand: a script says which faults happen to a served engine, and when.

``kinds`` has what each fault is and does; ``script`` reads a script and decides which fault happens
now; ``middleware`` carries it out. They are connected to the server by the middleware and by one
call in its streamed answers. The manual is docs/faults.md.
"""

from aprilsched.testing.faults.script import Faults, FaultScript, Fired, faults_of, parse_faults

__all__ = ["FaultScript", "Faults", "Fired", "faults_of", "parse_faults"]
