"""Summarizes a run from its event log, without its scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from aprilsched.kernel.shell.listener import Listener
from aprilsched.kernel.values.files import read_regular
from aprilsched.observe.figures.run_figures import SUMMARY_VERSION, RunSummary
from aprilsched.observe.figures.run_state import RunState
from aprilsched.observe.figures.summary import Remainder
from aprilsched.observe.log.basis import Clock, basis_of
from aprilsched.observe.log.line_format import LogEnded, Versioned, refuse_newer
from aprilsched.observe.log.reading import replay
from aprilsched.observe.log.run_folder import EVENTS, SUMMARY, config_in
from aprilsched.observe.log.tail import log_end

NOT_ENDED = "The run was killed or has not ended; the figures are those of its event log so far."


def summary_of_run(folder: Path) -> RunSummary:
    """Return the figures in summary.json, or rebuild them from the event log if they are missing.

    Raises:
        OSError, ValueError, MsgspecError, RunFolderError: as for :func:`replay`.
    """
    return written_summary(folder) or rebuilt_summary(folder)


def written_summary(folder: Path) -> RunSummary | None:
    """Return the figures in summary.json; None if the run did not write them.

    Raises:
        OSError, MsgspecError: if they cannot be read.
        RunFolderError: if they are of a newer format.
    """
    try:
        written = read_regular(folder / SUMMARY)
    except FileNotFoundError:
        return None
    found = msgspec.json.decode(written, type=Versioned).schema
    refuse_newer(folder / SUMMARY, found, SUMMARY_VERSION)
    return msgspec.json.decode(written, type=RunSummary)


def rebuilt_summary(folder: Path) -> RunSummary:
    """Compute the run's summary from its configuration and its event log.

    Raises:
        OSError, ValueError, MsgspecError, RunFolderError: as for :func:`replay`.
    """
    config = config_in(folder)
    rebuilding = Rebuilding(config)
    replay(folder / EVENTS, rebuilding.listeners)
    return rebuilding.result(log_end(folder / EVENTS))


class Rebuilding:
    """Summarizes a run with this configuration. Replay its log for `listeners`.

    Raises:
        ValueError: if the configuration is not one of a run.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._clock: Clock
        self._clock, self._summary = basis_of(config)
        self._state = RunState()
        self.listeners: tuple[Listener, ...] = (self._state, self._summary)

    def result(self, end: LogEnded | None) -> RunSummary:
        """Return the summary up to now; `end` is the last line of a log that has ended."""
        return self._summary.result(
            remainder_of(self._state),
            clock=self._clock,
            interrupted=end is not None and end.interrupted,
            error=NOT_ENDED if end is None else end.error,
        )


def remainder_of(state: RunState) -> Remainder:
    """Return the figures that the scheduler would report at the end."""
    return Remainder(
        in_flight=list(state.rollouts),
        counters=state.counters,
        ledger=state.ledger,
        open_groups=state.open_groups(),
    )
