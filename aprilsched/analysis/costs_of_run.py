"""What everything beside decoding took in a run, by its event log.

Each figure is a median over the whole run, so one slow refit or reward among many changes none.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from statistics import median

from aprilsched.analysis.lines import Line

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
    """Takes the lines of a run in their order."""

    def __init__(self) -> None:
        self._trainer = _Spans()
        self._refits = _Spans()
        self._pauses = _Spans()
        self._flushes = _Spans()
        self._continues = _Spans()
        self._rewards = _Spans()

    def add(self, line: Line) -> None:
        """One more line."""
        match line.event or line.command:
            case "Resumed":
                self._forget_begun()
            case "Deliver" | "Redeliver":
                self._trainer.begin("", line.t)
            case "UpdateRequested" | "BatchRequested":
                self._trainer.end("", line.t)
            case "Pause":
                self._pauses.begin(line.engine, line.t)
            case "Paused":
                self._pauses.end(line.engine, line.t)
            case "Flush":
                self._flushes.begin(line.engine, line.t)
            case "Flushed":
                self._flushes.end(line.engine, line.t)
            case "Continue":
                self._continues.begin(line.engine, line.t)
            case "Continued":
                self._continues.end(line.engine, line.t)
            case _:
                self._add_work(line)

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

    def _add_work(self, line: Line) -> None:
        match line.event or line.command:
            case "Refit" if not line.catch_up:
                self._refits.begin(line.version, line.t)
            case "Refitted" if not line.catch_up:
                self._refits.extend(line.version, line.t)
            case "Score":
                self._rewards.begin(("rollout", line.rollout_id), line.t)
            case "Rewarded":
                self._rewards.end(("rollout", line.rollout_id), line.t)
            case "ScoreGroup":
                self._rewards.begin(("group", line.group_id), line.t)
            case "GroupRewarded":
                self._rewards.end(("group", line.group_id), line.t)
            case _:
                pass

    def costs(self) -> RecordedCosts:
        """Of the lines so far."""
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
