"""What the lines of a run say, told to the tracks of its engines and of its trainer.

Invariant: whatever begins in the log has its end in the trace: where it happened, with the process
that was killed, or with the last line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aprilsched.analysis.lines import EngineLine, Line
from aprilsched.analysis.trace.engine import Attempt, EngineTracks, Key
from aprilsched.analysis.trace.trace_file import TraceFile
from aprilsched.analysis.trace.trainer import TrainerTrack

__all__ = ["Story"]

_FIRST_ENGINE = 2
"""Process ids; the trainer's is 1."""
_BANDS = frozenset({"pause", "flush", "refit"})
"""Control calls that are shown by a band of their name."""


class Story:
    """Fed with the lines in their order; :meth:`end` after the last one."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._engines: dict[str, EngineTracks] = {}
        self._where: dict[Key, EngineTracks] = {}
        """The engine of each attempt that is open."""
        self._first_versions: dict[int, int | None] = {}
        """Of the rollouts that are not over: see :attr:`Attempt.first_version`."""
        self._lent: dict[str, set[str]] = {}
        """The memory of each engine that the trainer has."""
        self._trainer = TrainerTrack(file)
        self._at = 0
        self._tellers: dict[str, Callable[[Line], None]] = {
            "Opened": self._opened,
            "Resumed": self._resumed,
            "Send": self._send,
            "Progress": self._progress,
            "Finished": self._ended,
            "Interrupted": self._ended,
            "Failed": self._ended,
            "Pause": self._pause,
            "Paused": self._paused,
            "Flush": self._flush,
            "Flushed": self._flushed,
            "Refit": self._refit,
            "Refitted": self._refitted,
            "Continue": self._continue,
            "Continued": self._continued,
            "ControlFailed": self._control_failed,
            "Release": self._release,
            "Woken": self._woken,
            "EngineJoined": self._joined,
            "AdmitEngine": self._admit,
            "LoseEngine": self._lose,
            "CancelWork": self._over,
            "Deliver": self._delivered,
            "Redeliver": self._delivered,
            "DeliverEvaluation": self._delivered,
        }

    def tell(self, line: Line) -> None:
        kind = line.event or line.command
        if kind != "Resumed":
            self._at = _microseconds(line.t)
        teller = self._tellers.get(kind)
        if teller is not None:
            teller(line)
        self._trainer.tell(kind, line, self._at)

    def end(self) -> None:
        """There are no more lines."""
        self._stop_all("open")
        self._trainer.end(self._at)

    def _stop_all(self, ending: str) -> None:
        for engine in self._engines.values():
            engine.stop(ending, self._at)
        self._where.clear()
        self._lent.clear()

    # --- processes and engines -----------------------------------------------------------------

    def _opened(self, line: Line) -> None:
        for info in _listed(line):
            if isinstance(info, EngineLine):
                self._engine(info.name).version = info.version

    def _resumed(self, line: Line) -> None:
        """The former process ended somewhere after its last line, and what it had with it."""
        self._stop_all("killed")
        self._trainer.end(self._at)
        self._at = _microseconds(line.t)

    def _engine(self, name: str) -> EngineTracks:
        engine = self._engines.get(name)
        if engine is None:
            number = _FIRST_ENGINE + len(self._engines)
            engine = self._engines[name] = EngineTracks(self._file, number=number, name=name)
        return engine

    def _joined(self, line: Line) -> None:
        """It takes part once it is admitted."""
        engine = self._engine(line.engine)
        engine.version = _version(line)
        engine.bands.begin("lost", self._at, cause="not admitted yet")

    def _admit(self, line: Line) -> None:
        engine = self._engine(line.engine)
        engine.version = line.version
        engine.bands.end("lost", self._at)

    def _lose(self, line: Line) -> None:
        engine = self._engine(line.engine)
        for key in engine.open:
            del self._where[key]
        engine.stop("lost", self._at)
        self._lent.pop(line.engine, None)
        engine.bands.begin("lost", self._at, cause=line.cause, standby=line.standby)

    # --- requests ------------------------------------------------------------------------------

    def _send(self, line: Line) -> None:
        engine = self._engine(line.engine)
        key = line.request_id, line.attempt
        first = engine.version if line.adapter is None else line.adapter
        attempt = Attempt(
            rollout_id=line.rollout_id,
            group_id=line.group_id,
            known=line.tokens,
            adapter=line.adapter,
            first_version=self._first_versions.setdefault(line.rollout_id, first),
        )
        self._where[key] = engine
        engine.send(key, attempt, self._at)

    def _progress(self, line: Line) -> None:
        key = line.request_id, line.attempt
        engine = self._where.get(key)
        if engine is not None:
            engine.progress(key, line.tokens, self._at)

    def _ended(self, line: Line) -> None:
        key = line.request_id, line.attempt
        engine = self._where.pop(key, None)
        if engine is not None:
            engine.close(key, line.event.lower(), self._at)

    def _over(self, line: Line) -> None:
        self._forget(line.rollout_ids)

    def _delivered(self, line: Line) -> None:
        self._forget(rollout.rollout_id for rollout in line.rollouts)

    def _forget(self, rollout_ids: Iterable[int]) -> None:
        for rollout_id in rollout_ids:
            self._first_versions.pop(rollout_id, None)

    # --- control -------------------------------------------------------------------------------

    def _pause(self, line: Line) -> None:
        self._engine(line.engine).bands.begin("pause", self._at, mode=line.mode)

    def _paused(self, line: Line) -> None:
        self._engine(line.engine).paused(self._at)

    def _flush(self, line: Line) -> None:
        self._engine(line.engine).bands.begin("flush", self._at)

    def _flushed(self, line: Line) -> None:
        engine = self._engine(line.engine)
        engine.bands.end("flush", self._at)
        engine.flushed(self._at)

    def _refit(self, line: Line) -> None:
        for name in _listed(line):
            if isinstance(name, str):
                bands = self._engine(name).bands
                bands.begin("refit", self._at, version=line.version, catch_up=line.catch_up)

    def _refitted(self, line: Line) -> None:
        engine = self._engine(line.engine)
        engine.bands.end("refit", self._at, **({"cause": line.cause} if line.cause else {}))
        engine.refitted(_version(line), self._at)

    def _continue(self, line: Line) -> None:
        """From here on tokens may come, before the answer does."""
        self._engine(line.engine).go_on(self._at)

    def _continued(self, line: Line) -> None:
        self._engine(line.engine).bands.end("pause", self._at)

    def _control_failed(self, line: Line) -> None:
        if line.call in _BANDS:
            self._engine(line.engine).bands.end(line.call, self._at, cause=line.cause)

    def _release(self, line: Line) -> None:
        self._lent.setdefault(line.engine, set()).update(line.tags)
        self._engine(line.engine).bands.begin("asleep", self._at)

    def _woken(self, line: Line) -> None:
        lent = self._lent.get(line.engine, set())
        lent.difference_update(line.tags)
        if not lent:
            self._engine(line.engine).bands.end("asleep", self._at)


def _listed(line: Line) -> tuple[EngineLine | str, ...]:
    """The engines of a line that names them, and does not count them."""
    return () if isinstance(line.engines, int) else line.engines


def _version(line: Line) -> int | None:
    """None: torn weights, neither old nor new."""
    return None if line.version < 0 else line.version


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
