"""Compares groups and single samples by generated tokens per second and the age of tokens.

    python -m experiments.frontier.samples

Rows that are in samples.json already are not made again. The machine has the step times of a
mixture of experts (30B-A3B on an H200) or of a dense model of 4 billion parameters, with KV kept.
For automatic scheduling there is also the forecast of its last schedule: seconds of a step, and
the age of tokens. The pools without prefill show what prefill costs a pool.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from aprilsched.config import SchedulerConfig
from aprilsched.kernel.core.messages.facts import BatchDelivered, Fact, ScheduleChanged
from aprilsched.kernel.core.policies.schedule import Forecast
from aprilsched.observe.figures.figures import Figures
from aprilsched.observe.figures.summary import Summary
from aprilsched.planning.presets import PRESETS
from aprilsched.planning.step_times.model import H200_QWEN3_4B, H200_QWEN3_4B_LINEAR, StepTimeModel
from aprilsched.simulation import NEVER, Simulation
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.modelled_engine import ModelledEngine
from aprilsched.simulation.workload import LongTailWorkload

__all__ = ["MOE"]

BATCHES, BURN_IN, SEEDS, KV_TOKENS = 60, 15, 2, 500_000
MOE = StepTimeModel(
    t0=6.4e-3,
    t0_experts=10.8e-3,
    expert_share=1 / 16,
    t1=15e-6,
    t2=34e-9,
    prefill_pass=41.19e-3,
    prefill_rate=70_480,
)


class _Meter:
    """Listens to a run: the generated tokens at each delivery, and the latest forecast."""

    def __init__(self) -> None:
        self.engines: list[ModelledEngine] = []
        self.marks: list[tuple[float, int]] = []
        self.forecast: Forecast | None = None

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, ScheduleChanged):
                self.forecast = fact.forecast
            elif isinstance(fact, BatchDelivered):
                generated = sum(each.batcher.counters.generated for each in self.engines)
                self.marks.append((now, generated))


def _arms() -> Iterator[tuple[str, StepTimeModel, SchedulerConfig]]:
    groups = SchedulerConfig(straggler="in_place")
    samples = replace(groups, delivery="samples", siblings=4)
    for name, model in (("moe", MOE), ("dense", H200_QWEN3_4B)):
        for unit in (groups, samples):
            yield name, model, replace(unit, over_provision=2.0)
            yield name, model, replace(unit, over_provision="auto")
    free = replace(MOE, prefill_pass=0.0, prefill_rate=1e12)
    for name, model in (("moe", MOE), ("moe without prefill", free)):
        for unit in (groups, samples):
            yield name, model, replace(unit, over_provision=1.75, refill="pool")
    for unit in (groups, samples):
        yield "dense, linear", H200_QWEN3_4B_LINEAR, replace(unit, over_provision=2.0)


def _measured(model: StepTimeModel, config: SchedulerConfig) -> dict[str, Any]:
    by_seed: list[tuple[float, float]] = []
    row: dict[str, Any] = {}
    for seed in range(SEEDS):
        meter, summary = _Meter(), Summary(trainer_waits=True)
        simulation = Simulation(
            config,
            LongTailWorkload(seed=seed, limits="exact"),
            engine=SimConfig(
                timing=model,
                kv_tokens=KV_TOKENS,
                admission="sglang-0.5.21",
                make_tokens=False,
                stream_interval=NEVER,
            ),
            batches=BATCHES,
            listeners=[summary, meter],
        )
        meter.engines = list(simulation.engines.values())
        simulation.run()
        (start, before), (end, after) = meter.marks[BURN_IN - 1], meter.marks[-1]
        age = Figures.over(summary.batches[BURN_IN:]).staleness_mean or 0.0
        by_seed.append(((after - before) / (end - start), age))
        if meter.forecast is not None:
            row["schedule"] = simulation.state.plan.schedule.why
            row["forecast"] = [meter.forecast.step_seconds, meter.forecast.mean_age]
            row["outcome"] = [(end - start) / (BATCHES - BURN_IN), age]
    speeds, ages = zip(*by_seed, strict=True)
    figures = {
        "generated_per_s": float(f"{fmean(speeds):.4g}"),
        "staleness": float(f"{fmean(ages):.4g}"),
        "by_seed": [[round(speed), round(age, 3)] for speed, age in by_seed],
    }
    return figures | row


def _presets() -> Iterator[tuple[str, SchedulerConfig]]:
    """The presets that carry responses, and waves of single samples to compare them with."""
    base = SchedulerConfig(straggler="in_place")
    for name in ("slime", "april", "areal", "copris", "pool"):
        yield name, PRESETS[name](base)
    for ratio in (1.25, 1.5, 2.0, 2.5, 3.0):
        yield "samples", replace(base, delivery="samples", siblings=4, over_provision=ratio)


def _write(part: str, arms: Iterable[tuple[str, StepTimeModel, SchedulerConfig]]) -> None:
    path = Path(__file__).with_name("samples.json")
    everything: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    known: list[dict[str, Any]] = everything.get(part, [])
    rows: list[dict[str, Any]] = []
    for name, model, config in arms:
        arm: dict[str, Any] = {
            "name": name,
            "delivery": config.delivery,
            "refill": config.policies.refill.name,
            "ratio": config.over_provision,
        }
        same = [row for row in known if all(row[key] == arm[key] for key in arm)]
        rows += same or [arm | _measured(model, config)]
        print(*arm.values(), rows[-1]["by_seed"], flush=True)
        path.write_text(json.dumps(everything | {part: rows}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    _write("kv_kept", _arms())
    _write("presets", ((name, MOE, config) for name, config in _presets()))


if __name__ == "__main__":
    main()
