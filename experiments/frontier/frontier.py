"""Measures efficiency and off-policy share of every schedule on the example workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aprilsched.config import SchedulerConfig
from aprilsched.planning.step_times.model import H200_QWEN3_4B
from aprilsched.simulation.workload import LongTailWorkload
from experiments.frontier.measured import Figures, mean, run
from experiments.frontier.results import rounded, write_section
from experiments.frontier.schedules import Candidate, keeping_kv, recomputing

__all__ = ["seeds_of"]

BATCHES, BURN_IN, SEEDS = 150, 15, 2


def seeds_of(
    config: SchedulerConfig,
    workload: LongTailWorkload,
    *,
    batches: int = BATCHES,
    burn_in: int = BURN_IN,
    seeds: int = SEEDS,
) -> dict[str, Any]:
    """The mean over seeds of one schedule's figures, and each seed's efficiency and share.

    The efficiency is that of the delivered responses. That of the generated tokens takes what the
    refined model has beside T_bound for work.
    """
    several: list[Figures] = []
    chosen = ""
    for seed in range(seeds):
        one = run(config, workload_of(workload, seed), batches=batches, model=H200_QWEN3_4B)
        several.append(one.figures(burn_in))
        chosen = one.schedule
    found: dict[str, Any] = dict(rounded(mean(several)))
    found["efficiency"] = found.pop("efficiency_delivered")
    found["by_seed"] = [[round(f.efficiency_delivered, 4), round(f.off_policy, 4)] for f in several]
    if config.over_provision == "auto":
        found["schedule"] = chosen
    return found


def workload_of(workload: LongTailWorkload, seed: int) -> LongTailWorkload:
    """The same law under another seed."""
    return replace(workload, seed=seed)


def _part(name: str, candidates: Sequence[Candidate]) -> None:
    rows: list[dict[str, Any]] = []
    for candidate in candidates:
        found = seeds_of(candidate.config, LongTailWorkload())
        row = {"name": candidate.name, "family": candidate.family, "ratio": candidate.ratio}
        rows.append(row | found)
        print(f"{name:10} {candidate.name:13} {found['efficiency']:.3f} {found['off_policy']:.3f}")
        write_section(name, rows)


def main() -> None:
    _part("recompute", recomputing())
    _part("kv_kept", keeping_kv())


if __name__ == "__main__":
    main()
