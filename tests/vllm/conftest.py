"""Real vLLM servers as fixtures, which all tests share; the first test that needs one boots it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from aprilsched import VLLMFleet
from aprilsched.kernel.engines.vllm import VLLMEngine
from tests.sglang.server import write_model
from tests.vllm.server import ENVIRONMENT, VLLMServer, server_python

KEY = "an-api-key-of-the-tests"
INTERVAL = 16
fleet = partial(VLLMFleet, api_key=KEY, stream_interval=INTERVAL)


async def reset(url: str, weights: Path) -> None:
    """Bring a server to its initial state: idle, not paused, an empty cache, label "default"."""
    async with aiohttp.ClientSession(url) as session:

        async def post(path: str, **body: object) -> None:
            async with session.post(path, json=body) as answer:
                assert answer.status == 200, await answer.text()

        await post("/wake_up")
        await post("/resume")
        await post("/abort_requests")
        async with session.get("/weight_info") as answer:
            label = (await answer.json())["weight_version"]
        if label != "default":
            folder = {"weights_path": str(weights)}
            await post("/collective_rpc", method="reload_weights", kwargs=folder)
            await post("/update_weight_version", new_version="default")
        await post("/reset_prefix_cache?reset_running_requests=true")


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python that has vLLM."""
    python = server_python()
    if python is None:
        pytest.skip(f"needs vLLM: run `make .venv-vllm`, or set {ENVIRONMENT} to the Python of one")
    return python


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, vllm_python: Path) -> tuple[Path, Path]:
    """Two checkpoints of one shape with very different weights; servers start with the first."""
    folder = tmp_path_factory.mktemp("models")
    first, second = (
        write_model(folder / name, seed=seed, python=vllm_python)
        for seed, name in enumerate(("first", "second"))
    )
    return first, second


@pytest.fixture(scope="session")
def vllm_server(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMServer]:
    """A server without keys, which takes weights by vLLM's own transfer too."""
    with VLLMServer(
        models[0],
        tmp_path_factory.mktemp("server") / "log.txt",
        *("--weight-transfer-config", '{"backend": "nccl"}'),
    ) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="session")
def second_server(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMServer]:
    """A server with LoRA, a key and logprobs of the sampled distribution; it may not be ready."""
    with VLLMServer(
        models[0],
        tmp_path_factory.mktemp("second") / "log.txt",
        *("--api-key", KEY, "--logprobs-mode", "processed_logprobs"),
        *("--enable-lora", "--max-lora-rank", "8", "--max-loras", "4"),
    ) as server:
        yield server


@pytest.fixture(scope="session")
def vllm_pair(second_server: VLLMServer, vllm_server: VLLMServer) -> tuple[VLLMServer, VLLMServer]:
    """Two servers, which boot at the same time."""
    second_server.wait_ready()
    return vllm_server, second_server


@pytest.fixture
async def clean_server(
    vllm_server: VLLMServer, models: tuple[Path, Path]
) -> AsyncIterator[VLLMServer]:
    """The server, reset to its initial state before and after the test."""
    await reset(vllm_server.url, models[0])
    yield vllm_server
    assert vllm_server.alive(), f"The test killed the server:\n{vllm_server.tail()}"
    await reset(vllm_server.url, models[0])


@pytest.fixture
async def clean_pair(
    clean_server: VLLMServer, vllm_pair: tuple[VLLMServer, VLLMServer], models: tuple[Path, Path]
) -> AsyncIterator[tuple[VLLMServer, VLLMServer]]:
    """Both servers, reset to their initial state before and after the test."""
    await reset(vllm_pair[1].url, models[0])
    yield vllm_pair
    await reset(vllm_pair[1].url, models[0])


@pytest.fixture
async def engine(clean_server: VLLMServer) -> AsyncIterator[VLLMEngine]:
    """An open engine on the server."""
    opened = VLLMEngine(clean_server.url, stream_interval=INTERVAL)
    await opened.open()
    yield opened
    await opened.close()
