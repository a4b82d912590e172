"""Tests what adapters share whose trainers push prompts and wait for each group."""

from __future__ import annotations

from aprilsched import Prompt, RolloutScheduler, SamplingParams, SchedulerConfig, Score, SimFleet
from aprilsched.config import Retries
from aprilsched.kernel.shell import PromptQueue, Turn
from aprilsched.simulation.engine import run_virtual
from aprilsched.trainers.pushed import NOT_TOKENIZED, PushedGroups, as_pushed

FOR_ONE = (SamplingParams(max_new_tokens=8),)
"""Parameters for a group of one rollout; groups have two."""


def test_every_prompt_that_was_pushed_is_delivered_or_has_failed():
    failed: list[str] = []
    groups: PushedGroups[str] = PushedGroups(failed.append)
    prompts = PromptQueue()

    async def episode(turn: Turn, prompt: Prompt) -> Score:
        if prompt.key == "raises":
            raise ValueError("this episode never works")
        await turn.generate([5, 6, 7])
        return Score(reward=1.0)

    async def run() -> dict[str, int]:
        found: dict[str, int] = {}
        config = as_pushed(SchedulerConfig(retries=Retries(member="drop_group")), group_size=2)
        async with RolloutScheduler(
            SimFleet(1), prompts, episode=episode, config=config, listeners=[groups]
        ) as rollouts:
            for key in ("one", "raises", "two", "refused", "three"):
                prompts.put(
                    Prompt(
                        input_ids=NOT_TOKENIZED,
                        key=key,
                        group_size=3 if key == "two" else None,
                        sampling=FOR_ONE if key == "refused" else None,
                    )
                )
                groups.pushed(key)
            while len(found) < 3:
                for group in (await rollouts.next_batch()).groups:
                    found[str(group.prompt.key)] = len(group.rollouts)
        return found

    assert run_virtual(run()) == {"one": 2, "two": 3, "three": 2}
    assert sorted(failed) == ["raises", "refused"]
    assert groups.open == {"one", "raises", "two", "refused", "three"}
