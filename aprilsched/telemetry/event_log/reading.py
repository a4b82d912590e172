"""Reads an event log as facts; everything that reads events.jsonl uses this module.

Lines of version 2 are facts. Lines of version 1 are events and commands, and are translated to
facts (:mod:`~aprilsched.telemetry.event_log.version_1`). A log can have both, if a newer version of
aprilsched resumed the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import Event
from aprilsched.core.messages.facts import Fact, by_delivery
from aprilsched.telemetry.base import Listener
from aprilsched.telemetry.event_log.format import ANY_FACT, FACT, KINDS, LogBegun, LogResumed
from aprilsched.telemetry.event_log.incarnations import whole_lines
from aprilsched.telemetry.event_log.version_1 import Protocol1
from aprilsched.telemetry.event_log.version_1_lines import chunk, typed

__all__ = ["LogReader", "read_facts", "replay"]

_TOKENS = (b'"fact":"TokensReceived"', b'"event":"Progress"')
"""Marks of the most frequent kinds of lines. Other lines have them only inside of quoted text."""
_PROGRESS = _TOKENS[1]


class _Progress(msgspec.Struct):
    t: float
    request_id: int
    attempt: int
    tokens: int
    event: str = ""


class _Kind(msgspec.Struct):
    fact: str = ""


class LogReader:
    """Takes the lines of a log in order, and returns the facts of each event together."""

    def __init__(self) -> None:
        self._as_fact: msgspec.json.Decoder[Fact] = msgspec.json.Decoder(ANY_FACT)
        self._as_kind = msgspec.json.Decoder(_Kind)
        self._as_progress = msgspec.json.Decoder(_Progress)
        self._as_fields = msgspec.json.Decoder(dict[str, Any])
        self._protocol = Protocol1(self._take)
        self._ready: list[tuple[Sequence[Fact], float]] = []
        self._facts: list[Fact] = []
        """Facts of the lines whose time is `at`."""
        self.at = 0.0
        """Time of the last line, in seconds."""

    def read(self, raw: bytes) -> list[tuple[Sequence[Fact], float]]:
        """Take the next line, and return the facts of the events that are complete with it.

        Returns:
            the facts of each event with their time.

        Raises:
            ValueError, MsgspecError: if the line cannot be understood.
        """
        if FACT.match(raw):
            self._read_fact(raw)
        else:
            self._read_version_1(raw)
        ready, self._ready = self._ready, []
        return ready

    def rest(self) -> list[tuple[Sequence[Fact], float]]:
        """Return the facts of the last lines, after which there are no more lines for now."""
        self._end_moment()
        self._protocol.flush()
        ready, self._ready = self._ready, []
        return ready

    def _read_fact(self, raw: bytes) -> None:
        # Every line begins with its time, which is not a field of the fact.
        at = float(raw[5 : raw.index(b",")])
        if at != self.at:
            self._end_moment()
            self.at = at
        try:
            fact = self._as_fact.decode(raw)
        except msgspec.ValidationError:
            if self._as_kind.decode(raw).fact in KINDS:
                raise
            return  # a fact of a later version
        if isinstance(fact, LogBegun | LogResumed):
            self._end_moment()
            self._protocol.flush()
        else:
            self._facts.append(fact)

    def _end_moment(self) -> None:
        facts, self._facts = self._facts, []
        for part in by_delivery(facts):
            self._ready.append((part, self.at))

    def _take(self, facts: Sequence[Fact], at: float) -> None:
        self._ready.append((facts, at))

    def _read_version_1(self, raw: bytes) -> None:
        # These are two thirds of all lines or more, so they are decoded without a dictionary.
        if _PROGRESS in raw:
            line = self._as_progress.decode(raw)
            if line.event == "Progress":
                self.at = line.t
                event = chunk(line.request_id, line.attempt, line.tokens)
                self._protocol.event(event, line.t)
                return
        fields = self._as_fields.decode(raw)
        try:
            self.at = fields["t"]
            what = typed(fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"a line of the event log lacks something: {error}") from error
        if what is None:
            return
        if "event" in fields:
            self._protocol.event(cast("Event", what), self.at)
        else:
            self._protocol.command(cast("Command", what), self.at)


def read_facts(
    path: Path, *, batches: int | None = None, tokens: bool = True
) -> Iterator[tuple[Sequence[Fact], float]]:
    """Yield the facts in the log at `path`: those of one event together, with their time.

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
        if tokens or not any(mark in raw for mark in _TOKENS):
            yield from reader.read(raw)
    yield from reader.rest()
    # The last lines may have no facts, and their time is the end of the log all the same.
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
    for facts, at in read_facts(path, batches=batches, tokens=tokens):
        if facts:
            for listener in listeners:
                listener.on_facts(facts, at)
    return at
