# pyright: reportUnknownMemberType=false
"""Compares delivered lengths with drawn lengths, with controls that must fail; see README.md."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from equivalence import Equivalence, StatisticName, equivalence
from numpy.typing import NDArray

from aprilsched.analysis.style import GREY, PALETTE, finish, new_figure, save
from aprilsched.config import SchedulerConfig, Staleness
from aprilsched.core.messages.facts import BatchDelivered, Fact
from aprilsched.presets import april, auto, pool
from aprilsched.simulation import Simulation
from aprilsched.workload import LongTailWorkload

HERE = Path(__file__).parent
BURN_IN = 30
BLOCK = 8
"""Batches resampled together: what one leaves over comes with the next."""
Ints = NDArray[np.int64]

CARRIES: dict[str, SchedulerConfig] = {
    "APRIL, waves of 2": april(SchedulerConfig()),
    "pool of 1, KV kept": pool(SchedulerConfig(straggler="in_place")),
    "buckets of 1.7": SchedulerConfig(refill="buckets", over_provision=1.6875),
    "auto": auto(SchedulerConfig()),
}
EVICTS = SchedulerConfig(over_provision=2.0, max_staleness=Staleness(1, rule="evict"))


class Lengths:
    """Listens for the delivered lengths: int64 [groups, group_size] for each batch."""

    def __init__(self) -> None:
        self.batches: list[Ints] = []

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, BatchDelivered):
                groups: dict[int, list[int]] = {}
                for rollout in fact.rollouts:
                    groups.setdefault(rollout.group_id, []).append(rollout.tokens)
                self.batches.append(np.array(list(groups.values()), dtype=np.int64))


def delivered(config: SchedulerConfig, batches: int, seed: int = 0) -> list[Ints]:
    lengths = Lengths()
    workload = LongTailWorkload(seed=seed)
    Simulation(config, workload, batches=batches, listeners=[lengths]).run()
    return lengths.batches


def discarded(batches: int) -> list[Ints]:
    """Every batch is the first of a run: what was left over has been thrown away."""
    config = april(SchedulerConfig())
    return [delivered(config, 1, seed=1000 + i)[0] for i in range(batches)]


def first_of_group(batches: list[Ints], keep: int) -> list[Ints]:
    """The `keep` of each group that finish first."""
    return [np.sort(batch, axis=1)[:, :keep] for batch in batches]


def compare(batches: list[Ints], law: Ints, *, block: int) -> Equivalence:
    return equivalence([batch.ravel() for batch in batches], [law], cap=6000, block=block)


def draw(found: dict[str, Equivalence], path: Path) -> None:
    """The 90 % intervals of mean, P90 and P99, with the margins."""
    figure = new_figure(width=13, height=4.2)
    names = list(found)
    titles: dict[StatisticName, str] = {"mean": "mean", "p90": "P90", "p99": "P99"}
    for place, (statistic, title) in enumerate(titles.items()):
        axes = figure.add_subplot(1, 3, place + 1)
        for row, name in enumerate(names):
            value = found[name][statistic]
            colour = PALETTE[2] if value.equivalent else PALETTE[5]
            axes.plot(
                [100 * value.low, 100 * value.high],
                [row, row],
                color=colour,
                linewidth=6,
                solid_capstyle="butt",
            )
        axes.axvspan(-5, 5, color=GREY, alpha=0.2, linewidth=0, zorder=0)
        axes.axvline(0, color=GREY, linewidth=1)
        axes.set_yticks(range(len(names)), names if place == 0 else [""] * len(names))
        axes.invert_yaxis()
        finish(axes, title=f"{title}: delivered / drawn - 1, %", x="grey: taken as equal", y="")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=270)
    parser.add_argument("--out", type=Path, default=HERE)
    arguments = parser.parse_args()
    workload = LongTailWorkload()
    # The very prompts that the counted batches are made of, but for those carried in and out.
    prompts = range(32 * BURN_IN, 32 * arguments.batches)
    law = np.concatenate([workload.lengths(i) for i in prompts])
    runs = {name: delivered(config, arguments.batches) for name, config in CARRIES.items()}
    kept = {name: run[BURN_IN:] for name, run in runs.items()}
    controls = {
        "control: stragglers discarded": discarded(60),
        "control: first 6 of 8 kept": first_of_group(kept["APRIL, waves of 2"], 6),
        "control: stale ones evicted": delivered(EVICTS, arguments.batches)[BURN_IN:],
    }
    found = {name: compare(run, law, block=BLOCK) for name, run in kept.items()}
    found |= {name: compare(run, law, block=5) for name, run in controls.items()}
    result: dict[str, Any] = {
        name: {
            "equivalent": value.equivalent,
            "statistics": [asdict(s) | {"equivalent": s.equivalent} for s in value.statistics],
            "first_batch": float(runs[name][0].mean() / law.mean() - 1) if name in runs else None,
        }
        for name, value in found.items()
    }
    (arguments.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    draw(found, arguments.out / "equivalence.png")
    for name, value in found.items():
        row = ", ".join(f"{s.name} {s.low:+.3f} to {s.high:+.3f}" for s in value.statistics)
        print(f"{name}: {'equivalent' if value.equivalent else 'NOT equivalent'}; {row}")


if __name__ == "__main__":
    main()
