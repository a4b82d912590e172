"""A run folder as data: its figures, and what happened when.

Files only: a folder written on another machine, by another version of the scheduler, can be read
as long as the names in it are known.
"""

from __future__ import annotations

import tomllib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from aprilsched.analysis.lines import Line, read_lines
from aprilsched.analysis.rebuild import summary_of_run
from aprilsched.errors import RunFolderError
from aprilsched.telemetry.figures import RunSummary
from aprilsched.telemetry.run_folder import CONFIG, EVENTS
from aprilsched.types import Segment

__all__ = [
    "Attempt",
    "DeliveredRollout",
    "Delivery",
    "History",
    "Pause",
    "Run",
    "Update",
    "read_run",
    "readable",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A request with an engine, from its sending to its end (or the end of the run)."""

    rollout_id: int
    group_id: int
    engine: str
    start: float
    end: float
    finished: bool
    """It ran to its own end; otherwise it came back, failed, or the run ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """An engine, from its pause call to the end of its continue call."""

    engine: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """`version` was in the engines at `time`."""

    time: float
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeliveredRollout:
    """A response as it reached the trainer; `tokens` is its length."""

    rollout_id: int
    group_id: int
    tokens: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """A batch and when it was handed over."""

    time: float
    index: int
    version: int
    rollouts: tuple[DeliveredRollout, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run folder says. Times are seconds since the run began."""

    config: dict[str, Any]
    summary: RunSummary
    attempts: tuple[Attempt, ...]
    pauses: tuple[Pause, ...]
    updates: tuple[Update, ...]
    deliveries: tuple[Delivery, ...]
    end: float


def read_run(folder: Path) -> Run:
    """The run in `folder`; one that was killed is summed up from its event log.

    Raises:
        RunFolderError: if a file is missing or cannot be understood.
    """
    with readable(folder):
        config = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
        summary = summary_of_run(folder)
        history = History()
        for line in read_lines(folder / EVENTS):
            history.add(line)
    return history.run(config, summary)


@contextmanager
def readable(folder: Path) -> Generator[None]:
    """What cannot be read or understood inside is said in one sentence about `folder`.

    Raises:
        RunFolderError: instead of OSError, ValueError or MsgspecError.
    """
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"{folder} is no whole run folder ({error.filename}: {error.strerror}); name one that "
            "aprilsched run has written."
        ) from error
    except (ValueError, msgspec.MsgspecError) as error:
        raise RunFolderError(
            f"{folder} cannot be understood ({error}); was it written by another version?"
        ) from error


class History:
    """Puts the lines of a run together; those of progress are not needed."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], Line] = {}
        self._paused: dict[str, float] = {}
        self._attempts: list[Attempt] = []
        self._pauses: list[Pause] = []
        self._updates: list[Update] = []
        self._deliveries: list[Delivery] = []
        self._end = 0.0

    def add(self, line: Line) -> None:
        """One more line."""
        self._end = line.t
        match line.event or line.command:
            case "Send":
                self._open[line.request_id, line.attempt] = line
            case "Finished" | "Interrupted" | "Failed" as ending:
                self._close((line.request_id, line.attempt), finished=ending == "Finished")
            case "Pause":
                self._paused.setdefault(line.engine, line.t)
            case "Continued" | "LoseEngine":
                self._unpause(line.engine)
            case "FinishUpdate" if not line.cause:
                self._updates.append(Update(time=line.t, version=line.version))
            case "Deliver":
                self._deliveries.append(_delivery(line))
            case "Resumed":
                self._end_all()
            case _:
                pass

    def run(self, config: dict[str, Any], summary: RunSummary) -> Run:
        """What they say; `config` and `summary` are those of the folder."""
        self._end_all()
        return Run(
            config=config,
            summary=summary,
            attempts=tuple(self._attempts),
            pauses=tuple(self._pauses),
            updates=tuple(self._updates),
            deliveries=tuple(self._deliveries),
            end=self._end,
        )

    def _end_all(self) -> None:
        """The run ends, or the process that had it did."""
        for key in list(self._open):
            self._close(key, finished=False)
        for engine in list(self._paused):
            self._unpause(engine)

    def _close(self, key: tuple[int, int], *, finished: bool) -> None:
        sent = self._open.pop(key, None)
        if sent is not None:
            self._attempts.append(
                Attempt(
                    rollout_id=sent.rollout_id,
                    group_id=sent.group_id,
                    engine=sent.engine,
                    start=sent.t,
                    end=self._end,
                    finished=finished,
                )
            )

    def _unpause(self, engine: str) -> None:
        since = self._paused.pop(engine, None)
        if since is not None:
            self._pauses.append(Pause(engine=engine, start=since, end=self._end))


def _delivery(line: Line) -> Delivery:
    return Delivery(
        time=line.t,
        index=line.batch,
        version=line.version,
        rollouts=tuple(
            DeliveredRollout(
                rollout_id=rollout.rollout_id,
                group_id=rollout.group_id,
                tokens=rollout.tokens,
                segments=_segments(rollout.segments),
            )
            for rollout in line.rollouts
        ),
    )


def _segments(rows: Sequence[tuple[int, int, int, str | None]]) -> tuple[Segment, ...]:
    return tuple(
        Segment(start=start, end=end, version=version, engine=engine)
        for start, end, version, engine in rows
    )
