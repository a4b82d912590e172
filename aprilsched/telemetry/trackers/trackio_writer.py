"""Steps in trackio, on this machine. Needs the extra ``trackio``."""

# It cannot be in the environment of the checks: it asks for an older pillow than matplotlib's.
# pyright: reportMissingImports=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

import trackio

__all__ = ["TrackioWriter"]


class TrackioWriter:
    """Begins a run of `project`; trackio keeps it where its own settings say (TRACKIO_DIR). It has
    one run at a time in a process: begin no other one meanwhile.

    Args:
        config: what the run was begun with.
    """

    def __init__(self, *, project: str, name: str, config: Mapping[str, Any] | None = None) -> None:
        with redirect_stdout(
            sys.stderr
        ):  # it says things there that are none of a command's answer
            self._run = trackio.init(project=project, name=name, config=dict(config or {}))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            # Not the run's own method: trackio would end it again at exit, and say so on stdout.
            trackio.finish()
