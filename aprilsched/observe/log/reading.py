"""Reads an event log as facts; everything that reads events.jsonl uses this module."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Union

import msgspec

from aprilsched.errors import RunFolderError
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.messages.facts import Fact, by_delivery
from aprilsched.kernel.shell.listener import Listener
from aprilsched.kernel.values.files import open_regular

# The format of events.jsonl: each line is a fact of the run, with its time.
#
# A line has ``t`` (seconds since the run began, on the run's clock), ``fact`` with the name of the
# fact, and the fact's fields; a field that has its default is left out. The first line of each
# process that writes the log is one of the two facts here.

FORMAT_VERSION = 1


class Versioned(msgspec.Struct):
    """What every line or file with a version of its format has, whatever else is in it.

    `version` is what lines call it, and `schema` what files of one object do.
    """

    version: int = 0
    schema: int = 0


def refuse_newer(path: Path, found: int, known: int) -> None:
    """Refuse a file of a format that this release does not know.

    Args:
        path: the file, for the message.
        found: the version in the file.
        known: the newest version that can be read.

    Raises:
        RunFolderError: if `found` is newer.
    """
    if found > known:
        raise RunFolderError(
            f"{path} has format {found}, and this aprilsched reads formats up to {known}; upgrade "
            "aprilsched."
        )


class LogBegun(Fact, frozen=True):
    """The first line of a log; `version` is the version of its format."""

    version: int


class LogResumed(Fact, frozen=True):
    """The first line of a process that resumes the run.

    Attributes:
        version: version of the format.
        incarnation: number of processes that have written the log, this one included.
        batches: number of batches that the process knows. Later deliveries in the log were not
            saved, and are void.
    """

    version: int
    incarnation: int
    batches: int


KINDS: dict[str, type[Fact]] = {
    kind.__name__: kind
    for kind in (*vars(facts).values(), LogBegun, LogResumed)
    if isinstance(kind, type) and issubclass(kind, Fact) and kind not in (Fact, facts.Order)
}
"""Every kind of line by its name."""

ANY_FACT: Any = Union[tuple(KINDS.values())]  # noqa: UP007 - of kinds that are listed above
"""The type that a decoder of lines takes: any kind of line."""


# --- tail ----------------------------------------------------------------------------------------

# Finds the end of an event log: the end of its last complete line.
#
# A process that is killed while it writes leaves an incomplete line, and a machine that crashes may
# leave NUL bytes. Both come after all complete lines.


@dataclass(frozen=True, kw_only=True, slots=True)
class Tail:
    """The end of the complete lines.

    Attributes:
        size: number of bytes of the complete lines.
        t: time of the last complete line in seconds; 0.0 if there is none.
        incarnation: number of processes that have written the log.
    """

    size: int
    t: float
    incarnation: int


class _Line(msgspec.Struct, frozen=True):
    t: float
    fact: str


def read_tail(path: Path) -> Tail:
    """Find the end of the log at `path`.

    Raises:
        OSError: if the log cannot be read.
        RunFolderError: if a line before the end is damaged, or if a process wrote a newer format.
    """
    decoder = msgspec.json.Decoder(_Line)
    size, t, incarnation = 0, 0.0, 1
    broken: int | None = None
    with open_regular(path) as file:
        for number, raw in enumerate(file, start=1):
            line = _decoded(decoder, raw)
            if line is None:
                broken = broken or number
            elif broken is not None:
                raise RunFolderError(
                    f"{path} is damaged in line {broken}, before its end; take that line out of it."
                )
            else:
                if line.fact in (LogBegun.__name__, LogResumed.__name__):
                    refuse_newer(
                        path, msgspec.json.decode(raw, type=Versioned).version, FORMAT_VERSION
                    )
                size, t = size + len(raw), line.t
                incarnation += line.fact == LogResumed.__name__
    return Tail(size=size, t=t, incarnation=incarnation)


def _decoded(decoder: msgspec.json.Decoder[_Line], raw: bytes) -> _Line | None:
    """Decode a line; None if it is not complete."""
    if not raw.endswith(b"\n"):
        return None
    try:
        return decoder.decode(raw)
    except msgspec.MsgspecError:
        return None


# --- incarnations --------------------------------------------------------------------------------

# Reads an event log that several processes of one run wrote one after the other.
#
# A process may have delivered a batch that the store did not save before the process was killed.
# The next process writes in its LogResumed line how many batches the store has, and delivers the
# others again. The earlier deliveries of those batches are void, and their lines are left out.
#
# A batch that the trainer has not acknowledged is delivered again, and this line is marked as a
# repetition. The batch counts once. If the log ended before the first delivery, the repetition is
# the delivery that counts, and its line is given without the mark.

_MARK = re.compile(rb'"fact":"(LogResumed|BatchDelivered)"')
_AGAIN = b',"again":true'
"""The mark of a repeated delivery in a line."""


class _Mark(msgspec.Struct, frozen=True):
    fact: str
    batch: int = -1
    again: bool = False
    batches: int | None = None


def whole_lines(
    path: Path, *, batches: int | None = None, tail: Tail | None = None
) -> Iterator[bytes]:
    """Yield the lines at `path` that count, without an incomplete line at the end.

    Args:
        batches: number of batches that the store has, if a process resumes the run and has not
            written its first line.
        tail: the end of the log, if it is known already; later lines are left out.

    Raises:
        OSError: if the file cannot be read.
        RunFolderError: if it is damaged before its end.
    """
    tail = read_tail(path) if tail is None else tail
    corrections = _Corrections(path, tail.size, batches)
    for number, raw in _numbered(path, tail.size):
        if number in corrections.void:
            continue
        yield raw.replace(_AGAIN, b"", 1) if number in corrections.first else raw


class _Corrections:
    """Finds the lines that need a correction.

    Attributes:
        void: numbers of the lines of deliveries that do not count.
        first: numbers of the lines of repeated deliveries that count as the first ones.
    """

    def __init__(self, path: Path, size: int, batches: int | None) -> None:
        self.void: set[int] = set()
        self.first: set[int] = set()
        self._delivered: dict[int, int] = {}
        decoder = msgspec.json.Decoder(_Mark)
        for number, raw in _numbered(path, size):
            if _MARK.search(raw):
                self._add(decoder.decode(raw), number)
        self._resume(batches)

    def _add(self, mark: _Mark, number: int) -> None:
        match mark.fact:
            case "LogResumed":
                self._resume(mark.batches)
            case "BatchDelivered" if not mark.again:
                self._delivered[mark.batch] = number
            case "BatchDelivered" if mark.batch not in self._delivered:
                self._delivered[mark.batch] = number
                self.first.add(number)
            case _:
                pass

    def _resume(self, batches: int | None) -> None:
        """Make the deliveries void that the next process does not know, which knows `batches`."""
        if batches is not None:
            for index in [index for index in self._delivered if index >= batches]:
                self.void.add(self._delivered.pop(index))


def _numbered(path: Path, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines within the first `size` bytes, with their numbers from 0."""
    with open_regular(path) as file:
        for number, raw in enumerate(file):
            size -= len(raw)
            if size < 0:
                return
            yield number, raw


# --- reading -------------------------------------------------------------------------------------

_TOKENS = b'"fact":"TokensReceived"'
"""Mark of the most frequent kind of lines. Other lines have it only inside of quoted text."""
_TIME = re.compile(rb'\{"t": ?([-+.0-9eE]+), ?"fact": ?"')
"""Matches the beginning of each line: its time, which is not a field of the fact."""


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
        """Take the next line, and return the facts of the events that are complete with it.

        Returns:
            the facts of each event with their time.

        Raises:
            ValueError, MsgspecError: if the line cannot be understood.
        """
        begins = _TIME.match(raw)
        if begins is None:
            raise ValueError("a line of the event log is not a fact with its time")
        at = float(begins[1])
        if at != self.at:
            self._end_moment()
            self.at = at
        try:
            fact = self._as_fact.decode(raw)
        except msgspec.ValidationError:
            if self._as_kind.decode(raw).fact in KINDS:
                raise
        else:
            if isinstance(fact, LogBegun | LogResumed):
                self._end_moment()
            else:
                self._facts.append(fact)
        ready, self._ready = self._ready, []
        return ready

    def rest(self) -> list[tuple[Sequence[Fact], float]]:
        """Return the facts of the last lines, after which there are no more lines for now."""
        self._end_moment()
        ready, self._ready = self._ready, []
        return ready

    def _end_moment(self) -> None:
        told, self._facts = self._facts, []
        for part in by_delivery(told):
            self._ready.append((part, self.at))


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
        if tokens or _TOKENS not in raw:
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
    for told, at in read_facts(path, batches=batches, tokens=tokens):
        if told:
            for listener in listeners:
                listener.on_facts(told, at)
    return at


# --- follow --------------------------------------------------------------------------------------

# Follows an events.jsonl that still grows, for the live view of a run in another process.
#
# Each complete line is returned once and in order. An incomplete line at the end is returned when
# it is complete. When another process resumes the run, earlier lines may become void
# (:mod:`~aprilsched.observe.log.reading`), so all lines are then returned again from
# the first one.

_READ_BYTES = 1 << 22
_FROM_START = (b'"fact":"LogResumed"', b'"again":true')
"""Marks of lines that may make earlier lines void."""


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """New lines of a log.

    Attributes:
        lines: the lines.
        from_start: whether these are the first lines of the log, and everything returned before is
            void.
    """

    lines: tuple[bytes, ...] = ()
    from_start: bool = False


class Follower:
    """Follows the log at `path`, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._existing: Iterator[bytes] | None = None
        """Iterator over the lines that the log had when it was read from its first line. None means
        that it must be read from its first line."""
        self._at = 0
        """Number of bytes that are returned, or that `_existing` will return."""
        self._given = 0
        """Number of those bytes that are returned; approximate while `_existing` is read."""

    @property
    def caught_up(self) -> float:
        """Share of the existing lines that is returned, from 0 to 1."""
        return min(1.0, self._given / self._at) if self._at else 1.0

    def poll(self, most: int) -> News:
        """Return new lines; of the existing lines at most `most`, and the rest in the next calls.

        Raises:
            OSError: if the log cannot be read.
            RunFolderError: if it is damaged before its end.
        """
        from_start = self._existing is None
        if self._existing is None:
            if not self._path.exists():
                return News()
            tail = read_tail(self._path)
            self._at, self._given = tail.size, 0
            self._existing = whole_lines(self._path, tail=tail)
        lines = tuple(islice(self._existing, most))
        if lines or from_start:
            self._given += sum(map(len, lines))
            return News(lines=lines, from_start=from_start)
        self._given = self._at
        fresh = self._fresh()
        if fresh is None:
            self._existing = None
            return self.poll(most)
        return News(lines=fresh)

    def _fresh(self) -> tuple[bytes, ...] | None:
        """Return the complete lines that were added, up to a line that may make earlier lines void.

        Returns None if that line is the next one.
        """
        with open_regular(self._path) as file:
            file.seek(0, 2)
            if file.tell() < self._at:
                return None
            file.seek(self._at)
            read = file.read(_READ_BYTES)
        lines: list[bytes] = []
        for raw in read[: read.rfind(b"\n") + 1].splitlines(keepends=True):
            broken = not _whole(raw)
            if broken and not lines and read.endswith(raw):
                return ()  # a process that resumes the run may remove it
            if broken or any(mark in raw for mark in _FROM_START):
                if lines:
                    break
                return None
            lines.append(raw)
        self._at += sum(map(len, lines))
        self._given = self._at
        return tuple(lines)


def _whole(raw: bytes) -> bool:
    try:
        msgspec.json.decode(raw)
    except msgspec.MsgspecError:
        return False
    return True
