"""What went wrong with engines: how many were lost, and what was said last."""

from __future__ import annotations

from dataclasses import dataclass

from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.telemetry.dispatching import DispatchingListener

__all__ = ["Mishap", "Mishaps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mishap:
    """One thing, in words, and when it was."""

    text: str
    time: float


class Mishaps(DispatchingListener):
    """What the ledger does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.engines_lost = 0
        """So often; some may be back."""
        self.latest: Mishap | None = None
        self._handlers = {
            ev.RewardFailed: lambda event: self._note(f"a reward failed: {event.cause}"),
            ev.EpisodeFailed: lambda event: self._note(f"an episode failed: {event.cause}"),
            do.LoseEngine: self._lose,
            do.ReportSlow: lambda command: self._note(f"{command.engine} is slow: {command.cause}"),
            do.AwaitFleet: lambda command: self._note(
                f"no engine is left; waited {command.waited_s:.0f} s, {command.left_s:.0f} s more"
            ),
            do.GiveUpFleet: lambda _: self._note("no engine came back in time"),
            do.GiveUp: lambda command: self._note(
                f"{command.groups} groups failed in a row: {command.cause}"
            ),
            do.WantUpdate: lambda _: self._note("engines wait for weights to be published"),
            do.FinishUpdate: self._updated,
        }

    def _lose(self, command: do.LoseEngine) -> None:
        self.engines_lost += 1
        self._note(f"{command.engine} lost: {command.cause}")

    def _updated(self, command: do.FinishUpdate) -> None:
        if command.cause:
            self._note(f"version {command.version} did not get in: {command.cause}")

    def _note(self, text: str) -> None:
        self.latest = Mishap(text=" ".join(text.split()), time=self._now)
