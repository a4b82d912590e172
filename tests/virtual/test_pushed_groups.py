"""Tests what adapters share whose trainers push prompts and wait for each group."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from aprilsched import Prompt, SamplingParams, SchedulerConfig, Score, SimFleet
from aprilsched.config import Retries
from aprilsched.errors import RunGivenUp
from aprilsched.kernel.shell import Turn
from aprilsched.simulation.engine import run_virtual
from aprilsched.trainers.pushed import NOT_TOKENIZED, PushedRollouts, as_pushed

FOR_ONE = (SamplingParams(max_new_tokens=8),)
"""Parameters for a group of one rollout; groups have two."""


async def episode(turn: Turn, prompt: Prompt) -> Score:
    if prompt.key == "raises":
        raise ValueError("this episode never works")
    await turn.generate([5, 6, 7])
    return Score(reward=1.0)


async def push(rollouts: PushedRollouts, found: dict[str, str], keys: Sequence[str]) -> None:
    """Push prompts with these keys, and wait for a report on each."""
    await rollouts.open()
    for key in keys:
        sampling = FOR_ONE if key == "refused" else None
        size = 3 if key == "two" else None
        rollouts.push(Prompt(input_ids=NOT_TOKENIZED, key=key, group_size=size, sampling=sampling))
    async with asyncio.timeout(1000):
        while len(found) < len(keys):  # noqa: ASYNC110
            await asyncio.sleep(1)


def with_retries(retries: Retries) -> tuple[PushedRollouts, dict[str, str]]:
    """A scheduler, and the error of each prompt that it has reported; "" for a complete group."""
    found: dict[str, str] = {}

    async def ended(prompt: Prompt, error: Exception | None) -> None:
        assert str(prompt.key) not in found, "each prompt is reported once"
        found[str(prompt.key)] = "" if error is None else type(error).__name__

    config = as_pushed(SchedulerConfig(retries=retries), group_size=2)
    return PushedRollouts(
        SimFleet(1), episode=episode, config=config, listeners=[], ended=ended
    ), found


def test_every_prompt_that_was_pushed_is_delivered_or_has_failed():
    rollouts, found = with_retries(Retries(member="drop_group"))

    async def run() -> None:
        await push(rollouts, found, ["one", "raises", "two", "refused", "three"])
        await rollouts.evaluate(Prompt(input_ids=NOT_TOKENIZED, key="evaluated"))
        await rollouts.close()

    run_virtual(run())
    complete = dict.fromkeys(("one", "two", "three", "evaluated"), "")
    assert found == {**complete, "raises": "GroupLost", "refused": "GroupLost"}


def test_an_error_of_the_scheduler_ends_every_open_group():
    rollouts, found = with_retries(Retries(member="drop_group", failed_groups=1))

    async def run() -> None:
        await push(rollouts, found, ["raises", "one"])
        with pytest.raises(RunGivenUp):
            await rollouts.open()
        await rollouts.close()

    run_virtual(run())
    assert found == {"raises": "GroupLost", "one": "RunGivenUp"}


def test_prompts_of_batches_are_unfinished_until_their_last_sample_left():
    async def lossy(turn: Turn, prompt: Prompt) -> Score:
        await turn.generate([5, 6, 7])
        if prompt.key == "raises":
            raise ValueError("this episode never works")
        return Score(reward=float(turn.index))

    async def ended(prompt: Prompt, error: Exception | None) -> None:
        pytest.fail(f"the trainer takes batches, and {prompt.key} was reported")

    rollouts = PushedRollouts(
        SimFleet(1),
        episode=lossy,
        config=SchedulerConfig(
            delivery="samples", siblings=1, group_size=3, batch_groups=1, pace="asynchronous"
        ),
        listeners=[],
        ended=ended,
        batches=True,
    )
    left = Counter[str]()

    async def run() -> None:
        await rollouts.open()
        keys = ["one", "raises", "refused", "two", "three", "four"]
        for key in keys:
            sampling = FOR_ONE if key == "refused" else None
            rollouts.push(Prompt(input_ids=NOT_TOKENIZED, key=key, sampling=sampling))
        assert rollouts.unfinished() == set(keys)
        rollouts.prompts.close()
        while rollouts.unfinished():
            batch = await rollouts.scheduler.next_batch()
            left.update(str(unit.prompt.key) for unit in batch.units)
            unfinished = rollouts.unfinished()
            assert {key for key in left if left[key] < 3} <= unfinished
            assert unfinished.isdisjoint(key for key in left if left[key] == 3)
        await rollouts.close()

    run_virtual(run())
    assert left == dict.fromkeys(("one", "two", "three", "four"), 3)


def test_groups_of_a_checkpoint_are_reported_by_the_next_process(tmp_path: Path):
    file, sampled = tmp_path / "checkpoint", dict[str, int]()

    async def stopped() -> None:
        rollouts, found = with_retries(Retries(member="drop_group"))
        await rollouts.open()
        for key in ("one", "two"):
            rollouts.push(Prompt(input_ids=NOT_TOKENIZED, key=key))
        flight = rollouts.scheduler.state.in_flight
        while not all(each.log.size for each in flight.rollouts.values()) or not flight.rollouts:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert not found
        await rollouts.scheduler.checkpoint(file)
        for group in flight.training_groups():
            sampled[str(group.prompt.key)] = sum(each.log.size for each in group.members)
        await rollouts.close()

    run_virtual(stopped())
    assert sampled.keys() == {"one", "two"}
    rollouts, found = with_retries(Retries(member="drop_group"))
    rollouts.scheduler.restore(file)

    async def resumed() -> None:
        await rollouts.open()
        assert rollouts.unfinished() == {"one", "two"}
        await push(rollouts, found, ["three", "raises", "four"])
        async with asyncio.timeout(1000):
            while len(found) < 5:  # noqa: ASYNC110
                await asyncio.sleep(1)
        assert not rollouts.unfinished()
        await rollouts.close()

    run_virtual(resumed())
    complete = dict.fromkeys(("one", "two", "three", "four"), "")
    assert found == {**complete, "raises": "GroupLost"}


def test_every_prompt_starts_when_it_is_pushed():
    """The trainer decides how many are in flight, whatever a batch of one group would allow."""

    async def ended(prompt: Prompt, error: Exception | None) -> None:
        assert error is None

    rollouts = PushedRollouts(
        SimFleet(1),
        episode=episode,
        config=as_pushed(SchedulerConfig(), group_size=2),
        listeners=[],
        ended=ended,
    )

    async def run() -> None:
        await rollouts.open()
        for key in range(20):
            rollouts.push(Prompt(input_ids=NOT_TOKENIZED, key=str(key)))
        while rollouts.scheduler.state.in_flight.counters.launched < 40:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert len(rollouts.scheduler.state.in_flight.groups) == 20
        await rollouts.close()

    run_virtual(run())
