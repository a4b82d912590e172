"""Keeps the latest fault of a run as text, for the live view."""

from __future__ import annotations

from dataclasses import dataclass

from aprilsched.core.messages import facts as of
from aprilsched.core.state.ledger import Reason
from aprilsched.telemetry.dispatching import DispatchingListener

__all__ = ["Mishap", "Mishaps"]


_FAILED = {Reason.REWARD_FAILED.value: "a reward", Reason.EPISODE_FAILED.value: "an episode"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mishap:
    """A fault as text, and its time."""

    text: str
    time: float


class Mishaps(DispatchingListener):
    """Keeps the latest fault of a run in words; the counts are in the state of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: Mishap | None = None
        self._handlers = {
            of.GroupDropped: self._group_dropped,
            of.EngineLost: lambda fact: self._note(f"{fact.engine} lost: {fact.cause}"),
            of.EngineSlow: lambda fact: self._note(f"{fact.engine} is slow: {fact.cause}"),
            of.FleetAwaited: lambda fact: self._note(
                f"no engine is left; waited {fact.waited_s:.0f} s, {fact.left_s:.0f} s more"
            ),
            of.FleetGivenUp: lambda _: self._note("no engine came back in time"),
            of.GroupsFailed: lambda fact: self._note(
                f"{fact.groups} groups failed in a row: {fact.cause}"
            ),
            of.UpdateWanted: lambda _: self._note("engines wait for weights to be published"),
            of.UpdateFinished: self._updated,
        }

    def _group_dropped(self, fact: of.GroupDropped) -> None:
        what = _FAILED.get(fact.reason)
        if what is not None:
            self._note(f"{what} failed: {fact.cause}")

    def _updated(self, fact: of.UpdateFinished) -> None:
        if fact.cause:
            self._note(f"version {fact.version} did not get in: {fact.cause}")

    def _note(self, text: str) -> None:
        self.latest = Mishap(text=" ".join(text.split()), time=self._now)
