"""Writes samples.jsonl in a worker thread, as the event log is written.

Invariant: whatever goes wrong while writing, the run continues, and it is said once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from aprilsched.telemetry.file_writer import FileWriter
from aprilsched.telemetry.sampling.sample_lines import DescriptionLine, ResumedLine, SampleLine

__all__ = ["SampleLog"]

_PENDING_BYTES = 1 << 22
_CLOSE_SECONDS = 5.0
_TAIL_BYTES = 1 << 16


class SampleLog:
    """Appends lines to a file, from any thread. A new file begins with their description.

    Args:
        path: the file.
        interval: seconds between two samples, for the description.
        patient: wait for a slow disk instead of dropping lines, as a run on a virtual clock should.
    """

    def __init__(self, path: Path, *, interval: float, patient: bool = False) -> None:
        self._path = path
        self._interval = interval
        self._encoder = msgspec.json.Encoder()
        self._closed = False
        self._writer = FileWriter(
            path, "ab", max_bytes=_PENDING_BYTES, close_seconds=_CLOSE_SECONDS, patient=patient
        )

    def start(self, t: float) -> None:
        """Write the first line of this process, at `t` on the run's clock."""
        there = False
        try:
            there = self._cut_to_whole_lines() > 0
        except OSError as error:
            self._writer.fail(error)
        self.write([ResumedLine(t=t) if there else DescriptionLine(t=t, interval=self._interval)])

    def write(self, lines: Sequence[SampleLine]) -> None:
        """Write `lines`. If the disk is too slow for them, they are dropped."""
        block = b"".join(self._encoder.encode(line) + b"\n" for line in lines)
        if block and not self._closed:
            self._writer.put(block)

    def close(self) -> None:
        """Write the remaining lines, in bounded time. Later lines are ignored."""
        self._closed = True
        self._writer.close()

    def _cut_to_whole_lines(self) -> int:
        """Cut off a piece of a line that a killed process may have left; returns the bytes that
        remain."""
        if not self._path.exists():
            return 0
        size = self._path.stat().st_size
        with self._path.open("rb") as file:
            file.seek(max(0, size - _TAIL_BYTES))
            tail = file.read()
        whole = tail.rfind(b"\n") + 1
        if not whole and len(tail) < size:
            raise OSError("it is damaged at its end")
        size += whole - len(tail)
        os.truncate(self._path, size)
        return size
