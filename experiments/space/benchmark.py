"""Measures what automatic scheduling leaves out: unequal engines, mixed prompts, and settings that
are no candidates.

    python experiments/space/benchmark.py --out experiments/space/result.json

Runs that are in the file already are not made again, so it can be stopped and continued. See
README.md in this folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from aprilsched import LongTailWorkload, SchedulerConfig
from aprilsched.config import Dispatch
from aprilsched.coordinator.replanning import StepTimes
from aprilsched.core.messages.facts import (
    AttemptSent,
    BatchDelivered,
    BatchRequested,
    Fact,
    TokensReceived,
)
from aprilsched.core.policies.schedule import Objective
from aprilsched.engines.sim import SimConfig
from aprilsched.planning import Planner
from aprilsched.presets import PRESETS
from aprilsched.simulation import NEVER, Costs, Simulation, rare_collections
from aprilsched.telemetry.figures import Figures
from aprilsched.telemetry.summary import Summary
from aprilsched.timing.model import H200_QWEN3_4B as MODEL
from aprilsched.types import Prompt

BATCHES, BURN_IN = 28, 10
SHORT, LONG = 50, 8000
"""Prompts of the mixture, in tokens; every second one is long."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts, engines and a trainer."""

    name: str
    groups: int = 16
    speeds: tuple[float, ...] = (1.0,)
    """Speed of each engine in the units of the planner's first model."""
    train_s: float = 0.0
    mixed: bool = False
    kv_tokens: int = 1_000_000

    def __iter__(self) -> Iterator[Prompt]:
        for index, prompt in enumerate(LongTailWorkload(seed=7)):
            tokens = (SHORT, LONG)[index % 2] if self.mixed else 8
            yield replace(prompt, input_ids=np.zeros(tokens, dtype=np.int32))

    def config(self, **changes: Any) -> SchedulerConfig:
        values: dict[str, Any] = {"batch_groups": self.groups, "group_size": 8, **changes}
        return SchedulerConfig(**values)


class Meter:
    """The work that was generated until each request for a batch, and when batches came."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.delivered: list[float] = []
        self.tokens: list[int] = []
        self.work: list[float] = []
        """T_bound of what was generated, on an engine of speed 1, in seconds."""
        self._tokens, self._reads = 0, 0.0
        self._context: dict[int, int] = {}

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, AttemptSent):
                self._context[fact.request_id] = fact.tokens
            elif isinstance(fact, TokensReceived):
                before = self._context[fact.request_id]
                self._context[fact.request_id] = before + fact.tokens
                self._tokens += fact.tokens
                self._reads += fact.tokens * (before + fact.tokens / 2)
            elif isinstance(fact, BatchRequested):
                self.asked.append(now)
                self.tokens.append(self._tokens)
                work = MODEL.token_seconds(512) * self._tokens + MODEL.t2 * self._reads
                self.work.append(work)
            elif isinstance(fact, BatchDelivered):
                self.delivered.append(now)


def run(workload: Workload, config: SchedulerConfig) -> dict[str, Any]:
    """The figures of the batches after the burn-in, and the time of all of them."""
    planner, meter = Planner(MODEL, inline=True), Meter()
    speed = sum(workload.speeds)
    summary = Summary(trainer_waits=True, bound=lambda p, n: MODEL.bound_seconds(p, n, 512) / speed)
    unequal = len(set(workload.speeds)) > 1
    # The run fits one model to all engines, from the chunks that they stream.
    learns = [StepTimes(planner)] if config.automatic and unequal else []
    simulation = Simulation(
        config,
        workload,
        engines=len(workload.speeds),
        engine=[
            SimConfig(
                timing=MODEL.at_speed(each),
                kv_tokens=workload.kv_tokens,
                make_tokens=False,
                stream_interval=64 if learns else NEVER,
            )
            for each in workload.speeds
        ],
        costs=Costs(train_seconds=workload.train_s, refit_seconds=0.1),
        batches=BATCHES + 1,
        planner=planner,
        listeners=[summary, meter, *learns],
    )
    with rare_collections():
        simulation.run()
    kept = summary.batches[BURN_IN:BATCHES]
    seconds = meter.asked[BATCHES] - meter.asked[BURN_IN]
    tokens = meter.tokens[BATCHES] - meter.tokens[BURN_IN]
    drawn = [LongTailWorkload(seed=7).lengths(index).sum() for index in range(2000)]
    usual = float(np.mean(drawn)) * workload.groups * len(kept)
    driven = 0.0
    for place in range(BURN_IN, BATCHES):
        waited = meter.delivered[place] - meter.asked[place]
        step = meter.asked[place + 1] - meter.asked[place]
        driven += step if simulation.state.asynchronous and waited > 0 else waited
    # Chance in the lengths makes batches longer, as far as the engines decide how long they take.
    step_s = (seconds + driven * (usual / tokens - 1)) / len(kept)
    over = Figures.over(kept)
    age = over.staleness_mean or 0.0
    told = [f.efficiency_forecast for b in kept if (f := b.forecast) is not None]
    work = (meter.work[BATCHES] - meter.work[BURN_IN]) / speed
    return {
        "step_s": step_s,
        "value": float(np.exp(-age / Objective().usefulness_age)) / step_s,
        "age_mean": age,
        "off_policy": over.off_policy_token_share or 0.0,
        "from_the_start_s": meter.asked[BATCHES],
        "efficiency": work / (seconds - sum(b.trainer_seconds for b in kept)),
        "efficiency_forecast": float(np.mean(told)) if told else None,
        "chosen": simulation.state.plan.schedule.why.partition(":")[0],
    }


AUTO: dict[str, Any] = {"over_provision": "auto", "pace": "auto"}
SPEEDS = (1.0, 1.0, 0.5, 0.5)


def cells() -> Iterator[tuple[Workload, str, SchedulerConfig]]:
    """Every run: its workload, its name and its configuration."""
    for train_s in (0.0, 20.0):
        trainer = f", trainer of {train_s:g} s" if train_s else ""
        unequal = Workload(
            name=f"speeds {SPEEDS}{trainer}", speeds=SPEEDS, groups=32, train_s=train_s
        )
        yield from _against_fixed(unequal)
        by_length = Dispatch(placement="length")
        yield unequal, "auto, placement length", unequal.config(**AUTO, dispatch=by_length)
        yield from _against_fixed(
            Workload(name=f"mixed prompts{trainer}", mixed=True, train_s=train_s)
        )
        plain = Workload(name=f"one engine{trainer}", train_s=train_s)
        yield plain, "auto", plain.config(**AUTO)
        for rule in ("choose", "abort", "run"):
            yield plain, f"straggler {rule}", plain.config(**AUTO, straggler=rule)
        if train_s:
            for ready in (1, 3):
                yield plain, f"ready_batches {ready}", plain.config(**AUTO, ready_batches=ready)


def _against_fixed(work: Workload) -> Iterator[tuple[Workload, str, SchedulerConfig]]:
    yield work, "auto", work.config(**AUTO)
    for name in ("april", "areal", "pool"):
        yield work, name, PRESETS[name](work.config())
    yield work, "buckets 2.5", work.config(over_provision=2.5, refill="buckets")
    for ratio in (1.5, 2.0, 2.5):
        ahead = work.config(over_provision=ratio, pace="asynchronous")
        yield work, f"waves {ratio} ahead", ahead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="names of workloads that contain this")
    parser.add_argument("--policy", default="", help="names of policies that contain this")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if options.out.exists():
        rows = json.loads(options.out.read_text(encoding="utf-8"))
    open_ = [
        (work, name, config)
        for work, name, config in cells()
        if options.only in work.name
        and options.policy in name
        and name not in rows.get(work.name, {})
    ]
    with ProcessPoolExecutor(options.processes) as pool:
        runs: list[Callable[[], dict[str, Any]]] = [
            pool.submit(partial(run, work, config)).result for work, _, config in open_
        ]
        for (work, name, _), result in zip(open_, runs, strict=True):
            rows.setdefault(work.name, {})[name] = figures = result()
            options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            print(f"{work.name}, {name}: {figures}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
