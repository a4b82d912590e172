"""Draws one engine in a trace: its slots with the rollouts in them, its bands and its counters.

Invariants: an attempt keeps its slot from its sending to its end. It has a slice for each stretch
in which the engine works on it under one version, so a pause is a gap. A token counts in the slice
in which it arrived, or in the last one before if it arrived in a gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from aprilsched.analysis.trace.bands import Bands
from aprilsched.analysis.trace.lanes import Lanes
from aprilsched.analysis.trace.trace_file import Counter, TraceFile

__all__ = ["Attempt", "EngineTracks", "Key"]

Key: TypeAlias = tuple[int, int]
"""The id of a request and the number of its attempt."""

_STEP = 0.01
"""The counter of known tokens is written when its value has changed by this share. A run has an
event for each chunk of tokens, and single tokens among a hundred thousand cannot be seen."""
_TIDS = 100_000
"""Number of track ids of an engine."""
_SLOTS = 10
"""Number of track ids for its bands, before those of its slots."""


# A slice shows its policy version by its colour. Perfetto takes the colour from the name of a slice
# and ignores the digits in it, so a name ends in letters that change with the version.
# chrome://tracing is given the name of a colour.
_ENDINGS = ("mn", "eg", "dr", "uk", "ri", "ir", "pa", "pf")
"""After "rollout v", these names give blue, orange, green, pink, violet, lime, teal and red in the
UI of Perfetto 52. They have no other meaning."""
_COLORS = (
    "thread_state_running",
    "rail_response",
    "rail_animation",
    "rail_load",
    "cq_build_attempt_passed",
    "rail_idle",
    "thread_state_iowait",
    "startup",
)
_UNKNOWN = "v?"


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """An open attempt on the engine. `known` is the number of tokens of its prompt and output so
    far."""

    rollout_id: int
    group_id: int
    known: int
    adapter: int | None
    first_version: int | None
    """The version that the rollout's first token was to be sampled with."""
    slot: int = 0
    version: int | None = None
    since: int | None = None
    """Begin of its present slice; None before the first one."""
    until: int | None = None
    """End of its present slice; None while the engine works on it."""
    tokens: int = 0
    """Number of tokens in its slice."""


class EngineTracks:
    """The tracks of process `number` in `file`."""

    def __init__(self, file: TraceFile, *, number: int, name: str) -> None:
        self.version: int | None = None
        self._file = file
        self._pid = number
        self._first_slot = number * _TIDS + _SLOTS
        self._attempts: dict[Key, Attempt] = {}
        self._slots = Lanes()
        self._paused = False
        self._kv_held = True
        file.process(number, f"engine {name}")
        self.bands = Bands(file, pid=number, first_tid=number * _TIDS + 1, name="state")
        self._in_flight = Counter(file, pid=number, name="in flight", unit="requests")
        self._kv = Counter(file, pid=number, name="KV", unit="tokens", step=_STEP)
        self._known = 0

    # --- requests ------------------------------------------------------------------------------

    def send(self, key: Key, attempt: Attempt, at: int) -> None:
        known, attempt.slot = self._slots.count, self._slots.take()
        if attempt.slot == known:
            name = f"slot {attempt.slot:03}"
            self._file.track(self._pid, self._first_slot + attempt.slot, name)
        self._attempts[key] = attempt
        self._known += attempt.known
        if not self._paused:
            self._start(attempt, at)
        self._count(at)

    def progress(self, key: Key, tokens: int, at: int) -> None:
        attempt = self._attempts[key]
        attempt.tokens += tokens
        attempt.known += tokens
        self._known += tokens
        self._count(at)

    def close(self, key: Key, ending: str, at: int) -> None:
        attempt = self._attempts.pop(key)
        self._write(key, attempt, ending, at)
        self._slots.free(attempt.slot)
        self._known -= attempt.known
        self._count(at)

    @property
    def open(self) -> list[Key]:
        """The open attempts on the engine."""
        return list(self._attempts)

    # --- the engine ----------------------------------------------------------------------------

    def paused(self, at: int) -> None:
        """Note that the engine is paused: no attempt continues until :meth:`go_on`."""
        self._paused = True
        for attempt in self._attempts.values():
            if attempt.until is None:
                attempt.until = at

    def flushed(self, at: int) -> None:
        """Note that the cache was flushed, so it is empty until the engine continues."""
        self._kv_held = False
        self._count(at)

    def go_on(self, at: int) -> None:
        if not self._paused:
            return
        self._paused, self._kv_held = False, True
        for key, attempt in self._attempts.items():
            self._write(key, attempt, "paused", at)
            self._start(attempt, at)
        self._count(at)

    def refitted(self, version: int | None, at: int) -> None:
        """Begin new slices, because the attempts that continue are sampled under another version
        from now on."""
        if version == self.version:
            return
        self.version = version
        for key, attempt in self._attempts.items():
            if attempt.until is None and attempt.adapter is None:
                self._write(key, attempt, "refit", at)
                self._start(attempt, at)

    def stop(self, ending: str, at: int) -> None:
        """End everything that is open, for example because the process of the run has ended."""
        for key in self.open:
            self.close(key, ending, at)
        self.bands.end_all(at)
        self._paused, self._kv_held = False, True
        self._in_flight.finish()
        self._kv.finish()

    # --- slices --------------------------------------------------------------------------------

    def _start(self, attempt: Attempt, at: int) -> None:
        attempt.version = self.version if attempt.adapter is None else attempt.adapter
        attempt.since, attempt.until, attempt.tokens = at, None, 0

    def _write(self, key: Key, attempt: Attempt, ending: str, at: int) -> None:
        if attempt.since is None:
            return
        end = at if attempt.until is None else attempt.until
        if end == attempt.since and not attempt.tokens:
            return
        request_id, number = key
        self._file.slice(
            pid=self._pid,
            tid=self._first_slot + attempt.slot,
            start=attempt.since,
            end=end,
            name=f"rollout {attempt.rollout_id} {_version_label(attempt.version)}",
            args={
                "rollout_id": attempt.rollout_id,
                "group_id": attempt.group_id,
                "request_id": request_id,
                "attempt": number,
                "tokens": attempt.tokens,
                "version": attempt.version,
                "carried": attempt.version != attempt.first_version,
                "ending": ending,
            },
            category="rollout",
            color=_color_of(attempt.version),
        )

    def _count(self, at: int) -> None:
        self._in_flight.set(len(self._attempts), at)
        self._kv.set(self._known if self._kv_held else 0, at)


def _version_label(version: int | None) -> str:
    """The name of a version, for example ``v3 uk``. Consecutive versions end in different
    letters."""
    if version is None:
        return _UNKNOWN
    return f"v{version} {_ENDINGS[version % len(_ENDINGS)]}"


def _color_of(version: int | None) -> str:
    """Name of the version's colour in chrome://tracing."""
    return "" if version is None else _COLORS[version % len(_COLORS)]
