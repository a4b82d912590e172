"""Speed against staleness of each schedule, from simulated runs on the same prompts.

.. code-block:: python

    arms = {
        "wave@2": SchedulerConfig(over_provision=2.0),
        "samples:4@2": SchedulerConfig(over_provision=2.0, delivery="samples", siblings=4),
    }
    points = frontier(arms, lambda config, seed: simulate(workload, config, seed=seed), seeds=3)
    figure = aprilsched.observe.plots.frontier(points)  # after `import aprilsched.observe.plots`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aprilsched.errors import ConfigError
from aprilsched.kernel.core.config import SchedulerConfig
from aprilsched.simulation.results import SimulationResult
from aprilsched.simulation.side_by_side import PolicyRow, row_of
from aprilsched.simulation.virtual import checked_count


def frontier(
    arms: Mapping[str, SchedulerConfig],
    run: Callable[[SchedulerConfig, int], SimulationResult],
    *,
    seeds: int = 1,
    first_seed: int = 0,
) -> list[PolicyRow]:
    """Simulate each arm under each seed, and return its figures, means over the seeds.

    Args:
        arms: configurations by name. :func:`aprilsched.observe.plots.frontier` joins those with
            the same rule before an "@" and the same settings after the ratio, except "auto".
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
    rows: list[PolicyRow] = []
    for arm, config in arms.items():
        results = [run(config, seed) for seed in several]
        rows.append(row_of(arm, results))
        if not rows[-1].delivered_tokens_per_s:
            first = results[0].summary
            raise ConfigError(
                f"batches must be above the burn-in of {first.steady_state.burn_in}, got "
                f"{first.batches} delivered batches for {arm}."
            )
    return rows
