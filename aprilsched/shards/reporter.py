"""Gathers what a shard has to report, from the facts and the state of its scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from aprilsched.core.messages import facts as of
from aprilsched.core.messages.facts import Fact
from aprilsched.core.state.ledger import FAILURES
from aprilsched.core.state.state import SchedulerState
from aprilsched.core.steps.engines import stranded
from aprilsched.shards.base import Complete, News, serial_of
from aprilsched.telemetry.base import TokenChunks
from aprilsched.types import Group

__all__ = ["Reporter", "serials_of"]


class Reporter:
    """A listener of a shard's scheduler that keeps the next :class:`News` of the shard.

    There is news when a group is complete or dropped, when the version has changed, and when
    :attr:`step` rollouts have ended, because some refill rules count the rollouts that generate.

    Args:
        state: returns the state of the scheduler.
        wake: is called when there is news.
    """

    def __init__(self, state: Callable[[], SchedulerState], wake: Callable[[], None]) -> None:
        self._state = state
        self._wake = wake
        self._groups: list[tuple[int, Group]] = []
        self._dropped: dict[int, str] = {}
        self._open: dict[int, int] = {}
        """Serial of each group that was launched and is neither delivered nor dropped."""
        self._cursor: int | None = None
        """Number of prompts that were launched when the shard was opened."""
        self.step = 0
        """Number of rollouts whose end is news; 0 if it never is."""
        self._ended = 0
        """Number of rollouts that have ended since the last news."""
        self._said_complete = 0

    def opened(self) -> None:
        """The scheduler is open. What it has in flight is known, and later launches are counted."""
        state = self._state()
        self._cursor = state.prompts.cursor
        for group in state.in_flight.groups.values():
            self._note(group.group_id)

    def deliver(self, number: int, groups: Iterable[Group]) -> None:
        """A batch of the scheduler was taken."""
        for group in groups:
            self._open.pop(group.group_id, None)
            self._groups.append((number, group))
        self._wake()

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        """Look at what has changed; see :class:`~aprilsched.telemetry.base.Listener`."""
        for fact in facts:
            match fact:
                case of.GroupLaunched(evaluation_id=None):
                    self._note(fact.group_id)
                case of.RolloutFinished():
                    self._ended += 1
                    self._look()
                case of.GroupDropped():
                    serial = self._open.pop(fact.group_id, None)
                    if serial is not None:
                        self._dropped[serial] = fact.cause if fact.reason in FAILURES else ""
                        self._wake()
                case of.UpdateFinished() | of.EngineAdmitted() | of.EngineLost():
                    self._wake()
                case _:
                    pass

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        """Tokens are no news; see :class:`~aprilsched.telemetry.base.BulkListener`."""

    def news(self) -> News:
        """Everything since the last call."""
        state = self._state()
        self._ended = 0
        complete = _complete(state)
        self._said_complete = complete.groups
        groups, self._groups = tuple(self._groups), []
        dropped, self._dropped = self._dropped, {}
        return News(
            groups=groups,
            dropped=dropped,
            launched=state.prompts.cursor - (self._cursor or 0),
            generating=state.in_flight.generating,
            complete=complete,
            version=None if stranded(state) else state.weights.versions.trainer,
            engines=len(state.fleet.control.engines),
        )

    def _note(self, group_id: int) -> None:
        group = self._state().in_flight.groups.get(group_id)
        serial = None if group is None else serial_of(group.prompt)
        if serial is not None:
            self._open[group_id] = serial

    def _look(self) -> None:
        """Wake the collector if it would decide otherwise by now."""
        many = self.step and self._ended >= self.step
        if many or _complete(self._state()).groups > self._said_complete:
            self._wake()


def serials_of(state: SchedulerState) -> tuple[int, ...]:
    """The serials of the prompts whose groups a scheduler has: in flight, or in batches that were
    not acknowledged."""
    unacknowledged = state.delivery.unacknowledged.values()
    records = chain(state.in_flight.groups.values(), *(record.groups for record in unacknowledged))
    found = (serial_of(record.prompt) for record in records)
    return tuple(dict.fromkeys(serial for serial in found if serial is not None))


def _complete(state: SchedulerState) -> Complete:
    ready, offer = state.in_flight.ready, state.delivery.offer
    offered = () if offer is None or offer.record is None else offer.groups
    return Complete(
        groups=len(ready) + len(offered),
        samples=ready.samples + sum(len(group.members) for group in offered),
        tokens=ready.tokens + sum(group.tokens for group in offered),
    )
