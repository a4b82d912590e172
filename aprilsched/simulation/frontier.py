"""Speed against staleness: a point for each schedule, from simulated runs on the same prompts.

.. code-block:: python

    arms = {
        "wave@2": SchedulerConfig(over_provision=2.0),
        "samples:4@2": SchedulerConfig(over_provision=2.0, delivery="samples", siblings=4),
    }
    points = frontier(arms, lambda config, seed: simulate(workload, config, seed=seed), seeds=3)
    figure = aprilsched.observe.plots.frontier(points)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from aprilsched.errors import ConfigError
from aprilsched.kernel.core.config import SchedulerConfig
from aprilsched.simulation.results import SimulationResult
from aprilsched.simulation.virtual import checked_count


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontierPoint:
    """The figures of one arm after the burn-in: means over seeds.

    Attributes:
        arm: name of the arm.
        siblings: number of siblings of each sample; None if whole groups are delivered.
        seeds: number of seeds.
        tokens_per_s: sampled tokens that the trainer gets, over the seconds of whole steps.
        tokens_per_s_range: the smallest and the largest of the seeds.
        staleness: mean staleness of these tokens, in versions.
        staleness_range: the smallest and the largest of the seeds.
        oldest: largest staleness of a token of any seed, in versions.
        off_policy_share: share of the tokens that an older version sampled.
        efficiency: T_bound over the seconds without those of the trainer; None if unknown.
        schedule: the schedule that "auto" chose last under the last seed; otherwise empty.
        tokens_per_s_by_seed: the values of the seeds, in their order; so `staleness_by_seed`.
    """

    arm: str
    siblings: int | None
    seeds: int
    tokens_per_s: float
    tokens_per_s_range: tuple[float, float]
    staleness: float
    staleness_range: tuple[float, float]
    oldest: int
    off_policy_share: float
    efficiency: float | None
    schedule: str
    tokens_per_s_by_seed: tuple[float, ...] = ()
    staleness_by_seed: tuple[float, ...] = ()


def frontier(
    arms: Mapping[str, SchedulerConfig],
    run: Callable[[SchedulerConfig, int], SimulationResult],
    *,
    seeds: int = 1,
    first_seed: int = 0,
) -> list[FrontierPoint]:
    """Simulate each arm under each seed, and return its point.

    Args:
        arms: configurations by name. :func:`aprilsched.observe.plots.frontier` draws those with the
            same name before an "@" as one line.
        run: simulates a configuration under a seed, for example with
            :func:`aprilsched.simulation.simulate`.
        seeds: number of seeds.
        first_seed: the smallest seed; the others follow.

    Raises:
        ConfigError: if a run has no batch after its burn-in.
        AprilschedError: whatever `run` raises.
    """
    checked_count("seeds", seeds, least=1)
    several = range(first_seed, first_seed + seeds)
    return [_point(arm, [run(arms[arm], seed) for seed in several]) for arm in arms]


def _point(arm: str, results: Sequence[SimulationResult]) -> FrontierPoint:
    steady = [result.summary.steady_state for result in results]
    if not all(each.delivered_tokens_per_s for each in steady):
        raise ConfigError(
            f"batches must be above the burn-in of {steady[0].burn_in}, got "
            f"{results[0].summary.batches} delivered batches for {arm}."
        )
    speeds = [each.delivered_tokens_per_s or 0.0 for each in steady]
    means = [each.staleness_mean or 0.0 for each in steady]
    efficiencies = [each.efficiency for each in steady if each.efficiency is not None]
    return FrontierPoint(
        arm=arm,
        siblings=results[0].config.policies.siblings,
        seeds=len(results),
        tokens_per_s=fmean(speeds),
        tokens_per_s_range=(min(speeds), max(speeds)),
        staleness=fmean(means),
        staleness_range=(min(means), max(means)),
        oldest=max(each.staleness_max for each in steady),
        off_policy_share=fmean(each.off_policy_token_share or 0.0 for each in steady),
        efficiency=fmean(efficiencies) if efficiencies else None,
        schedule=results[-1].schedule,
        tokens_per_s_by_seed=tuple(speeds),
        staleness_by_seed=tuple(means),
    )
