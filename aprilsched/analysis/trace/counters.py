"""A value over time, written sparsely: what it is when a time has passed, not on the way."""

from __future__ import annotations

from aprilsched.analysis.trace.trace_file import TraceFile

__all__ = ["Counter"]


class Counter:
    """Of process `pid`. Changes by less than the share `step` of what was written last are left
    out, those from and to 0 never."""

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
        """A time may come many times: a batch of requests is sent at once."""
        if at != self._at:
            self.finish()
            self._at = at
        self._value = value

    def finish(self) -> None:
        """Write the value of the last time."""
        change = abs(self._value - self._written)
        if not change or (self._value and change < self._step * self._written):
            return
        self._written = self._value
        self._file.counter(
            pid=self._pid, at=self._at, name=self._name, unit=self._unit, value=self._value
        )
