"""One engine in a trace: its slots with the rollouts in them, its bands and its counters.

Invariants: an attempt keeps its slot from its sending to its end, and has a slice for each stretch
in which the engine works on it in one version, so a pause is a gap; a token counts in the slice
that it arrived in, or in the last one before, if it arrived in a gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from aprilsched.analysis.trace.bands import Bands
from aprilsched.analysis.trace.lanes import Lanes
from aprilsched.analysis.trace.trace_file import Counter, TraceFile

__all__ = ["Attempt", "EngineTracks", "Key"]

Key: TypeAlias = tuple[int, int]
"""A request and the number of the attempt at it."""

_STEP = 0.01
"""The share by which known tokens change before the counter is written: a run has a chunk of
tokens per event, and nobody sees single ones among a hundred thousand."""
_TIDS = 100_000
"""Ids that an engine has for its tracks."""
_SLOTS = 10
"""Ids before those of its slots, for its bands."""


# A slice shows its policy version by its colour. Perfetto takes the colour from the name of a slice
# and ignores the digits in it, so a name ends in letters that change with the version.
# chrome://tracing is given the name of a colour.
_ENDINGS = ("mn", "eg", "dr", "uk", "ri", "ir", "pa", "pf")
"""Behind "rollout v" these are blue, orange, green, pink, violet, lime, teal and red in the UI of
Perfetto 52. They have no other meaning."""
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
    """A request with the engine. `known` tokens are prompt and output so far."""

    rollout_id: int
    group_id: int
    known: int
    adapter: int | None
    first_version: int | None
    """That the rollout's first token was to be sampled with."""
    slot: int = 0
    version: int | None = None
    since: int | None = None
    """Of its slice; None before the first one."""
    until: int | None = None
    """None while the engine works on it."""
    tokens: int = 0
    """In its slice."""


class EngineTracks:
    """The `number`-th process of `file`."""

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
        """Its attempts."""
        return list(self._attempts)

    # --- the engine ----------------------------------------------------------------------------

    def paused(self, at: int) -> None:
        """It works on nothing from now on."""
        self._paused = True
        for attempt in self._attempts.values():
            if attempt.until is None:
                attempt.until = at

    def flushed(self, at: int) -> None:
        """Its cache is empty until it goes on."""
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
        """What runs on through it is another version's from now on."""
        if version == self.version:
            return
        self.version = version
        for key, attempt in self._attempts.items():
            if attempt.until is None and attempt.adapter is None:
                self._write(key, attempt, "refit", at)
                self._start(attempt, at)

    def stop(self, ending: str, at: int) -> None:
        """Everything that goes on with it ends, the process that had it included."""
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
    """For example ``v3 uk``; versions that follow each other end in different letters."""
    if version is None:
        return _UNKNOWN
    return f"v{version} {_ENDINGS[version % len(_ENDINGS)]}"


def _color_of(version: int | None) -> str:
    """The name of a colour for chrome://tracing."""
    return "" if version is None else _COLORS[version % len(_COLORS)]
