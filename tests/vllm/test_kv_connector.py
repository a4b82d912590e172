"""Tests a connector whose store keeps KV of older weights, on a real vLLM server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from aprilsched.errors import ConfigError
from aprilsched.kernel.engines.vllm import VLLMEngine
from aprilsched.kernel.shell.opening import check_engines
from aprilsched.testing.contract import greedy, whole
from tests.sglang.recorded import sequence_scores
from tests.support.driver import config
from tests.vllm.conftest import INTERVAL
from tests.vllm.server import VLLMServer, server_python

PROMPT = ((np.arange(600) * 7919 + 13) % 480 + 5).astype(np.int32)


@pytest.fixture
def storing_server(models: tuple[Path, Path], tmp_path: Path) -> Iterator[VLLMServer]:
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")},
    }
    transfer = ("--kv-transfer-config", json.dumps(connector))
    with VLLMServer(models[0], tmp_path / "log.txt", *transfer) as server:
        server.wait_ready()
        yield server


@pytest.mark.lacks(
    "KV stores outside",
    engine="vLLM",
    why="A store that ignores cache keys keeps KV of older weights.",
)
async def test_a_store_that_ignores_keys_keeps_old_kv_and_is_refused(
    storing_server: VLLMServer, models: tuple[Path, Path], tmp_path: Path
) -> None:
    engine = VLLMEngine(storing_server.url, stream_interval=INTERVAL)
    await engine.open()
    assert engine.capabilities.kv_tier == "unkeyed"
    with pytest.raises(ConfigError, match="of all cache keys"):
        await check_engines([engine], config(straggler="abort"))
    request = greedy(20, prompt=PROMPT)
    await whole(engine, msgspec.structs.replace(request, cache_key="0"))
    await engine.pause("retract")
    await engine.flush()
    await engine.update_from_disk(models[1], 1)
    await engine.resume()
    stale = await whole(engine, msgspec.structs.replace(request, cache_key="1"))
    await engine.close()
    response = PROMPT, np.array(stale.ids, dtype=np.int32)
    ((true,),) = sequence_scores([models[1]], [response], tmp_path, python=server_python())
    assert np.abs(true - stale.logprobs).max() > 0.1
