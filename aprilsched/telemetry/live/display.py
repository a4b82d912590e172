"""Draws the live view on a terminal, in a thread of its own.

Invariants: a run waits for the drawing only while a snapshot is taken. Drawing takes at most a
fiftieth of the time, however slow the terminal is. When the block ends, in whatever way, nothing of
the view is left on the terminal.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from aprilsched.core.messages.facts import BatchDelivered, Fact
from aprilsched.core.state.ledger import Counters, Ledger
from aprilsched.telemetry.base import Listener, TokenChunks
from aprilsched.telemetry.figures import Figures, Measured
from aprilsched.telemetry.live.live_model import LiveModel, RunFacts
from aprilsched.telemetry.live.view import ASCII, BLOCKS, figure_texts, frame, one_line
from aprilsched.telemetry.live_figures import LiveFigures

log = logging.getLogger("aprilsched")

_REFRESH_SECONDS = 1.0
"""Seconds between two frames. A frame takes 2 ms between other work of the process. With four
frames a second, it would cost a run with 100,000 tokens/s as much as all other telemetry."""
_REST = 20
"""Largest number of lines without those of the engines."""
_SHARE = 50
"""The next frame is drawn after this many times the time that the last one took."""


def can_draw(console: Console) -> bool:
    """Whether the output is a terminal whose cursor can be moved."""
    return console.is_terminal and not console.is_dumb_terminal


class _AsItIs:
    """A text whose lines are known to fit. Searching for places to break them would be a third of
    the time of drawing."""

    def __init__(self, text: Text) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return self._text.render(console, end="\n")


class LiveView:
    """Shows a run on `console`. Use it as ``with view:`` around the run.

    Args:
        figures: the figures of the run, a listener before this one.
        compact: whether to show one line only.
    """

    def __init__(
        self, console: Console, facts: RunFacts, figures: LiveFigures, *, compact: bool = False
    ) -> None:
        self.model = LiveModel(facts, figures)
        self._console = console
        self._figures = figures
        self._compact = compact
        self._live: Live | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def listeners(self) -> Sequence[Listener]:
        """The listeners of the view, in the order in which they must be called."""
        return (self._figures, self.model)

    def begin(self, counters: Counters, ledger: Ledger, *, batches: int) -> None:
        """Use the scheduler's own counters. `batches` is the number of batches that the prior run
        has delivered."""
        self._figures.count_with(counters, ledger)
        self.model.skip(batches)

    def restart(self, facts: RunFacts, figures: LiveFigures) -> None:
        """Begin again: the facts of the run are given to the present :attr:`listeners` from the
        start."""
        self._figures = figures
        self.model = LiveModel(facts, figures)

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            # Ctrl-C may arrive here too. A drawing thread that is not stopped would keep the
            # process alive.
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _begin(self) -> None:
        self._live = Live(
            _AsItIs(self.frame()), console=self._console, auto_refresh=False, transient=True
        )
        self._live.start(refresh=True)
        self._thread = threading.Thread(
            target=self._draw, args=(self._live,), name="live view", daemon=True
        )
        self._thread.start()

    def _end(self) -> None:
        self._ended.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        if self._live is not None:
            self._live.stop()

    def frame(self, *, whole: bool = False) -> Text:
        """The present frame; `whole` ignores the height of the terminal."""
        snapshot = self.model.snapshot()
        width, height = self._console.size
        height = len(snapshot.engines) + _REST if whole else height
        if self._compact:
            return one_line(snapshot, width=width)
        glyphs = ASCII if self._console.options.ascii_only else BLOCKS
        # The cursor is on the line below the frame, so a frame as high as the terminal would scroll
        # it.
        return frame(snapshot, width=width, height=height - 1, glyphs=glyphs)

    def _draw(self, live: Live) -> None:
        pause = _REFRESH_SECONDS
        while not self._ended.wait(pause):
            began = time.thread_time()
            try:
                live.update(_AsItIs(self.frame()), refresh=True)
            except Exception:
                log.exception("the live view failed and is drawn no more, the run goes on")
                return
            pause = max(_REFRESH_SECONDS, _SHARE * (time.thread_time() - began))


# --- plain ---------------------------------------------------------------------------------------

# Prints one line for each batch, where the live view cannot be drawn.


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

    def _delivered(self, batch: Measured) -> None:
        # A log that is read again from its start has batches whose lines were printed before.
        if batch.index < self.said:
            return
        self.said = batch.index + 1
        line = (
            f"{self._facts.title}  batch {batch.index + 1}/{self._facts.batches}"
            f"  {batch.seconds + batch.trainer_seconds:.1f} s  {batch.sums.sampled:,} tokens"
            f"  {len(self._figures.state.growing)} carried  version {batch.version}; lately "
            # The efficiency of a single batch says little, because carried rollouts took time
            # before it.
            + ", ".join(figure_texts(Figures.over(self._figures.recent)))
        )
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)
