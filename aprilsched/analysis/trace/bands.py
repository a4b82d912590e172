"""Draws named stretches of an engine or of the trainer: a pause, a refit, a wait.

Invariant: there is at most one open band of each kind, and each band is written once, when it ends.
Kinds that may be open at the same time have tracks of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aprilsched.analysis.trace.lanes import Lanes
from aprilsched.analysis.trace.trace_file import TraceFile

__all__ = ["Bands"]


@dataclass(slots=True, kw_only=True)
class _Band:
    lane: int
    since: int
    args: dict[str, Any] = field(default_factory=dict[str, Any])


class Bands:
    """The bands of process `pid`, on tracks called `name` that begin with `first_tid`."""

    def __init__(self, file: TraceFile, *, pid: int, first_tid: int, name: str) -> None:
        self._file = file
        self._pid = pid
        self._first_tid = first_tid
        self._name = name
        self._lanes = Lanes()
        self._open: dict[str, _Band] = {}

    def begin(self, kind: str, at: int, **args: Any) -> None:
        """Begin a band; no effect if one of this kind is open."""
        if kind in self._open:
            return
        known, lane = self._lanes.count, self._lanes.take()
        if lane == known:
            self._file.track(self._pid, self._first_tid + lane, self._name)
        self._open[kind] = _Band(lane=lane, since=at, args=args)

    def end(self, kind: str, at: int, **args: Any) -> None:
        """End a band; no effect if none of this kind is open."""
        band = self._open.pop(kind, None)
        if band is None:
            return
        self._lanes.free(band.lane)
        self._file.slice(
            pid=self._pid,
            tid=self._first_tid + band.lane,
            start=band.since,
            end=at,
            name=kind,
            args=band.args | args,
            category=self._name,
        )

    def end_all(self, at: int) -> None:
        for kind in list(self._open):
            self.end(kind, at)
