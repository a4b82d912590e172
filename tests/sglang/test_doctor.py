"""Tests ``aprilsched doctor`` on a real server: no check fails, and nothing is changed."""

from __future__ import annotations

import asyncio
import json
import sys

import aiohttp

from aprilsched.testing.contract import until
from tests.sglang.helpers import running
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
    # A weights update is not tried, and on a busy machine a response ends too soon for a check.
    warned = [found for found in findings.values() if found["status"] == "warn"]
    assert {found["check"] for found in warned if "was over" not in found["seen"]} == {
        "refit by its logprobs"
    }
    assert findings["left as found"]["status"] == "pass"
    assert "conservativeness 1.0, the clip is not reported" in findings["room"]["seen"]

    async def idle() -> bool:
        return await running(clean_server.url) == 0

    await until(idle)
    async with aiohttp.ClientSession(clean_server.url) as session:
        async with session.get("/ready") as answer:
            assert answer.status == 200
        async with session.get("/model_info") as answer:
            assert (await answer.json())["weight_version"] == "default"
