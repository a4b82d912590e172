"""What each piece costs for one event, from a recorded stream that is shown to it in a loop.

Hardly any noise, but warm caches: in a run something else goes on between two events.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, TypeAlias

from pieces import PIECES, together

from aprilsched.coordinator.listeners import Listeners
from aprilsched.core.commands import Command
from aprilsched.core.events import Event

__all__ = ["Recorder", "replayed"]

Recorded: TypeAlias = list[tuple[Event | None, Command | None, float]]


class Recorder:
    """A listener that keeps everything."""

    def __init__(self) -> None:
        self.stream: Recorded = []

    def on_event(self, event: Event, now: float) -> None:
        self.stream.append((event, None, now))

    def on_command(self, command: Command, now: float) -> None:
        self.stream.append((None, command, now))

    @property
    def seconds(self) -> float:
        return self.stream[-1][2] - self.stream[0][2]


def replayed(recorder: Recorder, repeats: int) -> dict[str, Any]:
    """By piece: CPU µs for an event or command, and ms for a second of the recorded run."""
    gc.collect()
    gc.freeze()
    found: dict[str, list[float]] = {name: [] for name in PIECES}
    for _ in range(repeats):
        for name, costs in found.items():
            costs.append(_cost(name, recorder.stream))
    shown, seconds = len(recorder.stream), recorder.seconds
    return {
        "shown_per_s": shown / seconds,
        "pieces": {
            name: {
                "us": 1e6 * statistics.median(costs) / shown,
                "ms_per_s": 1e3 * statistics.median(costs) / seconds,
                "least_ms_per_s": 1e3 * min(costs) / seconds,
            }
            for name, costs in found.items()
        },
    }


def _cost(name: str, stream: Recorded) -> float:
    """CPU of all threads, until what is left is written."""
    with tempfile.TemporaryDirectory() as folder:
        before = time.process_time()
        with together([name], Path(folder)) as (listener,):
            _show(Listeners([listener]), stream)
        return time.process_time() - before


def _show(listeners: Listeners, stream: Recorded) -> None:
    for event, command, now in stream:
        if event is not None:
            listeners.event(event, now)
        elif command is not None:
            listeners.command(command, now)
    listeners.release()
