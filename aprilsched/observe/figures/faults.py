"""The faults of a run and the reactions to them, for the live view and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.shell.listener import DispatchingListener


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultEvent:
    """An event of an engine, or of the fleet if `engine` is empty."""

    time: float
    engine: str
    what: str
    cause: str

    @property
    def text(self) -> str:
        """The event in one line."""
        what = f"{self.engine} {self.what}".strip()
        return f"{what}: {self.cause}" if self.cause else what


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """Rollouts that were dropped for the same reason and cause."""

    reason: str
    cause: str
    rollouts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """Attempts that failed for the same cause, whether or not they were retried."""

    cause: str
    attempts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultLedger:
    """Faults, and the reactions to them. Lists contain the most frequent or first entries; counts
    include all."""

    events: list[FaultEvent]
    events_in_all: int
    engines_lost: int
    engines_admitted: int
    resumed: int
    """Number of times that another process resumed the run."""
    failed_attempts: int
    retries: list[Retry]
    dropped_rollouts: int
    drops: list[Drop]


_SHOWN = 40
_CAUSE = 240
"""Largest number of characters of a cause, because a server's message may be a page long."""
_MAX_CAUSES = 1000
"""Number of causes after which new ones are counted together, so that memory stays bounded."""
_OTHERS = "other causes"
_FAILED = frozenset({Reason.REWARD_FAILED, Reason.EPISODE_FAILED, Reason.MEMBER_LOST})
"""Reasons of drops that are failures; the others are decisions of a schedule or of the user."""


class Faults(DispatchingListener):
    """A listener that collects faults; :meth:`ledger` returns them.

    Attributes:
        latest: the latest event or failed group; None before the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.latest: FaultEvent | None = None
        self._events: list[FaultEvent] = []
        self._in_all = 0
        self._lost = self._admitted = self._opened = 0
        self._failed: Counter[str] = Counter()
        self._rollouts: Counter[tuple[str, str]] = Counter()
        self._handlers = {
            of.RunOpened: self._open,
            of.AttemptEnded: self._attempt_ended,
            of.ControlCallFailed: lambda fact: self._note(
                fact.engine, f"its {fact.call} call failed", fact.cause
            ),
            of.EngineJoined: lambda fact: self._note(fact.info.name, "joined", ""),
            of.EngineLost: self._lose,
            of.EngineAdmitted: self._admit,
            of.EngineSlow: lambda fact: self._note(
                fact.engine, "is slow, and stays in use", fact.cause
            ),
            of.EngineBusy: lambda fact: self._note(
                fact.engine, f"had no room for {fact.in_flight} requests", fact.cause
            ),
            of.FleetAwaited: lambda _: self._note("", "no engine was left: waiting for one", ""),
            of.FleetGivenUp: lambda _: self._note("", "no engine came back in time", ""),
            of.UpdateWanted: lambda _: self._note("", "engines wait for weights", ""),
            of.GroupsFailed: lambda fact: self._note("", "the run was given up", fact.cause),
            of.UpdateFinished: self._update_finished,
            of.GroupDropped: lambda fact: self._drop(fact.reason, fact.cause, len(fact.rollouts)),
            of.PromptRefused: lambda fact: self._drop(Reason.BAD_PROMPT.value, fact.cause, 1),
        }

    def ledger(self) -> FaultLedger:
        """Return the faults up to now."""
        return FaultLedger(
            events=self._events,
            events_in_all=self._in_all,
            engines_lost=self._lost,
            engines_admitted=self._admitted,
            resumed=max(0, self._opened - 1),
            failed_attempts=self._failed.total(),
            retries=[Retry(cause=c, attempts=n) for c, n in self._failed.most_common(_SHOWN)],
            dropped_rollouts=self._rollouts.total(),
            drops=[
                Drop(reason=reason, cause=cause, rollouts=n)
                for (reason, cause), n in self._rollouts.most_common(_SHOWN)
            ],
        )

    def _note(self, engine: str, what: str, cause: str) -> None:
        self._in_all += 1
        self.latest = FaultEvent(time=self._now, engine=engine, what=what, cause=_short(cause))
        if len(self._events) < _SHOWN:
            self._events.append(self.latest)

    def _open(self, _: of.RunOpened) -> None:
        self._opened += 1
        if self._opened > 1:
            self._note("", "another process went on with the run", "")

    def _attempt_ended(self, fact: of.AttemptEnded) -> None:
        if fact.outcome == "failed":
            self._failed[_bounded(_short(fact.cause), self._failed)] += 1

    def _lose(self, fact: of.EngineLost) -> None:
        self._lost += 1
        what = "lost; it waits for the next weights" if fact.standby else "lost; quarantined"
        self._note(fact.engine, what, fact.cause)

    def _admit(self, fact: of.EngineAdmitted) -> None:
        self._admitted += 1
        self._note(fact.engine, f"takes part again, with version {fact.version}", "")

    def _update_finished(self, fact: of.UpdateFinished) -> None:
        if fact.cause:
            self._note("", f"the update to version {fact.version} failed", fact.cause)

    def _drop(self, reason: str, cause: str, rollouts: int) -> None:
        cause = _bounded(_short(cause), {cause for _, cause in self._rollouts})
        self._rollouts[reason, cause] += rollouts
        if reason in _FAILED:
            what = f"dropped ({reason})"
            self.latest = FaultEvent(time=self._now, engine="", what=what, cause=cause)


def _bounded(cause: str, known: Collection[str]) -> str:
    return cause if cause in known or len(known) < _MAX_CAUSES else _OTHERS


def _short(cause: str) -> str:
    text = " ".join(cause.split())
    return text if len(text) <= _CAUSE else f"{text[: _CAUSE - 1]}…"
