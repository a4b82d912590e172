"""Compares APRIL with waiting, in APRIL's own set-up, for several length laws; see README.md."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from aprilsched.config import SchedulerConfig
from aprilsched.presets import april, auto, sync
from aprilsched.timing.model import StepTimeModel
from aprilsched.workload import LongTailWorkload
from experiments.april_gains.engines import engine_of_two_gpus
from experiments.frontier.measured import Figures, Run, run
from experiments.frontier.results import write_section

__all__ = ["RESULT", "SIGMAS", "gain"]

RESULT = Path(__file__).with_name("result.json")
SIGMAS = (0.3, 0.5, 0.7, 0.9, 1.1)
_MEDIANS = (600.0, 2000.0, 6000.0, 12_000.0)
_SIZES = {"4B": 1.0, "8B": 8.2 / 4.0}
_CAP, _ENGINES, _BATCHES, _BURN_IN, _SEEDS = 16_384, 4, 30, 8, 2

# APRIL and waiting call everything back when a batch is full, as slime does.
_BASE = SchedulerConfig(batch_groups=32, group_size=8, straggler="abort")
POLICIES: dict[str, SchedulerConfig] = {
    "sync": sync(_BASE),
    "april": april(_BASE),
    "rounds": replace(_BASE, refill="buckets", over_provision=1.69),
    "auto": auto(_BASE),
}
_ANCHORED = {"low": (440.0, 0.80), "middle": (530.0, 0.83), "high": (612.0, 0.87)}
"""Median and sigma: 75th percentiles of 755, 930 and 1,100 tokens, and a longest of 32,000 draws
(4 deviations) of 25, 28 and 32 times the median."""


def gain(
    model: StepTimeModel, median: float, sigma: float, policy: str = "april"
) -> dict[str, Any]:
    """Of a policy over waiting, by what counts as throughput and by which batches."""
    several = [_one(model, median, sigma, seed, policy) for seed in range(_SEEDS)]
    found: dict[str, Any] = {"median": median, "sigma": sigma, "policy": policy}
    for name in several[0]:
        found[name] = round(fmean(one[name] for one in several), 4)
    return found


def _one(
    model: StepTimeModel, median: float, sigma: float, seed: int, policy: str
) -> dict[str, float]:
    law = LongTailWorkload(median=median, sigma=sigma, cap=_CAP, seed=seed, prompt_tokens=128)
    runs = {name: _run(name, law, model) for name in ("sync", policy)}
    steady = {name: one.figures(_BURN_IN) for name, one in runs.items()}
    first = {name: one.figures(0, 1) for name, one in runs.items()}
    ten = {name: one.figures(0, 10) for name, one in runs.items()}
    return {
        "generated": _over(steady, policy, "generated_per_s"),
        "consumed": _over(steady, policy, "delivered_per_s"),
        "seconds_a_batch": steady["sync"].seconds / steady[policy].seconds - 1,
        "first_batch_generated": _over(first, policy, "generated_per_s"),
        "first_batch_consumed": _over(first, policy, "delivered_per_s"),
        "first_batch_seconds": first["sync"].seconds / first[policy].seconds - 1,
        "first_ten_generated": _over(ten, policy, "generated_per_s"),
        "first_ten_consumed": _over(ten, policy, "delivered_per_s"),
        "waiting_efficiency": steady["sync"].efficiency,
        "efficiency": steady[policy].efficiency,
        "off_policy": steady[policy].off_policy,
        "mean_length": steady["sync"].mean_length,
        "waiting_tokens_per_s": steady["sync"].generated_per_s,
    }


@lru_cache(maxsize=8)
def _run(policy: str, law: LongTailWorkload, model: StepTimeModel) -> Run:
    return run(POLICIES[policy], law, batches=_BATCHES, engines=_ENGINES, model=model)


def _over(figures: dict[str, Figures], policy: str, name: str) -> float:
    return getattr(figures[policy], name) / getattr(figures["sync"], name) - 1


def main() -> None:
    anchored: list[dict[str, Any]] = []
    for size, scale in _SIZES.items():
        for name, (median, sigma) in _ANCHORED.items():
            for policy in ("april", "rounds", "auto")[
                : 3 if (size, name) == ("4B", "middle") else 2
            ]:
                row = gain(engine_of_two_gpus(scale), median, sigma, policy)
                anchored.append({"size": size, "law": name} | row)
                print(size, name, policy, row["generated"], row["consumed"], row["off_policy"])
    write_section("anchored", anchored, RESULT)
    curves: list[dict[str, Any]] = []
    for size, scale in _SIZES.items():
        for median in _MEDIANS if size == "4B" else _MEDIANS[1:]:
            for sigma in SIGMAS:
                row = gain(engine_of_two_gpus(scale), median, sigma)
                curves.append({"size": size} | row)
                print(size, median, sigma, row["generated"], row["consumed"])
                write_section("curves", curves, RESULT)


if __name__ == "__main__":
    main()
