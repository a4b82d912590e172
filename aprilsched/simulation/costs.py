"""What everything beside decoding and prefill costs in a simulation, in modelled seconds."""

from __future__ import annotations

from dataclasses import dataclass

from aprilsched.errors import ConfigError

__all__ = ["Costs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Latencies of the parts that are not engines.

    Attributes:
        pause_seconds: of a pause beyond the step in progress (SGLang, measured: 2 to 22 ms with
            that step).
        refit_seconds: of bringing one version into the engines, which all load it together.
        train_seconds: of the trainer, between a batch and the update that follows it.
        reward_seconds: of scoring one rollout; 0 is no reward at all.

    Raises:
        ConfigError: if one is negative.
    """

    pause_seconds: float = 2e-3
    refit_seconds: float = 0.0
    train_seconds: float = 0.0
    reward_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("pause_seconds", "refit_seconds", "train_seconds", "reward_seconds"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is a time; give 0 or more.")
