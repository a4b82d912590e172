"""What a schedule is tried out on: groups of known lengths, and the engines they run on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.policies.stop import Groups, Stop
from aprilsched.timing.model import StepTimeModel

__all__ = ["Outcome", "Setting"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Setting:
    """The same for every candidate, so that differences are the schedules' own.

    Attributes:
        lengths: int64 [groups, group_size], response lengths in the order of launching.
        batch_groups: groups that a batch takes, as far as is known when it begins.
        stop: when it is full; None: with so many groups.
        engines: equal engines that share the work evenly.
        model: the time of one.
        max_running: most requests that one decodes together.
        kv_tokens: KV pool of one; None: unlimited. What does not fit waits, or is preempted and
            prefilled again.
        prompt_tokens: mean prompt length.
        keeps_kv: a refit keeps the KV; otherwise everything in flight is prefilled again.
        max_staleness: the user's bound; None: none.
        shared: the share of the log lengths' variance that lies between groups.
        batches: how many are counted, after `burn_in` ones that are not (three times as many
            for a schedule with a store).
    """

    lengths: NDArray[np.int64]
    batch_groups: int
    model: StepTimeModel
    engines: int = 1
    max_running: int = 512
    kv_tokens: int | None = None
    prompt_tokens: float = 0.0
    keeps_kv: bool = False
    max_staleness: int | None = None
    shared: float = 0.5
    batches: int = 24
    burn_in: int = 5
    stop: Stop | None = None

    @property
    def full_at(self) -> Stop:
        """When a batch is full."""
        return self.stop or Groups(self.batch_groups)

    @property
    def usual_group(self) -> float:
        """What a group counts towards that."""
        usual = self.full_at.usual_group(
            self.lengths.shape[1], lambda: float(self.lengths.sum(axis=1).mean())
        )
        return 1.0 if usual is None else usual


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a schedule did, after the burn-in.

    Attributes:
        efficiency: T_bound / T.
        off_policy_share: delivered tokens of an older version / delivered tokens.
        too_stale_share: those beyond the bound / delivered tokens.
        peak_kv: the most tokens in the KV pool of one engine.
    """

    efficiency: float
    off_policy_share: float
    too_stale_share: float
    peak_kv: float
