"""Measures how many rollouts a minute the simulator runs on one core, and where its time goes.

    python experiments/simulator_speed/benchmark.py --out experiments/simulator_speed/result.json

See README.md in this folder.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import statistics
import time
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from aprilsched.config import SchedulerConfig
from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import Event
from aprilsched.presets import april, pool, sync
from aprilsched.simulation import Simulation, rare_collections
from aprilsched.telemetry.base import AnyListener
from aprilsched.telemetry.summary import Summary
from aprilsched.types import Prompt
from aprilsched.workload import LongTailWorkload

_GROUPS = 32
"""In a batch, for each engine."""
_PARTS = {
    "telemetry": "the Summary listener",
    "engines/sim": "modelled engines",
    "simulation": "agenda and wiring",
    "driver": "agenda and wiring",
    "coordinator": "agenda and wiring",
    "core/state/assembly": "delivering",
    "core/state/token_log": "token logs",
    "types": "delivering",
    "timing": "modelled engines",
    "core/scheduler": "decisions",
    "core/steps": "decisions",
    "core/policies": "decisions",
    "core": "bookkeeping",
}


class Events:
    """Counts the events that the core is given, which only a listener of the protocol sees."""

    def __init__(self) -> None:
        self.seen = 0

    def on_event(self, event: Event, now: float) -> None:
        self.seen += 1

    def on_command(self, command: Command, now: float) -> None:
        pass


def configuration(policy: str, engines: int) -> SchedulerConfig:
    config = SchedulerConfig(batch_groups=_GROUPS * engines)
    if policy == "rounds":
        return replace(config, refill="buckets", over_provision=1.5)
    return {"sync": sync, "april": april, "pool": pool}[policy](config)


def simulation(
    policy: str, prompts: list[Prompt], *, engines: int, batches: int, events: Events | None = None
) -> Simulation:
    listeners: list[AnyListener] = [Summary(trainer_waits=True)]
    if events is not None:
        listeners.append(events)
    return Simulation(
        configuration(policy, engines),
        prompts,
        engines=engines,
        batches=batches,
        listeners=listeners,
    )


def measure(policy: str, *, engines: int, batches: int, repeats: int) -> dict[str, Any]:
    """Rollouts a CPU minute; the prompts are made beforehand."""
    extra = 8 if policy == "rounds" else 4
    prompts = list(islice(LongTailWorkload(), (batches + extra) * _GROUPS * engines))
    rates: list[float] = []
    delivered = 0
    for _ in range(repeats):
        run = simulation(policy, prompts, engines=engines, batches=batches)
        began = time.process_time()
        with rare_collections():
            run.run()
        seconds = time.process_time() - began
        delivered = run.state.in_flight.counters.delivered
        rates.append(60 * delivered / seconds)
    events = Events()
    simulation(policy, prompts, engines=engines, batches=batches, events=events).run()
    return {
        "policy": policy,
        "engines": engines,
        "batches": batches,
        "rollouts": delivered,
        "rollouts_a_minute": round(statistics.median(rates)),
        "least": round(min(rates)),
        "most": round(max(rates)),
        "events_a_rollout": round(events.seen / delivered, 2),
    }


def shares(policy: str, *, batches: int) -> dict[str, float]:
    """Share of the time by part; what is built in counts for who calls it."""
    prompts = list(islice(LongTailWorkload(), (batches + 4) * _GROUPS))
    run = simulation(policy, prompts, engines=1, batches=batches)
    profile = cProfile.Profile()
    profile.runcall(run.run)
    time_in: Counter[str] = Counter()
    stats: dict[Any, Any] = vars(pstats.Stats(profile))["stats"]
    for (file, _, _), (_, _, own, _, callers) in stats.items():
        if (part := _part(file)) is not None:
            time_in[part] += own
            continue
        for (caller, _, _), (_, _, share, _) in callers.items():
            time_in[_part(caller) or "other"] += share
    total = sum(time_in.values())
    return {part: round(own / total, 3) for part, own in time_in.most_common()}


def _part(file: str) -> str | None:
    _, found, inside = file.partition("/aprilsched/")
    if not found or file.endswith("benchmark.py"):
        return None
    return next((part for prefix, part in _PARTS.items() if inside.startswith(prefix)), None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows = [
        measure(policy, engines=1, batches=100, repeats=options.repeats)
        for policy in ("sync", "april", "pool", "rounds")
    ]
    rows.append(measure("april", engines=64, batches=4, repeats=options.repeats))
    result = {
        "python": platform.python_version(),
        "runs": rows,
        "profile": {policy: shares(policy, batches=60) for policy in ("april", "pool")},
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
