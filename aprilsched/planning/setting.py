"""The conditions in which schedules are tried out: groups of known lengths, and engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.core.policies.objective import Objective
from aprilsched.kernel.core.policies.schedule import Pace
from aprilsched.kernel.core.policies.stop import Groups, Stop
from aprilsched.kernel.values.capabilities import Reservation
from aprilsched.planning.step_times.model import StepTimeModel

Amount = TypeVar("Amount", float, NDArray[np.float64])


_UNTIL_A_STOP = Reservation(fixed_in_full=False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Setting:
    """Conditions that are the same for every candidate, so that only the schedules differ.

    Attributes:
        lengths: int64 [groups, largest group], response lengths in the order of launching; 0 where
            a smaller group has no member.
        batch_groups: number of groups in a batch, or its estimate at the start of the batch.
        stop: rule that decides when a batch is full; None for `batch_groups` groups.
        engines: number of equal engines.
        share: the run's engines per engine here, and the groups of its batches per group here.
        fleet: number of engines of the run; None for `engines`.
        model: step-time model of one engine.
        max_running: largest number of requests that one engine decodes together.
        kv_tokens: size of one engine's KV pool; None if unlimited. Requests that do not fit wait,
            or are preempted and recomputed.
        prompt_tokens: mean prompt length.
        spare_tokens: mean number of tokens between the end of a response and its limit.
        reservation: room that engines leave for tokens to come; None if they leave none.
        empties: whether a refit leaves the engines without requests (``straggler="abort"``).
        keeps_kv: whether a refit keeps the KV; otherwise every request in flight is recomputed.
        runs_out: whether every response in flight finishes before a refit, while no group is
            started (``straggler="run"``); otherwise a refit interrupts it.
        max_staleness: the user's bound; None without one. It also limits how many groups are
            outstanding (:meth:`~aprilsched.kernel.core.policies.staleness.Staleness.admissible`).
        restarts: whether an update discards the tokens of groups that would exceed the bound, and
            generates their prompts again.
        pace: whether generation continues while the trainer trains, for a schedule without its own
            pace.
        ready_batches: number of complete batches kept for a slow trainer, at which no new groups
            are started, on the asynchronous pace.
        train_seconds: mean training time of a batch, in seconds.
        train_spread: standard deviation of the training time, in seconds.
        refit_seconds: mean time from the trainer's request for an update until all engines have it,
            including the pause.
        siblings: number of siblings of a single sample; None if whole groups are delivered. Single
            samples are the groups of `stop`, `reward_times` and `accepted`.
        reward_times: equally likely times from the end of a group's last response until the group
            is accepted or rejected, in seconds; empty for none.
        accepted: a threshold of tokens per group, the accepted share of the groups up to it, and
            the accepted share of the longer groups.
        gaps: mean number of gaps between the turns of a response, which divide its tokens evenly.
            In a gap it occupies no slot of an engine; afterwards its context is prefilled again.
        gap_times: equally likely lengths of such a gap, in seconds.
        end_times: equally likely times from the last turn of a response until it is complete, in
            seconds.
        objective: the objective that schedules are compared by.
        iid_distance: distance of a randomly drawn batch from the distribution, from 0 to 1.
        remembered: share of the variance of the prompts' levels that earlier epochs explain.
        shared: share of the log lengths' variance that lies between groups.
        batches: number of batches that are counted.
        burn_in: number of uncounted batches before the counted ones (three times this number for a
            schedule that defers groups).
        takes_over: whether a pool starts with responses at different positions, like a pool that
            takes over from another schedule; otherwise every engine starts empty.
    """

    lengths: NDArray[np.int64]
    batch_groups: int
    model: StepTimeModel
    engines: int = 1
    share: float = 1.0
    fleet: int | None = None
    max_running: int = 512
    kv_tokens: int | None = None
    prompt_tokens: float = 0.0
    spare_tokens: float = 0.0
    reservation: Reservation | None = _UNTIL_A_STOP
    empties: bool = False
    keeps_kv: bool = False
    runs_out: bool = False
    max_staleness: int | None = None
    restarts: bool = False
    pace: Pace = "synchronous"
    ready_batches: int = 2
    train_seconds: float = 0.0
    train_spread: float = 0.0
    refit_seconds: float = 0.0
    siblings: int | None = None
    reward_times: tuple[float, ...] = ()
    accepted: tuple[float, float, float] = (0.0, 1.0, 1.0)
    gaps: float = 0.0
    gap_times: tuple[float, ...] = ()
    end_times: tuple[float, ...] = ()
    objective: Objective = field(default_factory=Objective)
    iid_distance: float = 0.0
    remembered: float = 0.0
    shared: float = 0.5
    batches: int = 24
    burn_in: int = 5
    stop: Stop | None = None
    takes_over: bool = False

    def prefill_of_divided(self, staleness: float) -> float:
        """Return the extra seconds of prefill in a step if groups are split over engines.

        `staleness` is the staleness of tokens, in versions. Trials prefill the prompt of each
        response, because they do not know whether engines have a prefix cache.
        """
        copies = min(self.fleet or self.engines, self.group_size) - 1
        times = 1.0 if self.keeps_kv else 1.0 + staleness
        tokens = copies * self.prompt_tokens * self.batch_groups * times
        return tokens / self.engines / self.model.prefill_rate

    def work(self, tokens: Amount) -> Amount:
        """Return T_bound of a response of `tokens` tokens on one engine, in seconds.

        For an array, return T_bound of each response.
        """
        each = self.model.token_seconds(self.max_running)
        return tokens * (each + self.model.read_seconds * (self.prompt_tokens + tokens / 2))

    @property
    def thinner(self) -> float:
        """Size of an engine of the run, divided by the size of an engine here."""
        return self.share * self.engines / (self.fleet or self.engines * self.share)

    @property
    def group_work(self) -> float:
        """Mean T_bound per accepted group on all engines, in seconds.

        It includes rejected groups, which are work too. Their share is the same for all schedules.
        """
        work = float(self.work(self.lengths.astype(np.float64)).sum()) / len(self.lengths)
        shares = self.shares_accepted[self._unit_tokens > 0]
        return work / self.engines / float(shares.mean())

    @property
    def units_of_group(self) -> float:
        """The number of units that a group is delivered in: 1, or its size for single samples."""
        return 1.0 if self.siblings is None else self.group_size

    @property
    def shares_accepted(self) -> NDArray[np.float64]:
        """The share that is accepted of units like each one, float64 [groups, units]."""
        tokens, short, long = self.accepted
        return np.where(self._unit_tokens <= tokens, short, long).astype(np.float64)

    @property
    def _unit_tokens(self) -> NDArray[np.int64]:
        """Tokens of each group, int64 [groups, 1]; for single samples those of each response."""
        return self.lengths if self.siblings is not None else self.lengths.sum(axis=1)[:, None]

    @property
    def full_at(self) -> Stop:
        """The rule that decides when a batch is full."""
        return self.stop or Groups(self.batch_groups)

    @property
    def group_size(self) -> float:
        """The mean number of rollouts in a group."""
        return int(np.count_nonzero(self.lengths)) / len(self.lengths)

    @property
    def usual_group(self) -> float:
        """What a usual group adds to a batch, in the units of that rule."""
        usual = self.full_at.usual_group(
            self.group_size, lambda: float(self.lengths.sum(axis=1).mean())
        )
        return 1.0 if usual is None else usual


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a schedule did, after the burn-in.

    Attributes:
        value: the objective: useful work in seconds of T_bound, for each second of whole steps
            (:class:`~aprilsched.kernel.core.policies.objective.Objective`).
        step_seconds: mean seconds of a step, without `trainer_seconds`.
        trainer_seconds: mean seconds of a step in which the engines wait by design for the
            trainer, which has the whole batch: all of its time for a whole batch on the synchronous
            pace.
        efficiency: T_bound / T, without that time, as in summary.json.
        off_policy_share: delivered tokens of an older version / delivered tokens.
        mean_staleness: mean number of versions by which a delivered token is older than the version
            that consumes it.
        distance: mean distance of a batch's lengths from the distribution, 0 to 1.
        too_stale_share: delivered tokens beyond the bound / delivered tokens.
        peak_kv: largest number of tokens in the KV pool of one engine.
    """

    value: float
    step_seconds: float
    trainer_seconds: float
    efficiency: float
    off_policy_share: float
    mean_staleness: float
    distance: float
    too_stale_share: float
    peak_kv: float
