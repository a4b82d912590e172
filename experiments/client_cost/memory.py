"""Measures the memory of a held token: many streams stop twice in mid-answer.

The difference between the two stops is the cost of the tokens, because connections, tasks and
buffers are there at both.
"""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from pathlib import Path
from typing import Any

import aiohttp
from clients import ANSWER_TOKENS, scheduler

EVENT_TOKENS = 64
FIRST, SECOND = 1, 15
"""Events of 16 after which the streams are held."""


async def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST /bench."""
    async with aiohttp.ClientSession() as session, session.post(url + "/bench", json=body) as got:
        return await got.json()


async def held(url: str, *, in_flight: int, trace: bool) -> dict[str, Any]:
    """Bytes per token held in `in_flight` streams, by tracemalloc or as resident memory."""
    await post(url, {"pace": 0.05, "limit": FIRST})
    if trace:
        tracemalloc.start()
    async with scheduler([url], in_flight=in_flight, rollouts=in_flight) as running:
        batch = asyncio.create_task(running.next_batch())

        async def settled(events: int) -> tuple[int, int]:
            await post(url, {"limit": events})
            wanted = events * EVENT_TOKENS * in_flight
            while running.state.in_flight.counters.tokens_generated < wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
            await asyncio.sleep(0.5)
            return (_traced(), _logs()) if trace else (_resident(), 0)

        before, logs_before = await settled(FIRST)
        after, logs = await settled(SECOND)
        await post(url, {"limit": ANSWER_TOKENS // EVENT_TOKENS})
        await batch
    grown = (SECOND - FIRST) * EVENT_TOKENS * in_flight
    total = SECOND * EVENT_TOKENS * in_flight
    result: dict[str, Any] = {
        "tokens_held": total,
        "bytes_per_token": (after - before) / grown,
    }
    if trace:
        result["log_bytes_per_token"] = logs / total
        result["log_bytes_per_token_first"] = logs_before / (FIRST * EVENT_TOKENS * in_flight)
    return result


def _traced() -> int:
    return tracemalloc.get_traced_memory()[0]


def _logs() -> int:
    """Traced bytes that the token logs hold."""
    found = tracemalloc.take_snapshot().filter_traces(
        [tracemalloc.Filter(True, "*/core/state/token_log.py")]
    )
    return sum(statistic.size for statistic in found.statistics("filename"))


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
