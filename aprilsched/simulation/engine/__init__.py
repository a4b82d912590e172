"""The embedded engine: SGLang's scheduling on a fitted time model, with a toy language model.

``toy_model`` and ``batcher`` are pure and synchronous; ``sim_engine`` runs them on an asyncio loop.
"""

from aprilsched.planning.step_times.model import H200_QWEN3_4B, StepTimeModel
from aprilsched.simulation.engine.batcher import Batcher
from aprilsched.simulation.engine.clock import run_virtual
from aprilsched.simulation.engine.fleet import SimFleet
from aprilsched.simulation.engine.publisher import SimPublisher
from aprilsched.simulation.engine.settings import Counters, SimConfig
from aprilsched.simulation.engine.sim_engine import SimEngine

__all__ = [
    "H200_QWEN3_4B",
    "Batcher",
    "Counters",
    "SimConfig",
    "SimEngine",
    "SimFleet",
    "SimPublisher",
    "StepTimeModel",
    "run_virtual",
]
