"""`episode=`: rollouts of several turns under the real coordinator."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aprilsched import (
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
    Turn,
)
from aprilsched.engines.sim import run_virtual
from aprilsched.types import NO_VERSION

TOOL = np.array([7, 7, 7], dtype=np.int32)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(input_ids=np.array([i + 1, 2], dtype=np.int32)) for i in range(count)]


def config(straggler: str) -> SchedulerConfig:
    return SchedulerConfig(
        batch_groups=2,
        group_size=2,
        over_provision=2.0,
        straggler=straggler,  # type: ignore[arg-type]
        pace="asynchronous",
    )


async def two_turns(turn: Turn, prompt: Prompt) -> float:
    sampling = SamplingParams(max_new_tokens=300, temperature=0, ignore_eos=True)
    first = await turn.generate(prompt.input_ids, sampling)
    await asyncio.sleep(0.2)
    context = np.concatenate((prompt.input_ids, first.token_ids, TOOL))
    second = await turn.generate(context, sampling)
    return float(len(first.token_ids) + len(second.token_ids))


@pytest.mark.parametrize("straggler", ["retract", "in_place", "abort"])
def test_a_two_turn_episode_is_interrupted_inside_each_turn_and_goes_on(straggler: str):
    async def main() -> None:
        async with RolloutScheduler(
            SimFleet(2, stream_interval=8),
            prompts(4),
            episode=two_turns,
            config=config(straggler),
        ) as rollouts:
            for _ in range(12):
                # Each turn takes about 1.2 s, so every one meets several refits.
                await asyncio.sleep(0.25)
                await rollouts.update_weights(SimPublisher())
            batch = await rollouts.next_batch()
            for rollout in batch.rollouts:
                assert rollout.turns == 2
                assert rollout.reward == 600
                assert rollout.token_ids[300:303].tolist() == TOOL.tolist()
                assert rollout.versions[300:303].tolist() == [NO_VERSION] * 3
                assert rollout.loss_mask.tolist() == [True] * 300 + [False] * 3 + [True] * 300
                assert len(set(rollout.versions[:300].tolist())) >= 2, "inside the first turn"
                assert len(set(rollout.versions[303:].tolist())) >= 2, "inside the second turn"
                assert rollout.versions_exact

    run_virtual(main())


def test_a_rewritten_context_is_refused_in_one_sentence():
    async def rewrite(turn: Turn, prompt: Prompt) -> None:
        sampling = SamplingParams(max_new_tokens=5, ignore_eos=True)
        await turn.generate(prompt.input_ids, sampling)
        await turn.generate([9, 9, 9, 9, 9, 9, 9, 9], sampling)

    async def main() -> None:
        async with RolloutScheduler(
            SimFleet(1), prompts(1), episode=rewrite, config=config("retract")
        ) as rollouts:
            async for _ in rollouts:
                raise AssertionError("nothing can be delivered")
            (first, *_) = rollouts.state.book.ledger.entries
            assert "append to them" in first.cause

    run_virtual(main())
