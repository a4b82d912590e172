"""Measures the costs of a run besides decoding, from its event log.

Each figure is a median over the whole run, so one slow refit or reward among many does not change
it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median

from aprilsched.core.messages import facts as of
from aprilsched.core.messages.facts import Fact

__all__ = ["CostsOfRun", "RecordedCosts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCosts:
    """Median seconds of each kind of work; 0 for work that never happened.

    Attributes:
        train_seconds: from a delivery to the next request of the trainer, an update or a batch.
        refit_seconds: from the begin of a refit to the last engine's answer, with the flush and
            continue calls of the engines.
        pause_seconds: from a pause call to its answer, which includes the step in progress.
        reward_seconds: from the request for a reward of a rollout (or a group) to the reward.
    """

    train_seconds: float
    refit_seconds: float
    pause_seconds: float
    reward_seconds: float


class CostsOfRun:
    """Takes the facts of a run in order."""

    def __init__(self) -> None:
        self._trainer = _Spans()
        self._refits = _Spans()
        self._pauses = _Spans()
        self._flushes = _Spans()
        self._continues = _Spans()
        self._rewards = _Spans()

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            self._take(fact, now)

    def _take(self, fact: Fact, now: float) -> None:
        match fact:
            case of.RunOpened():
                self._forget_begun()
            case of.BatchDelivered():
                self._trainer.begin("", now)
            case of.UpdateBegun() | of.BatchRequested():
                self._trainer.end("", now)
            case of.EngineModeChanged():
                self._change_mode(fact, now)
            case of.RefitBegun(catch_up=False):
                self._refits.begin(fact.version, now)
            case of.EngineRefitted(catch_up=False):
                self._refits.extend(fact.version, now)
            case of.RewardRequested(rollout_id=None):
                self._rewards.begin(("group", fact.group_id), now)
            case of.RewardRequested():
                self._rewards.begin(("rollout", fact.rollout_id), now)
            case of.RolloutScored():
                self._rewards.end(("rollout", fact.rollout_id), now)
                self._rewards.end(("group", fact.group_id), now)
            case _:
                pass

    def _change_mode(self, fact: of.EngineModeChanged, now: float) -> None:
        calls = {"pausing": self._pauses, "flushing": self._flushes, "continuing": self._continues}
        if fact.start in calls:
            calls[fact.start].end(fact.engine, now)
        if fact.finish in calls:
            calls[fact.finish].begin(fact.engine, now)

    def _forget_begun(self) -> None:
        """Forget what had begun, because the process that would have ended it was killed."""
        kinds = (
            self._trainer,
            self._refits,
            self._pauses,
            self._flushes,
            self._continues,
            self._rewards,
        )
        for spans in kinds:
            spans.forget_begun()

    def costs(self) -> RecordedCosts:
        """The costs according to the facts so far."""
        refit = sum(spans.median() for spans in (self._flushes, self._refits, self._continues))
        return RecordedCosts(
            train_seconds=self._trainer.median(),
            refit_seconds=refit,
            pause_seconds=self._pauses.median(),
            reward_seconds=self._rewards.median(),
        )


class _Spans:
    """Measures the seconds from the begin to the end of each key."""

    def __init__(self) -> None:
        self._since: dict[Hashable, float] = {}
        self._took: dict[Hashable, float] = {}
        """Seconds by key and time of the begin."""

    def begin(self, key: Hashable, now: float) -> None:
        self._since.setdefault(key, now)

    def end(self, key: Hashable, now: float) -> None:
        """Take the end of a key; only the first one counts."""
        since = self._since.pop(key, None)
        if since is not None:
            self._took[key, since] = now - since

    def extend(self, key: Hashable, now: float) -> None:
        """Take an end of a key that began once for several ends; the last one counts."""
        since = self._since.get(key)
        if since is not None:
            self._took[key, since] = now - since

    def forget_begun(self) -> None:
        self._since.clear()

    def median(self) -> float:
        return median(self._took.values()) if self._took else 0.0
