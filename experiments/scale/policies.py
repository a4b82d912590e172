"""Measures what a delivered rollout costs the scheduler under every policy, as a fleet grows.

    python experiments/scale/policies.py --out experiments/scale/policies.json

See README.md in this folder. `--only finish --only length` measures some policies, `--profile 20`
prints where their time goes at the largest size.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aprilsched.config import (
    Dispatch,
    LengthBuckets,
    Samples,
    SchedulerConfig,
    Staleness,
    TailBatching,
    Tokens,
)
from aprilsched.core.messages.facts import Fact
from aprilsched.engines.sim.settings import SimConfig
from aprilsched.simulation import NEVER, Costs, Simulation
from aprilsched.telemetry.run_state import RunState
from aprilsched.workload import LongTailWorkload

GROUP = 8
SIZES = ((64, 1_024), (64, 16_384), (1_024, 16_384))
"""Engines and rollouts in flight: more and more on 64 engines, and as many on each of 1,024 as on
the first 64, so that the calls of an update are the same part of the cost."""
WARM = 2
"""Batches of a run that are not measured."""
BATCHES = 2
"""Batches that are: two, because tail batching has short ones and long ones."""
ROLLOUTS = 16_384
"""Delivered rollouts of a measurement, about: the smaller the batches, the more runs there are."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    ratio: float = 2.0
    """Rollouts in flight for each one of a batch."""
    interval: int = NEVER
    """Tokens between two chunks. Where a response is seen only when it ends, it costs least."""
    kv_share: float | None = None
    """The engines' KV pools together, for each token that is in flight on average."""
    train_seconds: float = 0.0
    reward_seconds: float = 0.0
    streamed: bool = False
    accept: bool = False
    prompt_group: int = GROUP
    """Responses that a prompt has lengths for."""


def dispatch(**settings: Any) -> dict[str, Any]:
    return {"dispatch": Dispatch(**settings)}


ASYNC: dict[str, Any] = {"pace": "asynchronous", "straggler": "in_place"}

POLICIES: dict[str, Policy] = {
    # Stragglers.
    "retract": Policy(),
    "in_place": Policy(settings={"straggler": "in_place"}),
    "abort": Policy(settings={"straggler": "abort"}),
    "run": Policy(settings={"straggler": "run"}),
    "choose": Policy(settings={"straggler": "choose"}),
    # Refill rules.
    "pool": Policy(settings={"refill": "pool"}),
    "buckets": Policy(settings={"refill": LengthBuckets(store=4), "over_provision": 1.25}, ratio=4),
    "buckets, mixed": Policy(
        settings={"refill": LengthBuckets(store=4, mixed=1), "over_provision": 1.25}, ratio=5
    ),
    "tail": Policy(settings={"refill": "tail"}),
    "tail, racing": Policy(
        settings={"refill": TailBatching(responses=1.25)}, interval=128, prompt_group=10
    ),
    # Stop rules.
    "stop samples": Policy(settings={"stop": "samples"}),
    "stop tokens": Policy(settings={"stop": "tokens"}),
    # Placements.
    "spread": Policy(settings=dispatch(placement="spread")),
    "length": Policy(settings=dispatch(placement="length")),
    "length, pool": Policy(settings={"refill": "pool", **dispatch(placement="length")}),
    # Staleness.
    "mask": Policy(settings={"max_staleness": 1}),
    "evict": Policy(settings={"max_staleness": Staleness(1, rule="evict")}),
    "finish": Policy(settings={"max_staleness": Staleness(1, rule="finish")}),
    "finish, pool": Policy(
        settings={"refill": "pool", "max_staleness": Staleness(1, rule="finish")}
    ),
    "restart": Policy(settings={"refill": "tail", "max_staleness": Staleness(0, rule="restart")}),
    # The order of sending, moving, and how many are sent.
    "shortest first": Policy(settings=dispatch(order="shortest")),
    "longest first": Policy(settings=dispatch(order="longest")),
    "migrate": Policy(settings=dispatch(migrate=True), interval=128, kv_share=1.1),
    "at most half": Policy(settings={"refill": "pool"}),
    # Paces and refits.
    "asynchronous": Policy(settings=ASYNC, train_seconds=5),
    "asynchronous, run": Policy(
        settings={"pace": "asynchronous", "straggler": "run"}, train_seconds=5
    ),
    "rolling": Policy(
        settings={"pace": "asynchronous", "straggler": "run", "refit": "rolling"},
        interval=128,
        train_seconds=5,
    ),
    "rolling, pool": Policy(
        settings={
            "pace": "asynchronous",
            "straggler": "run",
            "refit": "rolling",
            "refill": "pool",
        },
        interval=128,
        train_seconds=5,
    ),
    "automatic": Policy(settings={"over_provision": "auto", "refill": "wave"}),
    # How the trainer takes batches, and its filter.
    "streamed": Policy(streamed=True),
    "filtered": Policy(accept=True),
    "rewards after 2 s": Policy(settings=ASYNC, train_seconds=5, reward_seconds=2),
}


def configuration(name: str, in_flight: int) -> SchedulerConfig:
    policy = POLICIES[name]
    groups = round(in_flight / policy.ratio / GROUP)
    settings: dict[str, Any] = {"over_provision": policy.ratio, **policy.settings}
    if settings.get("stop") == "tokens":
        settings["stop"] = Tokens(groups * GROUP * 1_000)
    if settings.get("stop") == "samples":
        settings["stop"] = Samples(groups * GROUP)
    if name == "at most half":
        settings |= dispatch(max_in_flight=in_flight // 2)
    return SchedulerConfig(batch_groups=groups, group_size=GROUP, **settings)


class Clock:
    """The CPU time that some calls take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*arguments)
            finally:
                self.seconds += time.thread_time() - began

        return timed


class Marks:
    """The delivered rollouts and both clocks, at every delivery."""

    def __init__(self, core: Clock, state: Clock) -> None:
        self.now: Callable[[], int] = int
        self.rows: list[tuple[int, float, float]] = []
        self._core, self._state = core, state

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        if not self.rows or self.now() > self.rows[-1][0]:
            self.rows.append((self.now(), self._core.seconds, self._state.seconds))


def measure(name: str, engines: int, in_flight: int) -> dict[str, Any]:
    """Some runs with so many rollouts in flight, which are of the same batches at every size, since
    the first batches of a run are unlike later ones."""
    config = configuration(name, in_flight)
    batch = config.batch_groups * GROUP
    runs = [
        one(name, config, engines, in_flight, seed)
        for seed in range(max(1, round(ROLLOUTS / batch / BATCHES)))
    ]
    delivered, core, state = (sum(column) for column in zip(*runs, strict=True))
    return {
        "policy": name,
        "engines": engines,
        "in_flight": in_flight,
        "rollouts": delivered,
        "core_us": round(1e6 * core / delivered, 1),
        "run_state_us": round(1e6 * state / delivered, 1),
    }


def one(
    name: str, config: SchedulerConfig, engines: int, in_flight: int, seed: int
) -> tuple[int, float, float]:
    """The delivered rollouts of one run, and the CPU seconds of the core and of a RunState."""
    policy = POLICIES[name]
    core, state = Clock(), Clock()
    watching, marks = RunState(), Marks(core, state)
    watching.on_facts = state.of(watching.on_facts)
    kv_tokens = 1_000_000
    if policy.kv_share is not None:
        kv_tokens = int(policy.kv_share * 600 * in_flight / engines)
    simulation = Simulation(
        config,
        LongTailWorkload(group_size=policy.prompt_group, seed=seed),
        engines=engines,
        engine=SimConfig(make_tokens=False, stream_interval=policy.interval, kv_tokens=kv_tokens),
        batches=WARM + BATCHES,
        costs=Costs(train_seconds=policy.train_seconds, reward_seconds=policy.reward_seconds),
        streamed=policy.streamed,
        accept=(lambda _: True) if policy.accept else None,
        listeners=(watching, marks),
    )
    scheduler = simulation._loop.core  # pyright: ignore[reportPrivateUsage]
    scheduler.handle = core.of(scheduler.handle)
    marks.now = lambda: simulation.state.in_flight.counters.delivered
    # A collection looks at every record at some event or other, which says nothing of a policy.
    gc.collect()
    gc.disable()
    simulation.run()
    (before, *begin), (after, *end) = marks.rows[WARM], marks.rows[-1]
    return after - before, end[0] - begin[0], end[1] - begin[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=3)
    parser.add_argument("--only", action="append", choices=tuple(POLICIES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", type=int)
    options = parser.parse_args()
    if options.one is not None:
        name, engines, in_flight = options.one
        print(json.dumps(measure(name, int(engines), int(in_flight))))
        return
    names = options.only or list(POLICIES)
    if options.profile is not None:
        for name in names:
            with cProfile.Profile() as profile:
                print(measure(name, *SIZES[-1]))
            pstats.Stats(profile).sort_stats("tottime").print_stats(options.profile)
        return
    rows: list[dict[str, Any]] = []
    for name in names:
        # The sizes take turns, so that a busy moment of the machine does not meet one of them.
        for _ in range(options.repeats):
            for engines, in_flight in SIZES:
                command = [sys.executable, __file__, "--one", name, str(engines), str(in_flight)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                rows.append(json.loads(done.stdout))
        costs = {
            size: min(row["core_us"] for row in rows if _is(row, name, size)) for size in SIZES
        }
        print(name, *costs.values(), f"{max(costs.values()) / costs[SIZES[0]]:.2f}", flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps({"runs": rows}, indent=1) + "\n")


def _is(row: dict[str, Any], name: str, size: tuple[int, int]) -> bool:
    return row["policy"] == name and (row["engines"], row["in_flight"]) == size


if __name__ == "__main__":
    main()
