"""Draws the regret of auto in every cell, and makes the table of README.md.

python experiments/auto_regret/plot.py experiments/auto_regret/result.json
"""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from aprilsched.analysis.style import PALETTE, finish, new_figure, save


def best(cell: dict[str, Any], kind: str, by: str) -> tuple[str, dict[str, Any]]:
    """The ratio with the largest `by`, and its figures."""
    return max(cell[kind].items(), key=lambda item: item[1][by])


def regret(cell: dict[str, Any], kind: str, by: str = "efficiency") -> float:
    return 1 - cell["auto"][by] / best(cell, kind, by)[1][by]


def name(cell: dict[str, Any]) -> str:
    if cell["drift"] == "stationary":
        return f"sigma {cell['sigma']}, share {cell['share']}"
    return cell["drift"]


def table(cells: list[dict[str, Any]]) -> str:
    lines = [
        "| lengths | KV | auto | best waves | regret | best buckets, or pool | regret "
        "| by delivered tokens: waves, buckets |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        auto = cell["auto"]
        row = [name(cell), cell["kv"], f"{auto['efficiency']:.3f} ({auto['off_policy']:.2f})"]
        delivered: list[str] = []
        for kind in ("wave", "rounds", "pool"):
            if kind not in cell:
                continue
            ratio, figures = best(cell, kind, "efficiency")
            row.append(f"{figures['efficiency']:.3f} ({figures['off_policy']:.2f}) at {ratio}")
            row.append(f"{100 * regret(cell, kind):+.1f} %")
            delivered.append(f"{100 * regret(cell, kind, 'delivered_efficiency'):+.1f} %")
        lines.append("| " + " | ".join([*row, ", ".join(delivered)]) + " |")
    return "\n".join(lines)


def draw(cells: list[dict[str, Any]], path: Path) -> None:
    shown = list(reversed(cells))
    figure = new_figure(8, 0.36 * len(cells) + 1.6)
    axes = figure.add_subplot()
    for kind, offset, colour, label in (
        ("wave", 0.2, PALETTE[0], "against the best fixed ratio of waves"),
        ("rounds", -0.2, PALETTE[1], "against the best fixed ratio of rounds"),
        ("pool", -0.2, PALETTE[2], "against the best fixed ratio of a pool"),
    ):
        places = [i for i, cell in enumerate(shown) if kind in cell]
        axes.barh(
            [i + offset for i in places],
            [100 * regret(shown[i], kind) for i in places],
            height=0.38,
            color=colour,
            label=label,
        )
    axes.set_yticks(range(len(shown)), [f"{name(cell)}, {cell['kv']}" for cell in shown])
    axes.axvline(5, color="black", linestyle="--", linewidth=1)
    axes.annotate("budget", (5, -0.8), fontsize=9, ha="right")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.legend(loc="upper left", fontsize=8)
    finish(
        axes,
        title="Auto is within 5 % of the best fixed ratio, chosen afterwards",
        x="% of the efficiency (below 0: auto is faster)",
        y="",
    )
    save(figure, path)


def main() -> None:
    source = Path(sys.argv[1])
    cells = json.loads(source.read_text())["cells"]
    print(table(cells))
    draw(cells, source.with_name("regret.png"))


if __name__ == "__main__":
    main()
