"""Compares ways to correct forecasts by what earlier batches did.

    python experiments/forecasts/benchmark.py --out experiments/forecasts/result.json

See README.md in this folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from aprilsched import LongTailWorkload, SchedulerConfig
from aprilsched.config import LengthBuckets, Pool, Wave
from aprilsched.core.policies.refill import Refill
from aprilsched.core.policies.schedule import Schedule
from aprilsched.engines.sim import SimConfig
from aprilsched.planning import Planner, planner
from aprilsched.planning.planner import Bias
from aprilsched.simulation import NEVER, Costs, Simulation
from aprilsched.timing.model import H200_QWEN3_4B as MODEL

SLOWER = 1.08
SLOW = MODEL.at_speed(1 / SLOWER)
"""The engines: all that they do takes longer than the planner's model says."""
PAUSE_S = 0.3
RULES: dict[str, tuple[Refill, float]] = {
    "wave": (Wave(), 1.5),
    "pool": (Pool(together=4), 1.25),
    "buckets": (LengthBuckets(store=3.5, oldest=6), 1.625),
}
OWN, OTHERS = 4, 6
"""Batches of a rule that are known when it is forecast, and of each other rule."""

Batches = list[tuple[float, float]]
"""Work and time of each batch, over those that were forecast without a correction."""


@dataclass
class Recorded(Bias):
    """Corrects nothing, and keeps what it is told."""

    def __post_init__(self) -> None:
        super().__init__()
        self.told: Batches = []

    def observe(self, rule: str, *, work: float, time: float) -> None:
        self.told.append((work, time))


def recorded(rule: str, seed: int, batches: int) -> Batches:
    """The batches of a run under one schedule on engines that are slower than forecast."""
    refill, ratio = RULES[rule]
    only = Schedule(over_provision=ratio, refill=refill)
    own = Planner(MODEL, inline=True)
    own.bias = bias = Recorded()
    with patch.object(planner, "candidates", return_value=[only]):
        Simulation(
            SchedulerConfig(over_provision="auto"),
            LongTailWorkload(seed=seed),
            engine=SimConfig(timing=SLOW, make_tokens=False, stream_interval=NEVER),
            costs=Costs(pause_seconds=PAUSE_S),
            planner=own,
            batches=batches,
        ).run()
    return bias.told


def ratio(batches: Sequence[tuple[float, float]]) -> float:
    return sum(work for work, _ in batches) / sum(time for _, time in batches)


def errors(runs: dict[str, Batches]) -> list[dict[str, Any]]:
    """How far each way is off for each rule, with a few of its batches and more of the others."""
    found: list[dict[str, Any]] = []
    for rule, batches in runs.items():
        known = {other: told[:OTHERS] for other, told in runs.items() if other != rule}
        own, truth = batches[:OWN], ratio(batches[OWN:])
        bias = Bias()
        for other, told in known.items():
            for work, time in told:
                bias.observe(other, work=work, time=time)
        for work, time in own:
            bias.observe(rule, work=work, time=time)
        everything = [batch for told in (*known.values(), own) for batch in told]
        guesses = {
            "nothing": 1.0,
            "one factor for all": ratio(everything),
            "the rule's own": ratio(own),
            "both": bias.factor(rule),
        }
        off = {name: guess / truth - 1 for name, guess in guesses.items()}
        found.append({"rule": rule, "truth": truth, **off})
    return found


def summed(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean absolute error of each way, and what each rule's factor really was."""
    by_rule = {rule: [row for row in rows if row["rule"] == rule] for rule in RULES}
    ways = ("nothing", "one factor for all", "the rule's own", "both")
    return {
        "mean_error": {
            way: {
                name: statistics.fmean(abs(row[way]) for row in some)
                for name, some in {**by_rule, "all": rows}.items()
            }
            for way in ways
        },
        "truth": {rule: [row["truth"] for row in some] for rule, some in by_rule.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    raw: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        runs = {rule: recorded(rule, seed, options.batches) for rule in RULES}
        rows += [{"seed": seed, **row} for row in errors(runs)]
        raw += [{"seed": seed, "rule": rule, "batches": told} for rule, told in runs.items()]
        print(json.dumps(rows[-len(RULES) :]), flush=True)
    result: dict[str, Any] = {**summed(rows), "rows": rows, "runs": raw}
    print(json.dumps({name: result[name] for name in ("mean_error", "truth")}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
