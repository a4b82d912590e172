"""Writes a run as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing, from its event log.

Only open attempts and bands are kept in memory, so a log may have any length. Times are whole
microseconds, as in the trace event format and in events.jsonl.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any, BinaryIO

import msgspec

_BEGIN = b'{"displayTimeUnit":"ms","traceEvents":[\n'
_END = b"\n]}\n"


class TraceFile:
    """Writes one line for each event to `file`. :meth:`close` completes the content and leaves the
    file open."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encode = msgspec.json.Encoder().encode
        self._between = b""
        file.write(_BEGIN)

    def name(self, name: str, pid: int, tid: int = 0) -> None:
        """Name a process, or one of its tracks. Viewers sort both by id, and merge tracks of two
        processes with the same id."""
        kind = "thread" if tid else "process"
        self.write("M", f"{kind}_name", 0, pid, tid, {"name": name})
        self.write("M", f"{kind}_sort_index", 0, pid, tid, {"sort_index": tid or pid})

    def write(
        self,
        phase: str,
        name: str,
        at: int,
        pid: int,
        tid: int,
        args: Mapping[str, Any],
        **more: Any,
    ) -> None:
        """Write an event of a phase of the format, with `more` fields that only this phase has."""
        event = {"ph": phase, "name": name, "ts": at, "pid": pid, "tid": tid, "args": args, **more}
        self._file.write(self._between + self._encode(event))
        self._between = b",\n"

    def close(self) -> None:
        self._file.write(_END)


class Tracks:
    """Tracks of process `pid` with ids from `first` on, named `name` and a number. Each has one
    holder at a time, so slices do not overlap. A new holder gets the lowest free track, so the
    number of tracks is the largest number of concurrent holders."""

    def __init__(self, file: TraceFile, *, pid: int, first: int, name: str) -> None:
        self._file = file
        self._pid = pid
        self._first = first
        self._name = name
        self._count = 0
        self._freed: list[int] = []

    def take(self) -> int:
        """Return the id of an unused track."""
        if self._freed:
            return heapq.heappop(self._freed)
        track = self._first + self._count
        self._file.name(self._name.format(self._count), self._pid, track)
        self._count += 1
        return track

    def free(self, track: int) -> None:
        heapq.heappush(self._freed, track)


class Bands:
    """Named stretches of an engine or of the trainer: a pause, a refit, a wait. There is at most
    one open band of each kind, and each is written when it ends, in the category `category`. Bands
    that are open at the same time have separate tracks."""

    def __init__(self, file: TraceFile, *, pid: int, first: int, category: str) -> None:
        self._file = file
        self._pid = pid
        self._category = category
        self._tracks = Tracks(file, pid=pid, first=first, name=category)
        self._open: dict[str, tuple[int, int, dict[str, Any]]] = {}
        """Track, start time and arguments of each open band, by kind."""

    def start(self, kind: str, at: int, **args: Any) -> None:
        """Start a band; no effect if one of this kind is open."""
        if kind not in self._open:
            self._open[kind] = self._tracks.take(), at, args

    def end(self, kind: str, at: int, **args: Any) -> None:
        """End a band; no effect if none of this kind is open."""
        if kind not in self._open:
            return
        track, since, args_before = self._open.pop(kind)
        self._tracks.free(track)
        more = {"dur": at - since, "cat": self._category}
        self._file.write("X", kind, since, self._pid, track, args_before | args, **more)

    def end_all(self, at: int) -> None:
        for kind in list(self._open):
            self.end(kind, at)
