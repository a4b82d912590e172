"""Writes a file in the trace event format, one line for each event; no event is kept in memory.

Times are whole microseconds, as in the format and as in events.jsonl.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO

import msgspec

__all__ = ["Counter", "TraceFile"]

_BEGIN = b'{"displayTimeUnit":"ms","traceEvents":[\n'
_END = b"\n]}\n"


class TraceFile:
    """Writes to `file`. :meth:`close` completes the content and leaves the file open.

    The tracks of a process are shown below each other, sorted by `tid`. No two processes share a
    `tid`, because viewers take threads with the same id for one thread.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encode = msgspec.json.Encoder().encode
        self._between = b""
        file.write(_BEGIN)

    def process(self, pid: int, name: str) -> None:
        self._describe("process_name", pid, 0, name=name)
        self._describe("process_sort_index", pid, 0, sort_index=pid)

    def track(self, pid: int, tid: int, name: str) -> None:
        self._describe("thread_name", pid, tid, name=name)
        self._describe("thread_sort_index", pid, tid, sort_index=tid)

    def slice(
        self,
        *,
        pid: int,
        tid: int,
        start: int,
        end: int,
        name: str,
        args: Mapping[str, Any],
        category: str,
        color: str = "",
    ) -> None:
        """Write a slice. `color` is a name that chrome://tracing knows; other viewers ignore it."""
        event: dict[str, Any] = {
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "ts": start,
            "dur": end - start,
            "name": name,
            "cat": category,
            "args": args,
        }
        if color:
            event["cname"] = color
        self._write(event)

    def instant(
        self, *, pid: int, tid: int, at: int, name: str, args: Mapping[str, Any], category: str
    ) -> None:
        self._write(
            {
                "ph": "i",
                "s": "t",
                "pid": pid,
                "tid": tid,
                "ts": at,
                "name": name,
                "cat": category,
                "args": args,
            }
        )

    def counter(self, *, pid: int, at: int, name: str, unit: str, value: int) -> None:
        """Write a value of a counter. Viewers name the track by `name` and `unit`."""
        self._write({"ph": "C", "pid": pid, "ts": at, "name": name, "args": {unit: value}})

    def close(self) -> None:
        self._file.write(_END)

    def _describe(self, what: str, pid: int, tid: int, **args: Any) -> None:
        self._write({"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": what, "args": args})

    def _write(self, event: Mapping[str, Any]) -> None:
        self._file.write(self._between + self._encode(event))
        self._between = b",\n"


class Counter:
    """A counter of process `pid` in `file` that is written rarely: only its value at the end of
    each moment, and only if it has changed by at least the share `step` of the value that was
    written last. Changes from and to 0 are always written."""

    def __init__(
        self, file: TraceFile, *, pid: int, name: str, unit: str, step: float = 0.0
    ) -> None:
        self._file = file
        self._pid = pid
        self._name = name
        self._unit = unit
        self._step = step
        self._at = 0
        self._value = 0
        self._written = 0

    def set(self, value: int, at: int) -> None:
        """Set the value from `at` on. The same time may be given often, because many requests are
        sent at once."""
        if at != self._at:
            self.finish()
            self._at = at
        self._value = value

    def finish(self) -> None:
        """Write the value of the latest time."""
        change = abs(self._value - self._written)
        if not change or (self._value and change < self._step * self._written):
            return
        self._written = self._value
        self._file.counter(
            pid=self._pid, at=self._at, name=self._name, unit=self._unit, value=self._value
        )
