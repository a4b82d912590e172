"""Phases that the whole fleet is in: an update of the policy version, a sleep, an outage."""

from __future__ import annotations

from dataclasses import dataclass, field

from aprilsched.core.state.engine_control import CUDA_GRAPH, WEIGHTS

__all__ = ["Answer", "Outage", "Sleep", "Update"]


@dataclass(slots=True, kw_only=True)
class Sleep:
    """From the trainer's wish to sleep until every engine has its memory back.

    `quiet` once the engines may be paused; `asleep` once the trainer was told that the memory is
    its own; `waking` once it gave it back.
    """

    tags: frozenset[str]
    inside: bool
    """Stragglers stay inside the paused engines."""
    may_pause: bool = False
    asleep: bool = False
    waking: bool = False

    @property
    def away(self) -> frozenset[str]:
        """What should be released now."""
        return self.tags if self.may_pause and not self.waking else frozenset()

    @property
    def away_in_refit(self) -> frozenset[str]:
        """The same while weights are loaded: they and what is captured of them are awake."""
        return self.away - {WEIGHTS, CUDA_GRAPH}


Answer = tuple[int | None, str]
"""The version an engine says it has, None if its weights are torn, and the cause of a failure."""


@dataclass(slots=True, kw_only=True)
class Update:
    """`quiet` once the engines may be paused for the refit; `answers` has one for each engine
    that was asked and has answered, or is lost."""

    version: int
    beside: bool = False
    """An adapter, loaded beside what runs: nothing is paused."""
    republishable: bool = False
    acknowledges: tuple[int, ...] = ()
    """Batches that the trainer has made the version from."""
    may_pause: bool = False
    refitting: frozenset[str] = frozenset()
    answers: dict[str, Answer] = field(default_factory=dict[str, Answer])

    @property
    def answered(self) -> bool:
        """Every engine that was asked has answered or is lost."""
        return bool(self.refitting) and self.refitting <= self.answers.keys()

    def took(self) -> frozenset[str]:
        """Engines that have the version."""
        return frozenset(
            engine
            for engine, (version, cause) in self.answers.items()
            if version == self.version and not cause
        )

    def failed(self) -> tuple[tuple[str, str], ...]:
        """Engines that do not have it, and why."""
        took = self.took()
        return tuple(
            (engine, cause or f"says it has version {version} after the refit to {self.version}")
            for engine, (version, cause) in self.answers.items()
            if engine not in took
        )


@dataclass(slots=True)
class Outage:
    """`since`: when no engine at all was there for the first time in it; None if some stand by.

    `said_at`: when that was said last. `given_up`: the trainer was told that the fleet is lost.
    """

    since: float | None = None
    said_at: float | None = None
    given_up: bool = False
