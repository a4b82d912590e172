"""The trackers by name. Each imports its package when it begins a writer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from aprilsched.errors import ConfigError
from aprilsched.extras import extra

__all__ = ["TRACKERS", "Writer", "begin_writer", "tracker_names"]

_PROJECT = "aprilsched"


class Writer(Protocol):
    """Writes the figures of each step to one tracker. It may be slow, because its methods are
    called in a thread of its own, one at a time."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of one step, by name; steps come in order."""
        ...

    def close(self) -> None:
        """Write everything that is left. It is called once, in the thread that began the writer."""
        ...


def _tensorboard(folder: Path, config: Mapping[str, Any]) -> Writer:
    from aprilsched.telemetry.trackers.tensorboard_writer import TensorBoardWriter

    return TensorBoardWriter(folder / "tensorboard")


def _trackio(folder: Path, config: Mapping[str, Any]) -> Writer:
    from aprilsched.telemetry.trackers.trackio_writer import TrackioWriter

    return TrackioWriter(project=_PROJECT, name=folder.name, config=config)


def _wandb(folder: Path, config: Mapping[str, Any]) -> Writer:
    from aprilsched.telemetry.trackers.wandb_writer import WandbWriter

    project = os.environ.get("WANDB_PROJECT", _PROJECT)
    return WandbWriter(folder, project=project, name=folder.name, config=config)


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any]], Writer]] = {
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
}
"""Trackers by name, which is also the name of the extra."""


def tracker_names(named: str) -> tuple[str, ...]:
    """The trackers in `named`, which are separated by commas.

    Raises:
        ConfigError: if a name is unknown or is given twice.
    """
    names = tuple(name.strip() for name in named.split(",") if name.strip())
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"track names {name!r}; there are {', '.join(TRACKERS)}.")
    if len(set(names)) < len(names):
        raise ConfigError(f"track is {named!r}; name each tracker once.")
    return names


def begin_writer(name: str, folder: Path, config: Mapping[str, Any]) -> Writer:
    """Begin a writer for the run in `folder` with the settings `config`.

    Raises:
        ConfigError: if the tracker is not installed, or refuses to begin.
    """
    with extra(name):
        return TRACKERS[name](folder, config)
