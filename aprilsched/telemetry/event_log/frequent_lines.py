"""Lines of the most frequent kinds, as structs: each is made in a quarter of a dictionary's time.

Invariant: they are the bytes that :mod:`aprilsched.telemetry.event_log.lines` writes of its table;
a test holds each to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev

__all__ = ["FREQUENT", "ProgressLine", "progress_lines"]


class ProgressLine(msgspec.Struct, gc=False):
    """That of a chunk, which can be held: the chunks themselves, hundreds of them, would be looked
    at by each collection of garbage, and more collections would begin because of them."""

    t: float
    event: Literal["Progress"]
    request_id: int
    attempt: int
    tokens: int


class _FinishedLine(msgspec.Struct, gc=False):
    t: float
    event: Literal["Finished"]
    request_id: int
    attempt: int
    reason: str
    spans: object


class _SendLine(msgspec.Struct, gc=False):
    t: float
    command: Literal["Send"]
    engine: str
    request_id: int
    attempt: int
    rollout_id: int
    group_id: int
    tokens: int
    max_new_tokens: int
    adapter: int | None
    cache_version: int | None


def progress_lines(chunks: Sequence[tuple[ev.Progress, float]]) -> list[ProgressLine]:
    """Without their times."""
    return [
        ProgressLine(0.0, "Progress", event.request_id, event.attempt, len(event.token_ids))
        for event, _ in chunks
    ]


def _progress(event: ev.Progress, t: float) -> msgspec.Struct:
    return ProgressLine(t, "Progress", event.request_id, event.attempt, len(event.token_ids))


def _timed(line: ProgressLine, t: float) -> msgspec.Struct:
    line.t = t
    return line


def _finished(event: ev.Finished, t: float) -> msgspec.Struct:
    spans = event.spans and [(span.version, span.start, span.end) for span in event.spans]
    return _FinishedLine(t, "Finished", event.request_id, event.attempt, event.reason, spans)


def _send(command: do.Send, t: float) -> msgspec.Struct:
    return _SendLine(
        t,
        "Send",
        command.engine,
        command.request_id,
        command.attempt,
        command.rollout_id,
        command.group_id,
        len(command.input_ids),
        command.sampling.max_new_tokens,
        command.adapter,
        command.cache_version,
    )


FREQUENT: dict[type, Callable[[Any, float], msgspec.Struct]] = {
    ProgressLine: _timed,
    ev.Progress: _progress,
    ev.Finished: _finished,
    do.Send: _send,
}
"""How each is made, at its time."""
