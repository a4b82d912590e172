"""Tests models with sliding windows and with recurrent states on real vLLM servers.

A state is not kept for each token: a retracted request computes it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from aprilsched.cli.doctor import ROWS, SCORES, examine
from aprilsched.kernel.engines.base import PauseMode
from aprilsched.kernel.engines.server import Over, read_series
from aprilsched.kernel.engines.vllm import VLLMEngine
from aprilsched.testing.contract import greedy, whole
from tests.sglang.held import Site, run_and_check
from tests.sglang.recorded import TOLERANCE, sequence_scores
from tests.sglang.server import write_model
from tests.vllm.conftest import INTERVAL, fleet, reset
from tests.vllm.server import VLLMServer

pytestmark = pytest.mark.long

ARGUMENTS = {
    "windows": ("--enable-prefix-caching",),
    # With a prefix cache vLLM 0.32 on a CPU ends in mamba_mixer2.py: its scan returns the last
    # state of each sequence, and it looks for one of each chunk.
    "mamba": ("--no-enable-prefix-caching",),
    # vLLM's linear attention for processors computes in bfloat16 alone.
    "linear": ("--dtype", "bfloat16"),
}
"""Of the server of each kind of model."""
BLOCK = 128
"""Tokens of a cached block."""


@pytest.fixture(scope="module", params=list(ARGUMENTS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory, vllm_python: Path, kind: str
) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp(kind)
    first, second = (
        write_model(folder / str(seed), seed=seed, kind=kind, python=vllm_python) for seed in (0, 1)
    )
    return first, second


@pytest.fixture(scope="module")
def server(
    checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, kind: str
) -> Iterator[VLLMServer]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with VLLMServer(checkpoints[0], log, *ARGUMENTS[kind]) as server:
        server.wait_ready()
        yield server


@pytest.mark.shows("abort", "retract", "in_place", "sliding windows", "Mamba layers", engine="vLLM")
@pytest.mark.parametrize("rule", ["retract", "in_place", "abort"])
async def test_every_token_is_of_the_version_that_it_was_given(
    server: VLLMServer,
    checkpoints: tuple[Path, Path],
    tmp_path: Path,
    vllm_python: Path,
    kind: str,
    rule: str,
) -> None:
    if kind == "linear":
        pytest.skip("doctor fails its refits")
    back = partial(reset, weights=checkpoints[0])
    site = Site([server.url], checkpoints, tmp_path, back, fleet, vllm_python)
    await run_and_check(site, rule, batches=3)


@pytest.mark.lacks(
    "linear attention",
    engine="vLLM",
    why="On a CPU vLLM 0.32 has wrong weights after a refit, which doctor's proof finds.",
)
async def test_doctor_proves_a_refit(
    server: VLLMServer, checkpoints: tuple[Path, Path], kind: str
) -> None:
    """On a CPU vLLM 0.32 generates with wrong weights after a refit of linear attention."""
    await reset(server.url, checkpoints[0])
    table = [row for row in ROWS if row.name == "refit by its logprobs"]
    (found,) = await examine(f"vllm+{server.url}", refit=str(checkpoints[1]), rows=table)
    assert found.status == ("fail" if kind == "linear" else "pass"), found.seen


async def test_doctor_agrees_with_transformers(
    server: VLLMServer, checkpoints: tuple[Path, Path], kind: str
) -> None:
    """The continuation of a response has its state again, from a cache or computed."""
    if kind == "linear":
        pytest.skip("the server's weights are wrong after a refit")
    await reset(server.url, checkpoints[0])
    (found,) = await examine(f"vllm+{server.url}", rows=[SCORES])
    assert found.status == "pass", found.seen


async def test_a_flush_drops_the_prefixes_of_older_weights(
    server: VLLMServer,
    checkpoints: tuple[Path, Path],
    tmp_path: Path,
    vllm_python: Path,
    kind: str,
) -> None:
    """A cached prefix serves the next request: rightly with its weights, wrongly with others."""
    if kind != "windows":
        pytest.skip("the server has no prefix cache, or wrong weights")
    await reset(server.url, checkpoints[0])
    prompt = np.random.default_rng(0).integers(3, 500, 3 * BLOCK + 40).astype(np.int32)
    engine = VLLMEngine(server.url, stream_interval=INTERVAL)
    await engine.open()

    async def sent(model: Path) -> tuple[float, float]:
        """Return the number of cached tokens, and the largest error under `model`."""
        before = await cached(server)
        answer = await whole(engine, greedy(24, prompt=prompt))
        ids = np.array(answer.ids, np.int32)
        ((scored,),) = sequence_scores([model], [(prompt, ids)], tmp_path, python=vllm_python)
        return await cached(server) - before, float(np.abs(answer.logprobs - scored).max())

    async def load(mode: PauseMode, version: int) -> None:
        await engine.pause(mode)
        if mode == "retract":
            await engine.flush()
        await engine.update_from_disk(checkpoints[version % 2], version)
        await engine.resume()

    tokens, error = await sent(checkpoints[0])
    assert tokens == 0
    assert error < TOLERANCE
    tokens, error = await sent(checkpoints[0])
    assert tokens >= BLOCK
    assert error < TOLERANCE
    await load("in_place", 1)
    tokens, error = await sent(checkpoints[1])
    assert tokens >= BLOCK
    assert error > 0.1, "the cached prefix of older weights makes no difference"
    await load("retract", 3)
    tokens, error = await sent(checkpoints[1])
    assert tokens == 0
    assert error < TOLERANCE
    await engine.close()


async def cached(server: VLLMServer) -> float:
    """Return the number of prompt tokens that came from the cache since the server was started."""
    names: dict[str, Over] = {"prefix_cache_hits_total": "sum"}
    async with aiohttp.ClientSession(server.url) as session, session.get("/metrics") as answer:
        return read_series(await answer.read(), names, program="vllm")["prefix_cache_hits_total"]
