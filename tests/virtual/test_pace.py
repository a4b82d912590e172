"""Tests whole runs in which the pace changes: nothing is lost, and every token has its version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest

from aprilsched import (
    Batch,
    LongTailWorkload,
    Prompt,
    RolloutScheduler,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
)
from aprilsched.kernel.core.invariants import check as check_invariants
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages.facts import ScheduleChanged
from aprilsched.kernel.core.policies.pool import Pool
from aprilsched.kernel.core.policies.refill import Refill
from aprilsched.kernel.core.policies.schedule import Pace, Schedule
from aprilsched.kernel.core.policies.straggler import BEHAVIOURS
from aprilsched.kernel.core.policies.wave import Wave
from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.observe.figures.summary import Summary
from aprilsched.planning import Planner
from aprilsched.simulation import Costs, Simulation
from aprilsched.simulation.engine import run_virtual
from aprilsched.simulation.results import remainder
from tests.support import small
from tests.support.checking import Checking
from tests.support.small import workload
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time


config = partial(small.config, over_provision="auto", pace="auto")


class Switching(Planner):
    """A planner that chooses these paces in turn, and records its inputs."""

    def __init__(self, paces: Sequence[Pace], *, refill: Refill | None = None) -> None:
        super().__init__(inline=True)
        self.asked: list[do.Plan] = []
        self._paces = cycle(paces)
        self._refill = refill or Wave()

    def plan(self, command: do.Plan, config: SchedulerConfig) -> Schedule:
        self.asked.append(command)
        return self.next()

    def next(self) -> Schedule:
        pace = next(self._paces)
        return Schedule(over_provision=1.5, refill=self._refill, pace=pace, why=pace)


class Watching(Checking):
    """Checks the invariants after every event, and changes the pace every `every` events."""

    def __init__(self, planner: Switching, every: int) -> None:
        super().__init__()
        self.paces: set[bool] = set()
        self._planner = planner
        self._left = self._every = every

    def on_event(self, event: ev.Event, now: float) -> None:
        if self.scheduler is None:
            return
        super().on_event(event, now)
        self.paces.add(self.scheduler.state.asynchronous)
        # Answers to pauses do not count, or the pace would change forever at one moment.
        self._left -= isinstance(event, ev.Progress | ev.Finished)
        if not self._left:
            self._left = self._every
            self.scheduler._feed(  # pyright: ignore[reportPrivateUsage]
                ev.Planned(schedule=self._planner.next())
            )


@each_row("straggler", BEHAVIOURS)
@each_row("every", [7, 61])
def test_a_change_of_pace_delivers_everything_once(straggler: str, every: int) -> None:
    async def main() -> list[Batch]:
        planner = Switching(["asynchronous", "synchronous"], refill=Pool(together=1))
        watching = Watching(planner, every)
        batches: list[Batch] = []
        rollouts = RolloutScheduler(
            SimFleet(2),
            workload(30),
            config=config(straggler=straggler),
            planner=planner,
            listeners=[watching],
            run_id="run",
        )
        async with rollouts:
            watching.scheduler = rollouts
            async for batch in rollouts:
                batches.append(batch)
                await rollouts.update_weights(SimPublisher())
            in_flight = rollouts.state.in_flight
            assert in_flight.counters.launched == in_flight.counters.delivered == 30 * 4
            assert not in_flight.rollouts
            assert not in_flight.ledger.total
        assert watching.paces == {True, False}
        return batches

    batches = run_virtual(main())
    rollouts = [rollout for batch in batches for rollout in batch.rollouts]
    assert len({rollout.rollout_id for rollout in rollouts}) == len(rollouts) == 30 * 4
    lengths = sorted(len(rollout) for rollout in rollouts)
    assert lengths == sorted(n for i in range(30) for n in workload().lengths(i).tolist())
    for batch in batches:
        for rollout in batch.rollouts:
            assert rollout.versions_exact
            assert rollout.versions.max() <= batch.version
            assert (rollout.versions[1:] >= rollout.versions[:-1]).all()
            assert len({segment.version for segment in rollout.segments}) == len(rollout.segments)


@each_row("lies", [False, True])
def test_the_planner_gets_the_share_that_epochs_explain(lies: bool) -> None:
    """Keys that name another prompt in each epoch explain little once that was seen."""

    def keyed() -> Iterator[Prompt]:
        prompts = LongTailWorkload(group_size=4, epoch_prompts=64, seed=1, median=400, cap=4000)
        for index, prompt in enumerate(prompts):
            epoch = index // 64
            yield replace(prompt, key=(index * 37 + epoch * 13) % 64) if lies else prompt

    planner = Switching(["synchronous"])
    Simulation(config(batch_groups=8), keyed(), batches=30, planner=planner).run()
    text = [plan.remembered for plan in planner.asked]
    assert text[0] == 0.0, "nothing is remembered in the first epoch"
    assert text[-1] < 0.4 if lies else text[-1] > 0.7


class Facts:
    def __init__(self) -> None:
        self.schedules: list[tuple[str | None, float]] = []

    def on_facts(self, facts: Sequence[object], now: float) -> None:
        self.schedules += [(f.pace, now) for f in facts if isinstance(f, ScheduleChanged)]


def simulated(
    planner: Planner,
    *,
    train_seconds: float = 20.0,
    batches: int = 20,
    **changes: object,
) -> tuple[RunSummary, Facts, float]:
    summary, facts = Summary(burn_in=4), Facts()
    costs = Costs(train_seconds=train_seconds, refit_seconds=1.5)
    settings = config(batch_groups=8, straggler="in_place", **changes)
    simulation = Simulation(
        settings,
        LongTailWorkload(group_size=4, seed=1, median=400, cap=4000),
        engines=1,
        costs=costs,
        batches=batches,
        planner=planner,
        listeners=[summary, facts],
    )
    simulation.run()
    check_invariants(simulation.state)
    figures = summary.result(remainder(simulation.state), clock="virtual")
    return figures, facts, simulation.agenda.now


def test_training_time_is_measured_on_both_paces() -> None:
    """Once the pace is asynchronous, a trainer of 20 s no longer keeps engines waiting, and its
    time per batch is still measured as 20 s."""
    walls: dict[str, float] = {}
    for pace in ("synchronous", "asynchronous"):
        planner = Switching([pace])
        figures, facts, walls[pace] = simulated(planner)
        assert [received for received, _ in facts.schedules] == [pace] * len(planner.asked)
        first, *later = planner.asked
        assert (first.train_seconds, first.refit_seconds) == (None, None)
        assert len(later) >= 2
        for plan in later:
            assert plan.train_seconds == pytest.approx(20.0)
            assert plan.train_spread == pytest.approx(0.0, abs=1e-6)
            assert plan.refit_seconds == pytest.approx(1.5)
        assert figures.rollouts.lost == figures.rollouts.duplicated == 0
        took = sum(batch.seconds + batch.trainer_seconds for batch in figures.per_batch)
        # The run ends when the trainer is done with the last batch.
        assert took == pytest.approx(walls[pace] - 20.0 - 1.5, abs=1.0)
        # The pace is asynchronous from the end of the first batch on.
        trained = figures.seconds.trainer
        assert trained == pytest.approx(20 * 20.0 if pace == "synchronous" else 0.0, abs=1e-3)
    assert walls["asynchronous"] < 0.9 * walls["synchronous"]


def test_the_figures_follow_a_pace_that_changes_twice() -> None:
    figures, facts, wall = simulated(Switching(["synchronous", "asynchronous", "synchronous"]))
    # Drifting lengths may request the last schedule again.
    paces = [pace for pace, _ in facts.schedules]
    assert paces[:3] == ["synchronous", "asynchronous", "synchronous"]
    assert set(paces[3:]) <= {"synchronous"}
    took = sum(batch.seconds + batch.trainer_seconds for batch in figures.per_batch)
    assert took == pytest.approx(wall - 20.0 - 1.5, abs=1.0)
    waited = [batch.trainer_seconds for batch in figures.per_batch]
    # A batch includes the training on the previous one. The changes come with batches 3 and 9.
    assert waited[1:3] == pytest.approx([20.0] * 2, abs=1e-3)
    assert waited[3:9] == pytest.approx([0.0] * 6, abs=1e-3)
    assert waited[9:] == pytest.approx([20.0] * 11, abs=1e-3)
