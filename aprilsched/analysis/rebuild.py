"""Sums a run up from its event log, without its scheduler."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from aprilsched.analysis.basis import basis_of
from aprilsched.telemetry.base import Listener
from aprilsched.telemetry.event_log.reading import replay
from aprilsched.telemetry.figures import RunSummary
from aprilsched.telemetry.run_folder import CONFIG, EVENTS, SUMMARY
from aprilsched.telemetry.run_state import RunState
from aprilsched.telemetry.summary import Remainder

__all__ = [
    "Rebuilding",
    "rebuilt_summary",
    "remainder_of",
    "summary_of_run",
    "written_summary",
]

NOT_ENDED = "The run was killed or has not ended; the figures are those of its event log so far."


def summary_of_run(folder: Path) -> RunSummary:
    """The figures in summary.json, or rebuilt from the event log if the run did not write them.

    Raises:
        OSError, ValueError, MsgspecError, RunFolderError: as for :func:`replay`.
    """
    return written_summary(folder) or rebuilt_summary(folder)


def written_summary(folder: Path) -> RunSummary | None:
    """The figures in summary.json; None if the run did not write them.

    Raises:
        OSError, MsgspecError: if they cannot be read.
    """
    try:
        written = (folder / SUMMARY).read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(written, type=RunSummary)


def rebuilt_summary(folder: Path) -> RunSummary:
    """Compute the run's own summary from its configuration and its event log.

    Raises:
        OSError, ValueError, MsgspecError, RunFolderError: as for :func:`replay`.
    """
    config = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
    rebuilding = Rebuilding(config)
    replay(folder / EVENTS, rebuilding.listeners)
    return rebuilding.result()


class Rebuilding:
    """Sums up a run with this configuration. Replay its log for `listeners`.

    Raises:
        ValueError: if the configuration is not one of a run.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._basis, self._state = basis_of(config), RunState()
        self._summary = self._basis.summary()
        self._summary.ledger, self._summary.warns = self._state.ledger, False
        self.listeners: tuple[Listener, ...] = (self._state, self._summary)

    def result(self) -> RunSummary:
        """The summary up to now."""
        return self._summary.result(
            remainder_of(self._state), clock=self._basis.clock, error=NOT_ENDED
        )


def remainder_of(state: RunState) -> Remainder:
    """The figures that the scheduler would give at the end."""
    return Remainder(
        in_flight=list(state.rollouts),
        counters=state.counters,
        ledger=state.ledger,
        open_groups=state.open_groups(),
    )
