"""Disturbs the engines of a life: at random times, and at the worst moments."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.simulation.engine import SimEngine

if TYPE_CHECKING:
    from tests.campaign.life import Life

_KINDS = ("restarts", "crashes", "foreign", "slow_engines", "membership")


class Disturber:
    """Restarts, crashes, slows down, reloads, adds and removes engines at random times."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._draw = life.mix.draw(f"chaos {life.number}")

    async def run(self) -> None:
        life, draw, fleet = self._life, self._draw, self._life.trial.fleet
        mix = life.mix
        kinds = [
            kind
            for kind in _KINDS
            if mix.has(kind) and not (kind == "foreign" and mix.has("adapters"))
        ]
        mean = draw.choice([2.0, 10.0, 40.0])
        while kinds:
            await asyncio.sleep(draw.expovariate(1 / mean))
            if life.closing:
                return
            engine = draw.choice(fleet.engines)
            match draw.choice(kinds):
                case "restarts":
                    self.restart(engine)
                case "crashes" if engine.name not in fleet.down:
                    fleet.restart(engine, self._some_version(), after=draw.choice([0.5, 5.0, 60.0]))
                case "foreign":
                    newer = life.scheduler.version + draw.choice([-1, 1, 3])
                    fleet.foreign_refit(engine, max(0, newer))
                case "slow_engines" if engine.name not in fleet.down:
                    fleet.slow_down(
                        engine, draw.choice([0.0, 0.05, 0.5]), draw.choice([5.0, 120.0])
                    )
                case "membership":
                    await fleet.change(draw, most=4)
                case _:
                    pass

    def _some_version(self) -> int:
        """Draw the version of a restarted engine: mostly the initial one."""
        version, draw = self._life.scheduler.version, self._draw
        if self._life.mix.has("adapters"):
            return 0  # the base, which is never another one
        return draw.choice([0, 0, max(0, version - 1), version // 2, version])

    def restart(self, engine: SimEngine) -> None:
        """Restart an engine now, with old weights or those of version 0."""
        fleet = self._life.trial.fleet
        if engine.name not in fleet.down and engine in fleet.engines and not self._life.closing:
            fleet.restart(engine, self._some_version())


class Moments:
    """A listener that restarts engines and evaluates at the worst moments."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._draw = life.mix.draw(f"moments {life.number}")
        self._restarts = life.mix.has("moments")
        self._evaluates = life.mix.has("evaluations")

    def on_event(self, event: ev.Event, now: float) -> None:
        match event:
            case ev.Paused() | ev.Flushed() | ev.Refitted() | ev.Continued():
                self._restart(event.engine, 0.06)
            case ev.EngineJoined():
                self._restart(event.info.name, 0.06)
            case ev.UpdateRequested() | ev.BatchRequested():
                self._evaluate(0.1)
            case _:
                pass

    def on_command(self, command: do.Command, now: float) -> None:
        match command:
            case do.Send():
                self._restart(command.engine, 0.004)
            case do.Pause() | do.Continue() | do.Flush() | do.Release() | do.Wake():
                self._restart(command.engine, 0.05)
            case facts.RefitBegun():
                for engine in command.engines:
                    self._restart(engine, 0.05)
            case do.WithdrawOffer() if self._life.store is not None:
                self._life.store.withdrawn[command.index] += 1
            case facts.UpdateFinished() | do.Deliver():
                self._evaluate(0.15)
            case _:
                pass

    def _restart(self, name: str, share: float) -> None:
        if not self._restarts or self._draw.random() > share:
            return
        for engine in self._life.trial.fleet.engines:
            if engine.name == name:
                after = self._draw.choice([0.0, 0.0, 0.001, 0.1, 1.0])
                asyncio.get_running_loop().call_later(after, self._life.disturber.restart, engine)

    def _evaluate(self, share: float) -> None:
        if self._evaluates and self._draw.random() < share:
            after = self._draw.choice([0.0, 0.0, 0.001, 0.1])
            loop = asyncio.get_running_loop()
            loop.call_later(after, self._life.evaluations.start, self._draw)
