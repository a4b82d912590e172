"""Compares automatic over-provisioning with the presets on KV pools of several sizes.

    python experiments/kv_pool/benchmark.py --out experiments/kv_pool/result.json

Rows that are in the file already are not run again, so a run can be stopped and continued. See
README.md in this folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from aprilsched.config import SchedulerConfig
from aprilsched.core.messages import commands as do
from aprilsched.core.messages.facts import BatchDelivered, BatchRequested, Fact
from aprilsched.core.policies.placement import Placement
from aprilsched.core.policies.schedule import Schedule
from aprilsched.engines.sim.settings import SimConfig
from aprilsched.planning import Planner, planner
from aprilsched.planning.setting import Outcome, Setting
from aprilsched.planning.trial import Trial
from aprilsched.presets import PRESETS
from aprilsched.simulation import NEVER, Simulation, rare_collections
from aprilsched.telemetry.batch_figures import ages_of
from aprilsched.timing.model import H200_QWEN3_4B
from aprilsched.workload import LongTailWorkload

POOLS = (50_000, 100_000, 200_000, 10_000_000)
"""Tokens; the last one is never full."""
POLICIES = ("sync", "april", "slime", "copris", "pool", "auto", "auto, pool as a limit")
BATCHES = 72
BURN_IN = 28
"""Four schedules are chosen in the first 27 batches."""


class LimitedPlanner(Planner):
    """The earlier rule: what needs more than the pool at its peak, in a trial without one, is
    chosen only if everything does, and then what needs least."""

    def setting(
        self, command: do.Plan, config: SchedulerConfig, placement: Placement = "prefix"
    ) -> Setting:
        """The trials were without a pool."""
        return replace(super().setting(command, config, placement), kv_tokens=None)

    def plan(self, command: do.Plan, config: SchedulerConfig) -> Schedule:
        """The schedule to follow."""
        pool = (command.kv_tokens or 0) / command.engines

        class LimitedTrial(Trial):
            def outcome(self, batches: int) -> Outcome:
                # The runs here have no bound on staleness, whose place the excess takes: what
                # passes it is not allowed, and if nothing is, the least excess is chosen.
                outcome = super().outcome(batches)
                over = outcome.peak_kv / pool
                return replace(outcome, too_stale_share=over if over > 1 else 0.0)

        with patch.object(planner, "Trial", LimitedTrial):
            return super().plan(command, config)


class Meter:
    """Tokens generated until each request for a batch, and the stale ones of each batch."""

    def __init__(self) -> None:
        self.simulation: Simulation | None = None
        self.marks: list[tuple[float, int, int]] = []
        """Time, tokens generated and preemptions."""
        self.stale: list[tuple[int, int]] = []
        """Off-policy and all tokens of each batch."""

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        """The trainer asks for a batch, or a batch is handed over."""
        for fact in facts:
            if isinstance(fact, BatchRequested) and self.simulation is not None:
                counters = [e.batcher.counters for e in self.simulation.engines.values()]
                generated = sum(c.generated for c in counters)
                self.marks.append((now, generated, sum(c.preemptions for c in counters)))
            elif isinstance(fact, BatchDelivered):
                ages = [ages_of(rollout, fact.version) for rollout in fact.rollouts]
                self.stale.append((sum(a.off_policy for a in ages), sum(a.sampled for a in ages)))


def measure(policy: str, pool: int, seed: int) -> dict[str, Any]:
    """One run."""
    limited = policy.startswith("auto,")
    config = PRESETS["auto" if limited else policy](SchedulerConfig(straggler="retract"))
    kind = LimitedPlanner if limited else Planner
    meter = Meter()
    meter.simulation = simulation = Simulation(
        config,
        LongTailWorkload(seed=seed),
        engine=SimConfig(make_tokens=False, stream_interval=NEVER, kv_tokens=pool),
        batches=BATCHES + 1,
        planner=kind(H200_QWEN3_4B, inline=True),
        listeners=(meter,),
    )
    with rare_collections():
        simulation.run()
    (first, *_), (began, before, _), (ended, after, preempted) = (
        meter.marks[0],
        meter.marks[BURN_IN],
        meter.marks[BATCHES],
    )
    kept = meter.stale[BURN_IN:BATCHES]
    return {
        "pool": pool,
        "policy": policy,
        "seed": seed,
        "tokens_per_s": (after - before) / (ended - began),
        "tokens_per_s_from_the_first_batch": after / (ended - first),
        "off_policy": sum(old for old, _ in kept) / sum(tokens for _, tokens in kept),
        "preemptions": preempted,
        "schedule": simulation.state.plan.schedule.why,
    }


def main() -> None:
    """Run what is not in the file yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--pools", type=int, nargs="+", default=POOLS)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.out.exists():
        rows = json.loads(options.out.read_text())["rows"]
    done = {(row["policy"], row["pool"], row["seed"]) for row in rows}
    for seed in options.seeds:
        for pool in options.pools:
            for policy in POLICIES:
                if (policy, pool, seed) not in done:
                    rows.append(measure(policy, pool, seed))
                    result = {"batches": BATCHES, "burn_in": BURN_IN, "rows": rows}
                    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
