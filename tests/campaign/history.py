"""The history of a run as readable lines, and its outcome."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import deque
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.simulation.engine import run_virtual

_KEPT = 4000
_MOST_CHARACTERS = 160
_IDS = ("rollout_id", "group_id", "key", "index")


@dataclass
class Outcome:
    """The outcome of a seed."""

    seed: int
    complaints: list[str] = field(default_factory=list[str])
    ending: list[str] = field(default_factory=list[str])
    """How each life ended."""
    figures: dict[str, int] = field(default_factory=dict[str, int])
    """Counts, which the campaign sums."""
    seconds: float = 0.0
    """In virtual time."""
    history: list[str] = field(default_factory=list[str])
    kinds: list[str] = field(default_factory=list[str])
    """The kinds of chaos in the run."""
    settings: str = ""
    """The most important settings, in one line."""


class History(logging.Handler):
    """A listener that records all facts, log messages of the library, and notes of the campaign."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=_KEPT)

    def note(self, text: str) -> None:
        try:
            now = asyncio.get_running_loop().time()
        except RuntimeError:
            now = 0.0
        self._lines.append(f"{now:10.3f}  {text}")

    def lines(self) -> list[str]:
        return list(self._lines)

    def emit(self, record: logging.LogRecord) -> None:
        self.note(f"LOG {record.levelname} {record.getMessage()}")

    def on_event(self, event: ev.Event, now: float) -> None:
        self.note(f"  {_shown(event)}")

    def on_command(self, command: do.Command, now: float) -> None:
        self.note(f"    -> {_shown(command)}")


def recorded(outcome: Outcome, history: History, run: Coroutine[Any, Any, None]) -> Outcome:
    """Run a seed on the virtual clock. Any error that it raises is a complaint."""
    with _logged(history):
        try:
            run_virtual(run, idle_timeout=20.0)
        except Exception as error:
            text = "".join(traceback.format_exception(error)[-12:])
            outcome.complaints.append(f"the run ended with {error!r}\n{text}")
    outcome.history = history.lines()
    return outcome


@contextmanager
def _logged(history: History) -> Generator[None]:
    """Redirect the log of the library into a history."""
    logger = logging.getLogger("aprilsched")
    before = logger.level, logger.propagate, logging.root.manager.disable
    logger.addHandler(history)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logging.disable(logging.NOTSET)
    try:
        yield
    finally:
        logger.removeHandler(history)
        logger.setLevel(before[0])
        logger.propagate = before[1]
        logging.disable(before[2])


def _shown(message: Any) -> str:
    # A struct without fields has an empty tuple, which must not select the dataclass branch.
    names = getattr(message, "__struct_fields__", None)
    names = message.__dataclass_fields__ if names is None else names
    fields = ", ".join(f"{name}={_short(getattr(message, name))}" for name in names)
    return f"{type(message).__name__}({fields})"


def _short(value: Any) -> str:
    """Return a short text for a value; objects with an id are shown by the id."""
    if isinstance(value, np.ndarray):
        return f"[{value.size}]"
    for name in _IDS:
        if hasattr(value, name):
            return f"{type(value).__name__} {getattr(value, name)}"
    return repr(value)[:_MOST_CHARACTERS]
