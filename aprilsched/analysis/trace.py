"""Writes a run as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import msgspec

from aprilsched.analysis.run import readable
from aprilsched.core.messages import facts as of
from aprilsched.core.messages.facts import Fact
from aprilsched.errors import RunFolderError
from aprilsched.telemetry.event_log.reading import replay
from aprilsched.telemetry.run_folder import EVENTS, TRACE

# --- trace file ----------------------------------------------------------------------------------

# Writes a file in the trace event format, one line for each event; no event is kept in memory.
#
# Times are whole microseconds, as in the format and as in events.jsonl.

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


# --- lanes ---------------------------------------------------------------------------------------

# Assigns slices to tracks so that they do not overlap.
#
# Invariant: a lane has one holder at a time. A new holder gets the lowest free lane, so there are
# as many lanes as were held at once.


class Lanes:
    """The lanes of one engine, counted from 0."""

    def __init__(self) -> None:
        self._freed: list[int] = []
        self.count = 0
        """Number of lanes."""

    def take(self) -> int:
        if self._freed:
            return heapq.heappop(self._freed)
        self.count += 1
        return self.count - 1

    def free(self, lane: int) -> None:
        heapq.heappush(self._freed, lane)


# --- bands ---------------------------------------------------------------------------------------

# Draws named stretches of an engine or of the trainer: a pause, a refit, a wait.
#
# Invariant: there is at most one open band of each kind, and each band is written once, when it
# ends. Kinds that may be open at the same time have tracks of their own.


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


# --- engine tracks -------------------------------------------------------------------------------

# Draws one engine in a trace: its slots with the rollouts in them, its bands and its counters.
#
# Invariants: an attempt keeps its slot from its sending to its end. It has a slice for each
# stretch in which the engine works on it under one version, so a pause is a gap. A token counts in
# the slice in which it arrived, or in the last one before if it arrived in a gap.

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


# --- trainer track -------------------------------------------------------------------------------

# Draws the trainer in a trace: what it waits for, the batches that it gets and the weights it
# gives.

_PID = 1
_EVENTS = 100_001
_WAITS = 100_002
"""Ids of the trainer's tracks."""
_BATCH, _UPDATE = "waits for a batch", "updates the engines"


class TrainerTrack:
    """Takes every fact; those that are not about the trainer are ignored."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._began = False
        file.process(_PID, "trainer")
        file.track(_PID, _EVENTS, "batches and weights")
        self._waits = Bands(file, pid=_PID, first_tid=_WAITS, name="trainer")

    def take(self, fact: Fact, at: int) -> None:
        match fact:
            case of.RunOpened():
                if self._began:
                    self._instant("resumed", at)
                self._began = True
            case of.BatchRequested():
                self._waits.begin(_BATCH, at)
            case of.BatchRequestWithdrawn() | of.PromptsEnded():
                self._waits.end(_BATCH, at)
            case of.UpdateBegun():
                self._waits.begin(_UPDATE, at, version=fact.version)
            case of.BatchDelivered():
                self._waits.end(_BATCH, at)
                self._delivered(fact, at)
            case of.EvaluationDelivered():
                self._instant(f"evaluation {fact.evaluation_id}", at, rollouts=len(fact.rollouts))
            case of.UpdateFinished():
                self._waits.end(_UPDATE, at)
                self._updated(fact, at)
            case _:
                pass

    def end(self, at: int) -> None:
        """End a wait that has no result."""
        self._waits.end_all(at)

    def _delivered(self, fact: of.BatchDelivered, at: int) -> None:
        self._instant(
            f"batch {fact.batch}{' again' if fact.again else ''}",
            at,
            version=fact.version,
            rollouts=len(fact.rollouts),
            tokens=sum(rollout.tokens for rollout in fact.rollouts),
        )

    def _updated(self, fact: of.UpdateFinished, at: int) -> None:
        if fact.cause:
            self._instant(f"no update to v{fact.version}", at, cause=fact.cause)
        else:
            self._instant(f"weights v{fact.version}", at, version=fact.version)

    def _instant(self, name: str, at: int, **args: object) -> None:
        self._file.instant(pid=_PID, tid=_EVENTS, at=at, name=name, args=args, category="trainer")


# --- builder -------------------------------------------------------------------------------------

# Builds a trace from the facts of a run: the tracks of its engines and of its trainer.
#
# Invariant: everything that begins in the log has an end in the trace: where it ended, where its
# process was killed, or at the last line.

_FIRST_ENGINE = 2
"""Process id of the first engine; the trainer's is 1."""
_BANDS = frozenset({"pause", "flush", "refit"})
"""Control calls that are shown as a band with their name."""


class TraceBuilder:
    """Takes the facts in order; call :meth:`end` after the last one."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._engines: dict[str, EngineTracks] = {}
        self._where: dict[int, tuple[EngineTracks, Key]] = {}
        """The engine of each open attempt, by the id of its request."""
        self._first_versions: dict[int, int | None] = {}
        """First version of each open rollout, see :attr:`Attempt.first_version`."""
        self._released: dict[str, set[str]] = {}
        """The memory (tags) that each sleeping engine has released."""
        self._waking: dict[str, tuple[str, ...]] = {}
        """The memory (tags) that each engine is taking back."""
        self._trainer = TrainerTrack(file)
        self._at = 0
        self._began = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            of.RunOpened: self._opened,
            of.AttemptSent: self._sent,
            of.TokensReceived: self._tokens,
            of.AttemptEnded: self._ended,
            of.EngineModeChanged: self._mode_changed,
            of.RefitBegun: self._refit_begun,
            of.EngineRefitted: self._refitted,
            of.ControlCallFailed: self._control_failed,
            of.EngineJoined: self._joined,
            of.EngineAdmitted: self._admitted,
            of.EngineLost: self._lost,
            of.GroupDropped: lambda fact: self._forget(fact.rollout_ids),
            of.BatchDelivered: self._delivered,
            of.EvaluationDelivered: self._delivered,
        }

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, of.RunOpened) and self._began:
                self._end_prior_run()
            self._at = _microseconds(now)
            handler = self._handlers.get(fact.__class__)
            if handler is not None:
                handler(fact)
            self._trainer.take(fact, self._at)

    def end(self, now: float) -> None:
        """End the trace at `now`, after the last fact."""
        self._at = _microseconds(now)
        self._stop_all("open")
        self._trainer.end(self._at)

    def _stop_all(self, ending: str) -> None:
        for engine in self._engines.values():
            engine.stop(ending, self._at)
        self._where.clear()
        self._released.clear()

    # --- processes and engines -----------------------------------------------------------------

    def _opened(self, fact: of.RunOpened) -> None:
        self._began = True
        for info in fact.engines:
            self._engine(info.name).version = info.version

    def _end_prior_run(self) -> None:
        """End everything that the prior run left open, at the time of its last fact."""
        self._stop_all("killed")
        self._trainer.end(self._at)

    def _engine(self, name: str) -> EngineTracks:
        engine = self._engines.get(name)
        if engine is None:
            number = _FIRST_ENGINE + len(self._engines)
            engine = self._engines[name] = EngineTracks(self._file, number=number, name=name)
        return engine

    def _joined(self, fact: of.EngineJoined) -> None:
        """An engine that joins takes part when it is admitted."""
        engine = self._engine(fact.info.name)
        engine.version = fact.info.version
        engine.bands.begin("lost", self._at, cause="not admitted yet")

    def _admitted(self, fact: of.EngineAdmitted) -> None:
        engine = self._engine(fact.engine)
        engine.version = fact.version
        engine.bands.end("lost", self._at)

    def _lost(self, fact: of.EngineLost) -> None:
        engine = self._engine(fact.engine)
        for request_id, _ in engine.open:
            del self._where[request_id]
        engine.stop("lost", self._at)
        self._released.pop(fact.engine, None)
        engine.bands.begin("lost", self._at, cause=fact.cause, standby=fact.standby)

    # --- requests ------------------------------------------------------------------------------

    def _sent(self, fact: of.AttemptSent) -> None:
        engine = self._engine(fact.engine)
        key = fact.request_id, fact.attempt
        first = engine.version if fact.adapter is None else fact.adapter
        attempt = Attempt(
            rollout_id=fact.rollout_id,
            group_id=fact.group_id,
            known=fact.tokens,
            adapter=fact.adapter,
            first_version=self._first_versions.setdefault(fact.rollout_id, first),
        )
        self._where[fact.request_id] = engine, key
        engine.send(key, attempt, self._at)

    def _tokens(self, fact: of.TokensReceived) -> None:
        where = self._where.get(fact.request_id)
        if where is not None:
            engine, key = where
            engine.progress(key, fact.tokens, self._at)

    def _ended(self, fact: of.AttemptEnded) -> None:
        where = self._where.pop(fact.request_id, None)
        if where is not None:
            engine, key = where
            engine.close(key, fact.outcome, self._at)

    def _delivered(self, fact: of.BatchDelivered | of.EvaluationDelivered) -> None:
        self._forget(rollout.rollout_id for rollout in fact.rollouts)

    def _forget(self, rollout_ids: Iterable[int]) -> None:
        for rollout_id in rollout_ids:
            self._first_versions.pop(rollout_id, None)

    # --- control -------------------------------------------------------------------------------

    def _mode_changed(self, fact: of.EngineModeChanged) -> None:
        engine = self._engine(fact.engine)
        self._end_call(engine, fact)
        match fact.finish:
            case "pausing":
                engine.bands.begin("pause", self._at, mode=fact.pause)
            case "flushing":
                engine.bands.begin("flush", self._at)
            case "continuing":
                # Tokens may arrive from now on, before the answer to the continue call.
                engine.go_on(self._at)
            case "releasing":
                self._released.setdefault(fact.engine, set()).update(fact.tags)
                engine.bands.begin("asleep", self._at)
            case "waking":
                self._waking[fact.engine] = fact.tags
            case _:
                pass

    def _end_call(self, engine: EngineTracks, fact: of.EngineModeChanged) -> None:
        """End the call whose answer changes the mode of the engine."""
        match fact.start:
            case "pausing":
                engine.paused(self._at)
            case "flushing":
                engine.bands.end("flush", self._at)
                engine.flushed(self._at)
            case "continuing":
                engine.bands.end("pause", self._at)
            case "waking":
                released = self._released.get(fact.engine, set())
                released.difference_update(self._waking.pop(fact.engine, ()))
                if not released:
                    engine.bands.end("asleep", self._at)
            case _:
                pass

    def _refit_begun(self, fact: of.RefitBegun) -> None:
        for name in fact.engines:
            bands = self._engine(name).bands
            bands.begin("refit", self._at, version=fact.version, catch_up=fact.catch_up)

    def _refitted(self, fact: of.EngineRefitted) -> None:
        engine = self._engine(fact.engine)
        engine.bands.end("refit", self._at, **({"cause": fact.cause} if fact.cause else {}))
        engine.refitted(fact.version, self._at)

    def _control_failed(self, fact: of.ControlCallFailed) -> None:
        if fact.call in _BANDS:
            self._engine(fact.engine).bands.end(fact.call, self._at, cause=fact.cause)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


# --- write ---------------------------------------------------------------------------------------

# Writes the trace of a run from its event log, fact by fact.
#
# Only what is open on the engines is kept in memory, so a log may have any length.

_BUFFER = 1 << 20


def write_trace(folder: Path, path: Path | None = None) -> Path:
    """Write the run in `folder` as a trace to `path` (by default its trace.json), and return the
    path.

    Open it in ui.perfetto.dev. Engines are processes with a track for each slot. Rollouts are
    slices that end where the version changes or the engine is paused. A run that was killed or has
    not ended is shown as far as its log goes.

    Raises:
        RunFolderError: if the log is missing or cannot be understood, or if `path` cannot be
            written.
    """
    target = folder / TRACE if path is None else path
    writing = target.with_name(f".{target.name}.writing")
    try:
        with writing.open("wb", buffering=_BUFFER) as file:
            trace = TraceFile(file)
            builder = TraceBuilder(trace)
            with readable(folder):
                end = replay(folder / EVENTS, [builder])
            builder.end(end)
            trace.close()
        os.replace(writing, target)
    except OSError as error:
        raise RunFolderError(
            f"{target} cannot be written ({error.strerror or error}); name a file in a folder that "
            "can be."
        ) from error
    finally:
        with suppress(OSError):
            writing.unlink(missing_ok=True)
    return target
