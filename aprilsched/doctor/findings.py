"""The lines of the report, and the notes of the scenarios on which they are based."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from aprilsched.engines.sglang.probe import ServerFacts

Status: TypeAlias = Literal["pass", "warn", "fail"]

NEWER = "update SGLang to 0.5.21 or later"
NO_STRAGGLERS = 'use straggler="abort"'
"""What to do about a server that cannot keep stragglers through a pause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a check found, what that means, what the scheduler does about it, what you can do."""

    check: str
    status: Status
    seen: str
    meaning: str
    action: str
    to_do: str = ""
    """What the user can do about it; empty if there is nothing to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of a check; the table of checks has the rest of the line."""

    status: Status
    seen: str
    to_do: str = ""


def passed(seen: str) -> Verdict:
    """The server does what the scheduler needs, or the scheduler itself avoids the hazard."""
    return Verdict(status="pass", seen=seen)


def warned(seen: str, to_do: str = "") -> Verdict:
    """It depends on the server and was not tried, or the user should know about it."""
    return Verdict(status="warn", seen=seen, to_do=to_do)


def failed(seen: str, to_do: str) -> Verdict:
    """The scheduler cannot work with the server as intended, until the user has done `to_do`."""
    return Verdict(status="fail", seen=seen, to_do=to_do)


@dataclass(slots=True)
class PauseNotes:
    """Notes on one pause with a stream of ours in it; None means that it was not observed."""

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
    """Whether another stream, aborted during the pause, ended before the continue."""
    abort_finish: str | None = None
    abort_tokens: int | None = None
    """Number of tokens that arrived from that stream after its abort."""


@dataclass(slots=True)
class Notes:
    """Everything that was seen on one server, in the order of the scenarios."""

    facts: ServerFacts
    version: tuple[int, int, int]
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """The content of /server_info."""
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    paths: frozenset[str] = frozenset()
    paused_before: bool = False
    others: int | None = None
    """Number of others' requests at the start; None where the server does not report it."""
    health_status: int | None = None
    whole: dict[str, Any] | None = None
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    cached: list[int] = field(default_factory=list[int])
    """Number of cached tokens of one prompt: under a cache key, under it again, under another."""
    aborted: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    abort_seconds: float | None = None
    unknown_abort_status: int | None = None
    duplicate_status: int | None = None
    left_seconds: float | None = None
    """Seconds until a request whose client disconnected had left the server."""
    retract: PauseNotes = field(default_factory=PauseNotes)
    in_place: PauseNotes = field(default_factory=PauseNotes)
    trouble: dict[str, str] = field(default_factory=dict[str, str])
    """The reason why a scenario broke off, by the scenario's name."""
    label_after: str | None = None
    paused_after: bool | None = None
    running_after: int | None = None

    @property
    def simulated(self) -> bool:
        """Whether the server says that it is a simulated engine."""
        return bool(self.info.get("simulated", False))


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the table of checks: `judge` gives the result, the rest is constant."""

    name: str
    judge: Callable[[Notes], Verdict]
    meaning: str
    action: str

    def finding(self, notes: Notes) -> Finding:
        """The line of the report."""
        try:
            verdict = self.judge(notes)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            verdict = failed(
                f"its answers do not have SGLang's form ({type(error).__name__}: {error})", NEWER
            )
        return Finding(
            check=self.name,
            status=verdict.status,
            seen=verdict.seen,
            meaning=self.meaning,
            action=self.action,
            to_do=verdict.to_do,
        )


def left_out(notes: Notes, scenario: str, why: str = "") -> Verdict:
    """The result of a check whose scenario did not complete."""
    if why:
        return warned(f"left out: {why}")
    if notes.paused_before:
        return warned("left out: somebody else has paused the server")
    if scenario in notes.trouble:
        return failed(
            f"the probe {notes.trouble[scenario]}", "look at its log, and examine it again"
        )
    return warned("left out: the probe saw nothing")


def never_met(_: Notes) -> Verdict:
    """The result for a hazard that the scheduler never causes, on whatever server."""
    return passed("not tried: the scheduler never causes it")


def not_tried(_: Notes) -> Verdict:
    """The result for a hazard that depends on the server and was not tried."""
    return warned("not tried: every release up to 0.5.23 is known to have it")
