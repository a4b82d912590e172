"""What went wrong in a run and what was done about it, told from its events and commands."""

from __future__ import annotations

from collections import Counter

from aprilsched.analysis.report.model import Drop, FaultEvent, FaultLedger, Retry
from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.telemetry.dispatching import DispatchingListener

__all__ = ["Faults"]

_SHOWN = 40
_CAUSE = 240
"""Characters of a cause that are shown; a server's own message may be a page."""


class Faults(DispatchingListener):
    """Listens to a run; :meth:`ledger` is what it heard."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[FaultEvent] = []
        self._in_all = 0
        self._lost = self._admitted = self._opened = 0
        self._failed: Counter[str] = Counter()
        self._groups: Counter[tuple[str, str]] = Counter()
        self._rollouts: Counter[tuple[str, str]] = Counter()
        self._handlers = {
            ev.Opened: self._open,
            ev.Failed: lambda event: self._failed.update([_short(event.cause)]),
            ev.ControlFailed: lambda event: self._note(
                event.engine, f"its {event.call} call failed", event.cause
            ),
            ev.EngineJoined: lambda event: self._note(event.info.name, "joined", ""),
            do.LoseEngine: self._lose,
            do.AdmitEngine: self._admit,
            do.ReportSlow: lambda command: self._note(
                command.engine, "is slow, and stays in use", command.cause
            ),
            do.AwaitFleet: lambda _: self._note("", "no engine was left: waiting for one", ""),
            do.GiveUpFleet: lambda _: self._note("", "no engine came back in time", ""),
            do.GiveUp: lambda command: self._note("", "the run was given up", command.cause),
            do.FinishUpdate: self._finish_update,
            do.CancelWork: self._cancel,
        }

    def ledger(self) -> FaultLedger:
        """Up to now."""
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

    def _open(self, event: ev.Opened) -> None:
        self._opened += 1
        if self._opened > 1:
            self._note("", "another process went on with the run", "")

    def _lose(self, command: do.LoseEngine) -> None:
        self._lost += 1
        what = "lost; it waits for the next weights" if command.standby else "lost; quarantined"
        self._note(command.engine, what, command.cause)

    def _admit(self, command: do.AdmitEngine) -> None:
        self._admitted += 1
        self._note(command.engine, f"takes part again, with version {command.version}", "")

    def _finish_update(self, command: do.FinishUpdate) -> None:
        if command.cause:
            self._note("", f"the update to version {command.version} failed", command.cause)

    def _cancel(self, command: do.CancelWork) -> None:
        key = (command.reason, _short(command.cause))
        self._groups[key] += 1
        self._rollouts[key] += len(command.rollout_ids)


def _short(cause: str) -> str:
    text = " ".join(cause.split())
    return text if len(text) <= _CAUSE else f"{text[: _CAUSE - 1]}…"
