"""Measures what grows with the fleet, from 8 to 4,096 modelled engines.

    python experiments/scale/benchmark.py --out experiments/scale/result.json

Every run is a fresh process, so that its peak memory is its own. See README.md in this folder.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from aprilsched.config import Dispatch, Pool, SchedulerConfig
from aprilsched.core.messages.facts import BatchRequested, Fact, TokensReceived
from aprilsched.presets import april, pool
from aprilsched.simulation import Simulation, rare_collections
from aprilsched.telemetry.figures import Figures
from aprilsched.telemetry.summary import Summary
from aprilsched.timing.model import H200_QWEN3_4B
from aprilsched.workload import LongTailWorkload


@dataclass(frozen=True, kw_only=True)
class Run:
    engines: int
    policy: str
    groups: int
    """In a batch, for each engine."""
    batches: int
    variant: str = ""
    """"spread", or nothing."""

    @property
    def burn_in(self) -> int:
        return max(1, self.batches // 3)


RUNS: tuple[Run, ...] = (
    *(Run(engines=8, policy=p, groups=32, batches=12) for p in ("april", "pool")),
    *(Run(engines=64, policy=p, groups=32, batches=5) for p in ("april", "pool")),
    *(Run(engines=8, policy=p, groups=4, batches=24) for p in ("april", "pool")),
    *(Run(engines=64, policy=p, groups=4, batches=12) for p in ("april", "pool")),
    *(Run(engines=512, policy=p, groups=4, batches=4) for p in ("april", "pool")),
    *(Run(engines=64, policy=p, groups=4, batches=12, variant="spread") for p in ("april", "pool")),
    Run(engines=4096, policy="april", groups=4, batches=2),
)


def configuration(run: Run) -> SchedulerConfig:
    config = SchedulerConfig(
        batch_groups=run.groups * run.engines,
        dispatch=Dispatch(placement="spread" if run.variant == "spread" else "prefix"),
    )
    if run.policy == "april":
        return april(config)
    together = max(1, min(4, run.groups // 4)) * run.engines
    return replace(pool(config), refill=Pool(together=together))


class Work:
    """T_bound of what was generated, at every request for a batch: what is delivered is biased
    towards short responses in the few batches that a large fleet is given here."""

    def __init__(self, engines: int) -> None:
        self.marks: list[tuple[float, float]] = []
        self._engines = engines
        self._bound = 0.0
        self._have: dict[int, int] = {}

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, TokensReceived):
                before = self._have.get(fact.request_id, 0)
                after = self._have[fact.request_id] = before + fact.tokens
                # Prompts of 8 tokens are read with every token.
                reads = 8 * fact.tokens + (after * after - before * before) / 2
                per_token = H200_QWEN3_4B.t1 + H200_QWEN3_4B.t0 / 512
                seconds = per_token * fact.tokens + H200_QWEN3_4B.t2 * reads
                self._bound += seconds / self._engines
            elif isinstance(fact, BatchRequested):
                self.marks.append((now, self._bound))


def measure(run: Run) -> dict[str, Any]:
    count = (run.batches + 4) * run.groups * run.engines
    prompts = list(islice(LongTailWorkload(), count))
    summary, work = Summary(trainer_waits=True), Work(run.engines)
    simulation = Simulation(
        configuration(run),
        prompts,
        engines=run.engines,
        batches=run.batches + 1,
        listeners=(summary, work),
    )
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with rare_collections():
        simulation.run()
    cpu = time.process_time() - began
    delivered = simulation.state.in_flight.counters.delivered
    kept = summary.batches[run.burn_in : run.batches]
    (began, before), (ended, after) = work.marks[run.burn_in], work.marks[run.batches]
    return {
        **asdict(run),
        "rollouts": delivered,
        "efficiency": (after - before) / (ended - began),
        "off_policy_share": Figures.over(kept).off_policy_token_share,
        "seconds_a_batch": (ended - began) / len(kept),
        "cpu_seconds": round(cpu, 2),
        "cpu_us_a_rollout": round(1e6 * cpu / delivered, 1),
        "rollouts_a_minute": round(60 * delivered / cpu),
        "memory_mib": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) / 1024),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", type=int)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(RUNS[int(options.one)])))
        return
    rows: list[dict[str, Any]] = []
    for place in range(len(RUNS)):
        command = [sys.executable, __file__, "--one", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout))
        if options.out is not None:
            options.out.write_text(json.dumps({"runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
