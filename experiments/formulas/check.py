"""Compares every formula with the simulation; writes result.json and a line for each comparison.

Arguments name the parts to run; without arguments all parts are run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from experiments.formulas import claims, lone
from experiments.formulas.row import Row
from experiments.frontier.results import write_section

__all__ = ["PARTS", "RESULT"]

RESULT = Path(__file__).with_name("result.json")

PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "transients": claims.transients,
    "bound": claims.bound,
    "least_stale": claims.least_stale,
    "waves": lone.waves,
    "pools": lone.pools,
    "pools_together": lone.pools_together,
    "caches": lone.caches,
    "best_ratio": lone.best_ratio,
    "whole_groups": lone.whole_groups,
}


def main(names: Sequence[str]) -> None:
    for name in names or PARTS:
        part = PARTS[name]
        rows: list[dict[str, str | float]] = []
        for row in part():
            values = {"predicted": row.predicted, "simulated": row.simulated, "error": row.error}
            rounded = {key: float(f"{value:.4g}") for key, value in values.items()}
            rows.append({"formula": row.formula, "where": row.where} | rounded)
            print(f"{row.formula:45} {row.where:45}", *rounded.values())
            write_section(name, rows, RESULT)


if __name__ == "__main__":
    main(sys.argv[1:])
