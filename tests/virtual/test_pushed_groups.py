"""Tests what adapters share whose trainers push prompts and wait for each group."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from aprilsched import Prompt, SamplingParams, SchedulerConfig, Score, SimFleet
from aprilsched.config import Retries
from aprilsched.errors import MemberLost, RunGivenUp
from aprilsched.kernel.shell import Turn
from aprilsched.simulation.engine import run_virtual
from aprilsched.trainers.pushed import NOT_TOKENIZED, PushedRollouts, as_pushed
from aprilsched.types import Sample

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


def test_a_group_of_single_samples_ends_when_each_was_delivered_or_lost():
    attempts = Counter[tuple[str, int]]()
    events: list[tuple[str, int | None]] = []
    """Samples that were delivered, by key and index; keys of groups that have ended."""

    async def lossy(turn: Turn, prompt: Prompt) -> Score:
        name = str(prompt.key), turn.index
        attempts[name] += 1
        await turn.generate([5, 6, 7])
        if name == ("again", 2) and attempts[name] == 1:
            raise MemberLost("a sandbox is gone")
        if name in (("lost", 0), ("lost", 3)) or prompt.key == "raises":
            raise ValueError("this episode never works")
        return Score(reward=float(turn.index))

    async def delivered(sample: Sample) -> None:
        await asyncio.sleep(1)  # Facts of later samples come in between.
        assert len(sample.siblings) == 2
        events.append((str(sample.prompt.key), sample.rollout.index))

    found: dict[str, str] = {}

    async def ended(prompt: Prompt, error: Exception | None) -> None:
        found[str(prompt.key)] = "" if error is None else type(error).__name__
        events.append((str(prompt.key), None))

    rollouts = PushedRollouts(
        SimFleet(1),
        episode=lossy,
        config=as_pushed(SchedulerConfig(delivery="samples", siblings=2), group_size=5),
        listeners=[],
        ended=ended,
        delivered=delivered,
    )

    async def run() -> None:
        keys = ["whole", "again", "lost", "raises", "refused"]
        await rollouts.open()
        for key in keys:
            sampling = FOR_ONE * 5 if key != "refused" else FOR_ONE
            rollouts.push(Prompt(input_ids=NOT_TOKENIZED, key=key, sampling=sampling))
        async with asyncio.timeout(1000):
            while len(found) < len(keys):  # noqa: ASYNC110
                await asyncio.sleep(1)
        await rollouts.close()

    run_virtual(run())
    members = {key: [i for name, i in events if name == key] for key in found}
    assert {key: sorted(i for i in each if i is not None) for key, each in members.items()} == {
        "whole": [0, 1, 2, 3, 4],
        "again": [0, 1, 2, 3, 4],
        "lost": [1, 2, 4],
        "raises": [],
        "refused": [],
    }
    # A group ends once, and after its last sample.
    assert all(each.index(None) == len(each) - 1 for each in members.values())
    assert attempts["again", 2] == 2
    assert {key for key, error in found.items() if error} >= {"raises", "refused"}
