"""Tests the real coordinator on the embedded engine, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from aprilsched import (
    Batch,
    Group,
    LongTailWorkload,
    Prompt,
    Rollout,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
)
from aprilsched.config import Dispatch, Health, Timeouts
from aprilsched.core.messages.events import EngineLost, Event, Finished
from aprilsched.core.state.ledger import Reason
from aprilsched.engines.base import Engine
from aprilsched.engines.sim import run_virtual
from aprilsched.errors import (
    FleetLost,
    RefitError,
    RunGivenUp,
    SchedulerClosed,
)
from tests.support.checking import Checking

pytestmark = pytest.mark.virtual_time

ONE = SamplingParams(max_new_tokens=1, ignore_eos=True)
STRAGGLERS = ["retract", "in_place", "abort", "run"]


def workload(count: int | None = None, group_size: int = 4) -> LongTailWorkload:
    return LongTailWorkload(
        median=60, sigma=0.9, cap=600, group_size=group_size, count=count, seed=3
    )


def config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {"batch_groups": 4, "group_size": 4, "over_provision": 2.0}
    return SchedulerConfig(**{**values, **changes})  # type: ignore[arg-type]


def check(batches: Sequence[Batch], scheduler: RolloutScheduler) -> None:
    """Check conservation, whole groups, equal lengths of all fields, and exact versions."""
    ids = [rollout.rollout_id for batch in batches for rollout in batch.rollouts]
    assert len(ids) == len(set(ids))
    in_flight = scheduler.state.in_flight
    assert (
        in_flight.counters.launched == len(ids) + len(in_flight.rollouts) + in_flight.ledger.total
    )
    for batch in batches:
        for group in batch.groups:
            assert [r.index for r in group.rollouts] == list(range(len(group.rollouts)))
        for rollout in batch.rollouts:
            n = len(rollout.token_ids)
            assert n == len(rollout.logprobs) == len(rollout.versions) == len(rollout.loss_mask)
            assert rollout.versions_exact
            assert [s.start for s in rollout.segments] == [
                0,
                *(s.end for s in rollout.segments[:-1]),
            ]


@pytest.mark.parametrize("straggler", STRAGGLERS)
@pytest.mark.parametrize("pace", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("refill", ["wave", "pool"])
async def test_every_rule_delivers_whole_groups_with_exact_versions(
    straggler: str, pace: str, refill: str
):
    listener = Checking()
    scheduler = RolloutScheduler(
        SimFleet(2, stream_interval=16),
        workload(),
        config=config(straggler=straggler, pace=pace, refill=refill),
        listeners=[listener],
    )
    listener.scheduler = scheduler
    batches: list[Batch] = []
    async with scheduler as rollouts:
        for _ in range(6):
            batches.append(await rollouts.next_batch())
            await rollouts.update_weights(SimPublisher())
        check(batches, scheduler)
    assert [batch.version for batch in batches] == list(range(6))
    spans = {len(set(r.versions.tolist())) for b in batches for r in b.rollouts}
    assert max(spans) == 1 if straggler == "run" else max(spans) > 1


@pytest.mark.parametrize("straggler", ["retract", "in_place", "abort"])
def test_greedy_tokens_of_interrupted_rollouts_equal_the_uninterrupted(straggler: str):
    prompts = [
        Prompt(
            input_ids=np.array([i + 1, 5, 9], dtype=np.int32),
            sampling=SamplingParams(max_new_tokens=40 + 60 * i, temperature=0, ignore_eos=True),
        )
        for i in range(8)
    ]

    async def tokens(rule: str, ratio: float) -> dict[int, list[int]]:
        same = SimPublisher(lambda _: 0)
        out: dict[int, list[int]] = {}
        async with RolloutScheduler(
            SimFleet(2, stream_interval=8),
            prompts,
            config=config(batch_groups=2, group_size=1, over_provision=ratio, straggler=rule),
        ) as rollouts:
            await rollouts.update_weights(same)
            async for batch in rollouts:
                for rollout in batch.rollouts:
                    out[int(rollout.prompt_ids[0])] = rollout.token_ids.tolist()
                await rollouts.update_weights(same)
        return out

    assert run_virtual(tokens(straggler, 3.0)) == run_virtual(tokens("run", 1.0))


def test_asynchronous_generation_goes_on_while_the_trainer_trains():
    async def seconds(pace: str) -> float:
        loop = asyncio.get_running_loop()
        async with RolloutScheduler(
            SimFleet(1), workload(), config=config(pace=pace, refill="pool")
        ) as rollouts:
            for _ in range(8):
                await rollouts.next_batch()
                await asyncio.sleep(1.0)
                await rollouts.update_weights(SimPublisher())
            return loop.time()

    assert run_virtual(seconds("asynchronous")) < run_virtual(seconds("synchronous")) - 1.0


async def test_a_synchronous_trainer_generates_nothing_while_it_trains():
    fleet = SimFleet(1)
    async with RolloutScheduler(fleet, workload(), config=config()) as rollouts:
        await rollouts.next_batch()
        await asyncio.sleep(0.1)
        before = rollouts.state.in_flight.counters.tokens_generated
        await asyncio.sleep(60)
        assert rollouts.state.in_flight.counters.tokens_generated == before


async def test_rewards_run_beside_generation_and_are_in_the_batch():
    async def score(rollout: Rollout, prompt: Prompt) -> float:
        await asyncio.sleep(0.5)
        return float(len(rollout))

    async with RolloutScheduler(SimFleet(1), workload(), reward=score, config=config()) as rollouts:
        batch = await rollouts.next_batch()
    assert all(r.reward == len(r) for r in batch.rollouts)


async def test_plain_functions_group_rewards_and_accept():
    """Plain functions run in threads, so this one runs in (scaled) wall time."""

    def score(group: Group) -> list[float]:
        return [float(i) for i in range(len(group.rollouts))]

    def liked(prompt: Prompt) -> bool:
        return int(prompt.input_ids.sum()) % 3 != 0

    async with RolloutScheduler(
        SimFleet(1, time_scale=0.01),
        workload(),
        reward=score,
        reward_scope="group",
        accept=lambda group: liked(group.prompt),
        config=config(),
    ) as rollouts:
        for _ in range(4):
            batch = await rollouts.next_batch()
            assert all(liked(group.prompt) for group in batch.groups)
            assert [r.reward for r in batch.groups[0].rollouts] == [0.0, 1.0, 2.0, 3.0]
        assert rollouts.state.in_flight.ledger.rollouts[Reason.REJECTED] > 0


async def test_the_reward_of_a_dropped_rollout_is_cancelled():
    cancelled: list[int] = []

    async def score(rollout: Rollout, prompt: Prompt) -> float:
        if rollout.index == 0:
            await asyncio.sleep(1e5)
            raise ValueError("first")
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            cancelled.append(rollout.rollout_id)
            raise
        return 0.0

    async with RolloutScheduler(
        SimFleet(1), workload(count=1), reward=score, config=config()
    ) as rollouts:
        with pytest.raises(RunGivenUp, match=r"no group was delivered: 1 of 1 failed.*first"):
            await rollouts.next_batch()
        assert rollouts.state.in_flight.ledger.total == 4
    assert cancelled, "siblings that were scoring when the first one failed"


async def test_an_evaluation_between_batches():
    async with RolloutScheduler(SimFleet(2), workload(), config=config()) as rollouts:
        await rollouts.next_batch()
        prompts = list(workload(count=5))
        result = await rollouts.evaluate(prompts, group_size=4)
        assert [g.prompt for g in result.groups] == prompts
        assert len({int(r.versions[0]) for r in result.rollouts}) == 1
        await rollouts.update_weights(SimPublisher())
        await rollouts.next_batch()


async def test_a_cancelled_update_runs_to_its_end_and_the_engines_go_on():
    async with RolloutScheduler(
        SimFleet(1, refit_seconds=5.0), workload(), config=config(pace="asynchronous")
    ) as rollouts:
        await rollouts.next_batch()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await rollouts.update_weights(SimPublisher())
        await rollouts.next_batch()
        report = await rollouts.update_weights(SimPublisher())
        assert report.version == 2
        await rollouts.next_batch()


class Hanging(SimPublisher):
    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        await asyncio.sleep(1e9)
        return {}


async def test_a_publisher_that_hangs_is_given_up_at_its_deadline():
    async with RolloutScheduler(
        SimFleet(1), workload(), config=config(timeouts=Timeouts(refit_s=30))
    ) as rollouts:
        await rollouts.next_batch()
        with pytest.raises(RefitError, match="did not finish within 30 s"):
            await rollouts.update_weights(Hanging())
        await rollouts.next_batch()


class LastingFleet(SimFleet):
    """Engines that live longer than the scheduler, as servers do."""

    async def close(self) -> None: ...


def test_closing_from_any_state_leaves_no_engine_paused_and_nothing_decoding():
    async def main(seconds: float, straggler: str) -> None:
        fleet = LastingFleet(2, refit_seconds=0.3)
        scheduler = RolloutScheduler(
            fleet, workload(), config=config(straggler=straggler, pace="asynchronous")
        )

        async def train() -> None:
            async with scheduler as rollouts:
                async for _ in rollouts:
                    await rollouts.update_weights(SimPublisher())

        task = asyncio.create_task(train())
        await asyncio.sleep(seconds)
        started = asyncio.get_running_loop().time()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.get_running_loop().time() - started <= 1.0
        await asyncio.sleep(0.1)
        for engine in fleet.engines:
            assert engine.batcher.paused is None
            assert engine.batcher.running + engine.batcher.waiting == 0
            await engine.close()
        assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    for straggler in STRAGGLERS:
        for seconds in np.linspace(0.0, 9.0, 13):
            run_virtual(main(float(seconds), straggler))


async def test_used_outside_of_its_block():
    scheduler = RolloutScheduler(SimFleet(1), workload(), config=config())
    with pytest.raises(SchedulerClosed):
        await scheduler.next_batch()
    async with scheduler:
        pass
    with pytest.raises(SchedulerClosed):
        await scheduler.next_batch()
    with pytest.raises(SchedulerClosed):
        async with scheduler:
            pass


async def test_prompts_that_are_none_end_the_run_with_the_reason():
    async with RolloutScheduler(
        SimFleet(1),
        itertools.repeat(np.array([1, 2, 3])),  # type: ignore[arg-type]
        config=config(),
    ) as rollouts:
        with pytest.raises(RunGivenUp, match="wrap token ids in Prompt"):
            await rollouts.next_batch()
        with pytest.raises(RunGivenUp):
            await rollouts.next_batch()


async def test_the_loss_of_the_last_engine_is_raised():
    settings = config(health=Health(fleet_wait_s=0))
    async with RolloutScheduler(SimFleet(1), workload(), config=settings) as rollouts:
        waiting = asyncio.create_task(rollouts.next_batch())
        await asyncio.sleep(0.1)
        rollouts._feed(EngineLost(engine="sim-0", cause="burnt"))
        with pytest.raises(FleetLost, match="burnt"):
            await waiting


def test_the_same_seed_gives_the_same_run():
    async def main() -> list[tuple[int, list[int], list[int]]]:
        async with RolloutScheduler(
            SimFleet(2), workload(), config=config(), run_id="r"
        ) as rollouts:
            out: list[tuple[int, list[int], list[int]]] = []
            for _ in range(4):
                batch = await rollouts.next_batch()
                out += [
                    (r.rollout_id, r.token_ids.tolist(), r.versions.tolist())
                    for r in batch.rollouts
                ]
                await rollouts.update_weights(SimPublisher())
        return out

    assert run_virtual(main()) == run_virtual(main())


def test_sends_are_paced():
    class Sends(Checking):
        def __init__(self) -> None:
            super().__init__()
            self.first_tokens: list[float] = []

        def on_event(self, event: Event, now: float) -> None:
            if isinstance(event, Finished):
                self.first_tokens.append(now)

    async def main(rate: int) -> float:
        listener = Sends()
        prompts = [
            Prompt(input_ids=np.array([i + 1], dtype=np.int32), sampling=ONE) for i in range(40)
        ]
        async with RolloutScheduler(
            SimFleet(1),
            prompts,
            config=config(
                batch_groups=40, group_size=1, over_provision=1.0, dispatch=Dispatch(rate=rate)
            ),
            listeners=[listener],
        ) as rollouts:
            await rollouts.next_batch()
        return listener.first_tokens[-1] - listener.first_tokens[0]

    assert run_virtual(main(10)) >= 3.0
    assert run_virtual(main(2000)) < 0.1
