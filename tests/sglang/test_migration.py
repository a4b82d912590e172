"""Tests that requests move from a real server whose KV pool is full, with all their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from aprilsched import Prompt, RolloutScheduler, SamplingParams, SchedulerConfig, SGLangFleet
from aprilsched.config import Dispatch, Prices
from aprilsched.kernel.core.messages.facts import AttemptSent, Fact
from aprilsched.testing.contract import greedy, whole
from tests.sglang.helpers import opened
from tests.sglang.server import CpuServer

pytestmark = pytest.mark.long

POOL = 2048
LONG, SHORT = 500, 16
"""A group of eight long responses needs twice the pool of a server."""


@pytest.fixture
def small_pair(models: tuple[Path, Path], tmp_path: Path) -> Iterator[tuple[CpuServer, CpuServer]]:
    """Two servers with small KV pools."""
    first, second = (
        CpuServer(models[0], tmp_path / f"{name}.txt", "--max-total-tokens", str(POOL))
        for name in ("first", "second")
    )
    try:
        first.start()
        second.start()
        first.wait_ready()
        second.wait_ready()
        yield first, second
    finally:
        first.stop()
        second.stop()


class Sent:
    """Listens for the engines that each rollout is sent to."""

    def __init__(self) -> None:
        self.engines: dict[int, set[str]] = {}

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, AttemptSent):
                self.engines.setdefault(fact.rollout_id, set()).add(fact.engine)


def prompts() -> list[Prompt]:
    """One group of long responses, and one of short ones for the other server."""
    rng = np.random.default_rng(3)
    return [
        Prompt(
            input_ids=rng.integers(3, 500, size=12).astype(np.int32),
            sampling=SamplingParams(max_new_tokens=length, temperature=0.0, ignore_eos=True),
        )
        for length in (LONG, SHORT)
    ]


async def test_requests_move_from_a_full_pool_and_end_with_the_same_greedy_tokens(
    small_pair: tuple[CpuServer, CpuServer],
) -> None:
    config = SchedulerConfig(
        batch_groups=2,
        group_size=8,
        over_provision=1.0,
        # A tiny model decodes fast and prefills faster, so what a move costs does not matter here.
        prices=Prices(step_seconds=1.0, prefill_tokens_per_s=1e6),
        dispatch=Dispatch(migrate=True),
    )
    fleet, sent = SGLangFleet([server.url for server in small_pair]), Sent()
    async with RolloutScheduler(fleet, prompts(), config=config, listeners=[sent]) as rollouts:
        batch = await anext(rollouts)
        reports = dict(rollouts.state.fleet.pools)
    moved = [engines for engines in sent.engines.values() if len(engines) == 2]
    assert 0 < len(moved) < 8
    assert reports.keys() == {engine.name for engine in fleet.engines}
    first = max(batch.rollouts, key=len)
    async with opened(small_pair[0].url) as engine:
        reference = await whole(engine, greedy(LONG, prompt=first.prompt_ids))
    for rollout in batch.rollouts:
        if len(rollout) == LONG:
            assert rollout.token_ids.tolist() == reference.ids
