"""The control state of every engine, and the next call that leads to the one wanted.

The scheduler never says "pause, then flush, then refit": it says each time what it wants of the
fleet, and :meth:`FleetControl.reconcile` gives the next call for every engine that is not there
yet. So a pause is followed by a continue whatever was raised or cancelled in between: as soon as
running is wanted again, that is the next call of every paused engine.

The order around a refit is the one that neither kills a server nor leaves stale keys (hazard 3):
pause, flush until done, load with the cache untouched, continue.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

from aprilsched.core.commands import Command, Continue, Flush, Pause, Refit

__all__ = ["EngineControl", "FleetControl", "Goal", "Mode"]


class Mode(StrEnum):
    """What an engine is doing, as far as control calls go."""

    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    FLUSHING = "flushing"
    REFITTING = "refitting"
    CONTINUING = "continuing"


Goal: TypeAlias = Literal["run", "pause", "refit"]


@dataclass(slots=True, kw_only=True)
class EngineControl:
    name: str
    mode: Mode = Mode.RUNNING
    strikes: int = 0
    """Failed attempts in a row."""
    flushed: bool = False
    """The KV was flushed in this pause, so its requests are prefilled again."""


class FleetControl:
    """The engines in use. Lost ones are not here."""

    def __init__(self, *, pause_mode: Literal["retract", "in_place"]) -> None:
        self._pause_mode: Literal["retract", "in_place"] = pause_mode
        self.engines: dict[str, EngineControl] = {}

    def join(self, engine: str) -> None:
        self.engines[engine] = EngineControl(name=engine)

    def runs(self, engine: str) -> bool:
        """May a request be sent to it now?"""
        control = self.engines.get(engine)
        return control is not None and control.mode is Mode.RUNNING

    def reconcile(self, goal: Goal, *, version: int | None, idle: frozenset[str]) -> list[Command]:
        """The next calls. `version` is wanted with the goal "refit".

        Engines in `idle` hold no requests; they are paused for a refit only.
        """
        commands: list[Command] = []
        for control in self.engines.values():
            rest = control.name in idle
            command = self._next_call(control, goal, rest=rest)
            if command is not None:
                commands.append(command)
        if goal == "refit" and version is not None and self._all_ready():
            for control in self.engines.values():
                control.mode = Mode.REFITTING
            commands.append(Refit(version=version, engines=tuple(self.engines)))
        return commands

    def confirm(self, engine: str, mode: Mode) -> EngineControl | None:
        """An engine answered a control call; None if it was lost meanwhile."""
        control = self.engines.get(engine)
        if control is not None:
            control.mode = mode
        return control

    def _next_call(self, control: EngineControl, goal: Goal, *, rest: bool) -> Command | None:
        match control.mode, goal:
            case (Mode.RUNNING, "pause") if rest:
                return None
            case (Mode.RUNNING, "pause" | "refit"):
                control.mode = Mode.PAUSING
                control.flushed = False
                return Pause(engine=control.name, mode=self._pause_mode)
            case (Mode.PAUSED, "refit") if self._flushes(control):
                control.mode = Mode.FLUSHING
                return Flush(engine=control.name)
            case (Mode.PAUSED, "run"):
                control.mode = Mode.CONTINUING
                return Continue(engine=control.name)
            case _:
                return None

    def _flushes(self, control: EngineControl) -> bool:
        return self._pause_mode == "retract" and not control.flushed

    def _all_ready(self) -> bool:
        return bool(self.engines) and all(
            control.mode is Mode.PAUSED and not self._flushes(control)
            for control in self.engines.values()
        )
