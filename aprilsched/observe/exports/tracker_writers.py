"""One writer for each tracker: TensorBoard, Weights & Biases, Trackio."""

# The trackers' packages have no types, and some make their classes when they are imported. trackio
# cannot be in the environment of the checks, because it needs an older pillow than matplotlib.
# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from aprilsched.errors import ConfigError
from aprilsched.kernel.values.extras import extra
from aprilsched.observe.exports.trackers import FLUSH_SECONDS, PROJECT, Writer


class TensorBoardWriter:
    """Writes TensorBoard event files into `folder`, which is made if it does not exist. Needs the
    extra ``tensorboard``, and no torch."""

    def __init__(self, folder: Path) -> None:
        with extra("tensorboard"):
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        self._event: Any = Event
        self._summary: Any = Summary
        self._events = EventFileWriter(str(folder), flush_secs=FLUSH_SECONDS)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        kind = self._summary
        values = [kind.Value(tag=name, simple_value=value) for name, value in figures.items()]
        event = self._event(wall_time=time.time(), step=step, summary=kind(value=values))
        self._events.add_event(event)

    def close(self) -> None:
        self._events.close()


class TrackioWriter:
    """Starts a trackio run of `project`, stored on this machine (in TRACKIO_DIR if it is set).
    Needs the extra ``trackio``.

    trackio supports one run at a time per process, so no other run may start until this one closes.

    Args:
        config: the settings of the run.
    """

    def __init__(self, *, project: str, name: str, config: Mapping[str, Any] | None = None) -> None:
        with extra("trackio"):
            import trackio
        self._package = trackio
        # trackio prints messages that are not part of the output of a command.
        with redirect_stdout(sys.stderr):
            self._run = trackio.init(project=project, name=name, config=dict(config or {}))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            # Not the run's finish method: trackio would end the run again at exit, and print a
            # message.
            self._package.finish()


class WandbWriter:
    """Starts a Weights & Biases run. Account, server and mode come from wandb's own settings. Needs
    the extra ``wandb``.

    Args:
        folder: where wandb keeps its files.
        config: the settings of the run.

    Raises:
        ConfigError: if wandb cannot start.
    """

    def __init__(
        self, folder: Path, *, project: str, name: str, config: Mapping[str, Any] | None = None
    ) -> None:
        with extra("wandb"):
            import wandb
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project, name=name, dir=str(folder), config=dict(config or {})
            )
        except wandb.Error as error:
            raise ConfigError(
                f"wandb cannot start ({error}); log in with wandb login, or set WANDB_MODE=offline."
            ) from error

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb(folder: Path, config: Mapping[str, Any]) -> Writer:
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    return WandbWriter(folder, project=project, name=folder.name, config=config)


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any]], Writer]] = {
    "tensorboard": lambda folder, config: TensorBoardWriter(folder / "tensorboard"),
    "trackio": lambda folder, config: TrackioWriter(
        project=PROJECT, name=folder.name, config=config
    ),
    "wandb": _wandb,
}
"""Trackers by name, which is also the name of the extra. Each starts a writer from the run folder
and the settings."""


def tracker_names(named: str) -> tuple[str, ...]:
    """Return the trackers in `named`, which are separated by commas.

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
    """Start a writer for the run in `folder` with the settings `config`.

    Raises:
        ConfigError: if the tracker is not installed, or cannot start.
    """
    return TRACKERS[name](folder, config)
