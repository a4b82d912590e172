"""Writes a run as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing, from its event log.

Only what is open on the engines is kept in memory, so a log may have any length. Times are whole
microseconds, as in the trace event format and as in events.jsonl.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from aprilsched.errors import RunFolderError
from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.kernel.shell.listener import DispatchingListener
from aprilsched.kernel.values.files import SHARED, written_whole
from aprilsched.observe.log.reading import replay
from aprilsched.observe.log.run import readable
from aprilsched.observe.log.run_folder import EVENTS, TRACE

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
        """Name a process, or one of its tracks. Viewers show both sorted by their ids, and take
        tracks of two processes for one if they have the same id."""
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
    """Tracks of process `pid` with the ids from `first` on, which are named by `name` and their
    number. Each has one holder at a time. A new holder gets the lowest free one, so there are as
    many as were held at once, and slices do not overlap."""

    def __init__(self, file: TraceFile, *, pid: int, first: int, name: str) -> None:
        self._file = file
        self._pid = pid
        self._first = first
        self._name = name
        self._count = 0
        self._freed: list[int] = []

    def take(self) -> int:
        """The id of a track that nobody has."""
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
    that are open at the same time have tracks of their own."""

    def __init__(self, file: TraceFile, *, pid: int, first: int, category: str) -> None:
        self._file = file
        self._pid = pid
        self._category = category
        self._tracks = Tracks(file, pid=pid, first=first, name=category)
        self._open: dict[str, tuple[int, int, dict[str, Any]]] = {}
        """Track, begin and arguments of each open band, by kind."""

    def begin(self, kind: str, at: int, **args: Any) -> None:
        """Begin a band; no effect if one of this kind is open."""
        if kind not in self._open:
            self._open[kind] = self._tracks.take(), at, args

    def end(self, kind: str, at: int, **args: Any) -> None:
        """End a band; no effect if none of this kind is open."""
        if kind not in self._open:
            return
        track, since, begun = self._open.pop(kind)
        self._tracks.free(track)
        more = {"dur": at - since, "cat": self._category}
        self._file.write("X", kind, since, self._pid, track, begun | args, **more)

    def end_all(self, at: int) -> None:
        for kind in list(self._open):
            self.end(kind, at)


# --- engines -------------------------------------------------------------------------------------

_TIDS = 100_000
"""Number of track ids of a process."""
_SLOTS = 10
"""Number of track ids for the bands of an engine, before those of its slots."""
_STEP = 0.01
"""The counter of known tokens is written when its value has changed by this share. A run has an
event for each chunk of tokens, and single tokens among a hundred thousand cannot be seen."""
_ENDINGS = ("mn", "eg", "dr", "uk", "ri", "ir", "pa", "pf")
"""Perfetto takes the colour of a slice from its name and ignores the digits in it, so a name ends
in letters that change with the version. After "rollout v", these names give blue, orange, green,
pink, violet, lime, teal and red in the UI of Perfetto 52. They have no other meaning."""


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """An open attempt on an engine, and its present slice."""

    sent: of.AttemptSent
    track: int
    known: int
    """Number of tokens of its prompt and output so far."""
    first_version: int | None
    """The version that the rollout's first token was to be sampled with."""
    version: int | None = None
    since: int | None = None
    """Begin of its slice; None before the first one."""
    until: int | None = None
    """End of its slice; None while the engine works on it."""
    tokens: int = 0
    """Number of tokens in its slice."""


class EngineTracks:
    """The tracks of an engine, which is process `pid`: its slots with the rollouts in them, its
    bands and its counters.

    An attempt keeps its slot from its sending to its end. It has a slice for each stretch in which
    the engine works on it under one version, so a pause is a gap. A token counts in the slice in
    which it arrived, or in the last one before if it arrived in a gap.
    """

    def __init__(self, file: TraceFile, *, pid: int, name: str) -> None:
        self.version: int | None = None
        self.attempts: dict[int, Attempt] = {}
        """The open attempts, by the id of their request."""
        self.released: set[str] = set()
        """Tags of the memory that the engine has released."""
        self.waking: tuple[str, ...] = ()
        """Tags of the memory that it is taking back."""
        self.flushed = False
        """Whether its cache is empty, because it was flushed and has not continued since."""
        self._file = file
        self._pid = pid
        self._known = 0
        """Tokens of all open attempts."""
        self._paused = False
        self._written: dict[str, int] = {}
        """The values of the counters that were written last."""
        file.name(f"engine {name}", pid)
        self.bands = Bands(file, pid=pid, first=pid * _TIDS + 1, category="state")
        self._slots = Tracks(file, pid=pid, first=pid * _TIDS + _SLOTS, name="slot {:03}")

    def send(self, sent: of.AttemptSent, first_version: int | None, at: int) -> None:
        attempt = Attempt(
            sent=sent, track=self._slots.take(), known=sent.tokens, first_version=first_version
        )
        self.attempts[sent.request_id] = attempt
        self._known += attempt.known
        if not self._paused:
            self._start(attempt, at)

    def progress(self, request_id: int, tokens: int) -> None:
        attempt = self.attempts[request_id]
        attempt.tokens += tokens
        attempt.known += tokens
        self._known += tokens

    def close(self, request_id: int, ending: str, at: int) -> None:
        attempt = self.attempts.pop(request_id)
        self._known -= attempt.known
        self._write(attempt, ending, at)
        self._slots.free(attempt.track)

    def pause(self, at: int) -> None:
        """No attempt continues until :meth:`go_on`."""
        self._paused = True
        for attempt in self.attempts.values():
            if attempt.until is None:
                attempt.until = at

    def go_on(self, at: int) -> None:
        if self._paused:
            self._paused = self.flushed = False
            for attempt in self.attempts.values():
                self._write(attempt, "paused", at)
                self._start(attempt, at)

    def refitted(self, version: int | None, at: int) -> None:
        """The attempts that continue are sampled under another version from now on."""
        changed, self.version = version != self.version, version
        for attempt in self.attempts.values() if changed else ():
            if attempt.until is None and attempt.sent.adapter is None:
                self._write(attempt, "refit", at)
                self._start(attempt, at)

    def stop(self, ending: str, at: int) -> None:
        """End everything that is open, for example because the process of the run has ended."""
        for request_id in list(self.attempts):
            self.close(request_id, ending, at)
        self.bands.end_all(at)
        self.released.clear()
        self._paused = self.flushed = False
        self.count(at)

    def count(self, at: int) -> None:
        """Write the counters that have changed enough to be seen, or from or to 0."""
        known = 0 if self.flushed else self._known
        for name, unit, value, step in (
            ("in flight", "requests", len(self.attempts), 0.0),
            ("KV", "tokens", known, _STEP),
        ):
            before = self._written.get(name, 0)
            if value != before and not (value and abs(value - before) < step * before):
                self._written[name] = value
                self._file.write("C", name, at, self._pid, 0, {unit: value})

    def _start(self, attempt: Attempt, at: int) -> None:
        adapter = attempt.sent.adapter
        attempt.version = self.version if adapter is None else adapter
        attempt.since, attempt.until, attempt.tokens = at, None, 0

    def _write(self, attempt: Attempt, ending: str, at: int) -> None:
        since, sent, version = attempt.since, attempt.sent, attempt.version
        end = at if attempt.until is None else attempt.until
        if since is None or (end == since and not attempt.tokens):
            return
        ended = "?" if version is None else f"{version} {_ENDINGS[version % len(_ENDINGS)]}"
        args = {
            "rollout_id": sent.rollout_id,
            "group_id": sent.group_id,
            "request_id": sent.request_id,
            "attempt": sent.attempt,
            "tokens": attempt.tokens,
            "version": version,
            "carried": version != attempt.first_version,
            "ending": ending,
        }
        name, more = f"rollout {sent.rollout_id} v{ended}", {"dur": end - since, "cat": "rollout"}
        self._file.write("X", name, since, self._pid, attempt.track, args, **more)


# --- the run -------------------------------------------------------------------------------------

_TRAINER = 1
"""Process id of the trainer; those of the engines follow."""
_EVENTS = _TRAINER * _TIDS + 1
"""Track of the trainer's batches and weights; those of its waits follow."""
_BATCH, _UPDATE = "waits for a batch", "updates the engines"
_CALLS = frozenset({"pause", "flush", "refit"})
"""Control calls that are shown as a band with their name."""


class TraceBuilder(DispatchingListener):
    """Takes the facts of a run in order; call :meth:`end` after the last one.

    Everything that begins in the log has an end in the trace: where it ended, where its process was
    killed, or at the last line.
    """

    def __init__(self, file: TraceFile) -> None:
        super().__init__()
        self._file = file
        self._engines: dict[str, EngineTracks] = {}
        self._where: dict[int, EngineTracks] = {}
        """The engine of each open attempt, by the id of its request."""
        self._first_versions: dict[int, int | None] = {}
        """First version of each open rollout, see :attr:`Attempt.first_version`."""
        self._changed: set[EngineTracks] = set()
        """Engines whose counters may have changed at the time `_at`. They are written when it is
        over, because many requests are sent at once."""
        self._at = 0
        self._began = False
        file.name("trainer", _TRAINER)
        file.name("batches and weights", _TRAINER, _EVENTS)
        self._waits = Bands(file, pid=_TRAINER, first=_EVENTS + 1, category="trainer")
        self._handlers = {
            of.RunOpened: self._opened,
            of.BatchRequested: lambda _: self._waits.begin(_BATCH, self._at),
            of.BatchRequestWithdrawn: lambda _: self._waits.end(_BATCH, self._at),
            of.PromptsEnded: lambda _: self._waits.end(_BATCH, self._at),
            of.BatchDelivered: self._batch_delivered,
            of.EvaluationDelivered: self._evaluation_delivered,
            of.UpdateBegun: lambda fact: self._waits.begin(_UPDATE, self._at, version=fact.version),
            of.UpdateFinished: self._update_finished,
            of.AttemptSent: self._sent,
            of.TokensReceived: self._tokens,
            of.AttemptEnded: self._ended,
            of.GroupDropped: lambda fact: self._forget(fact.rollout_ids),
            of.EngineModeChanged: self._mode_changed,
            of.RefitBegun: self._refit_begun,
            of.EngineRefitted: self._refitted,
            of.ControlCallFailed: self._control_failed,
            of.EngineJoined: self._joined,
            of.EngineAdmitted: self._admitted,
            of.EngineLost: self._lost,
        }

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        if self._began and any(isinstance(fact, of.RunOpened) for fact in facts):
            # What the prior run left open ended at the time of its last fact.
            self._stop_all("killed")
        at = _microseconds(now)
        if at != self._at:
            self._count()
            self._at = at
        super().on_facts(facts, now)

    def end(self, now: float) -> None:
        """End the trace at `now`, after the last fact."""
        self._count()
        self._at = _microseconds(now)
        self._stop_all("open")

    def _count(self) -> None:
        for engine in self._changed:
            engine.count(self._at)
        self._changed.clear()

    def _stop_all(self, ending: str) -> None:
        for engine in self._engines.values():
            engine.stop(ending, self._at)
        self._where.clear()
        self._waits.end_all(self._at)

    def _engine(self, name: str) -> EngineTracks:
        """The engine of this name, whose counters may change."""
        engine = self._engines.get(name)
        if engine is None:
            pid = _TRAINER + 1 + len(self._engines)
            engine = self._engines[name] = EngineTracks(self._file, pid=pid, name=name)
        self._changed.add(engine)
        return engine

    # --- the trainer ---------------------------------------------------------------------------

    def _opened(self, fact: of.RunOpened) -> None:
        if self._began:
            self._tell("resumed")
        self._began = True
        for info in fact.engines:
            self._engine(info.name).version = info.version

    def _batch_delivered(self, fact: of.BatchDelivered) -> None:
        self._waits.end(_BATCH, self._at)
        self._tell(
            f"batch {fact.batch}{' again' if fact.again else ''}",
            version=fact.version,
            rollouts=len(fact.rollouts),
            tokens=sum(rollout.tokens for rollout in fact.rollouts),
        )
        self._forget(rollout.rollout_id for rollout in fact.rollouts)

    def _evaluation_delivered(self, fact: of.EvaluationDelivered) -> None:
        self._tell(f"evaluation {fact.evaluation_id}", rollouts=len(fact.rollouts))
        self._forget(rollout.rollout_id for rollout in fact.rollouts)

    def _update_finished(self, fact: of.UpdateFinished) -> None:
        self._waits.end(_UPDATE, self._at)
        if fact.cause:
            self._tell(f"no update to v{fact.version}", cause=fact.cause)
        else:
            self._tell(f"weights v{fact.version}", version=fact.version)

    def _tell(self, name: str, **args: object) -> None:
        """Mark this moment of the trainer."""
        self._file.write("i", name, self._at, _TRAINER, _EVENTS, args, s="t", cat="trainer")

    # --- requests ------------------------------------------------------------------------------

    def _sent(self, fact: of.AttemptSent) -> None:
        engine = self._where[fact.request_id] = self._engine(fact.engine)
        version = engine.version if fact.adapter is None else fact.adapter
        first = self._first_versions.setdefault(fact.rollout_id, version)
        engine.send(fact, first, self._at)

    def _tokens(self, fact: of.TokensReceived) -> None:
        engine = self._where.get(fact.request_id)
        if engine is not None:
            engine.progress(fact.request_id, fact.tokens)
            self._changed.add(engine)

    def _ended(self, fact: of.AttemptEnded) -> None:
        engine = self._where.pop(fact.request_id, None)
        if engine is not None:
            engine.close(fact.request_id, fact.outcome, self._at)
            self._changed.add(engine)

    def _forget(self, rollout_ids: Iterable[int]) -> None:
        for rollout_id in rollout_ids:
            self._first_versions.pop(rollout_id, None)

    # --- engines -------------------------------------------------------------------------------

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
        for request_id in engine.attempts:
            del self._where[request_id]
        engine.stop("lost", self._at)
        engine.bands.begin("lost", self._at, cause=fact.cause, standby=fact.standby)

    def _mode_changed(self, fact: of.EngineModeChanged) -> None:
        engine, at = self._engine(fact.engine), self._at
        match fact.start:  # the call whose answer this is
            case "pausing":
                engine.pause(at)
            case "flushing":
                engine.bands.end("flush", at)
                engine.flushed = True
            case "continuing":
                engine.bands.end("pause", at)
            case "waking":
                engine.released.difference_update(engine.waking)
                if not engine.released:
                    engine.bands.end("asleep", at)
            case _:
                pass
        match fact.finish:  # the call that is made now
            case "pausing":
                engine.bands.begin("pause", at, mode=fact.pause)
            case "flushing":
                engine.bands.begin("flush", at)
            case "continuing":
                # Tokens may arrive from now on, before the answer to the continue call.
                engine.go_on(at)
            case "releasing":
                engine.released.update(fact.tags)
                engine.bands.begin("asleep", at)
            case "waking":
                engine.waking = fact.tags
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
        if fact.call in _CALLS:
            self._engine(fact.engine).bands.end(fact.call, self._at, cause=fact.cause)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


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
    try:
        with written_whole(target, mode=SHARED) as file:
            trace = TraceFile(file)
            builder = TraceBuilder(trace)
            with readable(folder):
                end = replay(folder / EVENTS, [builder])
            builder.end(end)
            trace.close()
    except OSError as error:
        raise RunFolderError(
            f"{target} cannot be written ({error.strerror or error}); name a file in a folder that "
            "can be."
        ) from error
    return target
