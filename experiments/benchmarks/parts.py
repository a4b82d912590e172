"""One measured process of the benchmarks: `parts.py PART [--url URL]` prints JSON.

It imports only what every checkout since 352eea8a has, so `run.py` can measure two of them.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp

from aprilsched import (
    LongTailWorkload,
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SGLangFleet,
    SqliteStore,
)
from aprilsched.config import Pool

GROUP_SIZE = 8
PROMPT_TOKENS, STOP_TOKENS = 128, 1600
ANSWER_TOKENS = 256
IN_FLIGHT = 512
ROLLOUTS = 4096
EVENTS_PER_SECOND = 4000
"""Of all streams together, so that the client keeps up and reads most events one by one."""
BATCHES, BATCH_GROUPS = 40, 32


@dataclass(frozen=True, kw_only=True)
class Cost:
    """CPU seconds of the measured process, and the rollouts that it delivered in them."""

    cpu_s: float
    rollouts: int


def named(name: str, *modules: str) -> Any:
    """Return `name` from the first of `modules` of aprilsched that the measured checkout has."""
    for module in modules:
        try:
            return getattr(importlib.import_module(f"aprilsched.{module}"), name)
        except ModuleNotFoundError:
            continue
    raise SystemExit(f"none of {modules} has {name}")


def simulator(policy: str) -> Cost:
    """A simulated run with one engine."""
    run = _simulation(policy)
    started_at = time.process_time()
    run.run()
    return Cost(
        cpu_s=time.process_time() - started_at, rollouts=run.state.in_flight.counters.delivered
    )


def core(policy: str) -> Cost:
    """The share of a simulated run that is spent in the core."""
    scheduler = named("Scheduler", "kernel.core.scheduler", "core.scheduler")
    handle, spent = scheduler.handle, [0]

    def timed(self: Any, event: Any, now: float) -> Any:
        started_at = time.perf_counter_ns()
        try:
            return handle(self, event, now)
        finally:
            spent[0] += time.perf_counter_ns() - started_at

    scheduler.handle = timed
    run = _simulation(policy)
    run.run()
    return Cost(cpu_s=spent[0] / 1e9, rollouts=run.state.in_flight.counters.delivered)


def _simulation(policy: str) -> Any:
    simulation = named("Simulation", "simulation")
    summary = named("Summary", "observe.figures.summary", "telemetry.summary")
    presets = named("PRESETS", "planning.presets", "presets")
    prompts = list(islice(LongTailWorkload(), (BATCHES + 4) * BATCH_GROUPS))
    config = presets[policy](SchedulerConfig(batch_groups=BATCH_GROUPS, max_staleness=None))
    # Before November 2026 the pace was an argument.
    pace = {"trainer_waits": True} if "trainer_waits" in signature(summary).parameters else {}
    listeners = [summary(**pace)]
    return simulation(config, prompts, engines=1, batches=BATCHES, listeners=listeners)


async def client(url: str, *, store: Path | None = None) -> Cost:
    """A scheduler with a fixed number of rollouts in flight on a server that answers at once."""
    async with aiohttp.ClientSession() as session:
        pace = {"pace": IN_FLIGHT / EVENTS_PER_SECOND}
        async with session.post(f"{url}/bench", json=pace) as answer:
            answer.raise_for_status()
    base = SamplingParams(max_new_tokens=ANSWER_TOKENS)
    prompts = (
        Prompt(input_ids=_ids(n), sampling=replace(base, stop_token_ids=_ids(n, STOP_TOKENS)))
        for n in range(ROLLOUTS // GROUP_SIZE)
    )
    config = SchedulerConfig(
        batch_groups=IN_FLIGHT // GROUP_SIZE,
        group_size=GROUP_SIZE,
        over_provision=1.0,
        refill=Pool(together=4),
        pace="asynchronous",
        max_staleness=None,
    )
    saved = None if store is None else SqliteStore(store)
    tokens = 0
    async with RolloutScheduler(SGLangFleet([url]), prompts, config=config, store=saved) as running:
        started_at = time.process_time()
        async for batch in running:
            tokens += batch.tokens
            if store is not None:
                batch.acknowledge()
        cpu_s = time.process_time() - started_at
    if tokens != ROLLOUTS * ANSWER_TOKENS:
        raise SystemExit(f"{tokens} tokens arrived instead of {ROLLOUTS * ANSWER_TOKENS}")
    return Cost(cpu_s=cpu_s, rollouts=ROLLOUTS)


async def store(url: str) -> Cost:
    """The same with a store that every batch is saved in and acknowledged."""
    with tempfile.TemporaryDirectory() as folder:
        return await client(url, store=Path(folder, "rollouts.store"))


async def gateway(url: str) -> Cost:
    """A gateway in this process, whose clients in this process read whole responses."""
    made = named("Gateway", "agents.gateway", "gateway")
    settings = named("GatewaySettings", "agents.gateway", "gateway")
    requests, at_once = ROLLOUTS // 4, asyncio.Semaphore(IN_FLIGHT // 4)
    body = {"sampling_params": {"max_new_tokens": ANSWER_TOKENS}, "return_logprob": True}

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        asked = {**body, "input_ids": _ids(number)}
        async with at_once, session.post("/generate", json=asked) as answer:
            answer.raise_for_status()
            await answer.read()

    async with (
        made(SGLangFleet([url]), settings=replace(settings(), port=0)) as served,
        aiohttp.ClientSession(served.url, connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        started_at = time.process_time()
        await asyncio.gather(*(one(session, number) for number in range(requests)))
        return Cost(cpu_s=time.process_time() - started_at, rollouts=requests)


def _ids(number: int, count: int = PROMPT_TOKENS) -> Any:
    return [(number * 31 + i) % 50_000 for i in range(count)]


ALONE: dict[str, Callable[[], Cost]] = {
    **{f"core {name}": lambda name=name: core(name) for name in ("sync", "april", "pool")},
    **{f"simulator {name}": lambda name=name: simulator(name) for name in ("april", "pool")},
}
"""Parts that need no server."""
SERVED = {"client": client, "store": store, "gateway": gateway}
"""Parts that read a server's responses."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[*ALONE, *SERVED])
    parser.add_argument("--url")
    given = parser.parse_args(arguments)
    served = SERVED.get(given.part)
    cost = ALONE[given.part]() if served is None else asyncio.run(served(given.url))
    print(json.dumps({"cpu_s": cost.cpu_s, "rollouts": cost.rollouts}))


if __name__ == "__main__":
    main()
