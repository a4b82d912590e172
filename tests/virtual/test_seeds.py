"""Tests the seeds of rollouts, with the real coordinator on the embedded engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from aprilsched import Batch, Prompt, RolloutScheduler, SamplingParams, SimFleet
from aprilsched.kernel.store import MemoryStore
from aprilsched.types import derived_seed
from tests.support.small import config

pytestmark = pytest.mark.virtual_time

SEEDED = SamplingParams(max_new_tokens=12, ignore_eos=True, sampling_seed=42)
SAME = [Prompt(input_ids=np.array([1, 2]))] * 8
SETTINGS: Mapping[str, Any] = {"batch_groups": 2, "group_size": 4, "over_provision": 1.0}


async def batches(
    prompts: list[Prompt], count: int, *, sampling: SamplingParams, **changes: Any
) -> list[Batch]:
    store = changes.pop("store", None)
    settings = config(**SETTINGS, sampling=sampling, **changes)
    async with RolloutScheduler(SimFleet(1), prompts, config=settings, store=store) as rollouts:
        return [await rollouts.next_batch() for _ in range(count)]


def outputs(given: list[Batch]) -> list[tuple[int, ...]]:
    return [tuple(each.token_ids.tolist()) for batch in given for each in batch.rollouts]


async def test_rollouts_that_share_a_seed_differ_in_and_between_groups():
    first = outputs(await batches(SAME, 4, sampling=SEEDED))
    assert len(set(first)) == len(first) == 32
    assert first == outputs(await batches(SAME, 4, sampling=SEEDED))
    other = SamplingParams(max_new_tokens=12, ignore_eos=True, sampling_seed=43)
    assert not set(first) & set(outputs(await batches(SAME, 4, sampling=other)))


async def test_the_seed_of_a_prompt_is_shared_by_its_group_only():
    plain = SamplingParams(max_new_tokens=12, ignore_eos=True)
    group = [Prompt(input_ids=np.array([1, 2]), sampling=SEEDED)] * 2
    assert len(set(outputs(await batches(group, 1, sampling=plain)))) == 8
    alone = [Prompt(input_ids=np.array([1, 2]), sampling=SEEDED, group_size=1)] * 2
    assert len(set(outputs(await batches(alone, 1, sampling=plain)))) == 1
    own = [Prompt(input_ids=np.array([1, 2]), sampling=(SEEDED,) * 4)] * 2
    assert len(set(outputs(await batches(own, 1, sampling=plain)))) == 1


async def test_a_resumed_run_keeps_its_seeds():
    whole = outputs(await batches(SAME, 4, sampling=SEEDED))
    store = MemoryStore()
    first = await batches(SAME, 2, sampling=SEEDED, store=store)
    rest = await batches(SAME, 2, sampling=SEEDED, store=store)
    assert set(outputs(first + rest)) <= set(whole)


def test_derived_seeds_are_stable():
    assert derived_seed(42, 3) == derived_seed(42, 3) != derived_seed(42, 4)
    assert all(0 <= derived_seed(seed, 1) < 2**31 for seed in (-(2**63), 0, 2**63 - 1))
