"""Compares automatic scheduling with every preset on many workloads, in whole training steps.

    python experiments/auto_regret/workloads.py --out experiments/auto_regret/workloads.json

Runs that are in the file already are not made again, so it can be stopped and continued.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from aprilsched.config import Objective, SchedulerConfig
from aprilsched.core.messages.facts import BatchDelivered, BatchRequested, Fact, TokensReceived
from aprilsched.engines.sim.config import SimConfig
from aprilsched.errors import ConfigError
from aprilsched.planning import Planner
from aprilsched.presets import PRESETS
from aprilsched.simulation import Costs, Simulation, rare_collections
from aprilsched.simulation.simulation import NEVER
from aprilsched.telemetry import batch_figures as of
from aprilsched.telemetry.summary import Summary
from aprilsched.timing.model import H200_QWEN3_4B
from aprilsched.types import Prompt, SamplingParams

MODEL = H200_QWEN3_4B
SIZE = 8
BATCHES, BURN_IN = 40, 14
FREE = Objective(usefulness_age=math.inf, distance_price=0.0)
"""Wants speed alone."""

Law = Callable[[Generator, Generator, float], NDArray[np.float64]]
"""Draws the lengths of a group from what is the prompt's and what is the responses' own; the last
argument is the batch, for laws that change."""


def lognormal(
    median: float = 700.0, sigma: float = 0.9, shared: float = 0.5, cap: float = 6000.0
) -> Law:
    def draw(prompt: Generator, own: Generator, _: float) -> NDArray[np.float64]:
        level, noise = prompt.standard_normal(), own.standard_normal(SIZE)
        x = math.sqrt(shared) * level + math.sqrt(1 - shared) * noise
        return np.minimum(median * np.exp(sigma * x), cap)

    return draw


def uniform(_: Generator, own: Generator, batch: float) -> NDArray[np.float64]:
    return own.uniform(100, 2000, SIZE)


def exponential(_: Generator, own: Generator, batch: float) -> NDArray[np.float64]:
    return np.minimum(own.exponential(1000, SIZE), 12_000)


def pareto(_: Generator, own: Generator, batch: float) -> NDArray[np.float64]:
    return np.minimum(300 * (1 + own.pareto(1.5, SIZE)), 16_000)


def constant(_: Generator, own: Generator, batch: float) -> NDArray[np.float64]:
    return np.full(SIZE, 1000.0)


def by_response(_: Generator, own: Generator, batch: float) -> NDArray[np.float64]:
    long = own.random(SIZE) < 0.2
    return np.where(long, own.normal(4000, 300, SIZE), own.normal(400, 60, SIZE))


def by_group(prompt: Generator, own: Generator, batch: float) -> NDArray[np.float64]:
    long = prompt.random() < 0.2
    return own.normal(4000, 300, SIZE) if long else own.normal(400, 60, SIZE)


def drifting(prompt: Generator, own: Generator, batch: float) -> NDArray[np.float64]:
    grown = 1 + min(batch / BATCHES, 1.0)
    return grown * lognormal(500)(prompt, own, batch)


def flipping(prompt: Generator, own: Generator, batch: float) -> NDArray[np.float64]:
    return lognormal(500 if int(batch / 20) % 2 == 0 else 1200)(prompt, own, batch)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts whose responses have the lengths that a law draws; the same for every schedule."""

    name: str
    law: Law
    prompt_tokens: int = 8
    groups: int = 16
    engines: int = 1
    max_running: int = 512
    kv_tokens: int = 1_000_000
    keeps_kv: bool = False
    train_s: float = 0.0
    streamed: bool = False
    changes: bool = False
    """Whether the law changes during the run."""

    def __iter__(self) -> Iterator[Prompt]:
        index = 0
        while True:
            yield Prompt(
                input_ids=np.zeros(self.prompt_tokens, dtype=np.int32),
                sampling=tuple(
                    SamplingParams(max_new_tokens=int(n), ignore_eos=True)
                    for n in self.lengths(index, 0)
                ),
                key=index,
            )
            index += 1

    def lengths(self, index: int, draw: int) -> NDArray[np.int64]:
        prompt = Generator(Philox(key=np.array([7, index], dtype=np.uint64)))
        counter = np.array([0, 0, 0, draw + 1], dtype=np.uint64)
        own = Generator(Philox(key=np.array([7, index], dtype=np.uint64), counter=counter))
        drawn = self.law(prompt, own, index / self.groups)
        return np.maximum(np.rint(drawn), 1).astype(np.int64)

    def lengths_again(self, prompt: Prompt, draw: int) -> NDArray[np.int64]:
        assert isinstance(prompt.key, int)
        return self.lengths(prompt.key, draw)

    def mean_work(self) -> float:
        """T_bound of a usual batch, on all engines, in seconds."""
        rows = [self.lengths(index, 0) for index in range(100_000, 102_000)]
        prompts = [self.prompt_tokens] * SIZE
        works = [MODEL.bound_seconds(prompts, row, self.max_running) for row in rows]
        return float(np.mean(works)) * self.groups / self.engines


def workloads() -> Iterator[Workload]:
    base = lognormal()
    yield Workload(name="built-in", law=base)
    yield Workload(name="uniform", law=uniform)
    yield Workload(name="exponential", law=exponential)
    yield Workload(name="Pareto", law=pareto)
    yield Workload(name="constant", law=constant)
    yield Workload(name="bimodal by response", law=by_response)
    yield Workload(name="bimodal by group", law=by_group)
    yield Workload(name="bimodal by group, 32 groups", law=by_group, groups=32)
    yield Workload(name="group-correlated", law=lognormal(shared=0.95))
    yield Workload(name="siblings unlike", law=lognormal(shared=0.05))
    yield Workload(name="capped at twice the median", law=lognormal(cap=1400.0))
    yield Workload(name="heavy, cap 16k", law=lognormal(sigma=1.1, cap=16_000.0))
    yield Workload(name="drifting", law=drifting, changes=True)
    yield Workload(name="flipping", law=flipping, changes=True)
    yield Workload(name="long prompts", law=base, prompt_tokens=4000)
    yield Workload(name="small batches", law=base, groups=4)
    yield Workload(name="small engine", law=base, max_running=32)
    yield Workload(name="small KV pool", law=base, kv_tokens=60_000)
    yield Workload(name="small KV pool, KV kept", law=base, kv_tokens=60_000, keeps_kv=True)
    yield Workload(name="KV kept", law=base, keeps_kv=True)
    yield Workload(name="KV kept, Pareto", law=pareto, keeps_kv=True)
    for train_s in (5.0, 20.0, 60.0):
        yield Workload(name=f"trainer of {train_s:g} s", law=base, train_s=train_s)
    yield Workload(name="trainer of 20 s, KV kept", law=base, train_s=20.0, keeps_kv=True)
    yield Workload(name="trainer of 5 s, bimodal by group", law=by_group, train_s=5.0)
    yield Workload(name="trainer of 5 s, exponential", law=exponential, train_s=5.0)
    yield Workload(name="trainer of 20 s, long prompts", law=base, train_s=20, prompt_tokens=4000)
    yield Workload(name="4 engines", law=base, engines=4, groups=32)
    yield Workload(name="4 engines, trainer of 20 s", law=base, engines=4, groups=32, train_s=20.0)
    yield Workload(name="16 engines", law=base, engines=16, groups=64)
    yield Workload(name="64 engines", law=base, engines=64, groups=64)


class Meter:
    """What was generated until each request for a batch, and whether the trainer waited for it."""

    def __init__(self, workload: Workload) -> None:
        self.asked: list[float] = []
        self.generated: list[float] = []
        self.delivered_at: list[float] = []
        self._prompt = workload.prompt_tokens
        self._each = MODEL.t1 + MODEL.t0 / workload.max_running
        self._engines = workload.engines
        self._work = 0.0
        self._have: dict[int, int] = {}

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, TokensReceived):
                before = self._have.get(fact.request_id, 0)
                after = self._have[fact.request_id] = before + fact.tokens
                reads = self._prompt * fact.tokens + (after**2 - before**2) / 2
                self._work += (self._each * fact.tokens + MODEL.t2 * reads) / self._engines
            elif isinstance(fact, BatchRequested):
                self.asked.append(now)
                self.generated.append(self._work)
            elif isinstance(fact, BatchDelivered):
                self.delivered_at.append(now)


def run(workload: Workload, config: SchedulerConfig) -> dict[str, Any]:
    """The figures of the batches after the burn-in."""
    one = partial(MODEL.bound_seconds, max_running=workload.max_running)
    meter = Meter(workload)
    summary = Summary(trainer_waits=True, bound=lambda p, n: one(p, n) / workload.engines)
    simulation = Simulation(
        config,
        workload,
        engines=workload.engines,
        engine=SimConfig(
            timing=MODEL,
            max_running=workload.max_running,
            kv_tokens=workload.kv_tokens,
            make_tokens=False,
            stream_interval=NEVER,
        ),
        costs=Costs(train_seconds=workload.train_s, refit_seconds=0.1),
        batches=BATCHES + 1,
        streamed=workload.streamed,
        planner=Planner(MODEL, max_running=workload.max_running, inline=True),
        listeners=[summary, meter],
    )
    with rare_collections():
        simulation.run()
    kept = summary.batches[BURN_IN:BATCHES]
    seconds = meter.asked[BATCHES] - meter.asked[BURN_IN]
    work = meter.generated[BATCHES] - meter.generated[BURN_IN]
    if config.policies.staleness.rule == "restart":
        # What is thrown away is no work.
        work = sum(batch.figures.t_bound or 0.0 for batch in kept)
    driven = 0.0
    for place in range(BURN_IN, BATCHES):
        waited = meter.delivered_at[place] - meter.asked[place]
        step = meter.asked[place + 1] - meter.asked[place]
        # On the asynchronous pace a step is as long as generation takes, if the trainer waits.
        overlaps = simulation.state.asynchronous and waited > 0
        driven += step if overlaps else waited
    mean_work = work / len(kept) if workload.changes else workload.mean_work()
    # Chance in the lengths makes batches longer, as far as the engines decide how long they take.
    step_s = (seconds + driven * (mean_work * len(kept) / work - 1)) / len(kept)
    stale = of.staleness(kept)
    counters = [engine.batcher.counters for engine in simulation.engines.values()]
    whole = simulation.agenda.now * workload.engines
    steady = of.steady_state(kept, 0)
    distance = max(0.0, (steady.length_distance or 0.0) - (steady.iid_length_distance or 0.0))
    # The mean of the exponential over ages that are near each other is nearly that of their mean.
    useful = math.exp(-stale.mean / Objective().usefulness_age)
    useful *= 1 - Objective().distance_price * distance
    return {
        "step_s": step_s,
        "step_s_as_measured": seconds / len(kept),
        "of_bound": work / seconds,
        "value": mean_work / step_s * useful,
        "off_policy": of.off_policy_token_share(kept) or 0.0,
        "age_mean": stale.mean,
        "age_max": stale.max,
        "distance_beyond_iid": distance,
        "decoding": sum(c.decode_seconds for c in counters) / whole,
        "prefill": sum(c.prefill_seconds for c in counters) / whole,
        "chosen": simulation.state.plan.schedule.why,
    }


def policies(workload: Workload) -> Iterator[tuple[str, SchedulerConfig]]:
    base = SchedulerConfig(
        batch_groups=workload.groups,
        group_size=SIZE,
        straggler="in_place" if workload.keeps_kv else "retract",
    )
    yield "auto", replace(base, over_provision="auto", pace="auto")
    yield "auto, speed alone", replace(base, over_provision="auto", pace="auto", objective=FREE)
    for name, preset in PRESETS.items():
        if name == "auto":
            continue
        try:
            yield name, preset(base)
        except ConfigError:
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="names of workloads that contain this")
    parser.add_argument("--policy", default="", help="names of policies that contain this")
    parser.add_argument("--again", action="store_true", help="make the runs of these once more")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if options.out.exists():
        rows = json.loads(options.out.read_text(encoding="utf-8"))
    for workload in workloads():
        if options.only not in workload.name:
            continue
        found = rows.setdefault(workload.name, {})
        for name, config in policies(workload):
            if options.policy not in name or (name in found and not options.again):
                continue
            found[name] = figures = run(workload, config)
            options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            print(
                f"{workload.name}, {name}: {figures['step_s']:.2f} s, of bound "
                f"{figures['of_bound']:.3f}, value {figures['value']:.3f}, off-policy "
                f"{figures['off_policy']:.2f}, age {figures['age_mean']:.2f} {figures['chosen']}",
                file=sys.stderr,
                flush=True,
            )


if __name__ == "__main__":
    main()
