"""Measures whole training steps: generation, update and trainer, for schedules old and new.

    python -m experiments.frontier.steps --out experiments/frontier/steps.json

Rows that are in the file already are kept, so a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprilsched.config import LengthBuckets, Pool, SchedulerConfig
from aprilsched.engines.sim.settings import SimConfig
from aprilsched.planning import Planner
from aprilsched.presets import PRESETS
from aprilsched.simulation import NEVER, Costs, Simulation, rare_collections
from aprilsched.telemetry.figures import Figures
from aprilsched.telemetry.summary import Summary
from aprilsched.timing.model import H200_QWEN3_4B
from aprilsched.workload import LongTailWorkload

MODEL = H200_QWEN3_4B
MAX_RUNNING = 512
SIZE = 8
FLEETS = {1: 32, 4: 64, 16: 128}
"""Groups of a batch by the number of engines. More engines serve larger batches, and each of them
has fewer requests, as in practice."""
TRAINERS = (0.0, 20.0)
BATCHES = {1: 60, 4: 45, 16: 36}
BURN_IN = 15
EPOCH = 30
"""Number of batches of an epoch, where prompts come twice."""
SEEDS = (0, 1)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule by name."""

    name: str
    config: SchedulerConfig
    streamed: bool = False
    kv: str = "recompute"
    """Whether contexts are recomputed after an update, or kept."""
    epochs: int = 1
    """With 2 the prompts of the counted batches were seen once before."""
    engines: int = 1
    """Number of engines that it needs."""


def schedules() -> Iterator[Schedule]:
    """Every schedule that is compared."""
    base = SchedulerConfig()
    yield Schedule(name="waiting", config=PRESETS["sync"](base))
    yield Schedule(name="waiting, streamed", config=PRESETS["sync"](base), streamed=True)
    for ratio in (1.125, 1.25):
        wave = replace(base, over_provision=ratio, refill="wave")
        yield Schedule(name=f"waves {ratio:g}", config=wave)
    for name in ("slime", "april", "areal", "copris", "pool"):
        yield Schedule(name=name, config=PRESETS[name](base))
    yield Schedule(name="pool 2", config=replace(PRESETS["pool"](base), over_provision=2.0))
    more = replace(PRESETS["areal"](base), over_provision=2.0)
    # The same number of responses in flight as with rolling refits.
    yield Schedule(name="areal, 2 batches", config=replace(more, refill=Pool(together=4)))
    yield Schedule(name="april, streamed", config=PRESETS["april"](base), streamed=True)
    buckets = replace(base, over_provision=1.69, refill=LengthBuckets(store=5, probes=1, oldest=16))
    yield Schedule(name="buckets", config=buckets)
    tail = replace(base, over_provision=1.25, refill="tail")
    yield Schedule(name="tail, tokens kept", config=tail)
    for name in ("rollpacker", "on_policy"):
        yield Schedule(name=name, config=PRESETS[name](base))
        yield Schedule(name=f"{name}, streamed", config=PRESETS[name](base), streamed=True)
    yield Schedule(name="on_policy, second epoch", config=PRESETS["on_policy"](base), epochs=2)
    yield Schedule(name="auto, second epoch", config=PRESETS["auto"](base), epochs=2)
    rolling = replace(
        base, refit="rolling", pace="asynchronous", straggler="run", refill=Pool(together=4)
    )
    for ratio in (1.0, 1.25, 1.5, 2.0):
        yield Schedule(
            name=f"rolling {ratio:g}", config=replace(rolling, over_provision=ratio), engines=2
        )
    yield Schedule(name="auto, rolling", config=PRESETS["auto"](rolling), engines=2)
    yield Schedule(name="auto", config=PRESETS["auto"](base))
    kept = SchedulerConfig(straggler="in_place")
    for name in ("april", "areal", "auto"):
        yield Schedule(name=f"{name}, KV kept", config=PRESETS[name](kept), kv="kept")


class Distances:
    """Distances of batches from the law of the lengths that are drawn."""

    def __init__(self, workload: LongTailWorkload) -> None:
        drawn = np.concatenate([workload.lengths(index) for index in range(4096)])
        self._drawn = np.sort(drawn)

    def __call__(self, lengths: NDArray[np.int64]) -> float:
        """The Kolmogorov distance of the lengths int64 [n] of a batch from the law, 0 to 1."""
        ordered = np.sort(lengths)
        law = np.searchsorted(self._drawn, ordered, side="right") / len(self._drawn)
        steps = np.arange(len(ordered) + 1) / len(ordered)
        return float(max(np.max(steps[1:] - law), np.max(law - steps[:-1])))


def run(schedule: Schedule, engines: int, train_s: float, seed: int) -> dict[str, Any]:
    """One run: the figures of the batches after the burn-in."""
    groups = FLEETS[engines]
    batches, burn_in, epoch = BATCHES[engines], BURN_IN, None
    if schedule.epochs == 2:
        batches, burn_in, epoch = 2 * EPOCH, EPOCH + 5, EPOCH * groups
    workload = LongTailWorkload(group_size=SIZE, seed=seed, epoch_prompts=epoch)
    config = replace(schedule.config, batch_groups=groups, group_size=SIZE)
    one = partial(MODEL.bound_seconds, max_running=MAX_RUNNING)
    summary = Summary(
        trainer_waits=config.first_pace == "synchronous", bound=lambda p, n: one(p, n) / engines
    )
    simulation = Simulation(
        config,
        workload,
        engines=engines,
        engine=SimConfig(
            timing=MODEL,
            max_running=MAX_RUNNING,
            kv_tokens=1_000_000,
            make_tokens=False,
            stream_interval=NEVER,
        ),
        costs=Costs(train_seconds=train_s),
        batches=batches,
        streamed=schedule.streamed,
        planner=Planner(MODEL, max_running=MAX_RUNNING, inline=True),
        listeners=[summary],
    )
    with rare_collections():
        simulation.run()
    kept = summary.batches[burn_in:]
    # A batch's seconds end at its delivery. The trainer's seconds lie between that and the next.
    step_s = statistics.fmean(b.seconds + b.trainer_seconds for b in kept)
    bound_s = statistics.fmean(b.t_bound or 0.0 for b in kept)
    counters = [engine.batcher.counters for engine in simulation.engines.values()]
    flight = simulation.state.in_flight.counters
    over = Figures.over(kept)
    distance = Distances(workload)
    seconds = simulation.agenda.now * engines
    return {
        "step_s": step_s,
        "bound_s": bound_s,
        "efficiency": bound_s / step_s,
        "off_policy": over.off_policy_token_share or 0.0,
        "age_mean": over.staleness_mean or 0.0,
        "age_max": over.staleness_max,
        "distance": statistics.fmean(distance(b.lengths) for b in kept),
        "mean_length": float(np.concatenate([b.lengths for b in kept]).mean()),
        "thrown_away": flight.tokens_discarded / flight.tokens_delivered,
        "recomputed_per_batch": flight.tokens_reprefilled / len(summary.batches),
        "decoding": sum(c.decode_seconds for c in counters) / seconds,
        "prefill": sum(c.prefill_seconds for c in counters) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures whole training steps.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engines", type=int, nargs="*", default=list(FLEETS))
    parser.add_argument("--only", help="names of schedules that contain this")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.out.exists():
        rows = json.loads(options.out.read_text(encoding="utf-8"))
    there = {(row["schedule"], row["engines"], row["train_s"]) for row in rows}
    for engines in options.engines:
        for train_s in TRAINERS:
            for schedule in schedules():
                key = (schedule.name, engines, train_s)
                if key in there or (options.only and options.only not in schedule.name):
                    continue
                if engines < schedule.engines:
                    continue
                runs = [run(schedule, engines, train_s, seed) for seed in SEEDS]
                row = {"schedule": schedule.name, "kv": schedule.kv, "engines": engines}
                row |= {"train_s": train_s, "runs": runs}
                row["mean"] = {k: statistics.fmean(each[k] for each in runs) for k in runs[0]}
                rows.append(row)
                options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
                mean = row["mean"]
                print(
                    f"{engines:3d} engines, trainer {train_s:3.0f} s, {schedule.name:22s}: "
                    f"{mean['step_s']:6.1f} s, {mean['efficiency']:.3f} of the bound, off-policy "
                    f"{mean['off_policy']:.2f}, age {mean['age_mean']:.2f} (max "
                    f"{mean['age_max']:.0f}), distance {mean['distance']:.3f}, thrown away "
                    f"{mean['thrown_away']:.2f}",
                    file=sys.stderr,
                    flush=True,
                )


if __name__ == "__main__":
    main()
