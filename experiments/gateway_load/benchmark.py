"""Runs 200 clients against ``aprilsched gateway`` in front of two embedded engines, and watches the
gateway's memory. Weights are loaded through the gateway all the while.

With ``--streams`` so many streams are opened at once instead, and read to their ends."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import clients  # noqa: E402

from tests.support.sim_http import two_weights  # noqa: E402
from tests.support.tiny_tokenizer import bytes_tokenizer  # noqa: E402

SERVER = """
import asyncio, sys
from aprilsched.engines.sim.settings import SimConfig
from aprilsched.testing import SimServer

async def serve():
    config = SimConfig(stream_interval=8, vocab_size=512, stream_at_pause=False)
    async with SimServer(config, time_scale=4.0) as server:
        print(server.url, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

asyncio.run(serve())
"""
GATEWAY = "from aprilsched.__main__ import main; main()"


@asynccontextmanager
async def process(*command: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A process, and the URL in its first line."""
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert started.stdout is not None
        line = (await started.stdout.readline()).decode()
        yield started, line.split()[-1]
    finally:
        if started.returncode is None:
            started.terminate()
        await started.wait()


def resident(pid: int) -> float:
    """MiB of memory that a process has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def processor(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def updates(url: str, weights: tuple[Path, Path], seconds: float) -> int:
    """Load weights every so many seconds, until cancelled."""
    async with aiohttp.ClientSession(url) as session:
        for number in itertools.count(1):
            await asyncio.sleep(seconds)
            body = {"model_path": str(weights[number % 2]), "weight_version": f"v{number}"}
            async with session.post("/update_weights_from_disk", json=body) as answer:
                assert answer.status == 200, await answer.text()
            UPDATES.append(number)
    return 0


UPDATES: list[int] = []


@asynccontextmanager
async def served(
    folder: Path,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, list[str]]]:
    """A gateway with a tokenizer in front of two engines: its process, its URL and theirs."""
    async with AsyncExitStack() as stack:
        servers = [(await stack.enter_async_context(process(SERVER)))[1] for _ in range(2)]
        tokenizer = bytes_tokenizer(folder / "model", parses=True)
        command = ["gateway", "--port", "0", "--tokenizer", str(tokenizer), "--engine", *servers]
        gateway, url = await stack.enter_async_context(process(GATEWAY, *command))
        yield gateway, url, servers


async def left_over(*urls: str) -> dict[str, list[str]]:
    """What each of them still has to do after 20 seconds, in words."""
    left: dict[str, list[str]] = {}
    for _ in range(100):
        left = {each: await clients.trouble(each) for each in urls}
        if not any(left.values()):
            break
        await asyncio.sleep(0.2)
    return left


async def streamed(streams: int, tokens: int) -> dict[str, Any]:
    """The result of opening so many streams at once."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        gateway, url, servers = await stack.enter_async_context(served(folder))
        began, used, before = time.perf_counter(), processor(gateway.pid), resident(gateway.pid)
        reading = asyncio.create_task(clients.held(url, streams, tokens))
        seen: list[dict[str, float]] = []
        while not reading.done():
            asked = time.perf_counter()
            now = await clients.metric(url, "aprilsched_gateway_open_streams")
            took = time.perf_counter() - asked
            seen.append({"streams": now, "answer_s": took, "mib": resident(gateway.pid)})
            await asyncio.wait([reading], timeout=1)
        tally, seconds = reading.result(), time.perf_counter() - began
        used = processor(gateway.pid) - used
        left = await left_over(url, *servers)
        return {
            "streams": streams,
            "open_at_once": max(each["streams"] for each in seen),
            "tokens_each": tokens,
            "ends": dict(sorted(tally.ended.items())),
            "wrong": tally.wrong[:20],
            "seconds": round(seconds, 1),
            "tokens_per_s": round(tally.tokens / seconds),
            "first_event_s": clients.percentiles(tally.first_s),
            "whole_answer_s": clients.percentiles(tally.all_s),
            "metrics_answer_s": clients.percentiles([each["answer_s"] for each in seen]),
            "gateway_cpu_share": round(used / seconds, 3),
            "gateway_memory_mib": {
                "before": round(before, 1),
                "largest": round(max(each["mib"] for each in seen), 1),
            },
            "left_over": {"gateway": left[url], "servers": [left[each] for each in servers]},
        }


async def measured(minutes: float, number: int, seed: int) -> dict[str, Any]:
    """The result of one run."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        gateway, url, servers = await stack.enter_async_context(served(folder))
        loop = asyncio.get_running_loop()
        until = loop.time() + 60 * minutes
        memory: list[float] = []
        async with asyncio.TaskGroup() as group:
            work = group.create_task(clients.running(url, number, seed=seed, until=until))
            loading = group.create_task(updates(url, two_weights(folder), 20))
            while not work.done():
                memory.append(round(resident(gateway.pid), 1))
                await asyncio.wait([work], timeout=5)
            loading.cancel()
        tally = work.result()
        left = await left_over(url, *servers)
        used = processor(gateway.pid)
        # Two minutes of clients who come for the first time warm caches up.
        settled = memory[len(memory) // 5 :]
        half = len(settled) // 2
        return {
            "clients": number,
            "minutes": minutes,
            "requests": dict(sorted(tally.ended.items())),
            "wrong": tally.wrong[:20],
            "wrong_count": len(tally.wrong),
            "tokens_read": tally.tokens,
            "updates": len(UPDATES),
            "responses_by_versions": dict(sorted(tally.versions.items())),
            "first_event_s": clients.percentiles(tally.first_s),
            "whole_answer_s": clients.percentiles(tally.all_s),
            "left_over": {"gateway": left[url], "servers": [left[each] for each in servers]},
            "gateway_cpu_share": round(used / (60 * minutes), 3),
            "gateway_memory_mib": {
                "first": memory[0],
                "first_half_mean": round(sum(settled[:half]) / max(1, half), 1),
                "second_half_mean": round(sum(settled[half:]) / max(1, len(settled) - half), 1),
                "largest": max(memory),
                "every_5_s": memory,
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.streams is not None:
        result = asyncio.run(streamed(given.streams, given.tokens))
    else:
        result = asyncio.run(measured(given.minutes, given.clients, given.seed))
    text = json.dumps(result, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
