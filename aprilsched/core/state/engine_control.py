"""The control state of every engine, and the next call that leads to the one wanted.

The scheduler never says "pause, then flush, then refit": it says each time what it wants of the
fleet, and :meth:`FleetControl.reconcile` gives the next call for every engine that is not there
yet. So a pause is followed by a continue whatever was raised or cancelled in between: as soon as
running is wanted again, that is the next call of every paused engine. Illegal orders cannot be
written down: memory is released only of a paused and flushed engine, weights are loaded only
while they are awake, an engine runs only with all its memory.

The order around a refit is the one that neither kills a server nor leaves stale keys (hazard 3):
pause, flush until done, load with the cache untouched, continue.

Engines are *in use*, or *on standby*: connected, but without the fleet's version. Nothing is
generated on standby; the next refit that reaches such an engine brings it (back) into use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

from aprilsched.core.messages.commands import Command, Continue, Flush, Pause, Release, Wake
from aprilsched.core.messages.events import EngineInfo
from aprilsched.core.messages.facts import EngineModeChanged, Fact

__all__ = [
    "CUDA_GRAPH",
    "KV_CACHE",
    "RUN",
    "WEIGHTS",
    "EngineControl",
    "FleetControl",
    "Goal",
    "Mode",
]

WEIGHTS = "weights"
CUDA_GRAPH = "cuda_graph"
KV_CACHE = "kv_cache"


class Mode(StrEnum):
    """What an engine is doing, as far as control calls go."""

    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    FLUSHING = "flushing"
    REFITTING = "refitting"
    RELEASING = "releasing"
    WAKING = "waking"
    CONTINUING = "continuing"
    VERIFYING = "verifying"
    """It runs, and is asked for its version before anything is sent to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """What is wanted of the engines.

    Attributes:
        kind: "refit" is a pause in which weights can be loaded.
        away: memory that should be released; only with a pause.
    """

    kind: Literal["run", "pause", "refit"]
    away: frozenset[str] = frozenset()


RUN = Goal(kind="run")

PauseKind: TypeAlias = Literal["retract", "in_place"]


@dataclass(slots=True, kw_only=True)
class EngineControl:
    name: str
    mode: Mode = Mode.RUNNING
    consecutive_failures: int = 0
    """Failures in a row; attempts that were under way together are one."""
    last_failure: int = 0
    """Attempts that had been sent, to any engine, at the last of them."""
    flushed: bool = False
    """The KV was flushed in this pause, so its requests are prefilled again."""
    paused_by: PauseKind = "retract"
    released: frozenset[str] = frozenset()
    """Memory that is given to the trainer."""
    inconsistent: bool = False
    """Its weights are neither old nor new, or were released without being kept."""
    keeps_weights: bool = False
    """Released weights come back as they were."""
    holds_stragglers: bool = False
    """Memory can be released while requests wait in a pause."""
    base: int = 0
    """The version of the weights it came with, below any adapter."""
    kv_tokens: int | None = None
    """The size of its KV pool."""
    catching_up: bool = False
    """On standby, with a refit to the fleet's version under way for it alone."""
    failed_version: int = -1
    """The version to which catching up failed."""
    version_seen_at: float = 0.0
    """When it last showed that it has the fleet's version: it was asked, or a response ended."""
    doubt: str = ""
    """How a connection to it broke: the process behind it may be another one by now."""

    @property
    def keeps_keys(self) -> bool:
        """Whether requests that wait in this pause go on with the KV that they had before it."""
        return not self.flushed and KV_CACHE not in self.released


class FleetControl:
    """The engines in use and those on standby. Lost ones are not here."""

    def __init__(
        self, *, pause_mode: PauseKind, flushes: bool, tell: Callable[[Fact], None]
    ) -> None:
        self._tell = tell
        self._pause_mode: PauseKind = pause_mode
        self._flushes_cache = flushes
        self.engines: dict[str, EngineControl] = {}
        self.standby: dict[str, EngineControl] = {}
        self._goal: Goal | None = None
        """What the last calls were given for."""
        self._touched: set[str] = set()
        """Engines whose record has changed since. In a fleet of thousands, looking at every
        engine after every event would take longer than everything else."""

    def join(self, engine: EngineInfo, *, standby: bool, now: float) -> EngineControl:
        """An engine is connected; not `standby` only with the fleet's version."""
        control = EngineControl(
            name=engine.name,
            inconsistent=engine.version is None,
            keeps_weights=engine.keeps_weights,
            holds_stragglers=engine.holds_stragglers,
            base=engine.version or 0,
            kv_tokens=engine.kv_tokens,
            version_seen_at=now,
        )
        (self.standby if standby else self.engines)[engine.name] = control
        self.touch(engine.name)
        return control

    def enter(
        self, control: EngineControl, mode: Mode, *, pause: str = "", tags: tuple[str, ...] = ()
    ) -> None:
        """The engine is in another mode from now on."""
        self._tell(
            EngineModeChanged(
                engine=control.name,
                start=control.mode.value,
                finish=mode.value,
                pause=pause,
                tags=tags,
            )
        )
        control.mode = mode

    def touch(self, engine: str) -> None:
        """Its record has changed: the next :meth:`reconcile` looks at it."""
        self._touched.add(engine)

    def of(self, engine: str) -> EngineControl | None:
        """Its record, in use or on standby; None if it is lost."""
        return self.engines.get(engine) or self.standby.get(engine)

    def all(self) -> Iterator[EngineControl]:
        yield from self.engines.values()
        yield from self.standby.values()

    @property
    def kv_tokens(self) -> int | None:
        """The KV pools in use together; None where one of them is unknown."""
        total = 0
        for control in self.engines.values():
            if control.kv_tokens is None:
                return None
            total += control.kv_tokens
        return total or None

    def runs(self, engine: str) -> bool:
        """May a request be sent to it now?"""
        control = self.engines.get(engine)
        return control is not None and control.mode is Mode.RUNNING

    def reconcile(self, goal: Goal, *, idle: Callable[[str], bool]) -> list[Command]:
        """The next calls. An engine that is `idle` holds no requests; a mere pause leaves it
        alone."""
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
    ) -> Command | None:
        flush = self._flushes(control)
        if control.name in self.engines:
            rests = goal.kind == "pause" and not goal.away and control.mode is Mode.RUNNING
            if rests and idle(control.name):
                return None
            return self._next_call(control, goal, self._pause(goal), flush=flush)
        # Of an engine on standby nothing is wanted but that it can be refitted.
        if goal.kind != "refit" and not control.catching_up:
            return None
        refit = goal if goal.kind == "refit" else Goal(kind="refit")
        return self._next_call(control, refit, "retract", flush=flush)

    def refittable(self, control: EngineControl) -> bool:
        """Paused, its cache as the refit wants it, its weights' memory there."""
        return (
            control.mode is Mode.PAUSED
            and not self._flushes(control)
            and WEIGHTS not in control.released
        )

    def confirm(self, engine: str, doing: Mode, done: Mode) -> EngineControl | None:
        """An engine answered a control call; None if it was lost meanwhile."""
        control = self.of(engine)
        if control is None or control.mode is not doing:
            return None
        self.enter(control, done)
        self.touch(engine)
        return control

    def _pause(self, goal: Goal) -> PauseKind:
        # Stragglers held in place would lose their KV with the memory.
        return "retract" if goal.away else self._pause_mode

    def _flushes(self, control: EngineControl) -> bool:
        return self._flushes_cache and control.paused_by == "retract" and not control.flushed

    def _next_call(
        self, control: EngineControl, goal: Goal, pause: PauseKind, *, flush: bool
    ) -> Command | None:
        name = control.name
        if control.mode is Mode.RUNNING and goal.kind != "run":
            self.enter(control, Mode.PAUSING, pause=pause)
            control.flushed = False
            control.paused_by = pause
            return Pause(engine=name, mode=pause)
        if control.mode is not Mode.PAUSED:
            return None
        back = control.released - goal.away
        if back:
            tags = tuple(sorted(back))
            self.enter(control, Mode.WAKING, tags=tags)
            return Wake(engine=name, tags=tags)
        if goal.kind == "run" or (goal.away and control.paused_by != "retract"):
            # An engine that was still pausing in place when its memory was asked for goes on first:
            # memory is released only under a retract.
            self.enter(control, Mode.CONTINUING)
            return Continue(engine=name)
        if flush and (goal.kind == "refit" or goal.away):
            self.enter(control, Mode.FLUSHING)
            return Flush(engine=name)
        missing = goal.away - control.released
        if missing and goal.kind == "pause":
            tags = tuple(sorted(missing))
            self.enter(control, Mode.RELEASING, tags=tags)
            return Release(engine=name, tags=tags)
        return None
