"""A run where nothing can be drawn: one line for each batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Self

from rich.console import Console

from aprilsched.core.messages import commands as do
from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import Event
from aprilsched.core.state.ledger import Counters, Ledger
from aprilsched.telemetry.base import Chunks, Listener
from aprilsched.telemetry.batch_figures import Measured, efficiency
from aprilsched.telemetry.batch_meter import BatchMeter
from aprilsched.telemetry.live.facts import RunFacts
from aprilsched.telemetry.live.rollouts import Rollouts
from aprilsched.telemetry.live.snapshot import RECENT_BATCHES

__all__ = ["PlainLines"]


class PlainLines:
    """Prints to `console`; `meter` is told of everything before this listener.

    Attributes:
        said: so many batches have their lines already.
    """

    def __init__(
        self, console: Console, facts: RunFacts, meter: BatchMeter, *, said: int = 0
    ) -> None:
        self._console = console
        self._facts = facts
        self._meter = meter
        self._rollouts = Rollouts()
        self._recent: deque[Measured] = deque(maxlen=RECENT_BATCHES)
        self.said = said

    @property
    def listeners(self) -> Sequence[Listener]:
        return (self,)

    def begin(self, counters: Counters, ledger: Ledger, *, batches: int) -> None:
        """So many batches were delivered before, in the same run."""
        self.said = batches

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def on_event(self, event: Event, now: float) -> None:
        self._rollouts.hear(event, now)

    def on_progress(self, chunks: Chunks, now: float) -> None:
        pass

    def on_command(self, command: Command, now: float) -> None:
        self._rollouts.hear(command, now)
        measured = self._meter.latest
        if isinstance(command, do.Deliver) and measured is not None:
            self._delivered(measured)

    def _delivered(self, measured: Measured) -> None:
        # A log that is read anew tells of what was said already.
        if measured.figures.index < self.said:
            return
        self.said = measured.figures.index + 1
        line = self._line(measured)
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _line(self, measured: Measured) -> str:
        figures = measured.figures
        self._recent.append(measured)
        # Of a single batch it says little: what was carried into it took its time before.
        latest = efficiency(self._recent)
        return (
            f"{self._facts.title}  batch {figures.index + 1}/{self._facts.batches}"
            f"  {figures.seconds + figures.trainer_seconds:.1f} s  {figures.tokens:,} tokens"
            f"  {len(self._rollouts.growing)} carried  version {figures.version}"
            f"  staleness {figures.staleness_mean:.2f}"
            + ("" if latest is None else f"  efficiency lately {latest:.0%}")
        )
