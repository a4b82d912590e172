"""SGLang servers and the scheduler as Ray actors, for trainers that run on Ray (extra ``ray``).

- :func:`start_scheduler` starts a scheduler as a named actor. A trainer on any node uses it by
  that name: :class:`ActorScheduler` if the trainer is asyncio code, :class:`RolloutScheduler` if
  it is not.
- :class:`SGLangServers` starts SGLang servers as actors, on GPUs of their own.
- :class:`RayFleet` is a fleet of the SGLang servers of any Ray actors.
- :class:`FromTrainer` runs a publisher in the trainer's process, where the tensors are.

Invariant: the death of any actor, and of the trainer, loses no rollout and delivers none twice, if
the scheduler has a store.
"""

from aprilsched.fronts.ray.fleet import RayFleet
from aprilsched.fronts.ray.scheduler import (
    ActorScheduler,
    RolloutScheduler,
    start_scheduler,
    stop_scheduler,
)
from aprilsched.fronts.ray.servers import SGLangServers
from aprilsched.kernel.weights.from_trainer import FromTrainer

__all__ = [
    "ActorScheduler",
    "FromTrainer",
    "RayFleet",
    "RolloutScheduler",
    "SGLangServers",
    "start_scheduler",
    "stop_scheduler",
]
