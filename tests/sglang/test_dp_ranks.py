"""Tests data-parallel attention on a real server: requests name their rank, tokens are exact."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from aprilsched.kernel.core.policies.straggler import StragglerRule
from tests.sglang.changing import run_through_deltas
from tests.sglang.held import Site, run_and_check
from tests.sglang.helpers import reset
from tests.sglang.ranks_contract import RANKS, check_ranks
from tests.sglang.server import CpuServer


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
    await check_ranks(ranked.url)


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
