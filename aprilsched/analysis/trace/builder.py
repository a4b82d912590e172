"""Builds a trace from the facts of a run: the tracks of its engines and of its trainer.

Invariant: everything that begins in the log has an end in the trace: where it ended, where its
process was killed, or at the last line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aprilsched.analysis.trace.engine_tracks import Attempt, EngineTracks, Key
from aprilsched.analysis.trace.trace_file import TraceFile
from aprilsched.analysis.trace.trainer_track import TrainerTrack
from aprilsched.core.messages import facts as of
from aprilsched.core.messages.facts import Fact

__all__ = ["TraceBuilder"]

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
