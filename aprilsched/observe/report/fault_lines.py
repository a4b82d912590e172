"""The faults of a run, as lines of a report."""

from __future__ import annotations

from collections import Counter

from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.shell.listener import DispatchingListener
from aprilsched.observe.report.report_data import Drop, FaultEvent, FaultLedger, Retry

# Collects the faults of a run and the reactions to them, from its facts.

_SHOWN = 40
_CAUSE = 240
"""Largest number of characters of a cause, because a server's message may be a page long."""


class Faults(DispatchingListener):
    """A listener that collects faults; :meth:`ledger` returns them."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[FaultEvent] = []
        self._in_all = 0
        self._lost = self._admitted = self._opened = 0
        self._failed: Counter[str] = Counter()
        self._groups: Counter[tuple[str, str]] = Counter()
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
            dropped_groups=self._groups.total(),
            drops=[
                Drop(reason=key[0], cause=key[1], groups=n, rollouts=self._rollouts[key])
                for key, n in self._groups.most_common(_SHOWN)
            ],
        )

    def _note(self, engine: str, what: str, cause: str) -> None:
        self._in_all += 1
        if len(self._events) < _SHOWN:
            self._events.append(
                FaultEvent(time=self._now, engine=engine, what=what, cause=_short(cause))
            )

    def _open(self, _: of.RunOpened) -> None:
        self._opened += 1
        if self._opened > 1:
            self._note("", "another process went on with the run", "")

    def _attempt_ended(self, fact: of.AttemptEnded) -> None:
        if fact.outcome == "failed":
            self._failed[_short(fact.cause)] += 1

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
        key = (reason, _short(cause))
        self._groups[key] += 1
        self._rollouts[key] += rollouts


def _short(cause: str) -> str:
    text = " ".join(cause.split())
    return text if len(text) <= _CAUSE else f"{text[: _CAUSE - 1]}…"
