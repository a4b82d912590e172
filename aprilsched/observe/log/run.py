"""Reads a run folder as data: its figures and its history.

Needs only files. A folder from another machine, or from another version of the scheduler, can be
read as long as the names in it are known.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from aprilsched.errors import RunFolderError
from aprilsched.kernel.core.messages.facts import (
    AttemptEnded,
    AttemptSent,
    BatchDelivered,
    DeliveredRollout,
    EngineLost,
    EngineModeChanged,
    Fact,
    RunOpened,
    UpdateFinished,
)
from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.observe.log.reading import replay
from aprilsched.observe.log.rebuild import summary_of_run
from aprilsched.observe.log.run_folder import EVENTS, config_in


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """An attempt of a request on an engine, from its sending to its end (or to the end of the
    run)."""

    rollout_id: int
    group_id: int
    engine: str
    start: float
    end: float
    finished: bool
    """Whether it ran to completion; otherwise it was interrupted, failed, or the run ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """The pause of an engine, from its pause call to the end of its continue call."""

    engine: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """An update: the engines had `version` from `time` on."""

    time: float
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """A batch and the time of its delivery, with its responses as in the event log."""

    time: float
    index: int
    version: int
    rollouts: tuple[DeliveredRollout, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The content of a run folder. Times are seconds since the start of the run. `config` is empty
    if the folder has only the log of a training loop."""

    config: dict[str, Any]
    summary: RunSummary
    attempts: tuple[Attempt, ...]
    pauses: tuple[Pause, ...]
    updates: tuple[Update, ...]
    deliveries: tuple[Delivery, ...]
    end: float


def read_run(folder: Path) -> Run:
    """Read the run in `folder`; a killed run is summarized from its event log.

    Raises:
        RunFolderError: if a file is missing or cannot be understood.
    """
    with readable(folder):
        config = config_in(folder)
        summary = summary_of_run(folder)
        history = History()
        end = replay(folder / EVENTS, [history], tokens=False)
    return history.run(config, summary, end)


@contextmanager
def readable(folder: Path) -> Generator[None]:
    """Turn errors in the block into one sentence about `folder`.

    Raises:
        RunFolderError: instead of OSError, ValueError or MsgspecError.
    """
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"{folder} is no whole run folder ({error.filename}: {error.strerror}); name one that "
            "aprilsched run or an EventLog has written."
        ) from error
    except (ValueError, msgspec.MsgspecError) as error:
        raise RunFolderError(
            f"{folder} cannot be understood ({error}); was it written by another version?"
        ) from error


class History:
    """Collects a run from its facts; facts about tokens are not needed."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[AttemptSent, float]] = {}
        """The open attempts with the times at which they were sent, by request."""
        self._paused: dict[str, float] = {}
        self._attempts: list[Attempt] = []
        self._pauses: list[Pause] = []
        self._updates: list[Update] = []
        self._deliveries: list[Delivery] = []
        self._now = 0.0

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            match fact:
                case RunOpened():
                    # Everything still open in the prior run ended at the time of its last line.
                    self._end_all()
                case AttemptSent():
                    self._open[fact.request_id] = (fact, now)
                case AttemptEnded():
                    self._now = now
                    self._close(fact.request_id, finished=fact.outcome == "finished")
                case EngineModeChanged(finish="pausing"):
                    self._paused.setdefault(fact.engine, now)
                case EngineModeChanged(start="continuing") | EngineLost():
                    self._now = now
                    self._unpause(fact.engine)
                case UpdateFinished(cause=""):
                    self._updates.append(Update(time=now, version=fact.version))
                case BatchDelivered(again=False):
                    self._deliver(fact, now)
                case _:
                    pass
        self._now = now

    def _deliver(self, fact: BatchDelivered, now: float) -> None:
        # The arrays of a log with tokens would fill the memory.
        bare = {"key": None, "input_ids": None, "token_ids": None, "logprobs": None}
        self._deliveries.append(
            Delivery(
                time=now,
                index=fact.batch,
                version=fact.version,
                rollouts=tuple(msgspec.structs.replace(each, **bare) for each in fact.rollouts),
            )
        )

    def run(self, config: dict[str, Any], summary: RunSummary, end: float) -> Run:
        """Return the run up to `end`; `config` and `summary` come from the folder."""
        self._now = end
        self._end_all()
        return Run(
            config=config,
            summary=summary,
            attempts=tuple(self._attempts),
            pauses=tuple(self._pauses),
            updates=tuple(self._updates),
            deliveries=tuple(self._deliveries),
            end=end,
        )

    def _end_all(self) -> None:
        """End everything that is open, because the run or its process has ended."""
        for request_id in list(self._open):
            self._close(request_id, finished=False)
        for engine in list(self._paused):
            self._unpause(engine)

    def _close(self, request_id: int, *, finished: bool) -> None:
        sent = self._open.pop(request_id, None)
        if sent is not None:
            fact, since = sent
            self._attempts.append(
                Attempt(
                    rollout_id=fact.rollout_id,
                    group_id=fact.group_id,
                    engine=fact.engine,
                    start=since,
                    end=self._now,
                    finished=finished,
                )
            )

    def _unpause(self, engine: str) -> None:
        since = self._paused.pop(engine, None)
        if since is not None:
            self._pauses.append(Pause(engine=engine, start=since, end=self._now))
