"""Tests sleep and adapters with the real coordinator and the embedded engine, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from aprilsched import ExternalWeights, RolloutScheduler, SimFleet, SimPublisher
from aprilsched.errors import ConfigError, RefitError
from aprilsched.kernel.core.policies.straggler import BEHAVIOURS
from aprilsched.types import Batch, Prompt, SamplingParams
from tests.support.publishers import SimAdapterPublisher
from tests.support.small import config, workload
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time


def carried_over(batch: Batch) -> int:
    return sum(len(rollout.segments) > 1 for rollout in batch.rollouts)


@each_row("straggler", ["retract", "in_place", "abort", "run"])
@each_row("pace", ["synchronous", "asynchronous"])
async def test_a_colocated_trainer_keeps_stragglers_through_a_sleep(straggler: str, pace: str):
    settings = config(straggler=straggler, pace=pace)
    async with RolloutScheduler(SimFleet(2), workload(), config=settings) as rollouts:
        carried = 0
        for step in range(4):
            batch = await rollouts.next_batch()
            carried += carried_over(batch)
            async with rollouts.asleep():
                await asyncio.sleep(10)
                assert all(c.released for c in rollouts.state.fleet.control.engines.values())
                await rollouts.update_weights(SimPublisher())
            assert rollouts.version == step + 1
        if straggler != "run":
            assert carried > 0
        in_flight = rollouts.state.in_flight
        assert in_flight.ledger.total == 0


async def test_what_cannot_be_done_asleep_is_refused():
    async with RolloutScheduler(SimFleet(1), workload(), config=config()) as rollouts:
        async with rollouts.asleep(tags=["kv_cache"]):
            with pytest.raises(ConfigError, match="the engines are asleep"):
                await rollouts.next_batch()
            with pytest.raises(ConfigError, match="asleep already"):
                async with rollouts.asleep():
                    pass
            with pytest.raises(ConfigError, match="outside of asleep"):
                await rollouts.update_weights(SimAdapterPublisher())
        with pytest.raises(ConfigError, match="give some of kv_cache"):
            async with rollouts.asleep(tags=["kv"]):
                pass
        await rollouts.next_batch()


@each_row("cancelled", ["falling asleep", "asleep"])
async def test_a_trainer_that_is_cancelled_leaves_the_engines_awake(cancelled: str):
    fleet = SimFleet(2, pause_seconds=2.0)
    async with RolloutScheduler(fleet, workload(), config=config()) as rollouts:
        await rollouts.next_batch()
        await asyncio.sleep(10)

        async def train() -> None:
            async with rollouts.asleep(tags=["kv_cache"]):
                await asyncio.sleep(1_000)

        task = asyncio.create_task(train())
        await asyncio.sleep(1 if cancelled == "falling asleep" else 100)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not any(c.released for c in rollouts.state.fleet.control.engines.values())
        await rollouts.next_batch()


async def test_missing_weights_are_an_error_until_the_next_update(
    monkeypatch: pytest.MonkeyPatch,
):
    fleet = SimFleet(1)

    async with RolloutScheduler(fleet, workload(), config=config()) as rollouts:
        await rollouts.next_batch()
        for control in rollouts.state.fleet.control.engines.values():
            control.able = replace(control.able, keeps_released_weights=False)
        with pytest.raises(RefitError, match="call update_weights"):
            async with rollouts.asleep():
                pass
        await rollouts.update_weights(SimPublisher())
        await rollouts.next_batch()


async def test_closing_a_scheduler_that_sleeps_wakes_its_engines():
    fleet = SimFleet(2)

    async def fall_asleep_and_close() -> None:
        async with RolloutScheduler(fleet, workload(), config=config()) as rollouts:
            await rollouts.next_batch()
            await rollouts.asleep().__aenter__()

    await fall_asleep_and_close()
    async with RolloutScheduler(fleet, workload(), config=config()) as rollouts:
        await rollouts.next_batch()


async def test_adapters_load_without_a_pause_and_unload_unused():
    fleet = SimFleet(2)
    unloaded: list[str] = []
    for engine in fleet.engines:
        unload = engine.unload_adapter

        async def note(name: str, unload: object = unload) -> None:
            unloaded.append(name)
            await unload(name)  # type: ignore[operator]

        engine.unload_adapter = note  # type: ignore[method-assign]
    settings = config(pace="asynchronous")
    async with RolloutScheduler(fleet, workload(), config=settings) as rollouts:
        for _ in range(8):
            batch = await rollouts.next_batch()
            for rollout in batch.rollouts:
                assert len(set(rollout.versions.tolist())) == 1
                assert rollout.versions_exact
            await rollouts.update_weights(SimAdapterPublisher())
        assert rollouts.state.in_flight.counters.updates == 8
        assert {len(loaded) for loaded in rollouts.state.weights.adapters.values()} <= {
            1,
            2,
            3,
            4,
            5,
        }
        with pytest.raises(ConfigError, match="continue to publish adapters"):
            await rollouts.update_weights(ExternalWeights())
    assert "policy-v1" in unloaded


@each_row("pace", ["synchronous", "asynchronous"])
@each_row("straggler", BEHAVIOURS)
async def test_no_request_mixes_adapters_and_a_full_model(straggler: str, pace: str):
    fleet = SimFleet(2)

    settings = config(straggler=straggler, pace=pace)
    async with RolloutScheduler(fleet, workload(), config=settings) as rollouts:
        for publisher in (SimAdapterPublisher, SimPublisher) * 3:
            batch = await rollouts.next_batch()
            if straggler == "run":
                assert all(len(set(r.versions.tolist())) == 1 for r in batch.rollouts)
            await rollouts.update_weights(publisher())
            adapter = rollouts.state.weights.adapter
            assert (adapter is not None) == (publisher is SimAdapterPublisher)
        await rollouts.next_batch()
        assert rollouts.state.weights.adapters == {"sim-0": set(), "sim-1": set()}
        # One token under the newest full model follows the weights of that version alone.
        greedy = SamplingParams(max_new_tokens=4, temperature=0)
        prompts = [Prompt(input_ids=np.array([1, 2, 3]), sampling=greedy)]
        own = next((await rollouts.evaluate(prompts)).rollouts)
    async with RolloutScheduler(SimFleet(1), [], config=settings) as other:
        await other.update_weights(SimPublisher(), version=6)
        fresh = next((await other.evaluate(prompts)).rollouts)
        assert own.token_ids.tolist() == fresh.token_ids.tolist()


async def test_a_full_model_update_reaches_engines_of_another_base():
    fleet = SimFleet(1)

    settings = config(straggler="abort")
    async with RolloutScheduler(fleet, workload(), config=settings) as rollouts:
        await rollouts.next_batch()
        await rollouts.update_weights(SimPublisher())
        await rollouts.update_weights(SimAdapterPublisher())
        await rollouts.next_batch()
        fleet.engines[0].crash()
        await fleet.engines[0].restart()
        with pytest.raises(RefitError, match="as a full model where an engine does not have"):
            await rollouts.next_batch()
        with pytest.raises(RefitError, match=r"no engine has version 1.*publish a full model"):
            await rollouts.update_weights(SimAdapterPublisher())
        report = await rollouts.update_weights(SimPublisher())
        assert report.version == 3
        batch = await rollouts.next_batch()
        assert {int(v) for rollout in batch.rollouts for v in rollout.versions} <= {0, 1, 2, 3}
        await rollouts.update_weights(SimAdapterPublisher())
        await rollouts.next_batch()
