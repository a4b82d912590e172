"""The asyncio shell around the core: it turns I/O into events and carries out commands."""

from aprilsched.kernel.shell.callbacks import Accept, GroupReward, Reward
from aprilsched.kernel.shell.episodes import Episode, Turn, TurnOutput
from aprilsched.kernel.shell.prompt_queue import PromptQueue
from aprilsched.kernel.shell.refits import RefitReport
from aprilsched.kernel.shell.rollouts import RolloutScheduler

__all__ = [
    "Accept",
    "Episode",
    "GroupReward",
    "PromptQueue",
    "RefitReport",
    "Reward",
    "RolloutScheduler",
    "Turn",
    "TurnOutput",
]
