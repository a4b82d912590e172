"""Compares automatic scheduling with every preset on eight workloads, in whole training steps.

    python experiments/auto_regret/workloads.py --out experiments/auto_regret/workloads.json

With `--seed` the same workloads have other lengths. Runs that are in the file already are not made
again, so it can be stopped and continued.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from aprilsched.config import Objective, SchedulerConfig
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.messages.facts import (
    AttemptSent,
    BatchDelivered,
    BatchRequested,
    Fact,
    TokensReceived,
)
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.observe.figures.figures import Figures
from aprilsched.observe.figures.summary import Summary
from aprilsched.planning import Planner
from aprilsched.planning.presets import PRESETS
from aprilsched.planning.step_times.model import H200_QWEN3_4B, StepTimeModel
from aprilsched.simulation import NEVER, Costs, Simulation, rare_collections
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.types import Prompt, SamplingParams

BATCHES, BURN_IN = 40, 14

Distribution = Callable[[Generator, Generator, int], NDArray[np.float64]]
"""Draws the lengths of a group, from a generator of its prompt and one of its responses."""


def lognormal(
    median: float = 700.0, sigma: float = 0.9, shared: float = 0.5, cap: float = 6000.0
) -> Distribution:
    def draw(prompt: Generator, own: Generator, size: int) -> NDArray[np.float64]:
        level, noise = prompt.standard_normal(), own.standard_normal(size)
        x = math.sqrt(shared) * level + math.sqrt(1 - shared) * noise
        return np.minimum(median * np.exp(sigma * x), cap)

    return draw


def pareto(least: float = 300.0, exponent: float = 1.5) -> Distribution:
    return lambda prompt, own, size: np.minimum(least * (1 + own.pareto(exponent, size)), 16_000)


def constant(length: float = 1000.0) -> Distribution:
    return lambda prompt, own, size: np.full(size, length)


def bimodal_by_group(share: float, short: float, long: float) -> Distribution:
    def draw(prompt: Generator, own: Generator, size: int) -> NDArray[np.float64]:
        if prompt.random() < share:
            return own.normal(long, 0.075 * long, size)
        return own.normal(short, 0.15 * short, size)

    return draw


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts whose lengths come from a distribution; the same for every schedule."""

    name: str
    distribution: Distribution
    prompt_tokens: int = 8
    groups: int = 16
    group_size: int = 8
    engines: int = 1
    max_running: int = 512
    kv_tokens: int = 1_000_000
    keeps_kv: bool = False
    train_s: float = 0.0
    model: StepTimeModel = field(default=H200_QWEN3_4B)
    seed: int = 7

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
        key = np.array([self.seed, index], dtype=np.uint64)
        counter = np.array([0, 0, 0, draw + 1], dtype=np.uint64)
        prompt, own = Generator(Philox(key=key)), Generator(Philox(key=key, counter=counter))
        drawn = self.distribution(prompt, own, self.group_size)
        return np.maximum(np.rint(drawn), 1).astype(np.int64)

    def lengths_again(self, prompt: Prompt, draw: int) -> NDArray[np.int64]:
        assert isinstance(prompt.key, int)
        return self.lengths(prompt.key, draw)

    def mean_work(self) -> float:
        """Return T_bound of a batch on all engines, in seconds: the mean of many."""
        works = [
            self.model.bound_seconds([self.prompt_tokens] * len(row), row, self.max_running)
            for index in range(100_000, 102_000)
            for row in (self.lengths(index, 0),)
        ]
        return float(np.mean(works)) * self.groups / self.engines


def workloads() -> Iterator[Workload]:
    """Workloads that show the spread: gains, chance, and the worst case."""
    base = lognormal()
    yield Workload(name="built-in", distribution=base)
    yield Workload(name="constant", distribution=constant())
    yield Workload(name="Pareto", distribution=pareto())
    yield Workload(name="bimodal by group", distribution=bimodal_by_group(0.2, 400, 4000))
    yield Workload(name="capped at twice the median", distribution=lognormal(cap=1400.0))
    yield Workload(name="KV kept", distribution=base, keeps_kv=True)
    yield Workload(name="trainer of 20 s", distribution=base, train_s=20.0)
    yield Workload(name="16 engines", distribution=base, engines=16, groups=64)


class Meter:
    """What was generated until each request for a batch, and whether the trainer waited for it."""

    def __init__(self, workload: Workload) -> None:
        self.asked: list[float] = []
        self.generated: list[float] = []
        self.delivered_at: list[float] = []
        self._each = workload.model.token_seconds(workload.max_running)
        self._t2 = workload.model.t2
        self._engines = workload.engines
        self._work = 0.0
        self._context: dict[int, int] = {}

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, AttemptSent):
                self._context[fact.request_id] = fact.tokens
            elif isinstance(fact, TokensReceived):
                before = self._context[fact.request_id]
                self._context[fact.request_id] = before + fact.tokens
                reads = fact.tokens * (before + fact.tokens / 2)
                self._work += (self._each * fact.tokens + self._t2 * reads) / self._engines
            elif isinstance(fact, BatchRequested):
                self.asked.append(now)
                self.generated.append(self._work)
            elif isinstance(fact, BatchDelivered):
                self.delivered_at.append(now)


def simulation_of(
    workload: Workload, config: SchedulerConfig, batches: int, listeners: Sequence[AnyListener]
) -> Simulation:
    """The simulation of so many batches of a workload."""
    return Simulation(
        config,
        workload,
        engines=workload.engines,
        engine=SimConfig(
            admission="sglang-0.5.21",
            timing=workload.model,
            max_running=workload.max_running,
            kv_tokens=workload.kv_tokens,
            make_tokens=False,
            stream_interval=NEVER,
        ),
        costs=Costs(train_seconds=workload.train_s, refit_seconds=0.1),
        batches=batches,
        planner=Planner(workload.model, max_running=workload.max_running, inline=True),
        listeners=listeners,
    )


def run(workload: Workload, config: SchedulerConfig) -> dict[str, Any]:
    """The figures of the batches after the burn-in."""
    last = BATCHES
    one = partial(workload.model.bound_seconds, max_running=workload.max_running)
    meter = Meter(workload)
    summary = Summary(bound=lambda p, n: one(p, n) / workload.engines)
    simulation = simulation_of(workload, config, last + 1, [summary, meter])
    with rare_collections():
        simulation.run()
    kept = summary.batches[BURN_IN:last]
    seconds = meter.asked[last] - meter.asked[BURN_IN]
    work = meter.generated[last] - meter.generated[BURN_IN]
    driven = 0.0
    for place in range(BURN_IN, last):
        waited = meter.delivered_at[place] - meter.asked[place]
        step = meter.asked[place + 1] - meter.asked[place]
        # On the asynchronous pace a step is as long as generation takes, if the trainer waits.
        overlaps = simulation.state.asynchronous and waited > 0
        driven += step if overlaps else waited
    mean_work = workload.mean_work()
    # Chance in the lengths makes batches longer, as far as the engines decide how long they take.
    step_s = (seconds + driven * (mean_work * len(kept) / work - 1)) / len(kept)
    over = Figures.over(kept)
    age = over.staleness_mean or 0.0
    counters = [engine.batcher.counters for engine in simulation.engines.values()]
    whole = simulation.agenda.now * workload.engines
    distance = max(0.0, (over.length_distance or 0.0) - (over.iid_length_distance or 0.0))
    # The mean of the exponential over tokens of similar staleness is nearly that of their mean.
    useful = math.exp(-age / Objective().staleness_scale)
    useful *= 1 - Objective().distance_price * distance
    return {
        "step_s": step_s,
        "step_s_as_measured": seconds / len(kept),
        "of_bound": work / seconds,
        "value": mean_work / step_s * useful,
        "off_policy": over.off_policy_token_share or 0.0,
        "staleness_mean": age,
        "staleness_max": over.staleness_max,
        "distance_beyond_iid": distance,
        "decoding": sum(c.decode_seconds for c in counters) / whole,
        "prefill": sum(c.prefill_seconds for c in counters) / whole,
        "chosen": simulation.state.plan.schedule.why,
    }


def policies(workload: Workload) -> Iterator[tuple[str, SchedulerConfig]]:
    base = SchedulerConfig(
        batch_groups=workload.groups,
        group_size=workload.group_size,
        straggler="in_place" if workload.keeps_kv else "retract",
        max_staleness=None,
    )
    yield "auto", replace(base, over_provision="auto", pace="auto")
    for name, preset in PRESETS.items():
        if name == "auto":
            continue
        try:
            config = preset(base)
        except ConfigError:
            continue
        if config.policies.staleness.rule != "restart":  # slower where tokens may be stale
            yield name, config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="names of workloads that contain this")
    parser.add_argument("--policy", nargs="+", help="names of policies")
    parser.add_argument("--seed", type=int, default=7, help="decides the lengths")
    parser.add_argument("--again", action="store_true", help="make the runs of these once more")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if options.out.exists():
        rows = json.loads(options.out.read_text(encoding="utf-8"))
    for workload in (replace(each, seed=options.seed) for each in workloads()):
        if options.only not in workload.name:
            continue
        found = rows.setdefault(workload.name, {})
        for name, config in policies(workload):
            unwanted = options.policy is not None and name not in options.policy
            if unwanted or (name in found and not options.again):
                continue
            found[name] = figures = run(workload, config)
            options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            print(
                f"{workload.name}, {name}: {figures['step_s']:.2f} s, of bound "
                f"{figures['of_bound']:.3f}, value {figures['value']:.3f}, off-policy "
                f"{figures['off_policy']:.2f}, staleness "
                f"{figures['staleness_mean']:.2f} {figures['chosen']}",
                file=sys.stderr,
                flush=True,
            )


if __name__ == "__main__":
    main()
