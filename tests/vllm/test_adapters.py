"""Tests LoRA adapters on a real vLLM server, whose logprobs are those of the merged weights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from aprilsched.kernel.engines.vllm import VLLMEngine
from aprilsched.testing.contract import PROMPT, whole
from tests.sglang.adapter_contract import ADAPTER_CHECKS, AdapterCheck, Adapting, adapted
from tests.sglang.recorded import TOLERANCE, sequence_scores
from tests.sglang.server import run_with_server_packages
from tests.vllm.conftest import INTERVAL, KEY
from tests.vllm.server import VLLMServer

pytestmark = pytest.mark.long
"""Short test runs cover adapters on SGLang's server."""


@pytest.fixture(scope="module")
def adapters(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, vllm_python: Path
) -> tuple[tuple[Path, Path], tuple[Path, Path]]:
    """Two adapters, and the model merged with each of them."""
    folder = tmp_path_factory.mktemp("adapters")
    alone = folder / "adapter-0", folder / "adapter-1"
    merged = folder / "merged-0", folder / "merged-1"
    for seed, (adapter, whole_model) in enumerate(zip(alone, merged, strict=True)):
        run_with_server_packages(
            "tiny_adapter", models[0], adapter, whole_model, seed, python=vllm_python
        )
    return alone, merged


@pytest.fixture
async def adapting(
    clean_pair: tuple[VLLMServer, VLLMServer],
    adapters: tuple[tuple[Path, Path], object],
    tmp_path: Path,
) -> AsyncIterator[Adapting]:
    """The adapter on the server that accepts LoRA."""
    engine = VLLMEngine(clean_pair[1].url, api_key=KEY, stream_interval=INTERVAL)
    await engine.open()
    yield Adapting(engine=engine, adapters=adapters[0], folder=tmp_path / "versions")
    await engine.close()


@pytest.mark.parametrize("check", ADAPTER_CHECKS, ids=lambda check: check.__name__)
async def test_vllm(adapting: Adapting, check: AdapterCheck) -> None:
    """The real server keeps the contract of adapters."""
    await check(adapting)


@pytest.mark.shows("LoRA adapters", engine="vLLM")
async def test_logprobs_are_those_of_the_merged_weights(
    adapting: Adapting,
    adapters: tuple[object, tuple[Path, Path]],
    tmp_path: Path,
    vllm_python: Path,
) -> None:
    assert adapting.engine.capabilities.adapters
    engine = adapting.engine
    streams = [await whole(engine, adapted(await adapting.load(which), 40)) for which in (0, 1)]
    responses = [(PROMPT, np.array(stream.ids, np.int32)) for stream in streams]
    scored = sequence_scores(adapters[1], responses, tmp_path, python=vllm_python)
    for which, stream in enumerate(streams):
        own, other = scored[which][which], scored[1 - which][which]
        np.testing.assert_allclose(stream.logprobs, own, atol=TOLERANCE)
        assert np.abs(stream.logprobs - other).max() > 1.0
