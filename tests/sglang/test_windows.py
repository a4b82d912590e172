"""Tests a model with sliding windows on a real server: each token is of its version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.held import Site, run_and_check
from tests.sglang.helpers import reset
from tests.sglang.server import CpuServer, write_model

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def windowed(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[CpuServer, tuple[Path, Path]]]:
    folder = tmp_path_factory.mktemp("windows")
    first, second = (
        write_model(folder / str(seed), seed=seed, kind="tied windows") for seed in (0, 1)
    )
    with CpuServer(first, folder / "log.txt") as server:
        server.wait_ready()
        yield server, (first, second)


@pytest.mark.shows("abort", "retract", "in_place", "sliding windows", engine="SGLang")
@pytest.mark.parametrize("rule", ["retract", "in_place", "abort"])
async def test_every_token_is_of_the_version_that_it_was_given(
    windowed: tuple[CpuServer, tuple[Path, Path]], tmp_path: Path, rule: str
) -> None:
    server, checkpoints = windowed
    site = Site([server.url], checkpoints, tmp_path, lambda url: reset(url, checkpoints[0]))
    await run_and_check(site, rule, batches=3)
