"""What everything beside decoding took in a run, by its event log.

Each figure is a median over the whole run, so one slow refit or reward among many changes none.
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
    """Median seconds; 0 of what never happened.

    Attributes:
        train_seconds: from a delivery to what the trainer asks for next, an update or a batch.
        refit_seconds: from a refit to its last engine's answer, with the engines' flush and
            continue calls.
        pause_seconds: from a pause call to its answer, the step in progress included.
        reward_seconds: from a rollout (or a group) to its reward.
    """

    train_seconds: float
    refit_seconds: float
    pause_seconds: float
    reward_seconds: float


class CostsOfRun:
    """Takes the facts of a run in their order."""

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
        """The process that would have ended it did not live to see it."""
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
        """Of the facts so far."""
        refit = sum(spans.median() for spans in (self._flushes, self._refits, self._continues))
        return RecordedCosts(
            train_seconds=self._trainer.median(),
            refit_seconds=refit,
            pause_seconds=self._pauses.median(),
            reward_seconds=self._rewards.median(),
        )


class _Spans:
    """Seconds between begins and ends of the same key."""

    def __init__(self) -> None:
        self._since: dict[Hashable, float] = {}
        self._took: dict[Hashable, float] = {}
        """By key and begin."""

    def begin(self, key: Hashable, now: float) -> None:
        self._since.setdefault(key, now)

    def end(self, key: Hashable, now: float) -> None:
        """The first end of a key counts."""
        since = self._since.pop(key, None)
        if since is not None:
            self._took[key, since] = now - since

    def extend(self, key: Hashable, now: float) -> None:
        """The last end of a key counts: it began once, for several."""
        since = self._since.get(key)
        if since is not None:
            self._took[key, since] = now - since

    def forget_begun(self) -> None:
        self._since.clear()

    def median(self) -> float:
        return median(self._took.values()) if self._took else 0.0
