"""Tests batches that the trainer takes group by group, on the embedded engine."""

from __future__ import annotations

import asyncio

import pytest

from aprilsched import Batch, RolloutScheduler, SimFleet, SimPublisher
from aprilsched.simulation import Costs, Simulation
from aprilsched.simulation.engine import run_virtual
from aprilsched.types import Group, Sample
from tests.support.checking import checked
from tests.support.small import by_length, config, workload
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time


async def streamed(rollouts: RolloutScheduler) -> list[Batch]:
    return [part async for part in rollouts.stream()]


@each_row(
    ("pace", "straggler", "delivery"),
    [
        ("synchronous", "retract", "groups"),
        ("asynchronous", "abort", "groups"),
        ("asynchronous", "in_place", "groups"),
        ("synchronous", "retract", "samples"),
        ("asynchronous", "run", "samples"),
    ],
)
def test_streamed_batches_equal_the_batches_of_a_plain_run(
    pace: str, straggler: str, delivery: str
):
    """The trainer takes no time between units, so every batch has the same units and tokens."""

    async def run(by_group: bool) -> list[dict[int, bytes]]:
        settings = config(pace=pace, straggler=straggler, delivery=delivery)
        fleet = SimFleet(2, stream_interval=16)
        scheduler = checked(fleet, workload(), reward=by_length, config=settings)
        found: list[dict[int, bytes]] = []
        async with scheduler as rollouts:
            for number in range(5):
                parts = await streamed(rollouts) if by_group else [await rollouts.next_batch()]
                assert [part.complete for part in parts] == [False] * (len(parts) - 1) + [True]
                assert {part.index for part in parts} == {number}
                assert not by_group or {len(part.units) for part in parts} == {1}
                units = Sample if delivery == "samples" else Group
                assert all(isinstance(unit, units) for part in parts for unit in part.units)
                rolled = [rollout for part in parts for rollout in part.rollouts]
                found.append({r.rollout_id: r.token_ids.tobytes() for r in rolled})
                await rollouts.update_weights(SimPublisher())
        return found

    assert run_virtual(run(True)) == run_virtual(run(False))


async def test_the_first_group_comes_while_the_others_are_generated():
    async with RolloutScheduler(SimFleet(1), workload(), config=config()) as rollouts:
        clock = asyncio.get_running_loop().time
        times: list[float] = []
        in_flight = 0
        async for part in rollouts.stream():
            times.append(clock())
            in_flight = in_flight or rollouts.state.in_flight.open_attempts
            assert len(part.groups) == 1
    assert times == sorted(times)
    assert times[0] < times[-1]
    assert in_flight > 0


def test_streams_overlap_training_with_the_tail_on_policy():
    """A step takes the longer of the tail and the trainer, and the work on the last group."""

    def seconds(by_group: bool) -> float:
        simulation = Simulation(
            config(over_provision=1.0),
            workload(),
            batches=10,
            streamed=by_group,
            costs=Costs(train_seconds=4.0),
        )
        simulation.run()
        counters = simulation.state.in_flight.counters
        assert counters.batches == 10
        assert not counters.tokens_reprefilled
        return simulation.agenda.now

    whole, by_group = seconds(False), seconds(True)
    assert whole - 10 * 3.0 - 1e-6 <= by_group < whole
