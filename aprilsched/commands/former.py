"""The part of a resumed run that former processes wrote: it is summed up before what is new."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aprilsched.analysis.rebuild import replay
from aprilsched.analysis.run import readable
from aprilsched.core.state import SchedulerState
from aprilsched.errors import RunFolderError
from aprilsched.telemetry.books import Books
from aprilsched.telemetry.onward import Onward
from aprilsched.telemetry.run_folder import CONFIG, EVENTS
from aprilsched.telemetry.summary import Summary

__all__ = ["Former"]


class Former:
    """Of the run in `folder`. :attr:`listener` stands before `summary`, which hears nothing new
    until :meth:`show` has shown it what was."""

    def __init__(self, folder: Path, summary: Summary) -> None:
        self._folder = folder
        self._summary = summary
        self.listener = Onward([summary])

    async def show(self, state: SchedulerState, *, inline: bool) -> int:
        """Once the scheduler is restored; how many batches the trainer has had.

        `inline`: not in a thread, since a virtual clock would run on meanwhile.

        Raises:
            RunFolderError: if nothing was saved, or the log cannot be read.
        """
        if not state.resumed:
            raise RunFolderError(
                f"{self._folder} has nothing saved that could go on; begin a new run with "
                f"--config {self._folder / CONFIG}."
            )
        batches = state.book.counters.batches
        at = self._replay(batches) if inline else await asyncio.to_thread(self._replay, batches)
        self.listener.begin(at)
        return batches - len(state.redelivery)

    def _replay(self, batches: int) -> float:
        books = Books()
        self._summary.ledger, self._summary.warns = books.ledger, False
        with readable(self._folder):
            return replay(self._folder / EVENTS, [books, self._summary], batches=batches)
