"""Tests `episode=`: rollouts of several turns with the real coordinator."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

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
    TurnOutput,
)
from aprilsched.errors import EpisodeError, RunGivenUp
from aprilsched.kernel.core.policies.straggler import BEHAVIOURS
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.simulation.engine import run_virtual
from aprilsched.types import NO_VERSION
from tests.support.checking import checked
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time

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
        max_staleness=None,
    )


def check_tokens(rollouts: RolloutScheduler) -> None:
    """Check that every generated token is delivered, in flight, or in the ledger."""
    in_flight = rollouts.state.in_flight
    counters = in_flight.counters
    held = sum(rollout.log.sampled_tokens for rollout in in_flight.rollouts.values())
    assert counters.tokens_generated == counters.tokens_delivered + counters.tokens_discarded + held
    assert counters.tokens_discarded == sum(in_flight.ledger.tokens.values())


async def two_turns(turn: Turn, prompt: Prompt) -> float:
    sampling = SamplingParams(max_new_tokens=300, temperature=0, ignore_eos=True)
    first = await turn.generate(prompt.input_ids, sampling)
    await asyncio.sleep(0.2)
    context = np.concatenate((prompt.input_ids, first.token_ids, TOOL))
    second = await turn.generate(context, sampling)
    return float(len(first.token_ids) + len(second.token_ids))


@each_row(
    ("straggler", "delivery"),
    [*product(["retract", "in_place", "abort"], ["groups"]), ("retract", "samples")],
)
async def test_a_two_turn_episode_survives_interrupts_in_each_turn(straggler: str, delivery: str):
    async with RolloutScheduler(
        SimFleet(2, stream_interval=8),
        prompts(4),
        episode=two_turns,
        config=replace(config(straggler), delivery=delivery),  # type: ignore[arg-type]
    ) as rollouts:
        for _ in range(12):
            # Each turn takes about 1.2 s, so several refits fall into each turn.
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


async def test_a_rewritten_context_is_refused_in_one_sentence():
    async def rewrite(turn: Turn, prompt: Prompt) -> None:
        sampling = SamplingParams(max_new_tokens=5, ignore_eos=True)
        await turn.generate(prompt.input_ids, sampling)
        await turn.generate([9, 9, 9, 9, 9, 9, 9, 9], sampling)

    async with RolloutScheduler(
        SimFleet(1), prompts(1), episode=rewrite, config=config("retract")
    ) as rollouts:
        with pytest.raises(RunGivenUp, match="append to them"):
            await rollouts.next_batch()
        (first, *_) = rollouts.state.in_flight.ledger.entries
        assert "append to them" in first.cause


async def with_timeouts(turn: Turn, prompt: Prompt) -> float:
    """An episode of two turns; the second is cancelled in the middle, kept, and continued."""
    sampling = SamplingParams(max_new_tokens=100, temperature=0, ignore_eos=True)
    first = await turn.generate(prompt.input_ids, sampling)
    context = np.concatenate((prompt.input_ids, first.token_ids, TOOL))
    try:
        async with asyncio.timeout(0.3):
            raise AssertionError(await turn.generate(context, sampling))
    except TimeoutError:
        part = await turn.partial()
    assert 0 < len(part.token_ids) < 100
    assert part.finish_reason == "length"
    context = np.concatenate((context, part.token_ids, TOOL))
    last = await turn.generate(context, sampling)
    return float(len(part.token_ids) + len(last.token_ids))


@each_row("straggler", BEHAVIOURS)
@each_row("pace", ["synchronous", "asynchronous"])
async def test_a_timed_out_turn_is_aborted_and_keeps_its_tokens(straggler: str, pace: Any):
    async with checked(
        SimFleet(2, stream_interval=8),
        prompts(12),
        episode=with_timeouts,
        config=replace(config(straggler), pace=pace),
    ) as rollouts:
        count = 0
        async for batch in rollouts:
            for rollout in batch.rollouts:
                count += 1
                assert rollout.turns == 3
                assert rollout.reward is not None
                kept = int(rollout.reward) - 100
                assert len(rollout) == 100 + 3 + kept + 3 + 100
                sampled = [True] * 100 + [False] * 3 + [True] * kept + [False] * 3
                assert rollout.loss_mask.tolist() == sampled + [True] * 100
                assert rollout.versions_exact
            await rollouts.update_weights(SimPublisher())
        assert count == 24
        check_tokens(rollouts)


@each_row("straggler", BEHAVIOURS)
async def test_an_unread_timed_out_turn_is_dropped_and_counted(straggler: str):
    async def asks_again(turn: Turn, prompt: Prompt) -> float:
        sampling = SamplingParams(max_new_tokens=100, temperature=0, ignore_eos=True)
        for _ in range(3):
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await turn.generate(prompt.input_ids, sampling)
        first = await turn.generate(prompt.input_ids, sampling)
        context = np.concatenate((prompt.input_ids, first.token_ids, TOOL))
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await turn.generate(context, sampling)
        return 1.0

    async with checked(
        SimFleet(1, stream_interval=4), prompts(6), episode=asks_again, config=config(straggler)
    ) as rollouts:
        async for batch in rollouts:
            for rollout in batch.rollouts:
                assert (rollout.turns, len(rollout)) == (1, 100)
                assert rollout.loss_mask.all()
            # Timeouts also fall into the pause while the trainer trains.
            await asyncio.sleep(1)
            await rollouts.update_weights(SimPublisher())
        in_flight = rollouts.state.in_flight
        assert in_flight.ledger.tokens[Reason.WITHDRAWN] == in_flight.counters.tokens_discarded > 0
        assert in_flight.ledger.total == 0
        check_tokens(rollouts)


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.long)])
def test_a_timeout_at_any_moment_keeps_or_drops_alike(every: int):
    """At any moment: while the request waits, while it runs, and when the answer arrives."""

    async def at(delay: float, *, keep: bool) -> int:
        kept = 0

        async def episode(turn: Turn, prompt: Prompt) -> float:
            nonlocal kept
            sampling = SamplingParams(max_new_tokens=10, temperature=0, ignore_eos=True)
            context = prompt.input_ids
            asked = asyncio.create_task(turn.generate(context, sampling))
            await asyncio.sleep(delay)
            # This cancels even if the answer has arrived.
            asked.cancel()
            with suppress(asyncio.CancelledError):
                await asked
            if not asked.cancelled():
                context = np.concatenate((context, asked.result().token_ids))
            elif keep:
                part = (await turn.partial()).token_ids
                kept += len(part)
                context = np.concatenate((context, part))
            await turn.generate(context, sampling)
            return 1.0

        async with checked(
            SimFleet(1, stream_interval=4), prompts(2), episode=episode, config=config("retract")
        ) as rollouts:
            batch = await rollouts.next_batch()
            assert all(len(rollout) <= 20 for rollout in batch.rollouts)
            check_tokens(rollouts)
        return kept

    kept = {run_virtual(at(step / 400, keep=True)) for step in range(0, 60, every)}
    assert {0, 4 * 4, 4 * 8} <= kept
    for step in range(0, 60, every):
        assert run_virtual(at(step / 400, keep=False)) == 0


async def test_an_unawaited_turn_is_aborted_when_its_episode_ends():
    async def leaves(turn: Turn, prompt: Prompt) -> float:
        sampling = SamplingParams(max_new_tokens=50, ignore_eos=True)
        first = await turn.generate(prompt.input_ids, sampling)
        context = np.concatenate((prompt.input_ids, first.token_ids))
        long = SamplingParams(max_new_tokens=100_000, ignore_eos=True)
        task = asyncio.create_task(turn.generate(context, long))
        await asyncio.sleep(0.1)
        tasks.append(task)
        return 1.0

    tasks: list[asyncio.Task[TurnOutput]] = []

    fleet = SimFleet(1, stream_interval=4)
    async with checked(fleet, prompts(2), episode=leaves, config=config("run")) as rollouts:
        batch = await rollouts.next_batch()
        assert [len(rollout) for rollout in batch.rollouts] == [50] * 4
        assert not rollouts.state.in_flight.open_attempts
        check_tokens(rollouts)
    for task in tasks:
        with pytest.raises(EpisodeError, match="has ended"):
            await task


async def test_abandoning_every_turn_keeps_the_last_partial_output():
    async def times_out(turn: Turn, prompt: Prompt) -> float:
        sampling = SamplingParams(max_new_tokens=100_000, temperature=0, ignore_eos=True)
        for _ in range(2):
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await turn.generate(prompt.input_ids, sampling)
        return 0.25

    async with checked(
        SimFleet(1, stream_interval=4), prompts(4), episode=times_out, config=config("retract")
    ) as rollouts:
        batch = await rollouts.next_batch()
        for rollout in batch.rollouts:
            assert (rollout.turns, rollout.finish_reason) == (1, "length")
            assert rollout.reward == 0.25
            assert len(rollout) >= 4
            assert rollout.loss_mask.all()
        in_flight = rollouts.state.in_flight
        assert in_flight.ledger.total == 0
        assert in_flight.ledger.tokens[Reason.WITHDRAWN] > 0, "those of the first turn"
        check_tokens(rollouts)


async def test_partial_output_needs_an_abandoned_turn():
    async def asks(turn: Turn, prompt: Prompt) -> None:
        await turn.partial()

    async with checked(SimFleet(1), prompts(1), episode=asks, config=config("retract")) as rollouts:
        with pytest.raises(RunGivenUp, match=r"no generate\(\) call was cancelled"):
            await rollouts.next_batch()
        (entry, *_) = rollouts.state.in_flight.ledger.entries
        assert "no generate() call was cancelled" in entry.cause


async def test_kept_turns_and_evaluations_and_dropped_groups():
    """A group is dropped before its cancelled turn has ended; an evaluation times out too."""

    async def episode(turn: Turn, prompt: Prompt) -> float:
        sampling = SamplingParams(max_new_tokens=200, ignore_eos=True)
        try:
            async with asyncio.timeout(0.3):
                await turn.generate(prompt.input_ids, sampling)
        except TimeoutError:
            if turn.index == 1 and prompt.metadata.get("fails"):
                raise
            part = await turn.partial()
            assert len(part.token_ids)
        return 1.0

    source = [
        Prompt(input_ids=p.input_ids, metadata={"fails": i % 2}) for i, p in enumerate(prompts(8))
    ]
    async with checked(
        SimFleet(1, stream_interval=4), source, episode=episode, config=config("in_place")
    ) as rollouts:
        scores = await rollouts.evaluate(prompts(2), group_size=2)
        assert all(0 < len(rollout) < 200 for rollout in scores.rollouts)
        async for batch in rollouts:
            assert all(0 < len(rollout) < 200 for rollout in batch.rollouts)
            await rollouts.update_weights(SimPublisher())
        assert rollouts.state.in_flight.ledger.rollouts[Reason.EPISODE_FAILED] == 4
        check_tokens(rollouts)
