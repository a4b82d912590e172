"""Measures the bias of the policy gradient under each baseline, on a policy with a closed form.

    python experiments/learning/baselines.py

The policy has one logit and chooses a long response with probability p, or a short one. The length
and the reward of a response depend on that choice, and the difficulty of the prompt on neither. The
true gradient of the mean reward is p (1 - p) (E[R | long] - E[R | short]).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.library import table

GROUPS, SIZE, LONG = 200_000, 8, 0.4
REWARDS = (0.35, 0.65)
"""Mean rewards of a short response and of a long one."""


def gradients(groups: int = GROUPS) -> list[dict[str, Any]]:
    """Return each baseline's mean gradient, its error and its standard deviation for a response.

    Args:
        groups: number of groups that are drawn.
    """
    rng = np.random.default_rng(0)
    long = rng.random((groups, SIZE)) < LONG
    level = rng.normal(0, 0.6, (groups, 1))
    lengths = np.exp(level + long + rng.normal(0, 0.6, (groups, SIZE)))
    rewards = (rng.random((groups, SIZE)) < np.where(long, REWARDS[1], REWARDS[0])).astype(float)
    rewards -= 0.2 * (level > 0)
    order = np.argsort(lengths, axis=1)
    place = np.argsort(order, axis=1)
    sums = np.take_along_axis(rewards, order, 1).cumsum(1)
    total = sums[:, -1:]
    score, truth = long - LONG, LONG * (1 - LONG) * (REWARDS[1] - REWARDS[0])
    kinds: dict[str, Any] = {
        "none": 0.0,
        "all others of the group (leave-one-out)": (total - rewards) / (SIZE - 1),
    }
    for k in (4, 2):
        own = np.where(place < k, sums[:, k : k + 1] - rewards, sums[:, k - 1 : k])
        kinds[f"the first {k} others to complete"] = own / k
    for k in (4, 2):
        last = np.maximum(place, k)
        others = (np.take_along_axis(sums, last, 1) - rewards) / last
        kinds[f"all others that are complete at delivery, at least {k}"] = others
    kinds["mean of the whole group, itself included"] = total / SIZE
    rows = []
    for title, baseline in kinds.items():
        found = (rewards - baseline) * score
        rows.append({
            "baseline": title, "gradient": float(found.mean()),
            "error": float(found.mean() / truth - 1), "deviation": float(found.std()),
        })  # fmt: skip
    return rows


def main() -> None:
    rows = [[row["baseline"], f"{row['gradient']:+.4f}", f"{row['error']:+.1%}",
             f"{row['deviation']:.3f}"] for row in gradients()]  # fmt: skip
    print(table(["baseline", "mean gradient", "error", "standard deviation"], rows))


if __name__ == "__main__":
    main()
