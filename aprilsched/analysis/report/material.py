"""Reads a run folder for a report, in one pass over its event log."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprilsched.analysis.launches import Launches
from aprilsched.analysis.rebuild import Rebuilding, written_summary
from aprilsched.analysis.report.faults import Faults
from aprilsched.analysis.report.report_data import FaultLedger
from aprilsched.analysis.run import History, Run, readable
from aprilsched.analysis.usage import RunUsage, UsageRecorder
from aprilsched.telemetry.base import Listener
from aprilsched.telemetry.event_log.reading import replay
from aprilsched.telemetry.figures import RunSummary
from aprilsched.telemetry.run_folder import CONFIG, EVENTS

__all__ = ["Material", "read_material"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """What a report needs of a run folder.

    Attributes:
        seen: number of tokens of each response that was launched for training, int64 [n].
        unfinished: whether each of these responses had not ended, bool [n].
    """

    name: str
    run: Run
    usage: RunUsage
    faults: FaultLedger
    seen: NDArray[np.int64]
    unfinished: NDArray[np.bool_]


def read_material(folder: Path) -> Material:
    """Read the run in `folder`.

    Raises:
        RunFolderError: if a file is missing or cannot be understood.
    """
    with readable(folder):
        config = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
        scheduler: dict[str, Any] = config.get("scheduler", {})
        summing, summary = _summing(folder, config)
        history, launches, faults = History(), Launches(), Faults()
        usage = UsageRecorder(batch_groups=scheduler.get("batch_groups"))
        end = replay(
            folder / EVENTS,
            [usage, faults, history, launches, *summing],
        )
        run, members = history.run(config, summary(), end), launches.members()
    tokens = np.array([member.tokens for member in members], dtype=np.int64)
    finished = np.array([member.finished for member in members], dtype=np.bool_)
    return Material(
        name=folder.resolve().name,
        run=run,
        usage=usage.usage(end),
        faults=faults.ledger(),
        seen=np.where(finished, np.maximum(tokens, 1), np.maximum(tokens, 0)),
        unfinished=~finished,
    )


def _summing(
    folder: Path, config: dict[str, Any]
) -> tuple[Sequence[Listener], Callable[[], RunSummary]]:
    """The listeners that are needed to sum the run up after its log was read."""
    written = written_summary(folder)
    if written is not None:
        return (), lambda: written
    rebuilding = Rebuilding(config)
    return rebuilding.listeners, rebuilding.result
