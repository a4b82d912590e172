"""Gives the figures of each delivered batch to experiment trackers: wandb, trackio, TensorBoard.

Invariants: the figures are taken in the run's own thread at the delivery, so they are of one
moment. The tracker runs in another thread, and the run never waits for it.
"""

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
from typing import Any, Protocol, Self

from aprilsched.errors import ConfigError
from aprilsched.kernel.core.messages.facts import BatchDelivered
from aprilsched.kernel.values.extras import extra
from aprilsched.observe.figures.engine_time import PARTS, Part
from aprilsched.observe.figures.live_figures import FiguresListener, LiveFigures
from aprilsched.observe.figures.table import FIGURES, Moment, values_at
from aprilsched.observe.worker import Worker

_MAX_PENDING = 1_000
_CLOSE_SECONDS = 30.0
_FLUSH_SECONDS = 5
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


class StepTracker(FiguresListener):
    """Gives the figures of each batch to `writer` and closes it at the end, both in a worker
    thread. A step is a delivered batch, and has its number.

    Use it as ``with StepTracker(writer) as tracker:`` around the scheduler, and pass it to the
    scheduler as a listener.

    Args:
        figures: LiveFigures that are a listener before this one. If it is None, the tracker keeps
            figures of its own.
        close_seconds: seconds that the end of the block waits at most until everything is written
            and the writer is closed.
    """

    def __init__(
        self,
        writer: Writer,
        figures: LiveFigures | None = None,
        *,
        close_seconds: float = _CLOSE_SECONDS,
    ) -> None:
        super().__init__(figures)
        self._handlers = {BatchDelivered: self._step}
        self._writer = writer
        self._seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        """Seconds of all engines by part, at the previous batch."""
        self._worker = Worker(
            f"the tracker {type(writer).__qualname__}",
            "steps",
            max_pending=_MAX_PENDING,
            close_seconds=close_seconds,
            at_end=writer.close,
        )

    @property
    def error(self) -> BaseException | None:
        """The error of the writer, after which it gets nothing more; None if there was none."""
        return self._worker.error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is pending and close the writer, in bounded time."""
        self._worker.close()

    def _step(self, fact: BatchDelivered) -> None:
        if fact.again:
            return
        figures = self._figures
        with figures.lock:
            # The time is counted up to the delivery and not up to now, because a scrape may have
            # counted further.
            figures.state.advance(figures.state.now)
            seconds = figures.state.seconds()
            if figures.batch is None:
                return
            spent: dict[Part, float] = {
                part: max(0.0, seconds[part] - self._seconds[part]) for part in PARTS
            }
            self._seconds = seconds
            written = _written(Moment(figures=figures, spent=spent))
        self._worker.put(self._writer.write, fact.batch, written)


def _written(moment: Moment) -> dict[str, float]:
    """The figures of a batch by name; what cannot be known is left out."""
    values = {name: values_at(each, moment) for name, each in FIGURES.items() if each.tracked}
    found = {name: float(sum(value.values())) for name, value in values.items() if value}
    if moment.figures.batch is not None:
        parts = moment.figures.batch.figures.rewards.parts
        found |= {f"batch/reward/{name}": value for name, value in parts.items()}
    return found


# --- writers -------------------------------------------------------------------------------------


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
        self._events = EventFileWriter(str(folder), flush_secs=_FLUSH_SECONDS)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        kind = self._summary
        values = [kind.Value(tag=name, simple_value=value) for name, value in figures.items()]
        event = self._event(wall_time=time.time(), step=step, summary=kind(value=values))
        self._events.add_event(event)

    def close(self) -> None:
        self._events.close()


class TrackioWriter:
    """Begins a run of `project`, which trackio keeps on this machine, where its own settings say
    (TRACKIO_DIR). Needs the extra ``trackio``.

    trackio has one run at a time in a process, so no other run may begin meanwhile.

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
            # The run's own method is not called: trackio would end it again at exit, and print
            # that.
            self._package.finish()


class WandbWriter:
    """Begins a run of Weights & Biases. The account, server and mode are those of wandb's own
    settings. Needs the extra ``wandb``.

    Args:
        folder: where wandb keeps its files.
        config: the settings of the run.

    Raises:
        ConfigError: if wandb refuses to begin.
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
                f"wandb cannot begin ({error}); log in with wandb login, or set WANDB_MODE=offline."
            ) from error

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb(folder: Path, config: Mapping[str, Any]) -> Writer:
    project = os.environ.get("WANDB_PROJECT", _PROJECT)
    return WandbWriter(folder, project=project, name=folder.name, config=config)


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any]], Writer]] = {
    "tensorboard": lambda folder, config: TensorBoardWriter(folder / "tensorboard"),
    "trackio": lambda folder, config: TrackioWriter(
        project=_PROJECT, name=folder.name, config=config
    ),
    "wandb": _wandb,
}
"""Trackers by name, which is also the name of the extra. Each begins a writer for the run in a
folder, with its settings."""


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
    return TRACKERS[name](folder, config)
