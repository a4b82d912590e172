"""The control state of every engine, and the next control call towards a goal.

The scheduler never runs a sequence such as "pause, flush, refit". After each event it sets the goal
of the fleet, and :meth:`FleetControl.reconcile` returns the next call for every engine that has not
reached the goal. So a pause is always followed by a continue, whatever is raised or cancelled in
between: once the goal is to run, Continue is the next call of every paused engine. Memory is
released only on a paused and flushed engine, and an engine continues only with all its memory.
:mod:`aprilsched.kernel.core.steps.refit` loads the weights, after a check of
:meth:`FleetControl.refittable`.

The order around a refit neither kills a server nor leaves stale keys (hazard 3): pause, flush until
it succeeds, load with the cache untouched, continue.

An engine is *in use*, or *on standby*: connected, but without the fleet's version. Nothing is
generated on standby. The next refit that reaches such an engine brings it into use. With rolling
refits an engine in use may also have an older version, and finishes the rollouts of that version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple, TypeAlias

from aprilsched.errors import InvariantViolation
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.values.capabilities import Capabilities, Reservation

WEIGHTS = "weights"
CUDA_GRAPH = "cuda_graph"
KV_CACHE = "kv_cache"


class Mode(StrEnum):
    """The state of an engine with regard to control calls."""

    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    FLUSHING = "flushing"
    REFITTING = "refitting"
    RELEASING = "releasing"
    WAKING = "waking"
    CONTINUING = "continuing"
    VERIFYING = "verifying"
    """The engine runs, but gets no request before it has reported its version."""


CHANGES: dict[Mode, frozenset[Mode]] = {
    Mode.RUNNING: frozenset({Mode.PAUSING, Mode.VERIFYING}),
    Mode.PAUSING: frozenset({Mode.PAUSED}),
    # A paused engine gets all other calls, one at a time. Only Continue ends the pause. An engine
    # that another client may have continued is paused once more.
    Mode.PAUSED: frozenset(
        {
            Mode.FLUSHING,
            Mode.REFITTING,
            Mode.RELEASING,
            Mode.WAKING,
            Mode.CONTINUING,
            Mode.PAUSING,
        }
    ),
    Mode.FLUSHING: frozenset({Mode.PAUSED}),
    Mode.REFITTING: frozenset({Mode.PAUSED}),
    Mode.RELEASING: frozenset({Mode.PAUSED}),
    Mode.WAKING: frozenset({Mode.PAUSED}),
    Mode.CONTINUING: frozenset({Mode.RUNNING}),
    Mode.VERIFYING: frozenset({Mode.RUNNING}),
}
"""The modes that may follow each mode. An engine whose control call fails is lost in any mode, and
starts in RUNNING when it rejoins."""


class Goal(NamedTuple):
    """The state that the engines should reach.

    Attributes:
        kind: "refit" is a pause in which weights can be loaded.
        away: tags of the memory to release; empty unless the engines should pause.
    """

    kind: Literal["run", "pause", "refit"]
    away: frozenset[str] = frozenset()


RUN, PAUSE = Goal(kind="run"), Goal(kind="pause")

PauseKind: TypeAlias = Literal["retract", "in_place"]


@dataclass(slots=True, kw_only=True)
class EngineControl:
    """The control state of one engine."""

    name: str
    able: Capabilities
    mode: Mode = Mode.RUNNING
    consecutive_failures: int = 0
    """Number of consecutive failures. Failures of attempts open at the same time count as one."""
    last_failure: int = 0
    """Number of attempts sent, to any engine, at the last counted failure."""
    flushed: bool = False
    """Whether the KV was flushed in this pause, so the engine recomputes its requests."""
    paused_by: PauseKind = "retract"
    """The kind of the latest pause."""
    continued_elsewhere: bool = False
    """Whether another client may have ended the pause since then, so it has to be repeated."""
    released: frozenset[str] = frozenset()
    """Tags of the memory that the trainer has."""
    inconsistent: bool = False
    """Whether the weights are neither old nor new, or were released and not preserved."""
    base: int = 0
    """Version of the full model, to which any adapter belongs."""
    catching_up: bool = False
    """Whether the engine is refitted separately to the fleet's version: it is on standby, or it is
    in use with an older version and gets no more requests (rolling refits)."""
    loading: int = -1
    """Version of the engine's last separate refit; -1 before the first."""
    loading_since: float = 0.0
    """Start of the engine's last separate refit."""
    failed_version: int = -1
    """Version that the engine failed to catch up with; -1 for none."""
    not_followed: int = -1
    """Newer version that the engine showed and too few other engines moved to; -1 for none."""
    paused_elsewhere: float | None = None
    """Time when a pause by another client was first seen; None while there is none."""
    version_seen_at: float = 0.0
    """Time when the engine last showed the fleet's version, in an answer or a finished response."""
    broken_connection: str = ""
    """How a connection broke, after which the engine may have restarted; empty if none broke."""
    suspect: bool = False
    """Whether the engine has to generate a few tokens before its next request, because it failed
    too many requests in a row that may be at fault themselves."""

    @property
    def keeps_keys(self) -> bool:
        """Whether requests that wait in this pause continue with their previous KV."""
        return not self.flushed and KV_CACHE not in self.released


class FleetControl:
    """The engines in use and on standby, without lost engines."""

    def __init__(
        self,
        *,
        pause_mode: PauseKind,
        flushes: bool,
        tell: Callable[[facts.Fact], None],
        changed: dict[str, None] | None = None,
    ) -> None:
        self._tell = tell
        self._pause_mode: PauseKind = pause_mode
        self._flushes_cache = flushes
        self.engines: dict[str, EngineControl] = {}
        self.standby: dict[str, EngineControl] = {}
        self._goal: Goal | None = None
        """The goal of the last :meth:`reconcile`."""
        self._touched: set[str] = set()
        """Engines whose record has changed since then. In a fleet of thousands, a scan of every
        engine after every event would take longer than everything else."""
        self._changed = {} if changed is None else changed

    def join(self, engine: ev.EngineInfo, *, standby: bool, now: float) -> EngineControl:
        """Add a connected engine, which must have the fleet's version unless on `standby`."""
        control = EngineControl(
            name=engine.name,
            able=engine.able,
            inconsistent=engine.version is None,
            base=engine.version or 0,
            version_seen_at=now,
        )
        (self.standby if standby else self.engines)[engine.name] = control
        self.touch(engine.name)
        return control

    def enter(
        self, control: EngineControl, mode: Mode, *, pause: str = "", tags: tuple[str, ...] = ()
    ) -> None:
        """Change the mode of an engine, and notify listeners.

        Raises:
            InvariantViolation: if :data:`CHANGES` does not contain this change.
        """
        if mode not in CHANGES[control.mode]:
            raise InvariantViolation(
                f"engine {control.name} cannot go from {control.mode} to {mode}"
            )
        self._tell(
            facts.EngineModeChanged(
                engine=control.name,
                start=control.mode.value,
                finish=mode.value,
                pause=pause,
                tags=tags,
            )
        )
        control.mode = mode
        self._changed[control.name] = None

    def touch(self, engine: str) -> None:
        """Mark the engine as changed, so that the next :meth:`reconcile` includes it."""
        self._touched.add(engine)
        self._changed[engine] = None

    def note_broken_connection(self, control: EngineControl, cause: str) -> None:
        """Record a broken connection, so that the engine is verified before its next request."""
        control.broken_connection = control.broken_connection or cause
        self._changed[control.name] = None

    def of(self, engine: str) -> EngineControl | None:
        """Return the record of an engine in use or on standby; None if the engine is lost."""
        return self.engines.get(engine) or self.standby.get(engine)

    def all(self) -> Iterator[EngineControl]:
        """Yield the engines in use, then the engines on standby."""
        yield from self.engines.values()
        yield from self.standby.values()

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that fit into the KV pools of all engines in use; None if one is unknown."""
        total = 0
        for control in self.engines.values():
            if control.able.kv_tokens is None:
                return None
            total += control.able.kv_tokens
        return total or None

    @property
    def reservation(self) -> Reservation | None:
        """The room that the first engine in use that leaves any leaves for tokens to come."""
        every = (control.able.reservation for control in self.engines.values())
        return next((each for each in every if each is not None), None)

    def runs(self, engine: str) -> bool:
        """Return whether a request may be sent to the engine now."""
        control = self.engines.get(engine)
        return control is not None and control.mode is Mode.RUNNING

    def reconcile(self, goal: Goal, *, idle: Callable[[str], bool]) -> list[do.Command]:
        """Return the next control call of each engine that has not reached the goal.

        `idle` returns whether an engine has no requests; a plain pause skips such an engine.
        """
        if goal == self._goal:
            if not self._touched:
                return []
            names = self._touched
            controls = [c for name in sorted(names) if (c := self.of(name)) is not None]
        else:
            controls = list(self.all())
        self._goal, self._touched = goal, set()
        calls = (self._next(control, goal, idle) for control in controls)
        return [call for call in calls if call is not None]

    def _next(
        self, control: EngineControl, goal: Goal, idle: Callable[[str], bool]
    ) -> do.Command | None:
        flush = self._flushes(control)
        alone = control.catching_up
        if control.name in self.engines and not alone:
            rests = goal.kind == "pause" and not goal.away and control.mode is Mode.RUNNING
            if rests and idle(control.name):
                return None
            # Requests paused in place would lose their KV with the memory.
            pause = "retract" if goal.away else self._pause_mode
            return self._next_call(control, goal, pause, flush=flush)
        if control.mode is Mode.RUNNING and not idle(control.name):
            # Its requests are moving to another engine, and end before any pause.
            return None
        # An engine on standby is only prepared for a refit.
        if goal.kind != "refit" and not alone:
            return None
        refit = goal if goal.kind == "refit" else Goal(kind="refit")
        return self._next_call(control, refit, "retract", flush=flush)

    def refittable(self, control: EngineControl) -> bool:
        """Return whether the engine is paused and prepared for weights."""
        return (
            control.mode is Mode.PAUSED
            and not control.continued_elsewhere
            and self.prepared(control)
        )

    def prepared(self, control: EngineControl) -> bool:
        """Return whether the engine is flushed, if necessary, and has its weight memory."""
        return not self._flushes(control) and WEIGHTS not in control.released

    def confirm(self, engine: str, doing: Mode, done: Mode) -> EngineControl | None:
        """Record the answer to a control call.

        Return the engine's record; None if the engine is lost or in another mode by now.
        """
        control = self.of(engine)
        if control is None or control.mode is not doing:
            return None
        self.enter(control, done)
        self.touch(engine)
        return control

    def _flushes(self, control: EngineControl) -> bool:
        return self._flushes_cache and control.paused_by == "retract" and not control.flushed

    def _next_call(
        self, control: EngineControl, goal: Goal, pause: PauseKind, *, flush: bool
    ) -> do.Command | None:
        """Enter the next mode towards the goal and return its call; never load weights.

        Return None while a call is in flight or none is necessary.
        """
        name = control.name
        again = control.mode is Mode.PAUSED and control.continued_elsewhere
        if (control.mode is Mode.RUNNING or again) and goal.kind != "run":
            self.enter(control, Mode.PAUSING, pause=pause)
            control.flushed = control.continued_elsewhere = False
            control.paused_by = pause
            return do.Pause(engine=name, mode=pause)
        if control.mode is not Mode.PAUSED:
            return None
        back = control.released - goal.away
        if back:
            tags = tuple(sorted(back))
            self.enter(control, Mode.WAKING, tags=tags)
            return do.Wake(engine=name, tags=tags)
        if goal.kind == "run" or (goal.away and control.paused_by != "retract"):
            # Memory is released only under a retract, so an engine that is paused in place
            # continues first.
            control.continued_elsewhere = False
            self.enter(control, Mode.CONTINUING)
            return do.Continue(engine=name)
        if flush and (goal.kind == "refit" or goal.away):
            self.enter(control, Mode.FLUSHING)
            return do.Flush(engine=name)
        missing = goal.away - control.released
        if missing and goal.kind == "pause":
            tags = tuple(sorted(missing))
            self.enter(control, Mode.RELEASING, tags=tags)
            return do.Release(engine=name, tags=tags)
        return None
