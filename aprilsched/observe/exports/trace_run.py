"""The run's own tracks of a trace: batches, updates, the trainer and the groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from aprilsched.errors import RunFolderError
from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.kernel.shell.listener import DispatchingListener
from aprilsched.kernel.values.files import SHARED, written_whole
from aprilsched.observe.exports.trace import Bands, TraceFile
from aprilsched.observe.exports.trace_engines import TIDS, EngineTracks
from aprilsched.observe.log.reading import replay
from aprilsched.observe.log.run import readable
from aprilsched.observe.log.run_folder import EVENTS, TRACE

_TRAINER = 1
"""Process id of the trainer; the engines' ids follow."""
_EVENTS = _TRAINER * TIDS + 1
"""Track of the trainer's batches and weights; the tracks of its waits follow."""
_BATCH, _UPDATE = "waits for a batch", "updates the engines"
_CALLS = frozenset({"pause", "flush", "refit"})
"""Control calls that are shown as a band with their name."""


class TraceBuilder(DispatchingListener):
    """Takes the facts of a run in order; call :meth:`end` after the last one.

    Everything that starts in the log has an end in the trace: its own end, the moment its process
    was killed, or the last line.
    """

    def __init__(self, file: TraceFile) -> None:
        super().__init__()
        self._file = file
        self._engines: dict[str, EngineTracks] = {}
        self._where: dict[int, EngineTracks] = {}
        """The engine of each open attempt, by the id of its request."""
        self._first_versions: dict[int, int | None] = {}
        """First version of each open rollout, see :attr:`Attempt.first_version`."""
        self._changed: dict[EngineTracks, None] = {}
        """Engines whose counters may have changed at the time `_at`. The counters are written when
        time advances, because many requests are sent at the same moment. A dict keeps their order,
        so that the same log gives the same trace."""
        self._at = 0
        self._began = False
        file.name("trainer", _TRAINER)
        file.name("batches and weights", _TRAINER, _EVENTS)
        self._waits = Bands(file, pid=_TRAINER, first=_EVENTS + 1, category="trainer")
        self._handlers = {
            of.RunOpened: self._opened,
            of.BatchRequested: lambda _: self._waits.start(_BATCH, self._at),
            of.BatchRequestWithdrawn: lambda _: self._waits.end(_BATCH, self._at),
            of.PromptsEnded: lambda _: self._waits.end(_BATCH, self._at),
            of.BatchDelivered: self._batch_delivered,
            of.EvaluationDelivered: self._evaluation_delivered,
            of.UpdateBegun: lambda fact: self._waits.start(_UPDATE, self._at, version=fact.version),
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
            # Everything still open in the prior run ended at the time of its last fact.
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
        """Return the engine of this name, whose counters may change."""
        engine = self._engines.get(name)
        if engine is None:
            pid = _TRAINER + 1 + len(self._engines)
            engine = self._engines[name] = EngineTracks(self._file, pid=pid, name=name)
        self._changed[engine] = None
        return engine

    # --- the trainer ---------------------------------------------------------------------------

    def _opened(self, fact: of.RunOpened) -> None:
        if self._began:
            self._tell("resumed")
        self._began = True
        for info in fact.engines:
            self._engine(info.name).version = info.version
            if info.name in fact.standby:
                self._engine(info.name).bands.start("lost", self._at, cause="standby")

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
        """Write an instant event of the trainer."""
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
            self._changed[engine] = None

    def _ended(self, fact: of.AttemptEnded) -> None:
        engine = self._where.pop(fact.request_id, None)
        if engine is not None:
            engine.close(fact.request_id, fact.outcome, self._at)
            self._changed[engine] = None

    def _forget(self, rollout_ids: Iterable[int]) -> None:
        for rollout_id in rollout_ids:
            self._first_versions.pop(rollout_id, None)

    # --- engines -------------------------------------------------------------------------------

    def _joined(self, fact: of.EngineJoined) -> None:
        """Mark an engine that joins as lost until it is admitted."""
        engine = self._engine(fact.info.name)
        engine.version = fact.info.version
        engine.bands.start("lost", self._at, cause="not admitted yet")

    def _admitted(self, fact: of.EngineAdmitted) -> None:
        engine = self._engine(fact.engine)
        engine.version = fact.version
        engine.bands.end("lost", self._at)

    def _lost(self, fact: of.EngineLost) -> None:
        engine = self._engine(fact.engine)
        for request_id in engine.attempts:
            del self._where[request_id]
        engine.stop("lost", self._at)
        engine.bands.start("lost", self._at, cause=fact.cause, standby=fact.standby)

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
                engine.bands.start("pause", at, mode=fact.pause)
            case "flushing":
                engine.bands.start("flush", at)
            case "continuing":
                # Tokens may arrive from now on, before the answer to the continue call.
                engine.go_on(at)
            case "releasing":
                engine.released.update(fact.tags)
                engine.bands.start("asleep", at)
            case "waking":
                engine.waking = fact.tags
            case _:
                pass

    def _refit_begun(self, fact: of.RefitBegun) -> None:
        for name in fact.engines:
            bands = self._engine(name).bands
            bands.start("refit", self._at, version=fact.version, catch_up=fact.catch_up)

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
