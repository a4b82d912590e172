"""Faults on demand: a script says which faults happen to a served engine, and when.

``kinds`` and ``script`` are data; ``choosing`` decides which fault happens now; ``answers``,
``stream_faults`` and ``engine_faults`` carry faults out on whole answers, streams and the engine.
They are connected to the server by its middleware and by one call in its streamed answers. The
manual is docs/faults.md.
"""

from aprilsched.testing.faults.script import Faults, FaultScript, Fired, faults_of, parse_faults

__all__ = ["FaultScript", "Faults", "Fired", "faults_of", "parse_faults"]
