"""Tests a slow listener in a thread: the run does not wait for it, and lost calls are counted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest

from aprilsched.core.messages.facts import BatchRequested, Fact, PromptsEnded, TokensReceived
from aprilsched.errors import ConfigError
from aprilsched.telemetry.worker import QueuedListener


class Slow:
    """A listener that waits until it may continue; `begun` is set while it works."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []
        self.begun = threading.Event()
        self.may_go_on = threading.Event()
        self.thread: threading.Thread | None = None

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        self.thread = threading.current_thread()
        self.begun.set()
        self.may_go_on.wait()
        self.told += [(type(fact).__name__, now) for fact in facts]


class Raising(Slow):
    """A listener that raises at its first call."""

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        self.begun.set()
        self.may_go_on.wait()
        raise OSError("no route")


ASKED = (BatchRequested(),)
ENDED = (PromptsEnded(),)


def test_everything_arrives_in_order_and_in_another_thread() -> None:
    slow = Slow()
    with QueuedListener(slow) as queued:
        for now in range(100):
            queued.on_facts(ASKED, float(now))
            queued.on_facts(ENDED, now + 0.5)
        slow.may_go_on.set()
    names = ["BatchRequested", "PromptsEnded"] * 100
    assert slow.told == [(name, index / 2) for index, name in enumerate(names)]
    assert queued.dropped == 0
    assert slow.thread is not threading.current_thread()
    assert slow.thread is not None
    assert not slow.thread.is_alive()


def test_of_chunks_and_of_other_facts_only_those_asked_for_are_passed_on() -> None:
    slow = Slow()
    slow.may_go_on.set()
    with QueuedListener(slow, kinds={PromptsEnded}) as queued:
        queued.on_facts((BatchRequested(), PromptsEnded()), 1.0)
        queued.on_tokens([(TokensReceived(request_id=1, tokens=2), 2.0)], 2.0)
    with QueuedListener(slow) as queued:
        queued.on_tokens([(TokensReceived(request_id=1, tokens=2), 3.0)], 3.0)
    assert slow.told == [("PromptsEnded", 1.0), ("TokensReceived", 3.0)]


def test_nobody_waits_and_what_does_not_fit_is_counted_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow = Slow()
    with (
        caplog.at_level(logging.WARNING, logger="aprilsched"),
        QueuedListener(slow, max_pending=10) as queued,
    ):
        queued.on_facts(ASKED, -1.0)
        slow.begun.wait()
        for now in range(1000):
            queued.on_facts(ASKED, float(now))
        assert queued.dropped == 990
        slow.may_go_on.set()
    assert [now for _, now in slow.told] == [-1.0, *map(float, range(10))]
    assert ["Slow is too slow" in record.getMessage() for record in caplog.records] == [True]


def test_one_that_raises_is_told_no_more(caplog: pytest.LogCaptureFixture) -> None:
    raising = Raising()
    with (
        caplog.at_level(logging.WARNING, logger="aprilsched"),
        QueuedListener(raising) as queued,
    ):
        for now in range(5):
            queued.on_facts(ASKED, float(now))
        raising.may_go_on.set()
    queued.on_facts(ASKED, 9.0)
    assert isinstance(queued.error, OSError)
    assert queued.dropped == 5
    assert ["no route" in record.getMessage() for record in caplog.records] == [True]


def test_one_that_hangs_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    queued = QueuedListener(slow, close_seconds=0.01)
    for now in range(5):
        queued.on_facts(ASKED, float(now))
    slow.begun.wait()
    with caplog.at_level(logging.WARNING, logger="aprilsched"):
        queued.close()
    assert queued.dropped == 4
    assert ["not done after 0.01 s" in record.getMessage() for record in caplog.records] == [True]
    slow.may_go_on.set()


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_pending is 0"):
        QueuedListener(Slow(), max_pending=0)
    with pytest.raises(ConfigError, match="close_seconds is -1"):
        QueuedListener(Slow(), close_seconds=-1)
