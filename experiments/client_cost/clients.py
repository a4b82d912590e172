"""The clients that are compared: bare loops, and the scheduler with its SGLang adapter.

All take the same prompts, request the same answers, keep ids and logprobs of every rollout in
arrays, and keep the same number of requests in flight from the first to the last.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from aprilsched import Prompt, RolloutScheduler, SamplingParams, SchedulerConfig, SGLangFleet
from aprilsched.companions import Companion, routed_experts
from aprilsched.config import Pool
from aprilsched.engines.http import HttpLimits
from aprilsched.store import Store
from aprilsched.telemetry.base import AnyListener

GROUP_SIZE = 8
PROMPT_TOKENS = 128
ANSWER_TOKENS = 1024
ROUTED = routed_experts(layers=48, per_token=8, experts=128)
_CLIENT_BUFFER = 2**22


@dataclass(frozen=True, kw_only=True)
class Cost:
    """CPU and wall seconds of one run of one client."""

    cpu: float
    wall: float
    rollouts: int
    tokens: int


class Meta(msgspec.Struct):
    """What the bare loop reads of an event."""

    output_token_logprobs: list[tuple[float, int, Any]]
    finish_reason: dict[str, Any] | None = None


class Event(msgspec.Struct):
    """One event of a stream."""

    output_ids: list[int]
    meta_info: Meta


def prompt_ids(number: int) -> list[int]:
    """The prompt of a group; different for each."""
    return [(number * 31 + i) % 50_000 for i in range(PROMPT_TOKENS)]


async def by_line(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The payloads of a stream, as most loops read them: aiohttp's own lines."""
    async for line in content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield line[6:]


async def by_piece(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The same as fast as we know: whatever has arrived, cut at the empty lines."""
    rest = b""
    async for piece in content.iter_any():
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event != b"data: [DONE]":
                yield event[6:]


Read = Callable[[aiohttp.StreamReader], AsyncIterator[bytes]]


async def bare(url: str, *, in_flight: int, rollouts: int, read: Read = by_line) -> Cost:
    """POST, read lines, decode, append; nothing else."""
    prompts = [prompt_ids(number) for number in range(rollouts // GROUP_SIZE)]
    decoder = msgspec.json.Decoder(Event)
    kept: list[tuple[array[int], array[float]]] = []
    todo: Iterator[int] = iter(range(rollouts))

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        body: dict[str, object] = {
            "rid": f"bare-{number:010d}",
            "input_ids": prompts[number // GROUP_SIZE],
            "sampling_params": {"max_new_tokens": ANSWER_TOKENS, "temperature": 1.0},
            "stream": True,
            "return_logprob": True,
        }
        ids, logprobs = array("i"), array("f")
        async with session.post(url + "/generate", data=msgspec.json.encode(body)) as response:
            async for payload in read(response.content):
                event = decoder.decode(payload)
                ids.extend(event.output_ids)
                logprobs.extend([triple[0] for triple in event.meta_info.output_token_logprobs])
        kept.append((ids, logprobs))

    async def worker(session: aiohttp.ClientSession) -> None:
        for number in todo:
            await one(session, number)

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"Content-Type": "application/json"},
        read_bufsize=_CLIENT_BUFFER,
    ) as session:
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.gather(*(worker(session) for _ in range(in_flight)))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    tokens = sum(len(ids) for ids, _ in kept)
    return Cost(cpu=cpu, wall=wall, rollouts=len(kept), tokens=tokens)


async def tight(url: str, *, in_flight: int, rollouts: int) -> Cost:
    """The bare loop, reading pieces."""
    return await bare(url, in_flight=in_flight, rollouts=rollouts, read=by_piece)


def scheduler(
    urls: Sequence[str],
    *,
    in_flight: int,
    rollouts: int,
    store: Store | None = None,
    tokens: int = ANSWER_TOKENS,
    listeners: Sequence[AnyListener] = (),
    fleet: SGLangFleet | None = None,
    companions: Sequence[Companion] = (),
    limits: HttpLimits | None = None,
) -> RolloutScheduler:
    """A scheduler that keeps `in_flight` rollouts of so many tokens generating."""
    groups = in_flight // GROUP_SIZE
    sampling = SamplingParams(max_new_tokens=tokens)
    prompts = [
        Prompt(input_ids=prompt_ids(number), sampling=sampling)
        for number in range(rollouts // GROUP_SIZE)
    ]
    config = SchedulerConfig(
        batch_groups=groups,
        group_size=GROUP_SIZE,
        over_provision=1.0,
        refill=Pool(together=min(4, groups)),
        pace="asynchronous",
        companions=tuple(companions),
    )
    return RolloutScheduler(
        fleet or SGLangFleet(urls, limits=limits),
        prompts,
        config=config,
        store=store,
        listeners=listeners,
    )


async def scheduled(
    url: str,
    *,
    in_flight: int,
    rollouts: int,
    companions: Sequence[Companion] = (),
    limits: HttpLimits | None = None,
) -> Cost:
    """The same through the scheduler, batch after batch."""
    count = tokens = 0
    kept: list[object] = []
    running = scheduler(
        [url], in_flight=in_flight, rollouts=rollouts, companions=companions, limits=limits
    )
    async with running:
        cpu, wall = time.process_time(), time.perf_counter()
        async for batch in running:
            kept.append(batch)
            count += sum(1 for _ in batch.rollouts)
            tokens += batch.tokens
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Cost(cpu=cpu, wall=wall, rollouts=count, tokens=tokens)


async def single(url: str, *, in_flight: int, rollouts: int) -> Cost:
    """The scheduler, with a connection for each request."""
    limits = HttpLimits(max_connections=2 * in_flight)
    return await scheduled(url, in_flight=in_flight, rollouts=rollouts, limits=limits)


async def routed(url: str, *, in_flight: int, rollouts: int) -> Cost:
    """The scheduler with routed experts."""
    return await scheduled(url, in_flight=in_flight, rollouts=rollouts, companions=(ROUTED,))


CLIENTS = {"bare": bare, "tight": tight, "single": single, "scheduled": scheduled}
