"""Compares automatic scheduling with every preset on many workloads, in whole training steps.

    python experiments/auto_regret/workloads.py --out workloads.json
    python experiments/auto_regret/workloads.py --drawn 0 36 --out drawn.json
    python experiments/auto_regret/workloads.py --caller --out caller.json

The first set was made by hand. The second one is drawn at random, so that anybody can draw others:
`--drawn 1000 1040`. With `--seed` the same workloads have other lengths. Runs that are in the file
already are not made again, so it can be stopped and continued.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from aprilsched.config import Objective, SchedulerConfig
from aprilsched.core.messages.facts import (
    AttemptSent,
    BatchDelivered,
    BatchRequested,
    Fact,
    TokensReceived,
)
from aprilsched.engines.sim.settings import SimConfig
from aprilsched.errors import ConfigError
from aprilsched.planning import Planner
from aprilsched.presets import PRESETS
from aprilsched.simulation import NEVER, Costs, Simulation, rare_collections
from aprilsched.telemetry.base import AnyListener
from aprilsched.telemetry.figures import Figures
from aprilsched.telemetry.summary import Summary
from aprilsched.timing.model import H200_QWEN3_4B, StepTimeModel
from aprilsched.types import Group, Prompt, SamplingParams

BATCHES, BURN_IN = 40, 14
ROLLOUTS = 128
"""Of a batch in most workloads. With fewer there are more batches, because chance is larger."""

Law = Callable[[Generator, Generator, int, float], NDArray[np.float64]]
"""Draws the lengths of a group of a size from what is the prompt's and what is the responses' own;
the last argument is the share of the run that is over, for laws that change."""


def lognormal(
    median: float = 700.0, sigma: float = 0.9, shared: float = 0.5, cap: float = 6000.0
) -> Law:
    def draw(prompt: Generator, own: Generator, size: int, _: float) -> NDArray[np.float64]:
        level, noise = prompt.standard_normal(), own.standard_normal(size)
        x = math.sqrt(shared) * level + math.sqrt(1 - shared) * noise
        return np.minimum(median * np.exp(sigma * x), cap)

    return draw


def uniform(least: float = 100.0, most: float = 2000.0) -> Law:
    return lambda prompt, own, size, over: own.uniform(least, most, size)


def exponential(mean: float = 1000.0) -> Law:
    return lambda prompt, own, size, over: np.minimum(own.exponential(mean, size), 12_000)


def pareto(least: float = 300.0, exponent: float = 1.5) -> Law:
    return lambda prompt, own, size, over: np.minimum(
        least * (1 + own.pareto(exponent, size)), 16_000
    )


def weibull(scale: float, shape: float) -> Law:
    return lambda prompt, own, size, over: np.minimum(scale * own.weibull(shape, size), 16_000)


def constant(length: float = 1000.0) -> Law:
    return lambda prompt, own, size, over: np.full(size, length)


def bimodal(share: float, short: float, long: float, *, by_group: bool) -> Law:
    def draw(prompt: Generator, own: Generator, size: int, _: float) -> NDArray[np.float64]:
        def mode(length: float) -> NDArray[np.float64]:
            return own.normal(length, (0.075 if length == long else 0.15) * length, size)

        if by_group:
            return mode(long) if prompt.random() < share else mode(short)
        chosen = own.random(size) < share
        return np.where(chosen, mode(long), mode(short))

    return draw


def drifting(law: Callable[[float], Law], first: float, last: float, *, begin: float = 0.0) -> Law:
    """A law whose parameter goes from `first` to `last` from `begin` on, in shares of the run."""

    def draw(prompt: Generator, own: Generator, size: int, over: float) -> NDArray[np.float64]:
        share = min(max(over - begin, 0.0) / (1 - begin), 1.0)
        return law(first + share * (last - first))(prompt, own, size, over)

    return draw


def flipping(one: Law, other: Law, *, period: float = 0.5) -> Law:
    """Two laws in turn, each for `period` of the run."""
    return lambda prompt, own, size, over: (one if int(over / period) % 2 == 0 else other)(
        prompt, own, size, over
    )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts whose responses have the lengths that a law draws; the same for every schedule."""

    name: str
    law: Law
    prompt_tokens: int = 8
    groups: int = 16
    sizes: tuple[int, ...] = (8,)
    """The sizes of groups in turn."""
    engines: int = 1
    max_running: int = 512
    kv_tokens: int = 1_000_000
    keeps_kv: bool = False
    train_s: float = 0.0
    streamed: bool = False
    max_staleness: int | None = None
    model: StepTimeModel = field(default=H200_QWEN3_4B)
    changes: bool = False
    """Whether the law changes during the run."""
    reward_s: float = 0.0
    accepted: tuple[float, float] = (1.0, 1.0)
    """The share that is accepted of groups up to the median of their tokens, and of longer ones."""
    tools: int = 0
    """Number of gaps between the turns of a response; their times are lognormal with a median of
    5 s and a sigma of 1, so one in a hundred is longer than 51 s."""
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
                group_size=self._size(index) if len(self.sizes) > 1 else None,
            )
            index += 1

    @property
    def batches(self) -> int:
        rollouts = self.groups * np.mean(self.sizes)
        return int(BATCHES * min(max(ROLLOUTS / rollouts, 1.0), 4.0))

    def lengths(self, index: int, draw: int) -> NDArray[np.int64]:
        key = np.array([self.seed, index], dtype=np.uint64)
        counter = np.array([0, 0, 0, draw + 1], dtype=np.uint64)
        prompt, own = Generator(Philox(key=key)), Generator(Philox(key=key, counter=counter))
        drawn = self.law(prompt, own, self._size(index), index / self.groups / self.batches)
        return np.maximum(np.rint(drawn), 1).astype(np.int64)

    def lengths_again(self, prompt: Prompt, draw: int) -> NDArray[np.int64]:
        assert isinstance(prompt.key, int)
        return self.lengths(prompt.key, draw)

    def accept(self, group: Group) -> bool:
        long = sum(len(rollout.token_ids) for rollout in group.rollouts) > _median_tokens(self)
        return bool(self._generator(group.prompt, 1).random() < self.accepted[long])

    def pauses(self, prompt: Prompt, index: int) -> list[float]:
        rng = self._generator(prompt, 2 + index)
        return (5.0 * np.exp(rng.standard_normal(self.tools))).tolist()

    def _generator(self, prompt: Prompt, subject: int) -> Generator:
        assert isinstance(prompt.key, int)
        key = np.array([self.seed, prompt.key], dtype=np.uint64)
        return Generator(Philox(key=key, counter=np.array([0, 0, subject, 0], dtype=np.uint64)))

    def mean_work(self) -> float:
        """T_bound of what a usual batch takes to generate, on all engines, in seconds; with what is
        refused."""
        first, last = 100_000, 102_000
        if self.changes:
            first, last = BURN_IN * self.groups, self.batches * self.groups
        works = [
            self.model.bound_seconds([self.prompt_tokens] * len(row), row, self.max_running)
            for index in range(first, last)
            for draw in range(-(-2000 // (last - first)))
            for row in (self.lengths(index, draw),)
        ]
        return float(np.mean(works)) * self.groups / self.engines / float(np.mean(self.accepted))

    def _size(self, index: int) -> int:
        return self.sizes[index % len(self.sizes)]


def workloads() -> Iterator[Workload]:
    """The set that was made by hand, and with which auto was developed."""
    base = lognormal()
    by_response = bimodal(0.2, 400, 4000, by_group=False)
    by_group = bimodal(0.2, 400, 4000, by_group=True)
    yield Workload(name="built-in", law=base)
    yield Workload(name="uniform", law=uniform())
    yield Workload(name="exponential", law=exponential())
    yield Workload(name="Pareto", law=pareto())
    yield Workload(name="constant", law=constant())
    yield Workload(name="bimodal by response", law=by_response)
    yield Workload(name="bimodal by group", law=by_group)
    yield Workload(name="bimodal by group, 32 groups", law=by_group, groups=32)
    yield Workload(name="group-correlated", law=lognormal(shared=0.95))
    yield Workload(name="siblings unlike", law=lognormal(shared=0.05))
    yield Workload(name="capped at twice the median", law=lognormal(cap=1400.0))
    yield Workload(name="heavy, cap 16k", law=lognormal(sigma=1.1, cap=16_000.0))
    yield Workload(name="drifting", law=drifting(lognormal, 500, 1000), changes=True)
    flips = flipping(lognormal(500), lognormal(1200))
    yield Workload(name="flipping", law=flips, changes=True)
    yield Workload(name="long prompts", law=base, prompt_tokens=4000)
    yield Workload(name="small batches", law=base, groups=4)
    yield Workload(name="small engine", law=base, max_running=32)
    yield Workload(name="small KV pool", law=base, kv_tokens=60_000)
    yield Workload(name="small KV pool, KV kept", law=base, kv_tokens=60_000, keeps_kv=True)
    yield Workload(name="KV kept", law=base, keeps_kv=True)
    yield Workload(name="KV kept, Pareto", law=pareto(), keeps_kv=True)
    for train_s in (5.0, 20.0, 60.0):
        yield Workload(name=f"trainer of {train_s:g} s", law=base, train_s=train_s)
    yield Workload(name="trainer of 20 s, KV kept", law=base, train_s=20.0, keeps_kv=True)
    yield Workload(name="trainer of 5 s, bimodal by group", law=by_group, train_s=5.0)
    yield Workload(name="trainer of 5 s, exponential", law=exponential(), train_s=5.0)
    yield Workload(name="trainer of 20 s, long prompts", law=base, train_s=20, prompt_tokens=4000)
    yield Workload(name="4 engines", law=base, engines=4, groups=32)
    yield Workload(name="4 engines, trainer of 20 s", law=base, engines=4, groups=32, train_s=20.0)
    yield Workload(name="16 engines", law=base, engines=16, groups=64)
    yield Workload(name="64 engines", law=base, engines=64, groups=64)


@cache
def _median_tokens(workload: Workload) -> float:
    return float(np.median([workload.lengths(index, 0).sum() for index in range(1001)]))


def caller_workloads() -> Iterator[Workload]:
    """Workloads whose rewards, filters or tools take their time."""
    base = Workload(name="", law=lognormal())
    for reward_s in (20.0, 60.0):
        yield replace(base, name=f"rewards of {reward_s:g} s", reward_s=reward_s)
    told = "rewards of 20 s, trainer of 20 s"
    yield replace(base, name=told, reward_s=20.0, train_s=20.0)
    yield replace(base, name="half refused", accepted=(0.5, 0.5))
    yield replace(base, name="nine of ten long groups refused", accepted=(0.9, 0.1))
    yield replace(base, name="half refused, KV kept", accepted=(0.5, 0.5), keeps_kv=True)
    yield replace(base, name="tools of 5 s", tools=3)
    yield replace(base, name="tools of 5 s, KV kept", tools=3, keeps_kv=True)


SLOW = replace(
    H200_QWEN3_4B, t0=20e-3, t1=0.08e-3, t2=0.3e-6, prefill_pass=40e-3, prefill_rate=9000.0
)
"""A slower machine, or a larger model."""
COSTLY_PASSES = replace(H200_QWEN3_4B, prefill_pass=30e-3)


def _drawn_law(rng: Generator) -> tuple[str, Law, float, bool]:
    """A law in words, its longest response, and whether it changes."""

    def between(least: float, most: float, digits: int = 1) -> float:
        """Log-uniform, with so many digits."""
        drawn = math.exp(rng.uniform(math.log(least), math.log(most)))
        return float(f"{drawn:.{digits}e}")

    sigma, shared = round(rng.uniform(0.3, 1.4), 1), round(rng.uniform(0.0, 0.95), 2)
    median, cap = between(200, 1500), 16_000.0
    change = ("lognormal", median, sigma, shared)
    match int(rng.integers(11)):
        case 0 | 1:
            return f"lognormal {change[1:]}", lognormal(median, sigma, shared, cap), cap, False
        case 2:
            cap = round(rng.uniform(1, 4) * median)
            told = f"lognormal {change[1:]} capped at {cap:g}"
            return told, lognormal(median, sigma, shared, cap), cap, False
        case 3:
            most = between(500, 5000)
            least = round(rng.uniform(0.02, 0.8) * most)
            return f"uniform ({least:g}, {most:g})", uniform(least, most), most, False
        case 4:
            return f"exponential ({median:g})", exponential(median), 12_000.0, False
        case 5:
            exponent = round(rng.uniform(1.1, 3.0), 1)
            return f"Pareto ({median:g}, {exponent})", pareto(median, exponent), cap, False
        case 6:
            return f"constant ({median:g})", constant(median), median, False
        case 7 | 8 as kind:
            share, times = round(rng.uniform(0.05, 0.5), 2), round(rng.uniform(3, 15), 1)
            long, by_group = times * median, kind == 8
            told = f"bimodal by {'group' if by_group else 'response'}"
            told += f" ({share}, {median:g}, {long:g})"
            return told, bimodal(share, median, long, by_group=by_group), 1.5 * long, False
        case 9:
            shape = round(rng.uniform(0.5, 2.5), 1)
            return f"Weibull ({median:g}, {shape})", weibull(median, shape), cap, False
        case _:
            other = round(median * rng.choice([0.4, 0.6, 1.6, 2.5]))

            def of(level: float) -> Law:
                return lognormal(level, sigma, shared)

            if rng.random() < 0.5:
                begin = round(rng.uniform(0.0, 0.6), 1)
                told = f"lognormal {change[1:]} drifting to {other} from {begin}"
                return told, drifting(of, median, other, begin=begin), 6000.0, True
            period = round(rng.uniform(0.1, 0.5), 2)
            told = f"lognormal {change[1:]} flipping to {other} each {period}"
            return told, flipping(of(median), of(other), period=period), 6000.0, True


def drawn(index: int) -> Workload:
    """A workload that nobody has chosen; a function of its index."""
    rng = Generator(Philox(key=np.array([18, index], dtype=np.uint64)))
    told, law, longest, changes = _drawn_law(rng)
    sizes = ((1,), (4,), (8,), (8,), (16,), (4, 8, 16))[rng.integers(6)]
    groups = int(rng.choice([4, 8, 16, 32, 64, 128]))
    while groups * np.mean(sizes) > 512:
        groups //= 2
    rollouts = groups * float(np.mean(sizes))
    engines = int(rng.choice([1, 1, 1, 2, 4, 8, 16, 32, 64]))
    engines = max(1, min(engines, int(rollouts / 4)))
    prompt_tokens = int(math.exp(rng.uniform(math.log(8), math.log(8000))))
    kv = int(rng.choice([10**9, 10**9, 1_000_000, 0]))
    if not kv:
        # Room for a share of the responses of a batch, and for the longest one.
        kv = int(rng.uniform(0.2, 0.8) * rollouts / engines * (prompt_tokens + longest / 8))
    workload = Workload(
        name="",
        law=law,
        changes=changes,
        sizes=sizes,
        groups=groups,
        engines=engines,
        prompt_tokens=prompt_tokens,
        kv_tokens=max(kv, int(1.5 * (prompt_tokens + longest))),
        max_running=int(rng.choice([32, 64, 128, 256, 512, 1024])),
        keeps_kv=bool(rng.random() < 0.35),
        train_s=float(rng.choice([0, 0, 0, 2, 5, 20, 60])),
        streamed=bool(rng.random() < 0.3),
        max_staleness=(None, None, None, None, None, 0, 0, 1, 1, 3)[rng.integers(10)],
        model=(H200_QWEN3_4B, H200_QWEN3_4B, SLOW, COSTLY_PASSES)[rng.integers(4)],
    )
    parts = [
        f"{index}: {told}",
        f"{groups} x {'/'.join(map(str, sizes))}",
        f"{engines} of {workload.max_running}",
        f"prompts {prompt_tokens}",
    ]
    pool = workload.kv_tokens
    parts += [f"pool {pool // 1000}k"] if pool < 10**9 else []
    parts += ["KV kept"] if workload.keeps_kv else []
    if workload.train_s:
        streamed = ", streamed" if workload.streamed else ""
        parts.append(f"trainer {workload.train_s:g} s{streamed}")
    parts += [] if workload.max_staleness is None else [f"staleness {workload.max_staleness}"]
    parts += {SLOW: ["slow"], COSTLY_PASSES: ["costly passes"]}.get(workload.model, [])
    return replace(workload, name=", ".join(parts))


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
            timing=workload.model,
            max_running=workload.max_running,
            kv_tokens=workload.kv_tokens,
            make_tokens=False,
            stream_interval=NEVER,
        ),
        costs=Costs(
            train_seconds=workload.train_s, refit_seconds=0.1, reward_seconds=workload.reward_s
        ),
        accept=workload.accept if min(workload.accepted) < 1 else None,
        pauses=workload.pauses if workload.tools else None,
        batches=batches,
        streamed=workload.streamed,
        planner=Planner(workload.model, max_running=workload.max_running, inline=True),
        listeners=listeners,
    )


def run(workload: Workload, config: SchedulerConfig) -> dict[str, Any]:
    """The figures of the batches after the burn-in."""
    last = workload.batches
    one = partial(workload.model.bound_seconds, max_running=workload.max_running)
    meter = Meter(workload)
    summary = Summary(trainer_waits=True, bound=lambda p, n: one(p, n) / workload.engines)
    simulation = simulation_of(workload, config, last + 1, [summary, meter])
    with rare_collections():
        simulation.run()
    kept = summary.batches[BURN_IN:last]
    seconds = meter.asked[last] - meter.asked[BURN_IN]
    work = meter.generated[last] - meter.generated[BURN_IN]
    if config.policies.staleness.rule == "restart":
        # What is thrown away is no work.
        work = sum(batch.t_bound or 0.0 for batch in kept)
    driven = 0.0
    for place in range(BURN_IN, last):
        waited = meter.delivered_at[place] - meter.asked[place]
        step = meter.asked[place + 1] - meter.asked[place]
        # On the asynchronous pace a step is as long as generation takes, if the trainer waits.
        # Where no token may be stale, nothing generates meanwhile.
        ahead = simulation.state.asynchronous and config.policies.staleness.bound != 0
        overlaps = ahead and waited > 0
        driven += step if overlaps else waited
    mean_work = workload.mean_work()
    # Chance in the lengths makes batches longer, as far as the engines decide how long they take.
    step_s = (seconds + driven * (mean_work * len(kept) / work - 1)) / len(kept)
    over = Figures.over(kept)
    age = over.staleness_mean or 0.0
    counters = [engine.batcher.counters for engine in simulation.engines.values()]
    whole = simulation.agenda.now * workload.engines
    distance = max(0.0, (over.length_distance or 0.0) - (over.iid_length_distance or 0.0))
    # The mean of the exponential over ages that are near each other is nearly that of their mean.
    useful = math.exp(-age / Objective().usefulness_age)
    useful *= 1 - Objective().distance_price * distance
    return {
        "step_s": step_s,
        "step_s_as_measured": seconds / len(kept),
        "of_bound": work / seconds,
        "value": mean_work / step_s * useful,
        "off_policy": over.off_policy_token_share or 0.0,
        "age_mean": age,
        "age_max": over.staleness_max,
        "bound": workload.max_staleness,
        "masked": sum(b.sums.masked for b in kept) / sum(b.sums.sampled for b in kept),
        "distance_beyond_iid": distance,
        "decoding": sum(c.decode_seconds for c in counters) / whole,
        "prefill": sum(c.prefill_seconds for c in counters) / whole,
        "chosen": simulation.state.plan.schedule.why,
    }


def policies(workload: Workload) -> Iterator[tuple[str, SchedulerConfig]]:
    base = SchedulerConfig(
        batch_groups=workload.groups,
        group_size=max(workload.sizes),
        straggler="in_place" if workload.keeps_kv else "retract",
        max_staleness=workload.max_staleness,
    )
    yield "auto", replace(base, over_provision="auto", pace="auto")
    if workload.max_staleness == 0 and not workload.keeps_kv:
        yield "auto, tail", replace(base, over_provision="auto", refill="tail")
    for name, preset in PRESETS.items():
        if name == "auto":
            continue
        try:
            config = preset(base)
        except ConfigError:
            continue
        least = workload.max_staleness
        if least is not None and (config.policies.staleness.bound or 0) > least:
            config = replace(config, max_staleness=least)
        restarts = config.policies.staleness.rule == "restart"
        if name != "sync" and restarts != (least == 0):
            # Where no token may be stale, admission starts one batch at a time, so all others would
            # wait as `sync` does. Where tokens may be stale, those that throw them away are slower.
            continue
        yield name, config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="names of workloads that contain this")
    parser.add_argument("--policy", nargs="+", help="names of policies")
    parser.add_argument("--seed", type=int, default=7, help="decides the lengths")
    parser.add_argument("--drawn", type=int, nargs=2, help="the first, and the one after the last")
    parser.add_argument("--caller", action="store_true", help="slow rewards, filters and tools")
    parser.add_argument("--again", action="store_true", help="make the runs of these once more")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if options.out.exists():
        rows = json.loads(options.out.read_text(encoding="utf-8"))
    several = caller_workloads() if options.caller else workloads()
    if options.drawn is not None:
        several = map(drawn, range(*options.drawn))
    for workload in (replace(each, seed=options.seed) for each in several):
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
                f"{figures['off_policy']:.2f}, age {figures['age_mean']:.2f} {figures['chosen']}",
                file=sys.stderr,
                flush=True,
            )


if __name__ == "__main__":
    main()
