"""Measures memory and CPU of thousands of long responses in flight, on one core.

    python experiments/load/benchmark.py --out experiments/load/result.json

Each measurement is a fresh process that is bound to one core; its server has another core. See
README.md in this folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "client_cost"))
sys.path.append(str(Path(__file__).resolve().parents[2]))

import benchmark as client_cost
from clients import scheduler
from memory import _resident as resident
from memory import post

from aprilsched import RolloutScheduler
from experiments.library import arguments, machine, measured, say, write

ANSWER_TOKENS = 16_384
EVENT_TOKENS = 64
TRACED_EVENT_TOKENS = 512
TRACED_LEVELS = (64, 512)
"""tracemalloc looks at every object that is made, and would need most of an hour for the rest."""
LEVELS = {64: 3, 512: 3, 4096: 1}
"""Rollouts in flight, and how often each is measured."""
_EVENTS_PER_SECOND = 10_000
"""Of all streams together: 640,000 tokens/s, which thirty H200 give with a 4B model."""
_SETTLE_S = 0.5


async def settled(running: RolloutScheduler, url: str, tokens: int, events: int) -> None:
    """Every stream has given so many events, which are `tokens` in all, and stands still."""
    await post(url, {"limit": events})
    while running.state.in_flight.counters.tokens_generated < tokens:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await asyncio.sleep(_SETTLE_S)


def in_logs(running: RolloutScheduler) -> int:
    """Bytes of the arrays in which ids and logprobs are held, spare room included."""
    logs = [rollout.log for rollout in running.state.in_flight.rollouts.values()]
    return sum(log._ids.nbytes + log._logprobs.nbytes for log in logs)


async def load(url: str, *, in_flight: int, traced: bool) -> dict[str, Any]:
    """The measured process: all streams to their first event, their last but one, and their end."""
    event_tokens = TRACED_EVENT_TOKENS if traced else EVENT_TOKENS
    events = ANSWER_TOKENS // event_tokens
    pace = 0.0 if traced else in_flight / _EVENTS_PER_SECOND
    await post(url, {"pace": pace, "limit": 1})
    if traced:
        tracemalloc.start()
    async with scheduler(
        [url], in_flight=in_flight, rollouts=in_flight, tokens=ANSWER_TOKENS
    ) as running:
        batch = asyncio.create_task(running.next_batch())
        await settled(running, url, in_flight * event_tokens, 1)
        before = tracemalloc.get_traced_memory()[0] if traced else resident()
        cpu, wall = time.process_time(), time.perf_counter()
        held = in_flight * event_tokens * (events - 1)
        await settled(running, url, held, events - 1)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall - _SETTLE_S
        after = tracemalloc.get_traced_memory()[0] if traced else resident()
        logs = in_logs(running)
        grown = held - in_flight * event_tokens
        delivery = time.process_time()
        await post(url, {"limit": events})
        tokens = (await batch).tokens
        delivery = time.process_time() - delivery
    if tokens != in_flight * ANSWER_TOKENS:
        raise SystemExit(f"read {tokens} tokens of {in_flight * ANSWER_TOKENS}")
    result: dict[str, Any] = {"in_flight": in_flight, "traced": traced, "tokens_held": held}
    if traced:
        return result | {"traced_bytes_per_token": (after - before) / grown}
    return result | {
        "cpu_s": cpu,
        "wall_s": wall,
        "cpu_us_per_event": 1e6 * cpu / (grown / event_tokens),
        "resident_bytes_per_token": (after - before) / grown,
        "log_bytes_per_token": logs / held,
        "delivery_cpu_s": delivery,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def measure(in_flight: int, *, traced: bool) -> dict[str, Any]:
    """One process on one core, against a fresh server."""
    event_tokens = TRACED_EVENT_TOKENS if traced else EVENT_TOKENS
    with client_cost.server(ANSWER_TOKENS, event_tokens) as url:
        arguments = ("--url", url, "--in-flight", in_flight, *(("--traced",) if traced else ()))
        result = measured(__file__, *arguments)
    say(result)
    return result


def row(level: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of a level."""
    found: dict[str, Any] = {"in_flight": level, "tokens_held": runs[0]["tokens_held"]}
    for run in runs:
        for name in run:
            if name.endswith(("per_event", "per_token", "cpu_s", "wall_s", "peak_mib")):
                found[name] = statistics.median(r[name] for r in runs if name in r)
    return found


def options_of() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--levels", type=int, nargs="*", default=list(LEVELS))
    # What the measured processes are started with.
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--in-flight", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--traced", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = options_of()
    if options.url:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        found = asyncio.run(load(options.url, in_flight=options.in_flight, traced=options.traced))
        print(json.dumps(found))
        return
    runs: list[dict[str, Any]] = []
    for repeat in range(max(LEVELS.values())):
        levels = [level for level in options.levels if repeat < LEVELS.get(level, 1)]
        runs += [measure(level, traced=False) for level in levels]
    runs += [measure(level, traced=True) for level in options.levels if level in TRACED_LEVELS]
    result: dict[str, Any] = {
        **machine(),
        "answer_tokens": ANSWER_TOKENS,
        "rows": [row(n, [r for r in runs if r["in_flight"] == n]) for n in options.levels],
        "runs": runs,
    }
    write(options.out, result, shown={**result, "runs": len(runs)})


if __name__ == "__main__":
    main()
