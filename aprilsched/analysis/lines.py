"""The lines of events.jsonl, with the fields that analysis uses.

Every line is read as the same type: a field that it does not have keeps its default. Names that
are not known here are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from aprilsched.analysis.incarnations import whole_lines

__all__ = ["PROGRESS", "DeliveredLine", "EngineLine", "Line", "RestoredLine", "read_lines"]

PROGRESS = b'"event":"Progress"'
"""In every line of the most frequent kind; in others only where somebody's text says so."""


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
    version: int | None = None
    """None: torn weights, neither old nor new."""
    kv_tokens: int | None = None


class RestoredLine(msgspec.Struct, frozen=True, kw_only=True):
    """In a Launch line: the group is in flight again, with these lengths."""

    tokens: tuple[int, ...]
    finished: tuple[bool, ...]


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
    rollout_ids: tuple[int, ...] = ()
    prompt_tokens: float = 0
    """Of a Launch; a mean in others."""
    evaluation_id: int | None = None
    adapter: int | None = None
    mode: str = ""
    """Of a Pause."""
    call: str = ""
    tags: tuple[str, ...] = ()
    standby: bool = False
    restored: RestoredLine | None = None


def read_lines(path: Path, *, progress: bool = False) -> Iterator[Line]:
    """The lines at `path` that count: see :mod:`aprilsched.analysis.incarnations`.

    Progress lines are two thirds of all, and left out unless `progress` asks for them.

    Raises:
        OSError: if the file cannot be read.
        RunFolderError: if it is damaged before its end.
        msgspec.MsgspecError: if a line cannot be understood.
    """
    decoder = msgspec.json.Decoder(Line)
    for raw in whole_lines(path):
        if progress or PROGRESS not in raw:
            yield decoder.decode(raw)
