"""Measures what an update costs besides the refit itself: pause, flush, verification, continue.

    python experiments/refit/overhead.py --out experiments/refit

Run it from the root of the repository, in the environment of `make venv`; the row "cpu" starts an
SGLang server on the CPU from the one of `make test`. See README.md in this folder.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from timeline import TimedPublisher, Timeline, empty_checkpoint

from aprilsched import DiskPublisher, Prompt, RolloutScheduler, SchedulerConfig, SGLangFleet
from aprilsched.config import Pool
from aprilsched.kernel.engines.base import Fleet
from aprilsched.kernel.weights.publisher import WeightPublisher
from aprilsched.simulation.engine import SimFleet
from aprilsched.simulation.engine.publisher import SimPublisher
from aprilsched.types import SamplingParams

IN_FLIGHT = 8
ANSWER_TOKENS = 1024
BETWEEN_TOKENS = 16 * IN_FLIGHT
"""Generated between two updates, so that each finds requests in mid-answer."""
REFIT_SECONDS = 0.05
"""Of the embedded engine."""
WARM_UP = 2
"""Updates that are not counted: the first ones open connections and import modules."""
FIGURES = (
    "total", "whole", "publish", "overhead", "pause", "flush", "verify", "continue", "engine",
    "client", "cpu",
)  # fmt: skip

Set = tuple[Fleet, WeightPublisher]


# --- engines -----------------------------------------------------------------------------------


@contextlib.contextmanager
def cpu() -> Iterator[Set]:
    """SGLang on the CPU with a tiny model, which it loads again and again."""
    sys.path.insert(0, os.getcwd())
    from tests.sglang.server import CpuServer, write_model

    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        server = CpuServer(model, Path(folder) / "log.txt")
        try:
            server.start()
            server.wait_ready()
            yield SGLangFleet([server.url]), DiskPublisher(model)
        finally:
            server.stop()


@contextlib.contextmanager
def served() -> Iterator[Set]:
    """The embedded engine behind HTTP, in a process of its own."""
    command = [
        sys.executable, "-m", "aprilsched", "serve-sim", "--port", "0",
        "--sim.refit-seconds", str(REFIT_SECONDS),
    ]  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            yield SGLangFleet([url]), DiskPublisher(empty_checkpoint(Path(folder) / "weights"))
        finally:
            process.terminate()


@contextlib.contextmanager
def embedded() -> Iterator[Set]:
    """The embedded engine, a pause as long as on an H200."""
    yield SimFleet(refit_seconds=REFIT_SECONDS), SimPublisher()


@contextlib.contextmanager
def instant() -> Iterator[Set]:
    """The embedded engine, pausing in no time: what is left is ours."""
    yield SimFleet(refit_seconds=REFIT_SECONDS, pause_seconds=0.0), SimPublisher()


ROWS: dict[str, Callable[[], contextlib.AbstractContextManager[Set]]] = {
    "cpu": cpu,
    "served": served,
    "embedded": embedded,
    "instant": instant,
}


# --- measurement -------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def generating(fleet: Fleet, timeline: Timeline) -> AsyncIterator[RolloutScheduler]:
    """A scheduler that keeps 8 requests generating, its batches taken and thrown away."""
    sampling = SamplingParams(max_new_tokens=ANSWER_TOKENS, temperature=1.0, ignore_eos=True)
    prompts = (
        Prompt(input_ids=[(number * 7 + i) % 500 for i in range(32)], sampling=sampling)
        for number in itertools.count()
    )
    config = SchedulerConfig(
        batch_groups=IN_FLIGHT,
        group_size=1,
        over_provision=1.0,
        refill=Pool(together=1),
        pace="asynchronous",
        straggler="retract",
    )
    async with RolloutScheduler(fleet, prompts, config=config, listeners=[timeline]) as rollouts:
        for engine in fleet.engines:
            timeline.watch(engine)

        async def take() -> None:
            async for _ in rollouts:
                pass

        taking = asyncio.create_task(take())
        try:
            yield rollouts
        finally:
            taking.cancel()
            await asyncio.wait([taking])


async def measure(fleet: Fleet, publisher: WeightPublisher, updates: int) -> list[dict[str, Any]]:
    """Figures of each update, in seconds."""
    timeline = Timeline()
    timed = TimedPublisher(publisher, timeline)
    found: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    async with generating(fleet, timeline) as rollouts:
        for number in range(WARM_UP + updates):
            await _in_mid_answer(rollouts)
            in_flight = rollouts.state.in_flight.open_attempts
            started_at = loop.time()
            await rollouts.update_weights(timed)
            total = loop.time() - started_at
            await timeline.continued.wait()
            if number >= WARM_UP:
                calls = [[name, round(seconds, 6)] for name, seconds in timeline.calls]
                figures = {"total": total, **timeline.figures()}
                rounded = {name: round(seconds, 6) for name, seconds in figures.items()}
                found.append({"in_flight": in_flight, **rounded, "calls": calls})
    return found


async def _in_mid_answer(rollouts: RolloutScheduler) -> None:
    """Wait until requests decode again after the last update."""
    counters, in_flight = rollouts.state.in_flight.counters, rollouts.state.in_flight
    wanted = counters.tokens_generated + BETWEEN_TOKENS
    while counters.tokens_generated < wanted or in_flight.open_attempts < IN_FLIGHT:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def row(name: str, updates: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Median and 90th percentile of every figure, and the updates themselves."""
    with ROWS[name]() as (fleet, publisher):
        before = os.getloadavg()[0]
        found = asyncio.run(measure(fleet, publisher, updates))
        load = [round(before, 1), round(os.getloadavg()[0], 1)]
    summary: dict[str, Any] = {"row": name, "updates": len(found), "load": load}
    for figure in FIGURES:
        values = sorted(update[figure] for update in found)
        p90 = values[min(len(values) - 1, round(0.9 * len(values)))]
        summary[figure] = [round(1e3 * value, 2) for value in (statistics.median(values), p90)]
    return summary, [{"row": name, **update} for update in found]


# --- what comes out ----------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each row: median (90th percentile), in milliseconds."""
    names = ("row", "load", *FIGURES)
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for found in rows:
        cells = [found["row"], " to ".join(map(str, found["load"]))]
        cells += ["{:.1f} ({:.1f})".format(*found[figure]) for figure in FIGURES]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="folder for overhead.json and overhead.jsonl")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    raw: list[dict[str, Any]] = []
    for name in options.rows:
        summary, updates = row(name, options.updates)
        rows.append(summary)
        raw += updates
        print(f"{name}: done", file=sys.stderr, flush=True)
    result = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "in_flight": IN_FLIGHT,
        "rows": rows,
    }
    print(json.dumps(result, indent=1) if options.json else table(rows))
    if options.out:
        (options.out / "overhead.json").write_text(json.dumps(result, indent=1) + "\n")
        lines = "".join(json.dumps(update) + "\n" for update in raw)
        (options.out / "overhead.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
