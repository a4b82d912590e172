"""``aprilsched doctor`` on a real server: nothing fails, and nothing is changed."""

from __future__ import annotations

import asyncio
import json
import sys

import aiohttp

from tests.sglang.helpers import running, until
from tests.sglang.server import CpuServer

SECONDS = 240


async def test_a_real_server_passes_and_is_left_as_found(clean_server: CpuServer):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aprilsched.cli", "doctor", clean_server.url, "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(SECONDS):
        out, err = await process.communicate()
    findings = {found["check"]: found for found in json.loads(out)}
    failed = [found for found in findings.values() if found["status"] == "fail"]
    assert failed == []
    assert process.returncode == 0, err.decode()
    for name in ("version spans", "pause retract", "pause in_place", "continue after retract"):
        assert findings[name]["status"] == "pass", findings[name]
    assert findings["flush within an update (hazard 3)"]["status"] == "warn"
    assert findings["left as found"]["status"] == "pass"

    async def idle() -> bool:
        return await running(clean_server.url) == 0

    await until(idle, 5.0)
    async with aiohttp.ClientSession(clean_server.url) as session:
        async with session.get("/ready") as answer:
            assert answer.status == 200
        async with session.get("/model_info") as answer:
            assert (await answer.json())["weight_version"] == "default"
