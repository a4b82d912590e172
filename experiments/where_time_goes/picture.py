"""Runs policies on eight embedded engines, and draws where the engines' time goes.

``python -m experiments.where_time_goes.picture`` writes the picture of the README and, with
``--seeds``, result.json here: what a million tokens cost, with other prompts too.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from aprilsched.analysis import plots
from aprilsched.analysis.run import read_run
from aprilsched.analysis.usage import usage_of
from aprilsched.cli.simulate import SimulateCommand, simulated
from aprilsched.cli.simulate import main as simulate
from aprilsched.runs.settings import SimSettings
from aprilsched.simulation import NEVER

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


def draw() -> None:
    """The picture, of the first seed."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "runs"
        simulate(
            [
                f"--policy={','.join(DRAWN)}",
                f"--seed={SEEDS[0]}",
                f"--batches={BATCHES}",
                f"--batch-groups={GROUPS}",
                f"--train-seconds={TRAIN_SECONDS}",
                f"--sim.engines={ENGINES}",
                f"--sim.refit-seconds={REFIT_SECONDS}",
                "--sim.stream-interval=64",
                f"--out={root}",
                "--json",
                "--quiet",
            ]
        )
        start = read_run(root / "sync").deliveries[FIRST_SHOWN - 1].time
        usages = {title: usage_of(root / policy) for policy, title in DRAWN.items()}
    plots.save(plots.first_look(usages, start=start, seconds=SHOWN_SECONDS), PICTURE)


def costs(seed: int) -> dict[str, dict[str, float]]:
    """GPU-minutes for a million generated tokens, and what the trainer pays, by policy."""
    command = SimulateCommand(
        policy=",".join(DRAWN),
        batches=BATCHES,
        batch_groups=GROUPS,
        seed=seed,
        train_seconds=TRAIN_SECONDS,
        sim=SimSettings(engines=ENGINES, refit_seconds=REFIT_SECONDS, stream_interval=NEVER),
    )
    return {
        name: {
            "gpu_minutes_per_million_tokens": round(
                ENGINES * s.seconds.wall / 60 / s.tokens.generated * 1e6, 3
            ),
            "off_policy_token_share": round(s.off_policy_token_share or 0.0, 3),
            "staleness_max": s.staleness_max,
        }
        for name, s in ((name, trial.summary) for name, trial in simulated(command).items())
    }


if __name__ == "__main__":
    draw()
    if "--seeds" in sys.argv[1:]:
        found = {str(seed): costs(seed) for seed in SEEDS}
        (HERE / "result.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
