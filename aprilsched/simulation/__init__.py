"""Runs the production scheduler with modelled engines in virtual time.

It is the second shell around :mod:`aprilsched.core`. The coordinator uses asyncio and real
engines; this shell uses a heap of timed calls and
:class:`~aprilsched.engines.sim.batcher.Batcher` objects, and is a hundred times faster than a
virtual event loop.
"""

from aprilsched.simulation.simulation import Simulation, rare_collections
from aprilsched.simulation.trainer import Costs

__all__ = ["Costs", "Simulation", "rare_collections"]
