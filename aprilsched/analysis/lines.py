"""The lines of events.jsonl, with the fields that analysis uses.

Every line is read as the same type: a field that it does not have keeps its default. Names that
are not known here are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

__all__ = ["DeliveredLine", "EngineLine", "Line", "read_lines"]


class DeliveredLine(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout in a Deliver line."""

    rollout_id: int
    group_id: int
    tokens: int
    segments: tuple[tuple[int, int, int, str | None], ...]
    prompt_tokens: int = 0


class EngineLine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine in an Opened line."""

    name: str
    kv_tokens: int | None = None


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Any line."""

    t: float
    event: str = ""
    command: str = ""
    engine: str = ""
    request_id: int = -1
    attempt: int = -1
    rollout_id: int = -1
    group_id: int = -1
    version: int = -1
    cause: str = ""
    batch: int = -1
    rollouts: tuple[DeliveredLine, ...] = ()
    tokens: int = 0
    """New ones of a Progress; those of the context in a Send."""
    prompts: int = 0
    last: bool = False
    engines: tuple[EngineLine | str, ...] | int = ()
    """Of an Opened line; names alone, or their number, in others."""
    catch_up: bool = False


def read_lines(path: Path, *, progress: bool = False) -> Iterator[Line]:
    """The lines at `path`. One that was cut off at the end (a killed run) is passed over.

    Progress lines are two thirds of all, and left out unless `progress` asks for them.

    Raises:
        OSError: if the file cannot be read.
        msgspec.MsgspecError: if a line cannot be understood.
    """
    decoder = msgspec.json.Decoder(Line)
    with path.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            if not progress and b'"event":"Progress"' in raw:
                continue
            yield decoder.decode(raw)
