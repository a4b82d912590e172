"""Runs seeded runs under random faults, two at a time, and writes results.json.

python -m experiments.faults.campaign [--seeds 500] [--first 0] [--processes 2]
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from experiments.faults.run import run

__all__ = ["RESULTS"]

RESULTS = Path(__file__).with_name("results.json")
WALL_S = 120
"""Of real time: a run that takes longer loops without its clock going on."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    began = time.monotonic()
    # Not concurrent.futures: its executor of Python 3.11 hangs when it replaces a worker.
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes, maxtasksperchild=50) as pool:
        runs: list[dict[str, Any]] = []
        for figures in pool.imap_unordered(one, seeds):
            runs.append(figures)
            if figures["ending"] != "done":
                first = (figures["error"].strip().splitlines() or [""])[-1]
                print(f"seed {figures['seed']}: {figures['ending']}: {first[:200]}", flush=True)
    runs.sort(key=lambda figures: figures["seed"])
    options.out.write_text(as_json(runs), encoding="utf-8")
    print(f"{len(runs)} runs in {time.monotonic() - began:.0f} s")
    print(_summary(runs))


def as_json(runs: Sequence[dict[str, Any]]) -> str:
    """A line for each run, without what its seed says; three decimals."""
    lines = [json.dumps(_short({**figures, "script": None})) for figures in runs]
    return '{"runs": [\n' + ",\n".join(lines) + "\n]}\n"


def _short(value: Any) -> Any:
    match value:
        case float():
            return round(value, 3)
        case list():
            return [_short(item) for item in cast("list[Any]", value)]
        case dict():
            named = cast("dict[str, Any]", value).items()
            return {name: _short(item) for name, item in named if item not in (None, "", {}, [])}
        case _:
            return value


def one(seed: int) -> dict[str, Any]:
    """One run, ended after :data:`WALL_S`."""
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(WALL_S)
    began = time.monotonic()
    try:
        return run(seed) | {"wall_s": round(time.monotonic() - began, 2)}
    finally:
        signal.alarm(0)


def _too_long(*_: object) -> None:
    raise LoopsForEver(f"not done after {WALL_S} s of real time")


class LoopsForEver(BaseException):
    """No virtual time passes, and nothing ends."""


def _summary(runs: Sequence[dict[str, Any]]) -> str:
    """What must be zero, and how the runs ended."""
    total = Counter[str]()
    for figures in runs:
        total["lost"] += figures["rollouts"].get("lost", 0)
        total["duplicated"] += figures["rollouts"].get("duplicated", 0)
        total["delivered"] += figures["rollouts"].get("delivered", 0)
        for name in ("checked", "wrong", "left_paused", "left_running"):
            total[name] += figures[name]
    endings = Counter(figures["ending"] for figures in runs)
    fired = Counter[str]()
    for figures in runs:
        fired.update(figures["fired"])
    return f"{dict(total)}\n{dict(endings)}\n{dict(fired)}"


if __name__ == "__main__":
    main()
