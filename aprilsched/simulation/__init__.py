"""The production scheduler against modelled engines, on a heap of virtual time.

The second shell around :mod:`aprilsched.core`: what the coordinator does on asyncio with real
engines is done here on a heap with :class:`~aprilsched.engines.sim.batcher.Batcher` objects, a
hundred times faster than on a virtual event loop.
"""

from aprilsched.simulation.simulation import Simulation, rare_collections
from aprilsched.simulation.trainer import Costs

__all__ = ["Costs", "Simulation", "rare_collections"]
