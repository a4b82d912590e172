"""Tests data-parallel attention on a real server: requests name their rank, tokens are exact."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from aprilsched import SamplingParams
from aprilsched.kernel.core.policies.straggler import StragglerRule
from aprilsched.kernel.engines.base import GenerationRequest
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.testing.contract import whole
from tests.sglang.changing import run_through_deltas
from tests.sglang.held import Site, run_and_check
from tests.sglang.helpers import reset
from tests.sglang.server import CpuServer

RANKS = 2


class RankServer(CpuServer):
    """A server of two ranks, each with its own KV pool."""

    def _environment(self) -> dict[str, str]:
        return {"SGLANG_CPU_OMP_THREADS_BIND": f"0|{(os.cpu_count() or 1) - 1}"}


@pytest.fixture(scope="module")
def ranked(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RankServer]:
    count = str(RANKS)
    arguments = ("--enable-dp-attention", "--dp-size", count, "--tp-size", count)
    with RankServer(models[0], tmp_path_factory.mktemp("ranked") / "log.txt", *arguments) as server:
        server.wait_ready()
        yield server


@pytest.mark.shows("data-parallel ranks", engine="SGLang")
async def test_the_requests_of_a_group_share_a_rank(ranked: RankServer) -> None:
    """Two groups of four, each on its own rank; a body has requests of one rank."""
    engine = SGLangEngine(ranked.url, stream_interval=16)
    await engine.open()
    assert engine.facts.dp_ranks == RANKS
    sampling = SamplingParams(
        max_new_tokens=24, temperature=0.0, ignore_eos=True, keep=("dp_rank",)
    )
    requests = [
        GenerationRequest(
            request_id=f"{number:032d}",
            input_ids=np.arange(3 + number // 4, 40, dtype=np.int32),
            sampling=sampling,
            affinity=number // 4,
        )
        for number in range(8)
    ]
    streams = await asyncio.gather(*(whole(engine, each) for each in requests))
    ranks = [stream.last.answer.values["dp_rank"] for stream in streams if stream.last.answer]
    assert ranks == [0] * 4 + [1] * 4
    for group in (streams[:4], streams[4:]):
        assert len({tuple(stream.ids) for stream in group}) == 1
    await engine.close()


@pytest.mark.shows("abort", "retract", "data-parallel ranks", engine="SGLang")
@pytest.mark.long
@pytest.mark.parametrize("rule", ["retract", "abort"])
async def test_every_token_is_of_the_version_that_it_was_given(
    ranked: RankServer, models: tuple[Path, Path], tmp_path: Path, rule: str
) -> None:
    site = Site([ranked.url], models, tmp_path, lambda url: reset(url, models[0]))
    await run_and_check(site, rule, batches=3)


@pytest.mark.shows(
    "abort", "retract", "in_place", "deltas on disk", "data-parallel ranks", engine="SGLang"
)
@pytest.mark.long
@pytest.mark.parametrize("rule", ["retract", "in_place", "abort"])
async def test_tokens_of_two_ranks_are_exact_through_deltas(
    ranked: RankServer, models: tuple[Path, Path], tmp_path: Path, rule: StragglerRule
) -> None:
    """Together with the test of speculation, at least 100,000 tokens."""
    site = Site([ranked.url], models, tmp_path, lambda url: reset(url, models[0]))
    checked = await run_through_deltas(site, rule, keep=("dp_rank",))
    ranks = {answer.values["dp_rank"] for rollout in checked.rollouts for answer in rollout.answers}
    assert ranks == set(range(RANKS))
