"""Step times with batches that are taken whole and group by group, in virtual time.

    python experiments/streams/benchmark.py --out experiments/streams/result.json

See README.md in this folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from aprilsched import LongTailWorkload, SchedulerConfig
from aprilsched.core.messages.facts import BatchDelivered, Fact
from aprilsched.engines.sim.settings import SimConfig
from aprilsched.presets import PRESETS
from aprilsched.simulation import NEVER, Costs, Simulation, rare_collections
from aprilsched.timing.model import H200_QWEN3_4B_LINEAR

BATCHES, BURN_IN = 32, 8
GROUPS, SIZE = 32, 8
POLICIES = ("sync", "april", "areal")


class Deliveries:
    """Notes when each batch is delivered, and how many of its tokens are stale."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens = self.stale = 0

    def on_facts(self, facts: list[Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, BatchDelivered):
                self.times.append(now)
                if len(self.times) <= BURN_IN:
                    continue
                for rollout in fact.rollouts:
                    for begin, end, version, _ in rollout.segments:
                        self.tokens += end - begin
                        self.stale += (end - begin) * (version < fact.version)


def run(policy: str, engines: int, train_s: float, seed: int, *, streamed: bool) -> dict[str, Any]:
    noted = Deliveries()
    base = SchedulerConfig(batch_groups=GROUPS, group_size=SIZE)
    simulation = Simulation(
        replace(PRESETS[policy](base), batch_groups=GROUPS, group_size=SIZE),
        LongTailWorkload(median=700, sigma=0.9, cap=6000, group_size=SIZE, seed=seed),
        engines=engines,
        engine=SimConfig(timing=H200_QWEN3_4B_LINEAR, make_tokens=False, stream_interval=NEVER),
        costs=Costs(train_seconds=train_s),
        batches=BATCHES,
        streamed=streamed,
        listeners=[noted],
    )
    with rare_collections():
        simulation.run()
    steps = [after - before for before, after in pairwise(noted.times[BURN_IN - 1 :])]
    return {"step_s": statistics.fmean(steps), "off_policy": noted.stale / noted.tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for engines in (1, 4, 16):
        for train_s in (5.0, 20.0, 60.0):
            for policy in POLICIES:
                row: dict[str, Any] = {"engines": engines, "train_s": train_s, "policy": policy}
                for streamed in (False, True):
                    runs = [run(policy, engines, train_s, s, streamed=streamed) for s in (0, 1)]
                    row["streamed" if streamed else "whole"] = runs
                whole, by_group = (
                    statistics.fmean(each["step_s"] for each in row[kind])
                    for kind in ("whole", "streamed")
                )
                row["ratio"] = whole / by_group
                rows.append(row)
                share = statistics.fmean(r["off_policy"] for r in row["streamed"])
                print(
                    f"{engines:3d} engines, trainer {train_s:4.0f} s, {policy:6s}: "
                    f"{whole:6.1f} s whole, {by_group:6.1f} s streamed, "
                    f"ratio {row['ratio']:.2f}, off-policy {share:.2f}",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
