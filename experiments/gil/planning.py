"""Measures what automatic choices of a schedule take from a busy thread of the same process.

    python experiments/gil/planning.py --out experiments/gil/planning.json

See README.md in this folder.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))

from aprilsched import LongTailWorkload, SchedulerConfig
from aprilsched.coordinator.replanning import planned_apart
from aprilsched.core.lengths.observed import GroupLengths
from aprilsched.core.messages.commands import Plan
from aprilsched.core.policies.refill import Wave
from aprilsched.core.policies.schedule import Schedule
from aprilsched.planning import Planner
from experiments.library import arguments, machine, say, write

CONFIG = SchedulerConfig(batch_groups=32, group_size=8, over_provision="auto")
_BYTES = bytes(1 << 16)


def python() -> None:
    """Python code, which gives the lock away only when another thread waits for it."""
    sum(range(2_000))


def calls() -> None:
    """Calls in C that release the lock for some 20 µs, as a copy or the launch of a kernel does."""
    for _ in range(4):
        zlib.crc32(_BYTES)


TRAINERS: dict[str, Callable[[], None]] = {work.__name__: work for work in (python, calls)}


def command() -> Plan:
    """What is asked for after 27 batches."""
    workload = LongTailWorkload(group_size=CONFIG.group_size, seed=7)
    groups = 27 * CONFIG.batch_groups
    return Plan(
        batch_groups=CONFIG.batch_groups,
        group_size=CONFIG.group_size,
        ended=tuple(GroupLengths.whole(i, workload.lengths(i).tolist()) for i in range(groups)),
        open=(),
        prompt_tokens=256.0,
        engines=1,
        kv_tokens=None,
        current=Schedule(over_provision=1.5, refill=Wave()),
    )


async def nothing(planner: Planner, given: Plan) -> None:
    """No choice at all."""
    await asyncio.sleep(0.5)


async def in_a_thread(planner: Planner, given: Plan) -> None:
    await asyncio.to_thread(planner.plan, given, CONFIG)


async def in_a_process(planner: Planner, given: Plan) -> None:
    await planned_apart(planner, given, CONFIG)


PLACES: dict[str, Callable[[Planner, Plan], Any]] = {
    "none": nothing,
    "thread": in_a_thread,
    "process": in_a_process,
}


class Trainer:
    """A thread that works all the time, and counts what it has done."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.done = 0
        self._work = work
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Trainer:
        self._thread.start()
        return self

    def scheduled(self) -> tuple[float, float]:
        """Seconds for which it ran, and for which it could have run and had no core."""
        path = f"/proc/self/task/{self._thread.native_id}/schedstat"
        ran, waited, _ = Path(path).read_text(encoding="ascii").split()
        return int(ran) / 1e9, int(waited) / 1e9

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            self._work()
            self.done += 1


async def measure(trainer: str, place: str, seconds: float) -> dict[str, Any]:
    """The trainer's work while choices are made one after the other.

    On a machine with other work the thread waits for a core too. The kernel says for how long, and
    what is left of the time in which it did not run is its wait for Python's lock.
    """
    planner, given = Planner(), command()
    choices = 0
    with Trainer(TRAINERS[trainer]) as beside:
        await asyncio.sleep(0.5)
        began, before = time.perf_counter(), beside.done
        ran, queued = beside.scheduled()
        while time.perf_counter() < began + seconds:
            await PLACES[place](planner, given)
            choices += 1
        took, done = time.perf_counter() - began, beside.done - before
        ran_then, queued_then = beside.scheduled()
    ran, queued = ran_then - ran, queued_then - queued
    return {
        "trainer": trainer,
        "place": place,
        "seconds": took,
        "choices": choices,
        "work_per_s": done / took,
        "ran": ran,
        "without_core": queued,
        "blocked_share": 1 - ran / (took - queued),
    }


def rows(raw: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the repeats."""
    found: list[dict[str, Any]] = []
    for trainer in TRAINERS:
        for place in PLACES:
            runs = [r for r in raw if (r["trainer"], r["place"]) == (trainer, place)]
            shares = [run["blocked_share"] for run in runs]
            rates = [run["work_per_s"] * run["seconds"] / run["ran"] for run in runs]
            found.append(
                {
                    "trainer": trainer,
                    "place": place,
                    "blocked_share": statistics.median(shares),
                    "blocked_shares": [round(each, 4) for each in shares],
                    "work_per_cpu_s": statistics.median(rates),
                    "seconds_of_a_choice": statistics.median(
                        run["seconds"] / run["choices"] for run in runs
                    ),
                }
            )
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    raw: list[dict[str, Any]] = []
    for repeat in range(options.repeats):
        order = [(trainer, place) for trainer in TRAINERS for place in PLACES]
        for trainer, place in order[:: 1 if repeat % 2 == 0 else -1]:
            raw.append(asyncio.run(measure(trainer, place, options.seconds)))
            say(repeat, json.dumps(raw[-1]))
    result = {
        **machine(),
        "numpy": np.__version__,
        "rows": rows(raw),
        "runs": raw,
    }
    write(options.out, result, shown=result["rows"])


if __name__ == "__main__":
    main()
