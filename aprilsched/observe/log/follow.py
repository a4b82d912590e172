"""Follows an events.jsonl that still grows, for the live view of a run in another process.

Each complete line is returned once and in order; an incomplete last line is returned once it is
complete. When another process resumes the run, earlier lines may become void
(:mod:`~aprilsched.observe.log.reading`), so all lines are then returned again from the first one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from aprilsched.kernel.values.files import open_regular
from aprilsched.observe.log.tail import read_tail, whole_lines

_READ_BYTES = 1 << 22
_FROM_START = (b'"fact":"LogResumed"', b'"again":true')
"""Marks of lines that may void earlier lines."""


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
        """Iterator over the lines that existed when reading started from the first line. None means
        that the log must be read from its first line."""
        self._at = 0
        """Number of bytes that have been returned, or that `_existing` will return."""
        self._given = 0
        """Number of bytes that have been returned; approximate while `_existing` is read."""

    @property
    def caught_up(self) -> float:
        """Share of the existing lines that has been returned, 0 to 1."""
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
