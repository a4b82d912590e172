"""Writes steps to trackio on this machine. Needs the extra ``trackio``."""

# The package cannot be in the environment of the checks, because it needs an older pillow than
# matplotlib.
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
    """Begins a run of `project`, which trackio keeps where its own settings say (TRACKIO_DIR).

    trackio has one run at a time in a process, so no other run may begin meanwhile.

    Args:
        config: the settings of the run.
    """

    def __init__(self, *, project: str, name: str, config: Mapping[str, Any] | None = None) -> None:
        # trackio prints messages that are not part of the output of a command.
        with redirect_stdout(sys.stderr):
            self._run = trackio.init(project=project, name=name, config=dict(config or {}))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            # The run's own method is not called: trackio would end it again at exit, and print
            # that.
            trackio.finish()
