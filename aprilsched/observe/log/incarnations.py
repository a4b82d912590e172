"""Reads an event log written by several consecutive processes of one run.

A process may deliver a batch and be killed before the store saves it. The LogResumed line of the
next process contains the number of saved batches, and this process delivers the others again. The
earlier deliveries of those batches are void, and their lines are omitted.

A batch that the trainer has not acknowledged is delivered again, in a line marked as a repetition.
The batch counts once. If the first delivery is missing from the log, the repetition counts instead,
and its line is returned without the mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from aprilsched.kernel.values.files import open_regular
from aprilsched.observe.log.tail import Tail, read_tail

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
        """Void the deliveries after the first `batches`, which the next process does not know."""
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
