"""Measures rolling refits against refits of all engines together, in virtual time."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aprilsched.config import LengthBuckets, Pool, Prices, SchedulerConfig
from aprilsched.core.messages.facts import BatchDelivered, Fact
from aprilsched.engines.sim import SimConfig
from aprilsched.presets import april
from aprilsched.simulation import Costs, Simulation
from aprilsched.telemetry.figures import Figures
from aprilsched.telemetry.summary import Summary
from aprilsched.timing.model import H200_QWEN3_4B as MODEL
from aprilsched.workload import LongTailWorkload

ENGINES, GROUPS = 16, 512
BATCHES, BURN_IN = 14, 6
MAX_RUNNING = 512
REFIT_SECONDS = 1.0
RESULT = Path(__file__).parent / "result.json"

BASE = SchedulerConfig(batch_groups=GROUPS)
TOGETHER = replace(BASE, pace="asynchronous")
ROLLING = replace(
    TOGETHER,
    straggler="run",
    refit="rolling",
    prices=Prices(step_seconds=MODEL.t0, prefill_tokens_per_s=MODEL.prefill_rate),
)

CASES: dict[str, tuple[SchedulerConfig, float]] = {
    "APRIL": (april(BASE), 0.0),
    "length buckets, 2 batches": (
        replace(BASE, over_provision=2.0, refill=LengthBuckets(store=5, probes=1, oldest=16)),
        0.0,
    ),
    "waves of 2, asynchronous": (replace(TOGETHER, over_provision=2.0), 0.0),
    "rolling, pool of 1": (replace(ROLLING, over_provision=1.0, refill="pool"), 0.0),
    "rolling, pool of 1.5": (
        replace(ROLLING, over_provision=1.5, refill=Pool(together=32)),
        0.0,
    ),
    "waves of 2, asynchronous, trainer": (replace(TOGETHER, over_provision=2.0), 20.0),
    "rolling, pool of 1.5, trainer": (
        replace(ROLLING, over_provision=1.5, refill=Pool(together=32)),
        20.0,
    ),
}
"""Each schedule with the seconds of a training step."""


@dataclass
class Meter:
    """A listener that reads the counters of the run at each delivery."""

    simulation: Simulation | None = None
    marks: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    mixed: int = 0
    """Delivered rollouts of several versions."""

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, BatchDelivered) and self.simulation is not None:
                self._mark(self.simulation, fact, now)

    def _mark(self, simulation: Simulation, fact: BatchDelivered, now: float) -> None:
        counters = [engine.batcher.counters for engine in simulation.engines.values()]
        versions = simulation.state.weights.versions
        self.mixed += sum(len({part[2] for part in r.segments}) > 1 for r in fact.rollouts)
        decode, generated, steps = (
            sum(getattr(c, name) for c in counters)
            for name in ("decode_seconds", "generated", "steps")
        )
        self.marks.append(
            {
                "now": now,
                "generated": generated,
                "decode": decode,
                "thin": MODEL.t0 * (steps - generated / MAX_RUNNING),
                "prefill": sum(c.prefill_seconds for c in counters),
                "recomputed": simulation.state.in_flight.counters.tokens_reprefilled,
                "versions": len(set(versions.engines.values())),
            }
        )


def measured(config: SchedulerConfig, train_seconds: float) -> dict[str, Any]:
    """The figures of one schedule, over the batches after the burn-in."""
    meter, summary = Meter(), Summary(trainer_waits=config.pace == "synchronous")
    simulation = meter.simulation = Simulation(
        config,
        LongTailWorkload(),
        engines=ENGINES,
        engine=SimConfig(
            timing=MODEL,
            max_running=MAX_RUNNING,
            kv_tokens=1_000_000,
            make_tokens=False,
            stream_interval=128,
        ),
        costs=Costs(refit_seconds=REFIT_SECONDS, train_seconds=train_seconds),
        batches=BATCHES,
        listeners=[summary, meter],
    )
    simulation.run()
    kept, counted = summary.batches[BURN_IN:], BATCHES - BURN_IN
    first, last = meter.marks[BURN_IN - 1], meter.marks[-1]
    over = {name: last[name] - first[name] for name in last}
    seconds = over["now"]
    delivered = Figures.over(kept)
    of_time = {name: over[name] / ENGINES / seconds for name in ("decode", "thin", "prefill")}
    return {
        "train_seconds": train_seconds,
        "step_seconds": seconds / counted,
        "generated_per_s": over["generated"] / seconds,
        "off_policy": delivered.off_policy_token_share,
        "staleness": delivered.staleness_mean,
        "staleness_max": delivered.staleness_max,
        "recomputed_per_batch": over["recomputed"] / counted,
        "versions_of_engines": sum(m["versions"] for m in meter.marks[BURN_IN:]) / counted,
        "rollouts_of_several_versions": meter.mixed,
        "thin_steps": of_time["thin"],
        "prefill": of_time["prefill"],
        "standing_still": 1 - of_time["decode"] - of_time["prefill"],
    }


def main(names: Sequence[str]) -> None:
    """Measure the cases of these names, or all of them, and write each to result.json."""
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in names or CASES:
        result[name] = {
            key: round(value, 4) if isinstance(value, float) else value
            for key, value in measured(*CASES[name]).items()
        }
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
        print(name, result[name], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
