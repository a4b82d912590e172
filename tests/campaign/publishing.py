"""The trainer's publisher and planner with all kinds of faults."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, cast

from aprilsched import SimPublisher
from aprilsched.config import SchedulerConfig
from aprilsched.kernel.core.messages.commands import Plan
from aprilsched.kernel.core.policies.schedule import Schedule
from aprilsched.kernel.engines.base import Engine
from aprilsched.planning import Planner
from aprilsched.planning.candidates import Space, candidates
from tests.campaign.callers import Callers
from tests.campaign.mix import Mix
from tests.support.publishers import SimAdapterPublisher

_Results: TypeAlias = Mapping[str, Exception | None]
_Publish: TypeAlias = Callable[[int, Sequence[Engine]], Awaitable[_Results]]


class _BadPublisher:
    """A mixin for publishers: sometimes weights do not arrive, or it lies about them."""

    def __init__(self, mix: Mix, callers: Callers) -> None:
        super().__init__()
        self._mix = mix
        self._callers = callers
        self._draw = mix.draw("publisher")
        self._holds = self._draw.random() < 0.6
        self.fails = True

    def _is_bad(self, share: float) -> bool:
        return self.fails and self._mix.has("bad_publishers") and self._draw.random() < share

    def holds(self, version: int) -> bool:
        # Rolling refits need a publisher that keeps a version for later.
        return self._holds or self._mix.config().refit == "rolling"

    async def prepare(self, version: int) -> None:
        await asyncio.sleep(self._draw.choice([0.0, 0.0, 0.5]))
        if self._is_bad(0.05):
            raise self._callers.throw()

    async def publish(self, version: int, engines: Sequence[Engine]) -> _Results:
        draw = self._draw
        publish = cast("_Publish", super().publish)  # type: ignore[misc]
        await asyncio.sleep(draw.choice([0.0, 0.0, 0.5, 4.0]))
        if not self._is_bad(0.4):
            return await publish(version, engines)
        some = [engine for engine in engines if draw.random() < 0.5]
        match draw.randrange(7):
            case 0:
                raise self._callers.throw()
            case 1:
                await publish(version, some)
                raise self._callers.throw()
            case 2:
                await publish(version, some)
                return None  # type: ignore[return-value]
            case 3:
                await publish(version, some)
                return {engine.name: None for engine in engines}
            case 4:
                return dict(await publish(version, some))
            case 5:
                results = dict(await publish(version, engines))
                return results | {engine.name: ValueError("of the publisher") for engine in some}
            case _:
                await asyncio.sleep(200.0)
                return await publish(version, engines)


class ChaosPublisher(_BadPublisher, SimPublisher):
    """Publishes whole weights."""


class ChaosAdapters(_BadPublisher, SimAdapterPublisher):
    """Publishes adapters."""


class ChaosPlanner(Planner):
    """Chooses any possible schedule, and sometimes raises."""

    def __init__(self, mix: Mix) -> None:
        super().__init__(inline=mix.draw("planner").random() < 0.5)
        self._draw = mix.draw("planner")
        self._real = self._draw.random() < 0.01

    def plan(self, command: Plan, config: SchedulerConfig) -> Schedule:
        if self._real:
            return super().plan(command, config)
        if self._draw.random() < 0.05:
            raise ValueError("of the campaign")
        space = Space(may_defer=config.may_defer, paces=command.paces)
        schedule = self._draw.choice(candidates(self.setting(command, config), space))
        # The core must refuse a pace that the straggler rule does not allow, or no longer allows.
        pace = self._draw.choice(["synchronous", "asynchronous"]) if command.paces else None
        return replace(schedule, pace=pace)
