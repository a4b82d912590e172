"""Tests that interrupted or moved greedy responses equal uninterrupted ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aprilsched.kernel.core.policies.straggler import StragglerRule
from aprilsched.testing.contract import greedy, whole
from aprilsched.types import Rollout
from tests.sglang.conftest import ADMIN_KEY
from tests.sglang.helpers import opened, reset, settled
from tests.sglang.recorded import Run, crossing, long_tail, record, try_until, until_crossing
from tests.sglang.server import CpuServer


async def _greedy_run(
    pair: tuple[CpuServer, CpuServer],
    model: Path,
    rule: StragglerRule,
    *,
    lose_one: bool = False,
) -> Run:
    """Run all prompts to their end on both servers, with the same weights in every version."""
    for server, key in zip(pair, (None, ADMIN_KEY), strict=True):
        await reset(server.url, model, key)
    return await record(
        [server.url for server in pair],
        [model],
        rule,
        prompts=long_tail(18, longest=500, temperature=0.0),
        batches=99,
        lose_one=lose_one,
    )


async def _equal_to_uninterrupted(url: str, rollouts: list[Rollout]) -> None:
    async with opened(url) as engine:
        references = await asyncio.gather(
            *(whole(engine, greedy(len(r), prompt=r.prompt_ids)) for r in rollouts)
        )
    for rollout, reference in zip(rollouts, references, strict=True):
        assert rollout.token_ids.tolist() == reference.ids


pytestmark = pytest.mark.long
RULES = ["retract", "in_place", "abort"]


@pytest.mark.shows("abort", "retract", "in_place", engine="SGLang")
@pytest.mark.parametrize("rule", RULES)
async def test_greedy_tokens_survive_interruptions_unchanged(
    clean_pair: tuple[CpuServer, CpuServer], models: tuple[Path, Path], rule: StragglerRule
):
    """Updates load unchanged weights under new versions."""
    run = await until_crossing(lambda _: _greedy_run(clean_pair, models[0], rule))
    await _equal_to_uninterrupted(clean_pair[0].url, crossing(run))


@pytest.mark.shows("lost engines", engine="SGLang")
@pytest.mark.parametrize("rule", RULES)
async def test_a_continuation_on_the_other_server_gives_the_same_greedy_tokens(
    clean_pair: tuple[CpuServer, CpuServer], models: tuple[Path, Path], rule: StragglerRule
):
    """One server is given up in mid-batch, and its requests continue on the other."""

    async def once(_: int) -> list[Rollout]:
        run = await _greedy_run(clean_pair, models[0], rule, lose_one=True)
        return [r for r in run.rollouts if len({s.engine for s in r.segments}) == 2]

    moved = await try_until(once, bool, "no rollout continued on the other server")
    await _equal_to_uninterrupted(clean_pair[0].url, moved)
    for server in clean_pair:
        await settled(server.url)
