"""The view on a terminal, drawn by a thread of its own.

Invariants: a run never waits for the drawing but for the moment in which a snapshot is taken; the
drawing takes a fiftieth of the time at most, however slow the terminal is; the terminal is left as
it was, with nothing of the view on it, however the block ends.
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

from aprilsched.core.state.ledger import Counters, Ledger
from aprilsched.telemetry.base import Listener
from aprilsched.telemetry.live.bars import ASCII, BLOCKS
from aprilsched.telemetry.live.live_model import LiveModel
from aprilsched.telemetry.live.view import frame, one_line
from aprilsched.telemetry.live.view_data import RunFacts
from aprilsched.telemetry.live_figures import LiveFigures

__all__ = ["LiveView", "can_draw"]

log = logging.getLogger("aprilsched")

_REFRESH_SECONDS = 1.0
"""A frame takes 2 ms between everything else that the process does: at four a second it would
cost a run of 100,000 tokens/s as much as all other telemetry."""
_REST = 20
"""Lines beside the engines', at most."""
_SHARE = 50
"""A frame is drawn after so many times what the last one took."""


def can_draw(console: Console) -> bool:
    """It is a terminal whose cursor can be moved."""
    return console.is_terminal and not console.is_dumb_terminal


class _AsItIs:
    """A text whose lines fit: looking for places to break them would be a third of the drawing."""

    def __init__(self, text: Text) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return self._text.render(console, end="\n")


class LiveView:
    """Shows a run on `console`; use it as ``with view:`` around the run.

    Args:
        figures: those of the run, a listener before this one.
        compact: one line.
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
        """In their order."""
        return (self._figures, self.model)

    def begin(self, counters: Counters, ledger: Ledger, *, batches: int) -> None:
        """The scheduler's own counts; `batches` were delivered before, in the same run."""
        self._figures.count_with(counters, ledger)
        self.model.skip(batches)

    def restart(self, facts: RunFacts, figures: LiveFigures) -> None:
        """The run is told anew, to :attr:`listeners` as they are now."""
        self._figures = figures
        self.model = LiveModel(facts, figures)

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            # Ctrl-C may come here too: a thread that goes on would keep the process alive.
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
        """What is shown now; the `whole` of it is as high as it is."""
        snapshot = self.model.snapshot()
        width, height = self._console.size
        height = len(snapshot.engines) + _REST if whole else height
        if self._compact:
            return one_line(snapshot, width=width)
        glyphs = ASCII if self._console.options.ascii_only else BLOCKS
        # The line below is the cursor's: a frame that is as high as the terminal would scroll it.
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
