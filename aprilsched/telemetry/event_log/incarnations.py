"""A log that several processes of one run wrote, one after the other, as one account.

What a process wrote last may not have been saved when it was killed. Then the next one, which says
in its Resumed line how many batches it knows of, delivers it anew: the earlier delivery is void. A
batch that is handed over again, because the trainer had not acknowledged it, counts once; where
the log was cut off before its delivery, handing it over again is the delivery.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from aprilsched.telemetry.event_log.tail import Tail, read_tail

__all__ = ["whole_lines"]

_MARK = re.compile(
    rb'"fact":"(LogResumed|BatchDelivered)"|"event":"Resumed"|"command":"(Red|D)eliver"'
)
_AGAIN = ((b'"command":"Redeliver"', b'"command":"Deliver"'), (b',"again":true', b""))
"""How a line says that a batch is handed over again, and what it is without that: of version 1, and
of version 2."""


class _Mark(msgspec.Struct, frozen=True):
    fact: str = ""
    event: str = ""
    command: str = ""
    batch: int = -1
    again: bool = False
    batches: int | None = None


def whole_lines(
    path: Path, *, batches: int | None = None, tail: Tail | None = None
) -> Iterator[bytes]:
    """The lines at `path` that count, without what was cut off at the end.

    `batches`: as many as a process knows of that goes on with the run and has not written yet.
    `tail`: where the log ended when it was looked at; what came since is left out.

    Raises:
        OSError: if the file cannot be read.
        RunFolderError: if it is damaged before its end.
    """
    tail = read_tail(path) if tail is None else tail
    corrections = _Corrections(path, tail.size, batches)
    for number, raw in _numbered(path, tail.size):
        if number in corrections.void:
            continue
        yield _as_first(raw) if number in corrections.first else raw


def _as_first(raw: bytes) -> bytes:
    for again, first in _AGAIN:
        raw = raw.replace(again, first, 1)
    return raw


class _Corrections:
    """Numbers of lines: `void` are those of deliveries that do not count, `first` those of
    batches that were handed over again and count."""

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
        match mark.fact or mark.event or mark.command:
            case "Resumed" | "LogResumed":
                self._resume(mark.batches)
            case "Deliver":
                self._delivered[mark.batch] = number
            case "BatchDelivered" if not mark.again:
                self._delivered[mark.batch] = number
            case "Redeliver" | "BatchDelivered" if mark.batch not in self._delivered:
                self._delivered[mark.batch] = number
                self.first.add(number)
            case _:
                pass

    def _resume(self, batches: int | None) -> None:
        """The next process knows of `batches`."""
        if batches is not None:
            for index in [index for index in self._delivered if index >= batches]:
                self.void.add(self._delivered.pop(index))


def _numbered(path: Path, size: int) -> Iterator[tuple[int, bytes]]:
    """The lines of the first `size` bytes."""
    with path.open("rb") as file:
        for number, raw in enumerate(file):
            size -= len(raw)
            if size < 0:
                return
            yield number, raw
