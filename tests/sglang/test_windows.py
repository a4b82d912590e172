"""Tests a model with sliding windows on a real server: each token is of its version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aprilsched.cli.doctor import SCORES, examine
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


async def test_doctor_agrees_with_transformers(
    windowed: tuple[CpuServer, tuple[Path, Path]],
) -> None:
    server, checkpoints = windowed
    await reset(server.url, checkpoints[0])
    (found,) = await examine(server.url, rows=[SCORES])
    assert found.status == "pass", found.seen


async def test_doctor_finds_that_the_output_layer_is_dropped(tmp_path: Path) -> None:
    """SGLang 0.5.23 computes with Gemma 3's embeddings instead, if they are not tied."""
    model = write_model(tmp_path / "untied", kind="windows")
    with CpuServer(model, tmp_path / "log.txt") as server:
        server.wait_ready()
        (found,) = await examine(server.url, rows=[SCORES])
    assert found.status == "fail", found.seen


@pytest.mark.shows("abort", "retract", "in_place", "sliding windows", engine="SGLang")
@pytest.mark.parametrize("rule", ["retract", "in_place", "abort"])
async def test_every_token_is_of_the_version_that_it_was_given(
    windowed: tuple[CpuServer, tuple[Path, Path]], tmp_path: Path, rule: str
) -> None:
    server, checkpoints = windowed
    site = Site([server.url], checkpoints, tmp_path, lambda url: reset(url, checkpoints[0]))
    await run_and_check(site, rule, batches=3)
