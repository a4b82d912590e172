"""Makes the picture and the tables of README.md.

python experiments/scale/plot.py experiments/scale/result.json
python experiments/scale/plot.py experiments/scale/policies.json
"""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from aprilsched.analysis.style import PALETTE, finish, new_figure, save


def table(runs: list[dict[str, Any]]) -> str:
    lines = [
        "| engines | groups an engine | policy | efficiency | off-policy | CPU s "
        "| CPU µs a rollout | rollouts a minute | memory, MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        policy = run["policy"] + (f", {run['variant']}" if run["variant"] else "")
        lines.append(
            f"| {run['engines']:,} | {run['groups']} | {policy} | {run['efficiency']:.3f} "
            f"| {run['off_policy_share']:.2f} | {run['cpu_seconds']:.1f} "
            f"| {run['cpu_us_a_rollout']:.0f} | {run['rollouts_a_minute']:,} "
            f"| {run['memory_mib']:,} |"
        )
    return "\n".join(lines)


def policies(runs: list[dict[str, Any]]) -> str:
    """The least cost of a rollout under each policy at each size, and how much more the larger
    sizes cost than the first."""
    sizes = list(dict.fromkeys((run["engines"], run["in_flight"]) for run in runs))
    lines = [
        "| policy | "
        + " | ".join(f"{engines:,} engines, {flight:,} in flight" for engines, flight in sizes)
        + " | most / first |",
        "|---" * (len(sizes) + 2) + "|",
    ]
    for name in dict.fromkeys(run["policy"] for run in runs):
        costs = [
            min(
                run["core_us"]
                for run in runs
                if (run["policy"], run["engines"], run["in_flight"]) == (name, *size)
            )
            for size in sizes
        ]
        cells = " | ".join(f"{cost:.0f}" for cost in costs)
        lines.append(f"| {name} | {cells} | {max(costs) / costs[0]:.2f} |")
    return "\n".join(lines)


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    figure = new_figure(9, 3.6)
    cost, speed = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    for policy, colour in (("april", PALETTE[0]), ("pool", PALETTE[1])):
        own = [r for r in runs if r["policy"] == policy and r["groups"] == 4 and not r["variant"]]
        own.sort(key=lambda run: run["engines"])
        engines = [run["engines"] for run in own]
        cost.plot(engines, [r["cpu_us_a_rollout"] for r in own], "o-", color=colour, label=policy)
        speed.plot(engines, [r["efficiency"] for r in own], "o-", color=colour, label=policy)
    for axes, title, label in (
        (cost, "Cost of the scheduler and the model", "CPU µs a rollout"),
        (speed, "Efficiency", "T_bound / T"),
    ):
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.legend()
        finish(axes, title=title, x="engines", y=label)
    save(figure, path)


def main() -> None:
    source = Path(sys.argv[1])
    runs = json.loads(source.read_text())["runs"]
    if "core_us" in runs[0]:
        print(policies(runs))
        return
    print(table(runs))
    draw(runs, source.with_name("scale.png"))


if __name__ == "__main__":
    main()
