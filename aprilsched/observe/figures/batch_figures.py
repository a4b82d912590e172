"""Counts and times batches as they are delivered; their figures are in :mod:`.figures`.

:class:`BatchMeter` is the listener that calls :func:`measure` at each delivery. Its memory does not
grow with the length of the run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.facts import DeliveredRollout
from aprilsched.kernel.core.policies.schedule import Forecast
from aprilsched.kernel.shell.listener import DispatchingListener
from aprilsched.observe.figures.figures import (
    ForecastFigures,
    Mean,
    Measured,
    TokenStaleness,
    divided,
    mean_of,
)
from aprilsched.observe.figures.rollout_time import ROLLOUT_PARTS, RolloutClock, RolloutTime
from aprilsched.types import NO_VERSION


def staleness_of(rollout: DeliveredRollout, version: int) -> TokenStaleness:
    """Return the staleness of a rollout's tokens if the policy `version` is trained on it.

    It is exact, although single tokens are not inspected: a rollout of thousands of tokens
    consists of a few segments with one version each.
    """
    sampled = off_policy = total = oldest = oldest_trained = 0
    # All tokens older than some version are masked, so subtract from the oldest segments first.
    masked = rollout.masked
    segments = sorted(rollout.segments, key=_version) if masked else rollout.segments
    for start, end, sampled_under, _ in segments:
        if sampled_under == NO_VERSION:
            continue
        tokens = end - start
        sampled += tokens
        is_masked = 0 < tokens <= masked
        if is_masked:
            masked -= tokens
        # Another client may load a version newer than the trainer's. Tokens sampled under it have
        # staleness 0, not a negative one.
        staleness = max(0, version - sampled_under)
        total += staleness * tokens
        off_policy += tokens if sampled_under != version else 0
        if staleness > 0:
            oldest = max(oldest, staleness)
            if staleness > oldest_trained and not is_masked:
                oldest_trained = staleness
    return TokenStaleness(sampled, off_policy, total, oldest, oldest_trained, rollout.masked)


def sampled_tokens(rollout: DeliveredRollout) -> int:
    """Return the number of tokens of the response that a policy sampled."""
    return sum([end - start for start, end, version, _ in rollout.segments if version >= 0])


def _version(segment: tuple[int, int, int, str | None]) -> int:
    return segment[2]


Bound = Callable[[Sequence[int], Sequence[int]], float]
"""Prompt lengths and response lengths to T_bound of the whole fleet, in seconds."""

_PART_NAMES = 100
RECENT_BATCHES = 20
"""Number of latest batches in displayed figures: enough to smooth single batches, and few enough to
follow a change."""


def measure(
    batch: of.BatchDelivered,
    *,
    seconds: float,
    trainer_seconds: float,
    bound: Bound | None,
    parts: set[str] | None = None,
    forecast: Forecast | None = None,
    schedule: str = "",
    clocks: Sequence[RolloutClock | None],
) -> Measured:
    """Measure a batch that took `seconds`, with its `forecast` and its `schedule` in words.

    `clocks` are the clocks of its rollouts. `parts` contains the names of the reward parts counted
    so far; new names of this batch are added to it, up to 100 in total.
    """
    rollouts = batch.rollouts
    staleness = np.array(
        [staleness_of(rollout, batch.version) for rollout in rollouts], dtype=np.int64
    )
    lengths = [rollout.tokens for rollout in rollouts]
    prompts = [rollout.prompt_tokens for rollout in rollouts]
    most = TokenStaleness(*staleness.max(axis=0).tolist())
    sums = TokenStaleness(*staleness.sum(axis=0).tolist())._replace(
        oldest=most.oldest, oldest_trained=most.oldest_trained
    )
    outcome = None
    if forecast is not None:
        outcome = ForecastFigures(
            seconds=seconds,
            seconds_forecast=forecast.step_seconds,
            efficiency=divided(forecast.bound_seconds(prompts, lengths), seconds),
            efficiency_forecast=forecast.efficiency,
            off_policy_token_share=divided(sums.off_policy, sums.sampled) or 0.0,
            off_policy_token_share_forecast=forecast.off_policy_share,
            schedule=schedule,
        )
    return Measured(
        index=batch.batch,
        version=batch.version,
        seconds=seconds,
        trainer_seconds=trainer_seconds,
        groups=len({rollout.group_id for rollout in rollouts}),
        lengths=np.array(lengths, dtype=np.int64),
        staleness=staleness,
        sums=sums,
        t_bound=None if bound is None else bound(prompts, lengths),
        distance=batch.distance,
        iid_distance=batch.iid_distance,
        rewards=_reward_means(rollouts, set() if parts is None else parts),
        forecast=outcome,
        rollout_seconds={
            part: math.fsum([clock.seconds[part] for clock in clocks if clock is not None])
            for part in ROLLOUT_PARTS
        },
        turns=[
            rollout.turns
            for rollout, clock in zip(rollouts, clocks, strict=True)
            if clock is not None and clock.episode
        ],
        sessions=[clock.session for clock in clocks if clock is not None and clock.session],
    )


def _reward_means(
    rollouts: Sequence[of.DeliveredRollout], parts: set[str]
) -> dict[str | None, Mean]:
    found: dict[str | None, list[Mean]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            found.setdefault(None, []).append((1, rollout.reward))
        for name, value in rollout.reward_parts.items():
            # Otherwise names that differ between prompts would use unbounded memory.
            if name in parts or len(parts) < _PART_NAMES:
                parts.add(name)
                found.setdefault(name, []).append((1, value))
    return {name: mean_of(values) for name, values in found.items()}


class BatchTime(DispatchingListener):
    """Measures the time of each batch, without the time in which the engines are paused because the
    trainer trains (synchronous pace): the schedule is not charged for it.

    Attributes:
        seconds: time of the latest delivered batch, without the trainer's time.
        of_trainer: the trainer's time before that batch.
        trainer_seconds: the trainer's time, over all batches.
        delivered_at: when that batch was delivered; the start of the run before the first batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = self.of_trainer = self.trainer_seconds = self.delivered_at = 0.0
        self._trainer_waits = False
        self._began = False
        self._trainer = 0.0
        """Seconds of the trainer since the last delivery."""
        self._idle_since: float | None = None
        """Time since which the trainer has the latest batch and nothing else happens, or None."""
        self._handlers = {
            of.RunOpened: self._opened,
            of.BatchRequested: lambda _: self._stop_idling(),
            of.UpdateBegun: lambda _: self._stop_idling(),
            of.UpdateFinished: self._idle,
            of.BatchDelivered: self._delivered,
            of.ScheduleChanged: self._schedule_changed,
        }

    def _opened(self, fact: of.RunOpened) -> None:
        if self._began:
            self._stop_idling()
        else:
            self._began = True
            self.delivered_at = self._now
        self._trainer_waits = fact.pace == "synchronous"
        self._idle_since = self._now

    def _idle(self, _: of.UpdateFinished) -> None:
        self._idle_since = self._now

    def _delivered(self, fact: of.BatchDelivered) -> None:
        self._idle_since = self._now
        if not fact.again:
            self.seconds = self._now - self.delivered_at - self._trainer
            self.of_trainer, self._trainer = self._trainer, 0.0
            self.delivered_at = self._now

    def _schedule_changed(self, fact: of.ScheduleChanged) -> None:
        if fact.pace is not None:
            idle = self._idle_since is not None
            self._stop_idling()
            self._trainer_waits = fact.pace == "synchronous"
            self._idle_since = self._now if idle else None

    def _stop_idling(self) -> None:
        if self._idle_since is not None and self._trainer_waits:
            self._trainer += self._now - self._idle_since
            self.trainer_seconds += self._now - self._idle_since
        self._idle_since = None


class BatchMeter(RolloutTime):
    """Listens to a run and measures each batch.

    Args:
        bound: returns T_bound of a batch in seconds; None without a step-time model.

    Attributes:
        recent: the latest delivered batches.
        time: the time of the batches.
    """

    def __init__(self, *, bound: Bound | None = None) -> None:
        super().__init__()
        self.recent: deque[Measured] = deque(maxlen=RECENT_BATCHES)
        self.time = BatchTime()
        self._bound = bound
        self._parts: set[str] = set()
        """Names of the counted reward parts."""
        self._schedule = of.ScheduleChanged(schedule="")
        """The schedule in force."""
        self._expected = self._schedule
        """The schedule in force at the start of the current batch."""
        self._handlers |= dict.fromkeys(self.time.kinds, self._timed) | {
            of.RunOpened: self._opened,
            of.BatchDelivered: self._delivered,
            of.ScheduleChanged: self._schedule_changed,
        }

    @property
    def latest(self) -> Measured | None:
        """The latest delivered batch; None before the first."""
        return self.recent[-1] if self.recent else None

    def _timed(self, fact: of.Fact) -> None:
        self.time.hear(fact, self._now)

    def _delivered(self, fact: of.BatchDelivered) -> None:
        self._timed(fact)
        if fact.again:
            return
        measured = measure(
            fact,
            seconds=self.time.seconds,
            trainer_seconds=self.time.of_trainer,
            bound=self._bound,
            parts=self._parts,
            forecast=self._expected.forecast,
            schedule=self._expected.schedule,
            clocks=self.take(fact.rollouts, self._now),
        )
        self._expected = self._schedule
        self.recent.append(measured)

    def _schedule_changed(self, fact: of.ScheduleChanged) -> None:
        self._schedule = fact
        if self.recent and self._now == self.time.delivered_at:
            # It was chosen at the end of the previous batch, and no time has passed.
            self._expected = fact
        self._timed(fact)

    def _opened(self, fact: of.RunOpened) -> None:
        super()._opened(fact)
        # The prior run's forecast for the current batch did not account for its own end.
        self._expected = of.ScheduleChanged(schedule="")
        self._timed(fact)
