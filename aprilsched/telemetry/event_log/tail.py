"""Where an event log that was cut off ends: its last whole line.

A process that is killed in the middle of a write leaves a piece of a line; a machine that goes down
may leave a tail of NUL bytes. Both come after everything whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from aprilsched.errors import RunFolderError

__all__ = ["RESUMED", "Tail", "read_tail"]

RESUMED = frozenset({"LogResumed", "Resumed"})
"""The first line that a process writes into the log of a former one; in version 1, the event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tail:
    """The end of what is whole.

    Attributes:
        size: bytes up to there.
        t: the time of the last line; 0.0 where there is none.
        incarnation: how many processes have written the log.
    """

    size: int
    t: float
    incarnation: int


class _Line(msgspec.Struct, frozen=True):
    t: float
    fact: str = ""
    event: str = ""


def read_tail(path: Path) -> Tail:
    """The end of the log at `path`.

    Raises:
        OSError: if it cannot be read.
        RunFolderError: if it is damaged before its end.
    """
    decoder = msgspec.json.Decoder(_Line)
    size, t, incarnation = 0, 0.0, 1
    broken: int | None = None
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = _decoded(decoder, raw)
            if line is None:
                broken = broken or number
            elif broken is not None:
                raise RunFolderError(
                    f"{path} is damaged in line {broken}, before its end; take that line out of it."
                )
            else:
                size, t = size + len(raw), line.t
                incarnation += (line.fact or line.event) in RESUMED
    return Tail(size=size, t=t, incarnation=incarnation)


def _decoded(decoder: msgspec.json.Decoder[_Line], raw: bytes) -> _Line | None:
    """None for what is no whole line."""
    if not raw.endswith(b"\n"):
        return None
    try:
        return decoder.decode(raw)
    except msgspec.MsgspecError:
        return None
