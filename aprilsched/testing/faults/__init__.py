"""Faults on demand: what a script says goes wrong with a served engine goes wrong with it.

From the script to the wire: kinds and script (data), choosing (which fault now), and then one
module for each place where a fault is carried out: whole answers, streams, the engine. They meet
the server in its middleware and in one call in its streamed answers. docs/faults.md is the manual.
"""

from aprilsched.testing.faults.choosing import Faults, Fired
from aprilsched.testing.faults.script import FaultScript, faults_of, parse_faults

__all__ = ["FaultScript", "Faults", "Fired", "faults_of", "parse_faults"]
