"""Tests that a real server's preemptions limit the sessions on it, and that the limit recovers."""

from __future__ import annotations

from pathlib import Path

import pytest

from aprilsched import VLLMFleet
from tests.support.session_kv import fall_and_recover
from tests.vllm.server import VLLMServer

pytestmark = pytest.mark.long

BLOCK, BLOCKS = 32, 33
"""Tokens of a block of KV, and number of blocks, one of which is never used."""


async def test_preemptions_lower_the_limit_of_sessions_and_it_recovers(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    flags = (
        *("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS)),
        *("--max-model-len", str(BLOCK * (BLOCKS - 1))),
    )
    with VLLMServer(models[0], tmp_path / "log.txt", *flags) as server:
        server.wait_ready()
        await fall_and_recover(VLLMFleet([server.url], stream_interval=16))
