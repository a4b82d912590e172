"""Tests what a run does when a listener raises, is slow, or finds a bug."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import pytest

from aprilsched import Batch
from aprilsched.errors import InvariantViolation
from aprilsched.kernel.core.messages.commands import Command, Deliver, Send
from aprilsched.kernel.core.messages.events import Event, Finished
from aprilsched.kernel.core.messages.facts import (
    AttemptEnded,
    AttemptSent,
    BatchDelivered,
    Fact,
    TokensReceived,
)
from aprilsched.kernel.shell import notify as listeners
from aprilsched.kernel.shell import step_times
from aprilsched.kernel.shell.listener import TokenChunks
from tests.support.small import driven
from tests.support.table import each_row

BATCHES = 4
"""Batches of a run of `driven`."""


class Counting:
    """Counts facts; raises `error` at the third fact of the type `at`."""

    def __init__(self, at: type | None = None, error: Exception | None = None) -> None:
        self.facts = self.met = 0
        self._at = at
        self._error = error

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            self.facts += 1
            self.met += self._at is not None and isinstance(fact, self._at)
            if self.met == 3 and self._error is not None:
                raise self._error


class Watching:
    """Counts the events and the commands that it sees."""

    def __init__(self) -> None:
        self.events: Counter[type] = Counter()
        self.commands: Counter[type] = Counter()

    def on_event(self, event: Event, now: float) -> None:
        self.events[type(event)] += 1

    def on_command(self, command: Command, now: float) -> None:
        self.commands[type(command)] += 1


class Recording:
    """Records each fact with its time."""

    def __init__(self) -> None:
        self.received: list[tuple[Fact, float]] = []

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        self.received += [(fact, now) for fact in facts]


class Bulk(Recording):
    """A listener that takes many chunks at once; it raises `error` at the third call."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self._error = error

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        assert chunks[-1][1] == now
        self.sizes.append(len(chunks))
        self.received += chunks
        if len(self.sizes) == 3 and self._error is not None:
            raise self._error


def lengths(batches: Sequence[Batch]) -> list[list[int]]:
    return [[len(rollout) for rollout in batch.rollouts] for batch in batches]


@each_row("at", [AttemptEnded, BatchDelivered])
def test_a_listener_that_raises_is_removed_and_stops_no_run(
    at: type, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = Counting(at, RuntimeError("a disk on fire")), Counting()
    with caplog.at_level(logging.ERROR, logger="aprilsched"):
        batches = driven([broken, sound])
    assert lengths(batches) == lengths(driven([]))
    assert broken.met == 3
    assert broken.facts < sound.facts
    (record,) = caplog.records
    assert "Counting raised and is left out from now on, the run continues" in record.getMessage()
    assert "a disk on fire" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[2] is not None


def test_listeners_of_our_own_are_no_exception(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("never seen")

    monkeypatch.setattr(step_times.StepTimes, "on_tokens", broken)
    with caplog.at_level(logging.ERROR, logger="aprilsched"):
        assert len(driven([], over_provision="auto")) == BATCHES
    assert ["StepTimes" in record.getMessage() for record in caplog.records] == [True]


def test_chunks_in_bulk_come_in_the_same_order() -> None:
    one_by_one, bulk = Recording(), Bulk()
    driven([one_by_one, bulk])
    assert bulk.received == one_by_one.received
    assert max(bulk.sizes) > 1


def test_listeners_can_receive_commands_and_events_too() -> None:
    hearing, watching = Recording(), Watching()
    driven([hearing, watching])
    kinds = Counter(type(fact) for fact, _ in hearing.received)
    assert watching.commands[Send] == kinds[AttemptSent] > 0
    assert watching.commands[Deliver] == kinds[BatchDelivered] == BATCHES
    ended = [fact for fact, _ in hearing.received if isinstance(fact, AttemptEnded)]
    assert watching.events[Finished] == sum(fact.outcome == "finished" for fact in ended) > 0


def test_a_bulk_listener_that_raises_is_removed(caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = Bulk(RuntimeError("a disk on fire")), Bulk()
    with caplog.at_level(logging.ERROR, logger="aprilsched"):
        driven([broken, sound])
    assert len(broken.sizes) == 3
    assert broken.received == sound.received[: len(broken.received)]
    assert ["Bulk raised" in record.getMessage() for record in caplog.records] == [True]


def test_no_chunk_is_held_for_long() -> None:
    received = listeners.Listeners([bulk := Bulk()])
    chunk = [TokensReceived(request_id=0, tokens=1)]
    for tenth in range(10):
        received.facts(chunk, tenth / 10)
    assert bulk.sizes == [1, 3, 3, 3]
    received.facts(chunk, 1.0)
    received.release()
    assert bulk.sizes == [1, 3, 3, 3, 1]


def test_a_violated_invariant_ends_the_run() -> None:
    """The error was found by the listener, not caused by it."""
    with pytest.raises(InvariantViolation, match="incomplete"):
        driven([Counting(AttemptEnded, InvariantViolation("a group is incomplete"))])


class Clock:
    """Takes `seconds` for each call of a listener."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._now = 0.0

    def perf_counter(self) -> float:
        return self._now

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        self._now += self._seconds


@each_row(
    ("seconds", "named"),
    [(1.5, 1), (0.2, 1), (0.005, 0)],
    ids=["in one call", "in many calls", "not at all"],
)
def test_one_that_holds_the_loop_up_is_named_once(
    seconds: float, named: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Clock(seconds)
    monkeypatch.setattr(listeners, "time", slow)
    with caplog.at_level(logging.WARNING, logger="aprilsched"):
        driven([slow, Counting()])
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == named
    assert all("Clock has held the event loop up" in message for message in messages)
    assert all("QueuedListener" in message for message in messages)


class OfTheLibrary(Clock):
    """A slow listener of the library, which no user can wrap."""

    __module__ = "aprilsched.observe.figures.summary"


def test_one_of_the_library_is_never_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = OfTheLibrary(1.5)
    monkeypatch.setattr(listeners, "time", slow)
    driven([slow])
    assert slow.perf_counter() > 1.5
    assert not caplog.records


def test_a_slow_listener_in_an_idle_run_is_not_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """0.02 s per second is acceptable, however long the run."""
    received = listeners.Listeners([slow := Clock(0.02)])
    clock = pytest.MonkeyPatch()
    with clock.context() as patch, caplog.at_level(logging.WARNING, logger="aprilsched"):
        patch.setattr(listeners, "time", slow)
        for second in range(600):
            received.facts([AttemptEnded(request_id=1, outcome="finished")], float(second))
    assert caplog.records == []
