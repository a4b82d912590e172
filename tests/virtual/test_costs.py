"""What an event costs the core does not grow with what is in flight, nor with the engines.

It is counted in calls of functions for each delivered rollout, which are the same in every run.
docs/scale.md has the speed of one core.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from aprilsched.config import Dispatch, Pool, SchedulerConfig, Staleness
from aprilsched.kernel.core.messages.commands import Command
from aprilsched.kernel.core.messages.events import Event
from aprilsched.simulation import Costs, Simulation
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.workload import LongTailWorkload

ROLLING: dict[str, Any] = {"pace": "asynchronous", "straggler": "run", "refit": "rolling"}
POLICIES: dict[str, dict[str, Any]] = {
    "retract": {},
    "finish": {"max_staleness": Staleness(1, rule="finish")},
    "few at once": {"refill": Pool()},
    "rolling": ROLLING,
}
AT_LENGTH = ("rolling", "finish", "few at once")


class Counted:
    """Counts the calls of a function, and the function calls made inside it."""

    times = made = 0

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self.times += 1
            sys.setprofile(self._count)
            try:
                return function(*arguments)
            finally:
                sys.setprofile(None)

        return counted

    def _count(self, _frame: FrameType, what: str, _: object) -> None:
        self.made += what in ("call", "c_call")


def calls(name: str, *, engines: int, in_flight: int) -> float:
    """Return the function calls in the core per delivered rollout, after the first batches."""
    settings = dict(POLICIES[name])
    if name == "few at once":
        settings["dispatch"] = Dispatch(max_in_flight=in_flight // 2)
    simulation = Simulation(
        SchedulerConfig(batch_groups=in_flight // 16, group_size=8, over_provision=2, **settings),
        LongTailWorkload(),
        engines=engines,
        engine=SimConfig(make_tokens=False, stream_interval=512),
        batches=5,
        costs=Costs(train_seconds=2),
    )
    core = simulation._loop.core  # pyright: ignore[reportPrivateUsage]
    counted, counters = Counted(), simulation.state.in_flight.counters
    handle = counted.of(core.handle)
    marks: list[tuple[int, int]] = []

    def marking(event: Event, now: float) -> list[Command]:
        commands = handle(event, now)
        if not marks or counters.delivered > marks[-1][0]:
            marks.append((counters.delivered, counted.made))
        return commands

    core.handle = marking
    simulation.run()
    (before, start), (after, end) = marks[3], marks[-1]
    return (end - start) / (after - before)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name in AT_LENGTH)) for name in POLICIES],
)
def test_a_rollout_costs_the_same_in_a_large_fleet(name: str) -> None:
    cost = calls(name, engines=16, in_flight=256)
    # The 128 engines have as few requests each as the base: an update calls every engine.
    for engines, in_flight in ((16, 1_024), (128, 2_048)):
        assert calls(name, engines=engines, in_flight=in_flight) < 1.3 * cost, (engines, in_flight)
