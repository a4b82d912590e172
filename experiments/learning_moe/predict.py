"""Writes down what the simulator expects of each arm, before any is measured: predictions.json.

python experiments/learning_moe/predict.py
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aprilsched.config import SchedulerConfig
from aprilsched.kernel.core.messages import facts
from aprilsched.observe.figures.summary import Summary
from aprilsched.planning import Planner
from aprilsched.planning.presets import PRESETS
from aprilsched.planning.step_times.model import StepTimeModel
from aprilsched.simulation import NEVER, Costs, Simulation
from aprilsched.simulation.engine import SimConfig
from aprilsched.simulation.workload import LongTailWorkload

HERE = Path(__file__).resolve().parent
STEPS = StepTimeModel(t0=1.6e-3, t1=8e-6, t2=1e-9, prefill_pass=6e-3, prefill_rate=500_000.0)
"""A guess: the small policy of experiments/learning took 1.0 ms and 6 us for each request, with
four layers and no experts."""
LENGTHS: dict[str, Any] = {"median": 250, "sigma": 1.1, "cap": 3072}
"""About those of a policy that guesses and gives up less and less."""
TRAINS, REFITS = 0.8, 0.15
BATCHES = 40
ARMS = {
    "sync": ("sync", "abort"), "april": ("april", "abort"), "april-kept": ("april", "in_place"),
    "areal": ("areal", "abort"), "auto": ("auto", "abort"), "auto-kept": ("auto", "in_place"),
}  # fmt: skip


class Ends:
    """Notes when each update was over."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_facts(self, new: Sequence[facts.Fact], now: float) -> None:
        self.times += [now for fact in new if isinstance(fact, facts.UpdateFinished)]


def simulated(arm: str) -> dict[str, float]:
    """Seconds of an update, the share of stale tokens and their mean staleness."""
    preset, straggler = ARMS[arm]
    base = SchedulerConfig(batch_groups=32, group_size=8, max_staleness=8)
    config = replace(PRESETS[preset](base), straggler=straggler)
    ends = Ends()
    summary = Summary()
    simulation = Simulation(
        config,
        LongTailWorkload(**LENGTHS, group_size=8, seed=1, vocab_size=256, limits="exact"),
        engine=SimConfig(timing=STEPS, max_running=512, kv_tokens=600_000, make_tokens=False,
                         admission="sglang-0.5.21",
                         stream_interval=NEVER),
        batches=BATCHES,
        costs=Costs(train_seconds=TRAINS, refit_seconds=REFITS),
        planner=Planner(STEPS, max_running=512, inline=True),
        listeners=[summary, ends],
    )  # fmt: skip
    simulation.run()
    later = summary.batches[BATCHES // 2 :]
    tokens = sum(batch.figures.tokens for batch in later)
    return {
        "step_s": (ends.times[-1] - ends.times[BATCHES // 2 - 1])
        / (len(ends.times) - BATCHES // 2),
        "off_policy": sum(b.figures.off_policy_token_share * b.figures.tokens for b in later)
        / tokens,
        "staleness": sum(b.figures.staleness_mean * b.figures.tokens for b in later) / tokens,
    }


def main() -> None:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                         check=True, cwd=HERE)  # fmt: skip
    found: dict[str, Any] = {"code": git.stdout.strip(), "arms": {}}
    for arm in ARMS:
        found["arms"][arm] = {k: round(v, 3) for k, v in simulated(arm).items()}
        print(arm, found["arms"][arm], flush=True)
    (HERE / "predictions.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
