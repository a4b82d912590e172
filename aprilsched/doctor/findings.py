"""One line of the report, and what the scenarios noted for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from aprilsched.engines.sglang.probe import ServerFacts

__all__ = [
    "Check",
    "Finding",
    "Notes",
    "PauseNotes",
    "Status",
    "Verdict",
    "failed",
    "left_out",
    "never_met",
    "not_tried",
    "passed",
    "warned",
]

Status: TypeAlias = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a check found, what that means, and what the scheduler does about it."""

    check: str
    status: Status
    seen: str
    meaning: str
    action: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a check says; the table knows the rest."""

    status: Status
    seen: str


def passed(seen: str) -> Verdict:
    """As the scheduler wants it, or kept from a run by the scheduler alone."""
    return Verdict(status="pass", seen=seen)


def warned(seen: str) -> Verdict:
    """Not tried though it depends on the server, or to be known about."""
    return Verdict(status="warn", seen=seen)


def failed(seen: str) -> Verdict:
    """The scheduler cannot work with it as it is meant to."""
    return Verdict(status="fail", seen=seen)


@dataclass(slots=True)
class PauseNotes:
    """One pause with a stream of ours in it; None: it did not come to that."""

    why_not: str | None = None
    pause_seconds: float | None = None
    tokens_during: int | None = None
    ended_during: bool | None = None
    ready_status: int | None = None
    running_told: int | None = None
    flush_status: int | None = None
    held_silent: bool | None = None
    held_completed: bool | None = None
    finish: str | None = None
    same_tokens: bool | None = None
    abort_ended_during: bool | None = None
    """Whether another stream, aborted in the pause, ended before continue."""
    abort_finish: str | None = None
    abort_tokens: int | None = None
    """Tokens that the aborted stream still gave."""


@dataclass(slots=True)
class Notes:
    """Everything seen on one server, in the order of the scenarios."""

    facts: ServerFacts
    version: tuple[int, int, int]
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """What /server_info tells."""
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    paths: frozenset[str] = frozenset()
    paused_before: bool = False
    others: int | None = None
    """Requests of others when it began; None where the server does not tell."""
    health_status: int | None = None
    whole: dict[str, Any] | None = None
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    cached: list[int] = field(default_factory=list[int])
    """Cached tokens of one prompt under one cache key, the same again, and another."""
    aborted: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    abort_seconds: float | None = None
    unknown_abort_status: int | None = None
    duplicate_status: int | None = None
    left_seconds: float | None = None
    """Until a request whose client hung up was off the server."""
    retract: PauseNotes = field(default_factory=PauseNotes)
    in_place: PauseNotes = field(default_factory=PauseNotes)
    trouble: dict[str, str] = field(default_factory=dict[str, str])
    """What broke a scenario off, by its name."""
    label_after: str | None = None
    paused_after: bool | None = None
    running_after: int | None = None

    @property
    def simulated(self) -> bool:
        """Whether it says that it is an embedded engine."""
        return bool(self.info.get("simulated", False))


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the table of checks: `judge` says what was seen, the rest is always so."""

    name: str
    judge: Callable[[Notes], Verdict]
    meaning: str
    action: str

    def finding(self, notes: Notes) -> Finding:
        """The line of the report."""
        verdict = self.judge(notes)
        return Finding(
            check=self.name,
            status=verdict.status,
            seen=verdict.seen,
            meaning=self.meaning,
            action=self.action,
        )


def left_out(notes: Notes, scenario: str, why: str = "") -> Verdict:
    """For a check whose scenario did not come to its end."""
    if why:
        return warned(f"left out: {why}")
    if notes.paused_before:
        return warned("left out: somebody else has paused the server")
    if scenario in notes.trouble:
        return failed(f"the probe {notes.trouble[scenario]}")
    return warned("left out: the probe saw nothing")


def never_met(_: Notes) -> Verdict:
    """For a hazard that no server can bring into a run: the scheduler never does what causes it."""
    return passed("not tried: the scheduler never brings it about")


def not_tried(_: Notes) -> Verdict:
    """For a hazard that depends on the server."""
    return warned("not tried: known of every release up to 0.5.23")
