"""Makes the table of README.md from results.json, and prints the counts that must be zero.

python -m experiments.faults.table
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from aprilsched.testing.faults.script import KINDS
from experiments.faults.campaign import RESULTS

Run = dict[str, Any]

_HEAD = (
    "faults",
    "runs",
    "happened",
    "engines lost",
    "on standby",
    "back after s: median, max",
    "its next token after s: median, max",
    "groups dropped",
    "recomputed",
    "ended otherwise",
)


def main() -> None:
    runs: list[Run] = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]
    happened = [run for run in runs if run.get("fired")]
    single = [run for run in happened if len(run["kinds"]) == 1]
    mixed = [run for run in happened if len(run["kinds"]) > 1]
    print(_row(_HEAD))
    print(_row(["---"] * len(_HEAD)))
    for kind in KINDS:
        print(_row(_cells(f"`{kind}`", [run for run in single if run["kinds"] == [kind]])))
    print(_row(_cells("two to five", mixed)))
    print(_row(_cells("none happened", [run for run in runs if not run.get("fired")])))
    print()
    for line in _zeros(runs):
        print(line)


def _cells(name: str, runs: Sequence[Run]) -> list[str]:
    generated = sum(run.get("tokens", {}).get("generated", 0) for run in runs)
    again = sum(run.get("tokens", {}).get("reprefilled", 0) for run in runs)
    endings = Counter(run["ending"] for run in runs if run["ending"] != "done")
    return [
        name,
        str(len(runs)),
        str(sum(sum(run.get("fired", {}).values()) for run in runs)),
        str(sum(sum(run.get("losses", {}).values()) for run in runs)),
        str(sum(run["standby"] for run in runs)),
        _spread([seconds for run in runs for seconds in run.get("recoveries", [])]),
        _spread([seconds for run in runs for seconds in run.get("own_next_token", [])]),
        str(sum(sum(run.get("dropped_for", {}).values()) for run in runs)),
        f"{again / generated:.0%}" if generated else "",
        ", ".join(f"{ending} {count}" for ending, count in endings.items()),
    ]


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.1f}, {max(seconds):.0f}" if seconds else ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _zeros(runs: Sequence[Run]) -> list[str]:
    """One line for each figure over all runs."""
    rollouts = Counter[str]()
    for run in runs:
        rollouts.update({k: v for k, v in run.get("rollouts", {}).items() if isinstance(v, int)})
    names = ("launched", "delivered", "in_flight", "lost", "duplicated")
    dropped, endings, losses = Counter[str](), Counter[str](), Counter[str]()
    for run in runs:
        dropped.update(run.get("rollouts", {}).get("dropped", {}))
        losses.update(run.get("losses", {}))
        endings[run["ending"]] += 1
    return [
        f"runs {len(runs)}, ended: {dict(endings)}",
        f"rollouts: { ({name: rollouts[name] for name in names}) }, dropped: {dict(dropped)}",
        f"checked token by token: {sum(run['checked'] for run in runs)}, "
        f"wrong: {sum(run['wrong'] for run in runs)}",
        f"engines lost: {dict(losses)}",
        f"left paused {sum(run['left_paused'] for run in runs)}, "
        f"left running {sum(run['left_running'] for run in runs)}",
        f"hours of modelled time {sum(run['seconds'] for run in runs) / 3600:.1f}",
    ]


if __name__ == "__main__":
    main()
