"""Tests VLLMPublisher with vLLM's own ends of the transfer: in a trainer and in a real server.

NCCL itself needs GPUs, so gloo broadcasts in its place; CUDA IPC is held to vLLM's signatures.
"""

from __future__ import annotations

import asyncio
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprilsched
from aprilsched import VLLMPublisher
from aprilsched.errors import ConfigError, EngineRejected
from aprilsched.kernel.engines.vllm import VLLMEngine
from aprilsched.testing.contract import PROMPT
from tests.sglang.recorded import TOLERANCE, sequence_scores
from tests.sglang.server import server_environment
from tests.vllm.server import VLLMServer


async def trained(python: Path, script: str, *arguments: object) -> list[dict[str, Any]]:
    """Run a script with vLLM and aprilsched in one process; returns its lines."""
    needed = find_spec("asyncio_throttle")
    assert needed is not None
    assert needed.origin is not None
    trainer = await asyncio.create_subprocess_exec(
        *(python, Path(__file__).parent / script),
        *(Path(needed.origin).parents[1], *map(str, arguments)),
        env={
            **os.environ,
            **server_environment(),
            "PYTHONPATH": str(Path(aprilsched.__file__).parents[1]),
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await trainer.communicate()
    assert trainer.returncode == 0, errors.decode()[-4000:]
    return [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]


@pytest.mark.shows("vLLM's transfer", engine="vLLM")
@pytest.mark.long
async def test_weights_arrive_exactly_and_the_group_lasts(
    clean_server: VLLMServer, models: tuple[Path, Path], tmp_path: Path, vllm_python: Path
) -> None:
    order = (models[1], models[0], models[1])
    received = await trained(vllm_python, "with_vllm.py", clean_server.url, *order)
    assert [line["version"] for line in received] == [1, 2, 3]
    name = clean_server.url.removeprefix("http://")
    assert all(line["outcomes"] == {name: None} for line in received)
    responses = [(PROMPT, np.array(line["ids"], np.int32)) for line in received]
    by_model = sequence_scores(models, responses, tmp_path, python=vllm_python)
    for index, line in enumerate(received):
        own = by_model[models.index(order[index])][index]
        assert np.abs(np.array(line["logprobs"]) - own).max() < TOLERANCE
    other = by_model[0][0]
    assert np.abs(np.array(received[0]["logprobs"]) - other).max() > 1.0


@pytest.mark.shows("sparse transfer", engine="vLLM")
@pytest.mark.long
async def test_changes_alone_arrive_exactly_also_after_missed_versions(
    models: tuple[Path, Path], tmp_path: Path, vllm_python: Path
) -> None:
    flags = ("--weight-transfer-config", '{"backend": "sparse_nccl"}')
    with (
        VLLMServer(models[0], tmp_path / "first.txt", *flags) as first,
        VLLMServer(models[0], tmp_path / "second.txt", *flags) as second,
    ):
        first.wait_ready()
        second.wait_ready()
        rows = await trained(
            vllm_python, "sparse_trainer.py", tmp_path, *models, first.url, second.url
        )
    assert [row["version"] for row in rows] == list(range(1, 11))
    # Only a group that has the previous version takes changes alone.
    everything = [row["version"] for row in rows if row["sent"] == 2 * row["bytes"]]
    assert everything == [1, 5, 7, 9]
    assert [row["sent"] for row in rows if row["version"] not in everything] == [
        row["found"] for row in rows if row["version"] not in everything
    ]
    assert rows[1]["sent"] < 0.02 * rows[1]["bytes"]
    assert rows[-1]["sent"] == 0
    folders = [tmp_path / str(row["version"]) for row in rows]
    responses = [(PROMPT, np.array(ids, np.int32)) for row in rows for ids, _ in row["responses"]]
    by_model = sequence_scores(folders, responses, tmp_path, python=vllm_python)
    found = [(index, reply) for index, row in enumerate(rows) for reply in row["responses"]]
    for number, (index, (_, logprobs)) in enumerate(found):
        assert np.abs(np.array(logprobs) - by_model[index][number]).max() < TOLERANCE
        # Each version differs from the previous one by more than that.
        if 0 < index < 9:
            assert np.abs(np.array(logprobs) - by_model[index - 1][number]).max() > 0.01


async def test_a_server_without_transfer_refuses_and_keeps_weights(
    vllm_pair: tuple[VLLMServer, VLLMServer], clean_pair: object
) -> None:
    engine = VLLMEngine(vllm_pair[1].url, api_key="an-api-key-of-the-tests")
    await engine.open()
    try:
        with pytest.raises(EngineRejected, match="weight_transfer_config"):
            await engine.join_transfer(1, {"packed": True})
        assert await engine.version() == 0
        assert not engine.in_transfer(1)
    finally:
        await engine.close()


async def test_what_cannot_be_published_is_refused() -> None:
    with pytest.raises(ConfigError, match='must be "nccl", "ipc" or "sparse_nccl"'):
        VLLMPublisher(lambda: [], backend="gloo")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs vLLM in the trainer's environment"):
        await VLLMPublisher(lambda: []).prepare(1)
