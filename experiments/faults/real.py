"""Tests faults of real CPU servers in 40 seeded runs: kill -9, SIGSTOP for 20 s, resets.

    python experiments/faults/real.py --out experiments/faults/real.json

There are two SGLang servers behind TCP proxies. Each run has one fault, or several resets, at a
random time. Responses are greedy, so all runs must deliver the same tokens. It needs the CPU server
of `make test`. See README.md in this folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from aprilsched import Batch, RolloutScheduler, SchedulerConfig, SGLangFleet  # noqa: E402
from aprilsched.config import Health, Timeouts  # noqa: E402
from aprilsched.core.messages.facts import (  # noqa: E402
    AttemptSent,
    EngineAdmitted,
    EngineLost,
    Fact,
    TokensReceived,
)
from aprilsched.engines.http import ServerAddress  # noqa: E402
from tests.sglang.proxy import CuttingProxy  # noqa: E402
from tests.sglang.recorded import long_tail  # noqa: E402
from tests.sglang.server import CpuServer, write_model  # noqa: E402

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


async def run(servers: list[CpuServer], kind: str, seed: int) -> dict[str, Any]:
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

        began = time.monotonic()
        fault = asyncio.create_task(disturb())
        async for batch in rollouts:
            batches.append(batch)
        wall = time.monotonic() - began
        await fault
        # Whoever was lost comes back even when there is nothing left to do.
        names = [ServerAddress.parse(proxy.url).name for proxy in proxies]
        deadline = time.monotonic() + 60
        control = rollouts.state.fleet.control
        while time.monotonic() < deadline and len(control.engines) < len(names):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        return _figures(rollouts, batches, watch, kind=kind, seed=seed, wall=wall)


def _figures(
    rollouts: RolloutScheduler, batches: list[Batch], watch: Watch, **about: Any
) -> dict[str, Any]:
    delivered = [rollout for batch in batches for rollout in batch.rollouts]
    ids = {rollout.rollout_id for rollout in delivered}
    in_flight = rollouts.state.in_flight
    dropped = {entry.rollout_id for entry in in_flight.ledger.entries}
    return {
        **about,
        "straggler": rollouts.config.straggler,
        "pace": rollouts.config.pace,
        "launched": in_flight.counters.launched,
        "delivered": len(delivered),
        "dropped": len(dropped),
        "lost": len(watch.sent - ids - dropped - in_flight.rollouts.keys()),
        "doubled": len(delivered) - len(ids),
        "tokens_generated": in_flight.counters.tokens_generated,
        "tokens_regenerated": in_flight.counters.tokens_generated
        - in_flight.counters.tokens_delivered,
        "tokens_reprefilled": in_flight.counters.tokens_reprefilled,
        "engines_lost": len(watch.away) + len(watch.lost),
        "engines_back": len(watch.away),
        "seconds_away": watch.away,
        "seconds_to_the_next_token": watch.first_token,
        "responses": {
            f"{group.prompt.key}/{rollout.index}": rollout.token_ids.tolist()
            for batch in batches
            for group in batch.groups
            for rollout in group.rollouts
        },
    }


async def campaign(servers: list[CpuServer], options: argparse.Namespace) -> list[dict[str, Any]]:
    expected = (await run(servers, "none", 0))["responses"]
    results: list[dict[str, Any]] = []
    for seed in range(options.runs):
        result = await run(servers, KINDS[seed % len(KINDS)], options.seed + seed)
        result["different_tokens"] = sum(
            result["responses"].get(key) != tokens for key, tokens in expected.items()
        )
        del result["responses"]
        results.append(result)
        print(json.dumps(result), file=sys.stderr, flush=True)
    return results


def table(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sums and extremes by kind."""
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        chosen = [result for result in results if result["kind"] == kind]
        if not chosen:
            continue
        sums = ("launched", "delivered", "dropped", "lost", "doubled", "different_tokens")
        more = ("tokens_generated", "tokens_regenerated", "tokens_reprefilled")
        away = [seconds for result in chosen for seconds in result["seconds_away"]]
        next_token = [r["seconds_to_the_next_token"] for r in chosen]
        rows.append(
            {
                "kind": kind,
                "runs": len(chosen),
                **{name: sum(result[name] for result in chosen) for name in (*sums, *more)},
                "engines_lost": sum(result["engines_lost"] for result in chosen),
                "engines_back": sum(result["engines_back"] for result in chosen),
                "seconds_away": [min(away), max(away)] if away else None,
                "seconds_to_the_next_token_most": max(s for s in next_token if s is not None),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder / "model")
        servers = [CpuServer(model, folder / f"server-{i}.txt") for i in range(2)]
        try:
            for server in servers:
                server.start()
            for server in servers:
                server.wait_ready()
            results = asyncio.run(campaign(servers, options))
        finally:
            for server in servers:
                server.thaw()
                server.stop()
    result = {"table": table(results), "runs": results}
    print(json.dumps(result["table"], indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
