"""Finds the end of an event log: the end of its last complete line.

A process that is killed while it writes leaves an incomplete line, and a machine that crashes may
leave NUL bytes. Both come after all complete lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from aprilsched.errors import RunFolderError
from aprilsched.kernel.values.files import open_regular
from aprilsched.observe.log.line_format import (
    FORMAT_VERSION,
    LogBegun,
    LogResumed,
    Versioned,
    refuse_newer,
)


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
