"""Simulates runs in virtual time: the production scheduler, with modelled engines and a modelled
trainer.

.. code-block:: python

    from aprilsched import LongTailWorkload, SchedulerConfig
    from aprilsched.simulation import compare, simulate

    workload = LongTailWorkload(median=700, sigma=0.9, cap=6000)
    april = SchedulerConfig(batch_groups=32, group_size=8, over_provision=2.0)
    result = simulate(workload, april, engines=2, seed=1)
    print(result.summary.steady_state.delivered_tokens_per_s)
"""

from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.frontier import frontier
from aprilsched.simulation.modelled_trainer import Costs
from aprilsched.simulation.results import SimulationResult, simulate
from aprilsched.simulation.side_by_side import Comparison, PolicyRow, compare
from aprilsched.simulation.virtual import NEVER, Simulation, rare_collections

__all__ = [
    "NEVER",
    "Comparison",
    "Costs",
    "PolicyRow",
    "SimConfig",
    "Simulation",
    "SimulationResult",
    "compare",
    "frontier",
    "rare_collections",
    "simulate",
]
