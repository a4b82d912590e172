"""Tests ``aprilsched doctor`` on a real server: no check fails, and nothing is changed."""

from __future__ import annotations

import asyncio
import json
import sys

import aiohttp

from aprilsched.testing.contract import until
from tests.sglang.helpers import SOON, running
from tests.sglang.server import CpuServer

SECONDS = 600


async def test_a_real_server_passes_and_is_left_as_found(clean_server: CpuServer):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aprilsched", "doctor", clean_server.url, "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(SECONDS):
        out, err = await process.communicate()
    findings = {found["check"]: found for found in json.loads(out)}
    failed = [found for found in findings.values() if found["status"] == "fail"]
    assert failed == []
    assert process.returncode == 0, err.decode()
    warned = {name for name, found in findings.items() if found["status"] == "warn"}
    # On a busy machine events are joined, and a response is over before anything is done to it.
    late = {name for name in warned if "was over" in findings[name]["seen"]}
    # What only a GPU or another switch has, and what would change the server.
    expected = {"LoRA adapters", "released weights", "refit by its logprobs"}
    assert warned - late - {"stream interval (hazard 10)"} == expected
    assert "256 cached tokens under the same key, 0 under another" in findings["cache keys"]["seen"]
    name = "abort under in_place (hazard 5)"
    assert name in late or "after continue with 'abort'" in findings[name]["seen"]
    assert findings["left as found"]["status"] == "pass"

    async def idle() -> bool:
        return await running(clean_server.url) == 0

    await until(idle, SOON)
    async with aiohttp.ClientSession(clean_server.url) as session:
        async with session.get("/ready") as answer:
            assert answer.status == 200
        async with session.get("/model_info") as answer:
            assert (await answer.json())["weight_version"] == "default"
