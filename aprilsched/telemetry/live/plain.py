"""Prints one line for each batch, where the live view cannot be drawn."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Self

from rich.console import Console

from aprilsched.core.messages.facts import BatchDelivered, Fact
from aprilsched.core.state.ledger import Counters, Ledger
from aprilsched.telemetry.base import Listener, TokenChunks
from aprilsched.telemetry.batch_figures import Measured, efficiency
from aprilsched.telemetry.live.view_data import RECENT_BATCHES, RunFacts
from aprilsched.telemetry.live_figures import LiveFigures

__all__ = ["PlainLines"]


class PlainLines:
    """Prints the lines of a run to `console`.

    Args:
        figures: the figures of the run, a listener before this one.

    Attributes:
        said: number of batches whose lines were printed.
    """

    def __init__(
        self, console: Console, facts: RunFacts, figures: LiveFigures, *, said: int = 0
    ) -> None:
        self._console = console
        self._facts = facts
        self._figures = figures
        self._recent: deque[Measured] = deque(maxlen=RECENT_BATCHES)
        self.said = said

    @property
    def listeners(self) -> Sequence[Listener]:
        """The listeners, in the order in which they must be called."""
        return (self._figures, self)

    def begin(self, counters: Counters, ledger: Ledger, *, batches: int) -> None:
        """Note that `batches` batches were delivered by the prior run."""
        self._figures.count_with(counters, ledger)
        self.said = batches

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        measured = self._figures.batch
        if measured is None:
            return
        if any(isinstance(fact, BatchDelivered) and not fact.again for fact in facts):
            self._delivered(measured)

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        pass

    def _delivered(self, measured: Measured) -> None:
        # A log that is read again from its start has batches whose lines were printed before.
        if measured.figures.index < self.said:
            return
        self.said = measured.figures.index + 1
        line = self._line(measured)
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _line(self, measured: Measured) -> str:
        figures = measured.figures
        self._recent.append(measured)
        # The efficiency of a single batch says little, because carried rollouts took time before
        # it.
        latest = efficiency(self._recent)
        return (
            f"{self._facts.title}  batch {figures.index + 1}/{self._facts.batches}"
            f"  {figures.seconds + figures.trainer_seconds:.1f} s  {figures.tokens:,} tokens"
            f"  {len(self._figures.state.growing)} carried  version {figures.version}"
            f"  staleness {figures.staleness_mean:.2f}"
            + ("" if latest is None else f"  efficiency lately {latest:.0%}")
        )
