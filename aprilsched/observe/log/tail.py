"""Finds which lines of an event log count, in a log that several processes of one run wrote.

A process that is killed while it writes leaves an incomplete line, and a machine that crashes may
leave NUL bytes. Both come after all complete lines.

A process may deliver a batch and be killed before the store saves it. The LogResumed line of the
next process contains the number of saved batches, and this process delivers the others again. The
earlier deliveries of those batches are void, and their lines are omitted.

A batch that the trainer has not acknowledged is delivered again, in a line marked as a repetition.
The batch counts once. If the first delivery is missing from the log, the repetition counts instead,
and its line is returned without the mark.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from os import SEEK_END
from pathlib import Path

import msgspec

from aprilsched.errors import RunFolderError
from aprilsched.kernel.values.files import open_regular
from aprilsched.observe.log.line_format import (
    FORMAT_VERSION,
    LogBegun,
    LogEnded,
    LogResumed,
    Versioned,
    refuse_newer,
)

_LAST_BYTES = 1 << 14
"""More than the length of a LogEnded."""
_AGAIN = b',"again":true'
"""The mark of a repeated delivery in a line."""


class _Line(msgspec.Struct, frozen=True):
    t: float
    fact: str


class _Delivery(msgspec.Struct, frozen=True):
    batch: int
    again: bool = False


class _Resumption(msgspec.Struct, frozen=True):
    batches: int | None = None


@dataclass(kw_only=True, slots=True)
class Tail:
    """The end of the complete lines, and the lines before it that need a correction.

    Attributes:
        size: number of bytes of the complete lines.
        t: time of the last complete line in seconds; 0.0 if there is none.
        incarnation: number of processes that have written the log.
        void: numbers of the lines of deliveries that do not count, from 0.
        first: numbers of the lines of repeated deliveries that count as the first ones.
    """

    size: int = 0
    t: float = 0.0
    incarnation: int = 1
    void: set[int] = field(default_factory=set[int])
    first: set[int] = field(default_factory=set[int])


def read_tail(path: Path, *, batches: int | None = None) -> Tail:
    """Find the end of the log at `path`.

    Args:
        batches: number of batches that the store has, if a process resumes the run and has not
            written its first line.

    Raises:
        OSError: if the log cannot be read.
        RunFolderError: if a line before the end is damaged, or if a process wrote a newer format.
    """
    tail, delivered = Tail(), dict[int, int]()
    broken: int | None = None

    def resume(saved: int | None) -> None:
        """Void the deliveries after the first `saved` batches."""
        for index in [index for index in delivered if saved is not None and index >= saved]:
            tail.void.add(delivered.pop(index))

    decoder = msgspec.json.Decoder(_Line)
    with open_regular(path) as file:
        for number, raw in enumerate(file):
            line = _decoded(decoder, raw)
            if line is None:
                broken = number if broken is None else broken
                continue
            if broken is not None:
                raise RunFolderError(
                    f"{path} is damaged in line {broken + 1}, before its end; take that line out "
                    "of it."
                )
            if line.fact in (LogBegun.__name__, LogResumed.__name__):
                version = msgspec.json.decode(raw, type=Versioned).version
                refuse_newer(path, version, FORMAT_VERSION)
            if line.fact == LogResumed.__name__:
                tail.incarnation += 1
                resume(msgspec.json.decode(raw, type=_Resumption).batches)
            elif line.fact == "BatchDelivered":
                delivery = msgspec.json.decode(raw, type=_Delivery)
                if not delivery.again:
                    delivered[delivery.batch] = number
                elif delivery.batch not in delivered:
                    delivered[delivery.batch] = number
                    tail.first.add(number)
            tail.size, tail.t = tail.size + len(raw), line.t
    resume(batches)
    return tail


def whole_lines(
    path: Path, *, batches: int | None = None, tail: Tail | None = None
) -> Iterator[bytes]:
    """Yield the lines at `path` that count, without an incomplete line at the end.

    Args:
        batches: as for :func:`read_tail`.
        tail: the end of the log, if it is known already; later lines are left out.

    Raises:
        OSError, RunFolderError: as :func:`read_tail`.
    """
    tail = read_tail(path, batches=batches) if tail is None else tail
    left = tail.size
    with open_regular(path) as file:
        for number, raw in enumerate(file):
            left -= len(raw)
            if left < 0:
                return
            if number not in tail.void:
                yield raw.replace(_AGAIN, b"", 1) if number in tail.first else raw


def log_end(path: Path) -> LogEnded | None:
    """Return the last line of the log at `path` if its run has ended; None otherwise."""
    with suppress(OSError, msgspec.MsgspecError), open_regular(path) as file:
        file.seek(max(0, file.seek(0, SEEK_END) - _LAST_BYTES))
        return msgspec.json.decode((file.read().splitlines() or [b""])[-1], type=LogEnded)
    return None


def _decoded(decoder: msgspec.json.Decoder[_Line], raw: bytes) -> _Line | None:
    """Decode a line; None if it is not complete."""
    if not raw.endswith(b"\n"):
        return None
    try:
        return decoder.decode(raw)
    except msgspec.MsgspecError:
        return None
