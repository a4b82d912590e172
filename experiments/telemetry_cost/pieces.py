"""Makes the listeners of a run, single and together, as ``aprilsched run`` combines them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from rich.console import Console

from aprilsched.core.messages.facts import Fact
from aprilsched.core.state.ledger import Counters, Ledger
from aprilsched.telemetry.base import Listener
from aprilsched.telemetry.event_log import EventLog
from aprilsched.telemetry.live.live_model import RunFacts
from aprilsched.telemetry.live.view import LiveView
from aprilsched.telemetry.live_figures import LiveFigures
from aprilsched.telemetry.metrics import Metrics
from aprilsched.telemetry.prometheus import serve_metrics
from aprilsched.telemetry.summary import Summary

__all__ = ["EVERYTHING", "PIECES", "together", "with_needs"]

_BATCH_GROUPS = 64


@dataclass(kw_only=True)
class Bench:
    """Where pieces are put up; what needs another piece finds it here."""

    folder: Path
    stack: ExitStack
    listeners: dict[str, Listener] = field(default_factory=dict[str, Listener])
    summary: Summary | None = None
    account: LiveFigures | None = None


class Deaf:
    """What it costs to be told."""

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        pass


def deaf(_: Bench) -> Listener:
    return Deaf()


def event_log(bench: Bench) -> Listener:
    log = EventLog(bench.folder / "events.jsonl")
    bench.stack.enter_context(closing(log))
    log.start()
    return log


def summary(bench: Bench) -> Listener:
    bench.summary = Summary(trainer_waits=False)
    return bench.summary


def account(bench: Bench) -> Listener:
    meter = None if bench.summary is None else bench.summary.meter
    bench.account = LiveFigures(meter=meter, batch_groups=_BATCH_GROUPS)
    bench.account.count_with(Counters(), Ledger())
    return bench.account


def live_view(bench: Bench) -> Listener:
    """On a terminal of 120 columns that takes what it is sent."""
    assert bench.account is not None
    reads, writes = os.openpty()
    terminal = bench.stack.enter_context(os.fdopen(writes, "w"))
    threading.Thread(target=_drain, args=(reads,), daemon=True, name="terminal").start()
    facts = RunFacts(title="run", batches=100, batch_groups=_BATCH_GROUPS)
    console = Console(file=terminal, force_terminal=True, width=120, height=40)
    return bench.stack.enter_context(LiveView(console, facts, bench.account)).model


def metrics(bench: Bench) -> Listener:
    """Served, and scraped by nobody: that costs the more the oftener it is done."""
    assert bench.account is not None
    found = Metrics(bench.account)
    bench.stack.enter_context(serve_metrics(found, 0))
    return found


def _drain(terminal: int) -> None:
    try:
        while os.read(terminal, 1 << 16):
            pass
    except OSError:
        os.close(terminal)


Piece: TypeAlias = Callable[[Bench], Listener]

PIECES: dict[str, Piece] = {
    "deaf": deaf,
    "event_log": event_log,
    "summary": summary,
    "account": account,
    "live_view": live_view,
    "metrics": metrics,
}
EVERYTHING = tuple(name for name in PIECES if name != "deaf")
_NEEDS = {"live_view": ("account",), "metrics": ("account",)}


def with_needs(name: str) -> tuple[str, ...]:
    """The piece, after those that it needs."""
    return (*_NEEDS.get(name, ()), name)


@contextmanager
def together(names: Sequence[str], folder: Path) -> Generator[dict[str, Listener]]:
    """These pieces at work."""
    with ExitStack() as stack:
        bench = Bench(folder=folder, stack=stack)
        for name in names:
            bench.listeners[name] = PIECES[name](bench)
        yield bench.listeners
    log = bench.listeners.get("event_log")
    if isinstance(log, EventLog) and log.error is not None:
        raise SystemExit(log.error)
