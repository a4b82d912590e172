"""An events.jsonl that still grows, line by line.

Invariants: each whole line is given once and in order, a line that is not whole yet is waited for;
when a process goes on with the run of a former one, what counts of that one changes
(:mod:`~aprilsched.telemetry.event_log.incarnations`), and so everything is given anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from aprilsched.telemetry.event_log.incarnations import whole_lines
from aprilsched.telemetry.event_log.tail import read_tail

__all__ = ["Follower", "News"]

_READ_BYTES = 1 << 22
_FROM_START = (
    b'"fact":"LogResumed"',
    b'"again":true',
    b'"event":"Resumed"',
    b'"command":"Redeliver"',
)
"""Lines after which others count than before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """Lines that were not given before; with `anew` they are the log's first, again."""

    lines: tuple[bytes, ...] = ()
    from_start: bool = False


class Follower:
    """Of the log at `path`, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._existing: Iterator[bytes] | None = None
        """What was there when it was looked at as a whole; None: look."""
        self._at = 0
        """Bytes that are given, or were there then."""
        self._given = 0
        """Of those that were there then, about."""

    @property
    def caught_up(self) -> float:
        """The share that is given of what was there at the beginning, 0 to 1."""
        return min(1.0, self._given / self._at) if self._at else 1.0

    def poll(self, most: int) -> News:
        """What is new; after the first `most` lines the rest is for the next call.

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
        """Whole lines behind the last one, up to one after which everything has to be given anew;
        None if that is the next."""
        with self._path.open("rb") as file:
            file.seek(0, 2)
            if file.tell() < self._at:
                return None
            file.seek(self._at)
            read = file.read(_READ_BYTES)
        lines: list[bytes] = []
        for raw in read[: read.rfind(b"\n") + 1].splitlines(keepends=True):
            broken = not _whole(raw)
            if broken and not lines and read.endswith(raw):
                return ()  # it may be cut away by a process that goes on
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
