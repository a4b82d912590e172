"""Tests a slow listener in a thread: what it receives, and how it reports what it missed."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from aprilsched.kernel.core.messages.facts import BatchRequested, Fact, PromptsEnded, TokensReceived
from aprilsched.observe.queued import QueuedListener


class Slow:
    """A listener that waits until `may_go_on` is set; `started` is set by its first call."""

    def __init__(self) -> None:
        self.received: list[tuple[str, float]] = []
        self.started = threading.Event()
        self.may_go_on = threading.Event()
        self.thread: threading.Thread | None = None

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        self.thread = threading.current_thread()
        self.started.set()
        self.may_go_on.wait()
        self.received += [(type(fact).__name__, now) for fact in facts]


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
    assert slow.received == [(name, index / 2) for index, name in enumerate(names)]
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
    assert slow.received == [("PromptsEnded", 1.0), ("TokensReceived", 3.0)]


def test_it_reports_what_its_thread_missed_and_why() -> None:
    """The thread is a Worker, whose own tests have the rest."""

    class Raising(Slow):
        def on_facts(self, facts: Sequence[Fact], now: float) -> None:
            super().on_facts(facts, now)
            raise OSError("no route")

    raising = Raising()
    with QueuedListener(raising, max_pending=3) as queued:
        queued.on_facts(ASKED, 0.0)
        raising.started.wait()
        for now in range(5):
            queued.on_facts(ASKED, float(now))
        assert queued.dropped == 2
        raising.may_go_on.set()
    assert isinstance(queued.error, OSError)
    assert queued.dropped == 5
