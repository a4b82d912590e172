"""Tests faults of real CPU servers: kill -9, SIGSTOP for 20 s, resets.

There are two SGLang servers behind TCP proxies. Each seed has one fault, or several resets, at a
random time. Responses are greedy, so all runs must deliver the same tokens.
"""

from __future__ import annotations

import asyncio
import atexit
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from aprilsched import Batch, RolloutScheduler, SchedulerConfig, SGLangFleet
from aprilsched.config import Health, Timeouts
from aprilsched.core.messages.facts import (
    AttemptSent,
    EngineAdmitted,
    EngineLost,
    Fact,
    TokensReceived,
)
from aprilsched.engines.http import ServerAddress
from experiments.chaos.history import Outcome
from experiments.library import say, table
from tests.sglang.proxy import CuttingProxy
from tests.sglang.recorded import long_tail
from tests.sglang.server import CpuServer, write_model

__all__ = ["run", "tables"]

KINDS = ("kill -9", "SIGSTOP 20 s", "resets")
GROUPS = 20
STOPPED_SECONDS = 20.0


class Watch:
    """When engines were lost and came back, and when tokens came."""

    def __init__(self) -> None:
        self.fault_at: float | None = None
        self.lost: dict[str, float] = {}
        self.away: list[float] = []
        self.first_token: float | None = None
        self.sent: set[int] = set()

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            match fact:
                case TokensReceived() if self.fault_at is not None:
                    self.first_token = self.first_token or now - self.fault_at
                case EngineLost():
                    self.lost.setdefault(fact.engine, now)
                case EngineAdmitted() if fact.engine in self.lost:
                    self.away.append(now - self.lost.pop(fact.engine))
                case AttemptSent():
                    self.sent.add(fact.rollout_id)
                case _:
                    pass


async def meet(kind: str, server: CpuServer, proxy: CuttingProxy, draw: random.Random) -> None:
    """Let the fault happen, and end."""
    if kind == "kill -9":
        await asyncio.to_thread(server.kill)
        proxy.cut()
        await asyncio.to_thread(server.start)
        await asyncio.to_thread(server.wait_ready)
    elif kind == "SIGSTOP 20 s":
        server.freeze()
        await asyncio.sleep(STOPPED_SECONDS)
        server.thaw()
    elif kind == "resets":
        for _ in range(draw.randint(2, 6)):
            proxy.cut()
            await asyncio.sleep(draw.uniform(0.2, 2.0))


async def trained(servers: list[CpuServer], kind: str, seed: int) -> Found:
    """One run with one fault; what became of it."""
    draw, watch = random.Random(seed), Watch()
    batches: list[Batch] = []
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(CuttingProxy(s.port)) for s in servers]
        config = SchedulerConfig(
            batch_groups=4,
            group_size=4,
            over_provision=draw.choice([1.5, 2.0]),
            pace=draw.choice(["synchronous", "asynchronous"]),  # type: ignore[arg-type]
            straggler=draw.choice(["retract", "abort"]),  # type: ignore[arg-type]
            health=Health(stall_s=6.0),
            timeouts=Timeouts(control_s=15.0),
        )
        rollouts = await stack.enter_async_context(
            RolloutScheduler(
                SGLangFleet([proxy.url for proxy in proxies], stream_interval=16),
                long_tail(GROUPS, longest=400, temperature=0.0, every=2),
                config=config,
                listeners=[watch],
            )
        )

        async def disturb() -> None:
            await asyncio.sleep(draw.uniform(0.5, 4.0))
            place = draw.randrange(len(servers))
            watch.fault_at = asyncio.get_running_loop().time()
            await meet(kind, servers[place], proxies[place], draw)

        fault = asyncio.create_task(disturb())
        async for batch in rollouts:
            batches.append(batch)
        await fault
        # Whoever was lost comes back even when there is nothing left to do.
        names = [ServerAddress.parse(proxy.url).name for proxy in proxies]
        deadline = time.monotonic() + 60
        control = rollouts.state.fleet.control
        while time.monotonic() < deadline and len(control.engines) < len(names):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        return _found(rollouts, batches, watch)


@dataclass
class Found:
    """What became of a run: counts, times, and the tokens of each response by its prompt."""

    figures: dict[str, int]
    times: dict[str, Any]
    responses: dict[str, list[int]]


def _found(rollouts: RolloutScheduler, batches: list[Batch], watch: Watch) -> Found:
    delivered = [rollout for batch in batches for rollout in batch.rollouts]
    ids = {rollout.rollout_id for rollout in delivered}
    in_flight = rollouts.state.in_flight
    dropped = {entry.rollout_id for entry in in_flight.ledger.entries}
    counters = in_flight.counters
    figures = {
        "launched": counters.launched,
        "delivered": len(delivered),
        "dropped": len(dropped),
        "lost": len(watch.sent - ids - dropped - in_flight.rollouts.keys()),
        "doubled": len(delivered) - len(ids),
        "tokens_generated": counters.tokens_generated,
        "tokens_regenerated": counters.tokens_generated - counters.tokens_delivered,
        "tokens_reprefilled": counters.tokens_reprefilled,
        "engines_lost": len(watch.away) + len(watch.lost),
        "engines_back": len(watch.away),
    }
    times = {"seconds_away": watch.away, "seconds_to_the_next_token": watch.first_token}
    responses = {
        f"{group.prompt.key}/{rollout.index}": rollout.token_ids.tolist()
        for batch in batches
        for group in batch.groups
        for rollout in group.rollouts
    }
    return Found(figures, times, responses)


@cache
def _fleet() -> tuple[list[CpuServer], dict[str, list[int]]]:
    """The servers, which end with this process, and the responses of a run without a fault."""
    kept = tempfile.TemporaryDirectory()
    folder = Path(kept.name)
    model = write_model(folder / "model")
    servers = [CpuServer(model, folder / f"server-{i}.txt") for i in range(2)]
    atexit.register(kept.cleanup)
    for server in servers:
        atexit.register(server.stop)
        server.start()
    for server in servers:
        server.wait_ready()
    return servers, asyncio.run(trained(servers, "none", 0)).responses


def run(seed: int, **_: Any) -> Outcome:
    """Run a seed. The kinds of faults take turns."""
    servers, expected = _fleet()
    kind = KINDS[seed % len(KINDS)]
    try:
        found = asyncio.run(trained(servers, kind, seed + 1))
    finally:
        for server in servers:
            server.thaw()
    figures = found.figures
    figures["different_tokens"] = sum(
        found.responses.get(key) != tokens for key, tokens in expected.items()
    )
    bad = ("dropped", "lost", "doubled", "different_tokens")
    complaints = [f"{figures[what]} rollouts: {what}" for what in bad if figures[what]]
    say(seed, kind, figures, found.times)
    return Outcome(seed, complaints, ["done"], figures, kinds=[kind], details=found.times)


_HEAD = (
    *("fault", "runs", "launched", "delivered", "engines lost", "back"),
    *("away for s: least, most", "next token after s: most"),
)


def tables(results: Sequence[Mapping[str, Any]]) -> str:
    """A row for each kind of fault."""
    rows: list[list[object]] = []
    for kind in KINDS:
        chosen = [result for result in results if result["kinds"] == [kind]]
        away = [seconds for r in chosen for seconds in r["details"]["seconds_away"]]
        first = [s for r in chosen if (s := r["details"]["seconds_to_the_next_token"]) is not None]
        names = ("launched", "delivered", "engines_lost", "engines_back")
        rows.append(
            [
                *(kind, len(chosen)),
                *(sum(result["figures"][name] for result in chosen) for name in names),
                f"{min(away):.1f}, {max(away):.1f}" if away else "",
                f"{max(first):.2f}" if first else "",
            ]
        )
    return table(_HEAD, rows)
