"""The asyncio shell around the core: it turns I/O into events and carries out commands."""

from aprilsched.coordinator.episodes import Episode, Turn, TurnOutput
from aprilsched.coordinator.live_bias import BiasNow
from aprilsched.coordinator.prompts import PromptQueue
from aprilsched.coordinator.refits import RefitReport
from aprilsched.coordinator.rollouts import RolloutScheduler
from aprilsched.driver.callbacks import Accept, GroupReward, Reward

__all__ = [
    "Accept",
    "BiasNow",
    "Episode",
    "GroupReward",
    "PromptQueue",
    "RefitReport",
    "Reward",
    "RolloutScheduler",
    "Turn",
    "TurnOutput",
]
