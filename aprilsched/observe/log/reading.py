"""Reads an event log as facts; everything that reads events.jsonl uses this module."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from aprilsched.kernel.core.messages.facts import Fact, by_delivery
from aprilsched.kernel.shell.listener import Listener
from aprilsched.observe.log.line_format import ANY_FACT, KINDS, LogBegun, LogEnded, LogResumed
from aprilsched.observe.log.tail import whole_lines

_TOKENS = b'"fact":"TokensReceived"'
"""Mark of the most frequent kind of lines. In other lines it occurs only inside quoted text."""
_TIME = re.compile(rb'\{"t": ?([-+.0-9eE]+), ?"fact": ?"')
"""Matches the start of each line: its time, which is not a field of the fact."""


class _Kind(msgspec.Struct):
    fact: str = ""


class LogReader:
    """Takes the lines of a log in order, and returns the facts of each event together."""

    def __init__(self) -> None:
        self._as_fact: msgspec.json.Decoder[Fact] = msgspec.json.Decoder(ANY_FACT)
        self._as_kind = msgspec.json.Decoder(_Kind)
        self._ready: list[tuple[Sequence[Fact], float]] = []
        self._facts: list[Fact] = []
        """Facts of the lines whose time is `at`."""
        self.at = 0.0
        """Time of the last line, in seconds."""

    def read(self, raw: bytes) -> list[tuple[Sequence[Fact], float]]:
        """Read the next line, and return the facts of the events that it completes.

        Returns:
            the facts of each event with their time.

        Raises:
            ValueError, MsgspecError: if the line cannot be understood.
        """
        head = _TIME.match(raw)
        if head is None:
            raise ValueError("a line of the event log is not a fact with its time")
        at = float(head[1])
        if at != self.at:
            self._end_moment()
            self.at = at
        try:
            fact = self._as_fact.decode(raw)
        except msgspec.ValidationError:
            if self._as_kind.decode(raw).fact in KINDS:
                raise
        else:
            if isinstance(fact, LogBegun | LogResumed | LogEnded):
                self._end_moment()
            else:
                self._facts.append(fact)
        ready, self._ready = self._ready, []
        return ready

    def rest(self) -> list[tuple[Sequence[Fact], float]]:
        """Return the facts of the last lines, when no further lines are available for now."""
        self._end_moment()
        ready, self._ready = self._ready, []
        return ready

    def _end_moment(self) -> None:
        pending, self._facts = self._facts, []
        for part in by_delivery(pending):
            self._ready.append((part, self.at))


def read_facts(
    path: Path, *, batches: int | None = None, tokens: bool = True
) -> Iterator[tuple[Sequence[Fact], float]]:
    """Yield the facts in the log at `path`: all facts of one event together, with their time.

    Args:
        batches: number of batches that the store has, if a process resumes the run and has not
            written its first line.
        tokens: whether to include TokensReceived. Without these facts, reading a long log takes a
            third of the time.

    Raises:
        OSError: if the file cannot be read.
        RunFolderError: if it is damaged before its end.
        ValueError, MsgspecError: if a line cannot be understood.
    """
    reader = LogReader()
    for raw in whole_lines(path, batches=batches):
        if tokens or _TOKENS not in raw:
            yield from reader.read(raw)
    yield from reader.rest()
    # The last lines may contain no facts, but their time is still the end of the log.
    yield (), reader.at


def replay(
    path: Path,
    listeners: Sequence[Listener],
    *,
    batches: int | None = None,
    tokens: bool = True,
) -> float:
    """Show the facts in the log at `path` to `listeners`, and return the time of its last line.

    Raises: as ``read_facts``.
    """
    at = 0.0
    for pending, at in read_facts(path, batches=batches, tokens=tokens):
        if pending:
            for listener in listeners:
                listener.on_facts(pending, at)
    return at
