"""Measures what saving partial rollouts costs the coordinator, and how large the file gets.

    python experiments/store_cost/benchmark.py --out experiments/store_cost/result.json

The same stream of 100,000 tokens/s is read with and without a store, in alternating processes.
See README.md in this folder.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "client_cost"))
sys.path.append(str(Path(__file__).resolve().parents[2]))

import benchmark as client_cost
from clients import scheduler
from memory import post

from aprilsched import SqliteStore
from experiments.library import arguments, machine, measured, say, write

TOKENS_PER_SECOND = 100_000
EVENT_TOKENS = 64
ANSWER_TOKENS = 1024
LEVELS = (64, 512, 2048)


async def run(url: str, *, in_flight: int, rollouts: int, path: Path | None) -> dict[str, Any]:
    """The measured process: read everything, acknowledge each batch."""
    await post(url, {"pace": in_flight * EVENT_TOKENS / TOKENS_PER_SECOND})
    store = None if path is None else SqliteStore(path)
    count = tokens = largest = 0
    async with scheduler([url], in_flight=in_flight, rollouts=rollouts, store=store) as running:
        gc.collect()
        cpu, wall = time.process_time(), time.perf_counter()
        async for batch in running:
            count += sum(1 for _ in batch.rollouts)
            tokens += batch.tokens
            batch.acknowledge()
            if path is not None:
                wal = path.with_name(path.name + "-wal")
                largest = max(largest, sum(os.path.getsize(p) for p in (path, wal)))  # noqa: ASYNC240
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    if (count, tokens) != (rollouts, rollouts * ANSWER_TOKENS):
        raise SystemExit(f"read {count} rollouts of {tokens} tokens instead of {rollouts}")
    return {
        "store": path is not None,
        "in_flight": in_flight,
        "rollouts": count,
        "cpu": cpu,
        "wall": wall,
        "tokens_per_s": tokens / wall,
        "file_bytes": largest,
    }


def measure(in_flight: int, rollouts: int, *, store: bool) -> dict[str, Any]:
    """One run in a process of its own, against a fresh server."""
    with client_cost.server() as url, tempfile.TemporaryDirectory() as folder:
        arguments = ("--url", url, "--in-flight", in_flight, "--rollouts", rollouts)
        kept = ("--store", f"{folder}/rollouts.store") if store else ()
        return measured(__file__, *arguments, *kept)


def compare(
    level: int, repeats: int, seconds: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Alternating runs at one number in flight."""
    rollouts = max(2 * level, int(seconds * TOKENS_PER_SECOND / ANSWER_TOKENS))
    rollouts -= rollouts % 8
    raw: list[dict[str, Any]] = []
    ratios: list[float] = []
    for repeat in range(repeats):
        order = (False, True) if repeat % 2 == 0 else (True, False)
        pair = {store: measure(level, rollouts, store=store) for store in order}
        raw += pair.values()
        ratios.append(pair[True]["cpu"] / pair[False]["cpu"])
        say(f"{level} in flight, repeat {repeat}: {ratios[-1]:.3f}")
    with_store = [r for r in raw if r["store"]]
    return raw, {
        "in_flight": level,
        "rollouts": rollouts,
        "ratio": [min(ratios), statistics.median(ratios), max(ratios)],
        "tokens_per_s": statistics.median(r["tokens_per_s"] for r in raw),
        "cpu_share_without": statistics.median(r["cpu"] / r["wall"] for r in raw if not r["store"]),
        "cpu_share_with": statistics.median(r["cpu"] / r["wall"] for r in with_store),
        "file_bytes": max(r["file_bytes"] for r in with_store),
        "written_bytes": rollouts * ANSWER_TOKENS * 8,
    }


def options_of() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--levels", type=int, nargs="*", default=list(LEVELS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of streaming, for each run")
    # What the measured processes are started with.
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--in-flight", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rollouts", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = options_of()
    if options.url:
        done = run(
            options.url,
            in_flight=options.in_flight,
            rollouts=options.rollouts,
            path=options.store,
        )
        print(json.dumps(asyncio.run(done)))
        return
    raw: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for level in options.levels:
        runs, row = compare(level, options.repeats, options.seconds)
        raw += runs
        rows.append(row)
    result = {
        **machine(),
        "rows": rows,
        "runs": raw,
    }
    write(options.out, result, shown={**result, "runs": len(raw)})


if __name__ == "__main__":
    main()
