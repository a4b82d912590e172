"""Measures what each piece costs for the facts of one event, by a recorded stream in a loop.

There is almost no noise, but caches are warm: in a run other work is done between two events.
Pieces that draw or serve in a thread do almost nothing here, because the stream ends in a moment.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pieces import EVERYTHING, PIECES, together, with_needs

from aprilsched.core.messages.facts import Fact, TokensReceived
from aprilsched.driver.listeners import Listeners

__all__ = ["Recorder", "replayed"]

Recorded: TypeAlias = list[tuple[Sequence[Fact], float]]


class Recorder:
    """A listener that keeps everything."""

    def __init__(self) -> None:
        self.stream: Recorded = []

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        self.stream.append((facts, now))

    @property
    def tokens(self) -> int:
        return sum(
            fact.tokens
            for facts, _ in self.stream
            for fact in facts
            if isinstance(fact, TokensReceived)
        )


def replayed(recorder: Recorder, repeats: int, tokens_per_s: int) -> dict[str, Any]:
    """CPU µs for an event, and ms for a second of `tokens_per_s`."""
    gc.collect()
    gc.freeze()
    # Without listeners too: that is no telemetry.
    shown: dict[str, tuple[str, ...]] = {"nothing": ()}
    shown |= {name: with_needs(name) for name in PIECES} | {"everything": EVERYTHING}
    found: dict[str, list[float]] = {name: [] for name in shown}
    for _ in range(repeats):
        for name, names in shown.items():
            found[name].append(_cost(names, recorder.stream))
    events, seconds = len(recorder.stream), recorder.tokens / tokens_per_s
    return {
        "shown_per_s": events / seconds,
        "pieces": {
            name: {
                "with": names,
                "us": 1e6 * statistics.median(found[name]) / events,
                "ms_per_s": 1e3 * statistics.median(found[name]) / seconds,
                "least_ms_per_s": 1e3 * min(found[name]) / seconds,
            }
            for name, names in shown.items()
        },
    }


def _cost(names: Sequence[str], stream: Recorded) -> float:
    """CPU of all threads, until what is left is written; without putting the pieces up."""
    with tempfile.TemporaryDirectory() as folder, together(names, Path(folder)) as listeners:
        told = Listeners(list(listeners.values()))
        before = time.process_time()
        for facts, now in stream:
            told.facts(facts, now)
        told.release()
        return time.process_time() - before
