"""Simulated fleets in shards against one scheduler, in virtual time.

    python -m experiments.shards.fleets --out experiments/shards/fleets.json
    python -m experiments.shards.fleets --bias --out experiments/shards/bias.json

Every run is a fresh process, so that its peak memory is its own. See README.md in this folder.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np

from aprilsched.config import Pool, SchedulerConfig
from aprilsched.core.messages import commands as do
from aprilsched.core.messages import facts
from aprilsched.core.messages.facts import BatchDelivered, BatchRequested, Fact, TokensReceived
from aprilsched.simulation import Simulation, rare_collections
from aprilsched.timing.model import H200_QWEN3_4B
from aprilsched.workload import LongTailWorkload
from experiments.library import arguments, fresh, write
from experiments.shards.simulated import ShardedSimulation


@dataclass(frozen=True, kw_only=True)
class Run:
    shards: int
    """0 for one scheduler without a collector."""
    engines: int
    policy: str
    groups: int
    """In a batch, for each engine."""
    batches: int
    burn_in: int
    seed: int = 0


FLEETS: tuple[Run, ...] = tuple(
    Run(shards=shards, engines=4096, policy="wave", groups=1, batches=3, burn_in=1)
    for shards in (0, 1, 4, 16, 64)
)
BIAS: tuple[Run, ...] = tuple(
    Run(shards=shards, engines=16, policy=policy, groups=4, batches=48, burn_in=12, seed=seed)
    for policy in ("wave", "pool")
    for shards in (0, 1, 4, 16)
    for seed in (0, 1, 2)
)


def configuration(run: Run) -> SchedulerConfig:
    groups = run.groups * run.engines
    if run.policy == "wave":
        return SchedulerConfig(batch_groups=groups, over_provision=2.0)
    together = max(4, groups // 64)
    return SchedulerConfig(batch_groups=groups, over_provision=1.0, refill=Pool(together=together))


class Work:
    """What was generated and delivered, and T_bound of the generated tokens at every request for a
    batch."""

    def __init__(self, engines: int) -> None:
        self.marks: list[tuple[float, float]] = []
        self.batches: list[BatchDelivered] = []
        self._engines = engines
        self._bound = 0.0
        self._have: dict[tuple[int, int], int] = {}

    def of_shard(self, shard: int) -> _OfShard:
        return _OfShard(self, shard)

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        self.take(facts, now, 0)

    def take(self, facts: Sequence[Fact], now: float, shard: int) -> None:
        for fact in facts:
            if isinstance(fact, TokensReceived):
                key = (shard, fact.request_id)
                before = self._have.get(key, 0)
                after = self._have[key] = before + fact.tokens
                # Prompts of 8 tokens are read with every token.
                reads = 8 * fact.tokens + (after * after - before * before) / 2
                per_token = H200_QWEN3_4B.t1 + H200_QWEN3_4B.t0 / 512
                seconds = per_token * fact.tokens + H200_QWEN3_4B.t2 * reads
                self._bound += seconds / self._engines
            elif isinstance(fact, BatchRequested):
                self.marks.append((now, self._bound))
            elif isinstance(fact, BatchDelivered):
                self.batches.append(fact)


class _OfShard:
    """The work of one shard, whose own batches are groups."""

    def __init__(self, work: Work, shard: int) -> None:
        self._work, self._shard = work, shard

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        tokens = [fact for fact in facts if isinstance(fact, TokensReceived)]
        if tokens:
            self._work.take(tokens, now, self._shard)


class Commands:
    """Counts the commands to engines."""

    def __init__(self) -> None:
        self.sends = 0
        self.others = 0

    def on_event(self, event: object, now: float) -> None:
        """Events are not counted."""

    def on_command(self, command: object, now: float) -> None:
        if isinstance(command, do.Send):
            self.sends += 1
        elif isinstance(command, do.Abort | do.Pause | do.Flush | do.Continue | do.Verify):
            self.others += 1
        elif isinstance(command, facts.RefitBegun):
            self.others += len(command.engines)


def measure(run: Run) -> dict[str, Any]:
    workload = LongTailWorkload(seed=run.seed)
    prompts = list(islice(workload, (run.batches + 4) * run.groups * run.engines))
    config, work, commands = configuration(run), Work(run.engines), Commands()
    simulation: Simulation | ShardedSimulation
    if run.shards:
        simulation = ShardedSimulation(
            config,
            prompts,
            shards=run.shards,
            engines=run.engines,
            batches=run.batches + 1,
            listeners=[work],
            of_shard=lambda shard: [work.of_shard(shard), commands],
        )
    else:
        simulation = Simulation(
            config,
            prompts,
            engines=run.engines,
            batches=run.batches + 1,
            listeners=[work, commands],
        )
    began = time.process_time()
    with rare_collections():
        simulation.run()
    cpu = time.process_time() - began
    kept = work.batches[run.burn_in : run.batches]
    (start, before), (end, after) = work.marks[run.burn_in], work.marks[run.batches]
    messages = asdict(simulation.messages) if isinstance(simulation, ShardedSimulation) else {}
    return {
        **asdict(run),
        "efficiency": (after - before) / (end - start),
        "seconds_a_batch": (end - start) / len(kept),
        **staleness(kept),
        "delivered_mean": float(np.mean([r.tokens for b in kept for r in b.rollouts])),
        "delivered_mean_of_all": float(
            np.mean([r.tokens for b in work.batches[: run.batches] for r in b.rollouts])
        ),
        "drawn_mean": workload.mean_length(),
        "messages": messages,
        "sends": commands.sends,
        "control_calls": commands.others,
        "groups": sum(len({r.group_id for r in b.rollouts}) for b in work.batches),
        "cpu_seconds": round(cpu, 2),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def staleness(batches: Sequence[BatchDelivered]) -> dict[str, Any]:
    """Tokens by the number of versions that they are old."""
    ages: dict[int, int] = {}
    for batch in batches:
        for rollout in batch.rollouts:
            for start, end, version, _ in rollout.segments:
                age = batch.version - version
                ages[age] = ages.get(age, 0) + end - start
    total = sum(ages.values())
    return {
        "off_policy_share": 1 - ages.get(0, 0) / total,
        "staleness_mean": sum(age * tokens for age, tokens in ages.items()) / total,
        "staleness_max": max(ages),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--bias", action="store_true")
    options = parser.parse_args()
    write(
        options.out, {"runs": [fresh(measure, run) for run in (BIAS if options.bias else FLEETS)]}
    )


if __name__ == "__main__":
    main()
