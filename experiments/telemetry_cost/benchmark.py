"""Measures what telemetry costs the coordinator at 100,000 tokens/s.

    python experiments/telemetry_cost/benchmark.py --out experiments/telemetry_cost/result.json

There are three ways, from the most realistic to the least noisy: pairs of whole processes with and
without telemetry, its calls timed inside such a process, and a recorded stream shown to it in a
loop. See README.md in this folder.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "client_cost"))
sys.path.append(str(Path(__file__).resolve().parents[2]))

import benchmark as client_cost
from clients import scheduler
from garbage import Garbage
from memory import post
from pieces import EVERYTHING, PIECES, together, with_needs
from replayed import Recorder, replayed

from aprilsched import SGLangFleet
from aprilsched.core.messages.facts import Fact
from aprilsched.telemetry.base import BulkListener, Listener, TokenChunks
from aprilsched.telemetry.sampling import Sampler
from experiments.library import arguments, machine, measured, say, write

TOKENS_PER_SECOND = 100_000
EVENT_TOKENS = 64
ANSWER_TOKENS = 1024
IN_FLIGHT = 512
PAIRED: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "log_and_summary": ("event_log", "summary"),
    "unattended": tuple(name for name in EVERYTHING if name != "live_view"),
    "everything": EVERYTHING,
}
COMPARED = tuple(PAIRED)[1:]
SAMPLED = ("unattended", "everything")
RUNS = PAIRED | {name: with_needs(name) for name in PIECES}
"""What `--only` can name."""


class Timed:
    """Passes on, and adds up the CPU time of the calls in this thread.

    Not the wall's: another thread that draws, or a neighbour on the machine, would count as well.
    Nor what the collector of garbage takes, which clears up after everything and begins anywhere.
    """

    def __init__(self, listener: Listener, garbage: Garbage) -> None:
        self._listener = listener
        self._garbage = garbage
        self.ns = 0
        self.calls = 0
        if isinstance(listener, BulkListener):
            self._bulk = listener
            self.on_tokens = self._on_tokens

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        before = time.thread_time_ns() - self._garbage.ns
        self._listener.on_facts(facts, now)
        self.ns += time.thread_time_ns() - self._garbage.ns - before
        self.calls += 1

    def _on_tokens(self, chunks: TokenChunks, now: float) -> None:
        before = time.thread_time_ns() - self._garbage.ns
        self._bulk.on_tokens(chunks, now)
        self.ns += time.thread_time_ns() - self._garbage.ns - before
        self.calls += 1


def other_threads_s(but: Sequence[threading.Thread]) -> dict[str, float]:
    """CPU of the threads that telemetry has started, by name."""
    return {
        thread.name: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread not in but and thread.ident is not None
    }


async def read(
    url: str,
    rollouts: int,
    listeners: Sequence[Listener],
    garbage: Garbage,
    samples: Path | None = None,
) -> dict[str, float]:
    """Read everything; CPU of the whole process. Where to `samples`, the engine is sampled too."""
    await post(url, {"pace": IN_FLIGHT * EVENT_TOKENS / TOKENS_PER_SECOND})
    tokens, fleet = 0, SGLangFleet([url])
    async with scheduler(
        [url], in_flight=IN_FLIGHT, rollouts=rollouts, listeners=listeners, fleet=fleet
    ) as running:
        gc.collect()
        cpu, wall, collected = time.process_time(), time.perf_counter(), garbage.ns
        async with nullcontext() if samples is None else Sampler(samples, fleet):
            async for batch in running:
                tokens += batch.tokens
                batch.acknowledge()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        collected = garbage.ns - collected
    if tokens != rollouts * ANSWER_TOKENS:
        raise SystemExit(f"read {tokens} tokens of {rollouts} rollouts")
    # Of the tokens and not of the seconds: on a busy machine the server falls behind its pace.
    seconds = tokens / TOKENS_PER_SECOND
    return {
        "cpu": cpu,
        "wall": wall,
        "cpu_ms_per_s": 1e3 * cpu / seconds,
        "garbage_ms_per_s": collected / 1e6 / seconds,
        "tokens_per_s": tokens / wall,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The measured process."""
    url, rollouts, which = options.url, options.rollouts, options.run
    if which == "replayed":
        recorder = Recorder()
        asyncio.run(read(url, rollouts, [recorder], Garbage()))
        return replayed(recorder, options.repeats, TOKENS_PER_SECOND)
    names = (*(["deaf"] if options.inside else []), *RUNS[which])
    before = threading.enumerate()
    with (
        tempfile.TemporaryDirectory() as folder,
        together(names, Path(folder)) as pieces,
        Garbage() as garbage,
    ):
        listeners = list(pieces.values())
        timed = [Timed(listener, garbage) for listener in listeners] if options.inside else []
        samples = Path(folder) / "samples.jsonl" if which in SAMPLED else None
        found: dict[str, Any] = asyncio.run(
            read(url, rollouts, timed or listeners, garbage, samples)
        )
        threads = other_threads_s(before)
    found |= {"run": which}
    if timed:
        seconds = rollouts * ANSWER_TOKENS / TOKENS_PER_SECOND
        # What it costs to look at the clock, a listener shows that does nothing. It comes first.
        clock = timed[0].ns / timed[0].calls
        parts = {
            name: (each.ns - clock * each.calls) / 1e6 / seconds
            for name, each in zip(names[1:], timed[1:], strict=True)
        }
        parts |= {name: 1e3 * cpu / seconds for name, cpu in threads.items()}
        found |= {"inside_ms_per_s": parts, "shown_per_s": timed[0].calls / seconds}
        found["clock_us"] = clock / 1e3
    return found


def process(which: str, rollouts: int, *more: object) -> dict[str, Any]:
    """One run in a process of its own, against a fresh server."""
    with client_cost.server() as url:
        arguments = ("--url", url, "--run", which, "--rollouts", rollouts, *more)
        found = measured(__file__, *arguments)
    say(which, *more, found)
    return found


def compare(repeats: int, rollouts: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Alternating runs: without, with, with everything, and back."""
    raw: list[dict[str, Any]] = []
    ratios: dict[str, list[float]] = {which: [] for which in COMPARED}
    for repeat in range(repeats):
        order = ("nothing", *COMPARED)[:: 1 if repeat % 2 == 0 else -1]
        cpu: dict[str, float] = {}
        for which in order:
            found = process(which, rollouts)
            raw.append(found)
            cpu[which] = found["cpu_ms_per_s"]
        for which in COMPARED:
            ratios[which].append(cpu[which] / cpu["nothing"])
    rows = [
        {
            "with": which,
            "ratio": [f(ratios[which]) for f in (min, statistics.median, max)],
            "cpu_ms_per_s": _median(raw, which, "cpu_ms_per_s"),
            "cpu_ms_per_s_without": _median(raw, "nothing", "cpu_ms_per_s"),
            "garbage_ms_per_s": _median(raw, which, "garbage_ms_per_s"),
            "garbage_ms_per_s_without": _median(raw, "nothing", "garbage_ms_per_s"),
        }
        for which in COMPARED
    ]
    return raw, rows


def _median(raw: list[dict[str, Any]], which: str, what: str) -> float:
    return statistics.median(run[what] for run in raw if run["run"] == which)


def inside(repeats: int, rollouts: int, base_ms: float | None) -> dict[str, Any]:
    """Every call of everything timed; medians, and their sum as a share of the rest."""
    raw = [process("everything", rollouts, "--inside") for _ in range(repeats)]
    parts = {
        name: statistics.median(run["inside_ms_per_s"].get(name, 0.0) for run in raw)
        for name in raw[0]["inside_ms_per_s"]
    }
    rest = base_ms or statistics.median(
        run["cpu_ms_per_s"] - sum(run["inside_ms_per_s"].values()) for run in raw
    )
    total = sum(parts.values())
    return {
        "ms_per_s": parts,
        "total_ms_per_s": total,
        "rest_ms_per_s": rest,
        "share": total / rest,
        "shown_per_s": statistics.median(run["shown_per_s"] for run in raw),
        "runs": raw,
    }


def options_of() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="of what is timed inside")
    parser.add_argument("--seconds", type=float, default=15.0, help="of streaming, for each run")
    parser.add_argument("--only", choices=sorted(RUNS), help="one run of this, and nothing else")
    # What the measured processes are started with.
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--rollouts", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = options_of()
    if options.url:
        print(json.dumps(run(options)))
        return
    rollouts = max(2 * IN_FLIGHT, int(options.seconds * TOKENS_PER_SECOND / ANSWER_TOKENS))
    rollouts -= rollouts % IN_FLIGHT
    if options.only:
        print(json.dumps(process(options.only, rollouts), indent=1))
        return
    runs, pairs = compare(options.pairs, rollouts) if options.pairs else ([], [])
    base_ms = pairs[0]["cpu_ms_per_s_without"] if pairs else None
    result = {
        **machine(),
        "in_flight": IN_FLIGHT,
        "rollouts": rollouts,
        "pairs": pairs,
        "inside": inside(options.repeats, rollouts, base_ms),
        "replayed": process("replayed", rollouts, "--repeats", 5),
        "runs": runs,
    }
    write(options.out, result, shown={**result, "runs": len(runs)})


if __name__ == "__main__":
    main()
