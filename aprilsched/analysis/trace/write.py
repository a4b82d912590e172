"""Writes the trace of a run from its event log, fact by fact.

Only what is open on the engines is kept in memory, so a log may have any length.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from aprilsched.analysis.run import readable
from aprilsched.analysis.trace.builder import TraceBuilder
from aprilsched.analysis.trace.trace_file import TraceFile
from aprilsched.errors import RunFolderError
from aprilsched.telemetry.event_log.reading import replay
from aprilsched.telemetry.run_folder import EVENTS, TRACE

__all__ = ["write_trace"]

_BUFFER = 1 << 20


def write_trace(folder: Path, path: Path | None = None) -> Path:
    """Write the run in `folder` as a trace to `path` (by default its trace.json), and return the
    path.

    Open it in ui.perfetto.dev. Engines are processes with a track for each slot. Rollouts are
    slices that end where the version changes or the engine is paused. A run that was killed or has
    not ended is shown as far as its log goes.

    Raises:
        RunFolderError: if the log is missing or cannot be understood, or if `path` cannot be
            written.
    """
    target = folder / TRACE if path is None else path
    writing = target.with_name(f".{target.name}.writing")
    try:
        with writing.open("wb", buffering=_BUFFER) as file:
            trace = TraceFile(file)
            builder = TraceBuilder(trace)
            with readable(folder):
                end = replay(folder / EVENTS, [builder])
            builder.end(end)
            trace.close()
        os.replace(writing, target)
    except OSError as error:
        raise RunFolderError(
            f"{target} cannot be written ({error.strerror or error}); name a file in a folder that "
            "can be."
        ) from error
    finally:
        with suppress(OSError):
            writing.unlink(missing_ok=True)
    return target
