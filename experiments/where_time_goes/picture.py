"""Runs policies on eight embedded engines, and draws where the engines' time goes.

``python -m experiments.where_time_goes.picture`` writes the picture of the README and, with
``--seeds``, result.json here: what a million tokens cost, with other prompts too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from aprilsched import LongTailWorkload, SchedulerConfig
from aprilsched.analysis.plots import first_look, save
from aprilsched.presets import PRESETS
from aprilsched.simulation import Costs, SimulationResult, simulate

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parents[1] / "docs" / "images" / "where_time_goes.png"
DRAWN = {
    "sync": "Wait for all",
    "april": "APRIL: start twice as many, deliver the first half, carry the rest over",
    "auto": "aprilsched, auto: the same, with a schedule that it chooses by itself",
}
SEEDS = (0, 1, 2)
ENGINES, GROUPS, BATCHES = 8, 256, 24
TRAIN_SECONDS, REFIT_SECONDS = 2.0, 0.5
FIRST_SHOWN = 4
"""Batches before it: the begin of a run is not like the rest."""
SHOWN_SECONDS = 110.0


def runs(seed: int) -> dict[str, SimulationResult]:
    """The run of each policy."""
    config = SchedulerConfig(batch_groups=GROUPS, group_size=8, straggler="retract")
    return {
        name: simulate(
            LongTailWorkload(),
            PRESETS[name](config),
            engines=ENGINES,
            costs=Costs(train_seconds=TRAIN_SECONDS, refit_seconds=REFIT_SECONDS),
            batches=BATCHES,
            seed=seed,
        )
        for name in DRAWN
    }


def draw() -> None:
    """The picture, of the first seed."""
    found = runs(SEEDS[0])
    start = float(found["sync"].step_s[:FIRST_SHOWN].sum())
    usages = {title: found[policy].usage for policy, title in DRAWN.items()}
    save(first_look(usages, start=start, seconds=SHOWN_SECONDS), PICTURE)


def costs(seed: int) -> dict[str, dict[str, float]]:
    """GPU-minutes for a million generated tokens, and what the trainer pays, by policy."""
    return {
        name: {
            "gpu_minutes_per_million_tokens": round(
                ENGINES * s.seconds.wall / 60 / s.tokens.generated * 1e6, 3
            ),
            "off_policy_token_share": round(s.off_policy_token_share or 0.0, 3),
            "staleness_max": s.staleness_max,
        }
        for name, s in ((name, result.summary) for name, result in runs(seed).items())
    }


if __name__ == "__main__":
    draw()
    if "--seeds" in sys.argv[1:]:
        found = {str(seed): costs(seed) for seed in SEEDS}
        (HERE / "result.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
