"""Measures what a trainer that holds Python's lock costs the scheduler beside it.

    python experiments/gil/benchmark.py --out experiments/gil/result.json

Each measurement is a fresh trainer process with fresh servers. See README.md in this folder.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

import aprilsched
from aprilsched import (
    DiskPublisher,
    LongTailWorkload,
    SchedulerConfig,
    SGLangFleet,
    blocking,
    process,
)
from aprilsched.config import Pool
from aprilsched.engines.sim import SimConfig
from aprilsched.testing import SimServer
from experiments.library import arguments, machine, say, write

FORMS = ("thread", "process")
SERVERS = 2
IN_FLIGHT = 64
"""On each server."""
GROUP_SIZE = 8
BATCH_GROUPS = 8
MEAN_TOKENS = 400
STREAM_INTERVAL = 16
HELD_US = 50_000
_WARM_UP_SECONDS = 4.0
_UPDATE_SECONDS = 2.0


# --- trainers ------------------------------------------------------------------------------------


def idle() -> None:
    """No other thread: the trainer waits for its batches."""
    time.sleep(0.05)


def python() -> None:
    """Python code, which gives the lock away every 5 ms if another thread waits for it."""
    sum(range(100_000))


def half() -> None:
    """The lock is held for 50 ms, and then free for 50 ms."""
    held()
    time.sleep(HELD_US / 1e6)


def held() -> None:
    """A call in C that holds the lock for 50 ms and takes no CPU time from anybody."""
    _usleep(HELD_US)


# PyDLL, unlike CDLL, keeps the lock during a call.
_usleep = ctypes.PyDLL(None).usleep
TRAINERS: dict[str, Callable[[], None]] = {
    work.__name__: work for work in (idle, python, half, held)
}


@contextlib.contextmanager
def busy(work: Callable[[], None]) -> Iterator[None]:
    """A thread that does `work` again and again."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# --- the measured process ------------------------------------------------------------------------


def settings(urls: Sequence[str]) -> dict[str, Any]:
    """What both schedulers are made of."""
    return {
        "fleet": SGLangFleet(urls),
        "prompts": LongTailWorkload(median=MEAN_TOKENS, cap=4096, group_size=GROUP_SIZE, seed=1),
        "config": SchedulerConfig(
            batch_groups=BATCH_GROUPS,
            group_size=GROUP_SIZE,
            over_provision=SERVERS * IN_FLIGHT / (BATCH_GROUPS * GROUP_SIZE),
            refill=Pool(together=2),
            straggler="retract",
            pace="asynchronous",
        ),
    }


def make(urls: Sequence[str]) -> aprilsched.RolloutScheduler:
    return aprilsched.RolloutScheduler(**settings(urls))


def scheduler(form: str, urls: Sequence[str]) -> blocking.RolloutScheduler:
    if form == "process":
        return process.RolloutScheduler(make, urls)
    return blocking.RolloutScheduler(**settings(urls))


def train(form: str, trainer: str, urls: Sequence[str], seconds: float) -> dict[str, Any]:
    """Take batches and update the weights for some seconds, beside the busy thread.

    The parent asks the servers for their counters between the lines that this prints.
    """
    with (
        checkpoint() as publisher,
        scheduler(form, urls) as rollouts,
        busy(TRAINERS[trainer]),
    ):
        take(rollouts, _WARM_UP_SECONDS)
        print("begin", flush=True)
        begin = time.monotonic()
        updates: list[float] = []
        batches = 0
        while (left := begin + seconds - time.monotonic()) > 0:
            batches += take(rollouts, min(left, _UPDATE_SECONDS))
            asked = time.monotonic()
            rollouts.update_weights(publisher)
            updates.append(time.monotonic() - asked)
        wall = time.monotonic() - begin
        print("end", flush=True)
        sys.stdin.readline()
    return {"wall": wall, "batches": batches, "updates": updates}


@contextlib.contextmanager
def checkpoint() -> Iterator[DiskPublisher]:
    """Weights of a few bytes, so that an update takes the scheduler's own time."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text("{}")
        Path(folder, "model.safetensors").write_bytes(b"weights")
        yield DiskPublisher(folder)


def take(rollouts: blocking.RolloutScheduler, seconds: float) -> int:
    """Take every batch that comes within some seconds."""
    until, batches = time.monotonic() + seconds, 0
    while (left := until - time.monotonic()) > 0:
        with contextlib.suppress(TimeoutError):
            rollouts.next_batch(timeout=left)
            batches += 1
    return batches


# --- the servers ---------------------------------------------------------------------------------


async def serve() -> None:
    """Serve until the standard input ends; each line of it is answered with the counters."""
    config = SimConfig(stream_interval=STREAM_INTERVAL, stream_at_pause=False)
    async with SimServer(config) as server:
        print(server.url, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(asdict(server.engine.counters)), flush=True)


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def told(server: subprocess.Popen[str]) -> dict[str, float]:
    """The counters of a server."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write("counters\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


# --- the comparison ------------------------------------------------------------------------------


def measure(form: str, trainer: str, seconds: float) -> dict[str, Any]:
    """One run of one form beside one trainer."""
    with contextlib.ExitStack() as ends:
        servers = [started("--serve") for _ in range(SERVERS)]
        for server in servers:
            ends.callback(server.communicate)
        urls = [server.stdout.readline().strip() for server in servers if server.stdout]
        client = started(
            "--form", form, "--trainer", trainer, "--seconds", str(seconds), "--url", *urls
        )
        assert client.stdout is not None
        assert client.stdin is not None
        ends.callback(client.communicate)
        counters: list[list[dict[str, float]]] = []
        for line in ("begin", "end"):
            if client.stdout.readline().strip() != line:
                raise SystemExit(f"{form} beside {trainer} failed")
            counters.append([told(server) for server in servers])
        client.stdin.write("\n")
        client.stdin.flush()
        report = json.loads(client.stdout.readline())

    def during(name: str) -> float:
        before, after = (sum(each[name] for each in at) for at in counters)
        return after - before

    updates = len(report["updates"])
    return {
        "form": form,
        "trainer": trainer,
        **report,
        "tokens_per_s": during("generated") / report["wall"],
        "paused_s": during("paused_seconds") / SERVERS / updates,
    }


def rows(raw: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians of each form beside each trainer, and the ratio to the idle trainer's thread."""

    def median(form: str, trainer: str, figure: Callable[[dict[str, Any]], float]) -> float:
        found = [figure(run) for run in raw if (run["form"], run["trainer"]) == (form, trainer)]
        return statistics.median(found)

    def row(form: str, trainer: str) -> dict[str, Any]:
        tokens = median(form, trainer, lambda run: run["tokens_per_s"])
        return {
            "form": form,
            "trainer": trainer,
            "tokens_per_s": tokens,
            "share": tokens / median("thread", "idle", lambda run: run["tokens_per_s"]),
            "update_ms": 1e3 * median(form, trainer, lambda run: statistics.median(run["updates"])),
            "paused_ms": 1e3 * median(form, trainer, lambda run: run["paused_s"]),
        }

    return [row(form, trainer) for trainer in TRAINERS for form in FORMS]


def options_of() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    # What the measured processes are started with.
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--form", help=argparse.SUPPRESS)
    parser.add_argument("--trainer", help=argparse.SUPPRESS)
    parser.add_argument("--url", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = options_of()
    if options.serve:
        asyncio.run(serve())
        return
    if options.form:
        print(json.dumps(train(options.form, options.trainer, options.url, options.seconds)))
        return
    raw: list[dict[str, Any]] = []
    for repeat in range(options.repeats):
        order = [(form, trainer) for trainer in TRAINERS for form in FORMS]
        for form, trainer in order[:: 1 if repeat % 2 == 0 else -1]:
            raw.append(measure(form, trainer, options.seconds))
            say(repeat, json.dumps({**raw[-1], "updates": "…"}))
    result: dict[str, Any] = {
        **machine(),
        "rows": rows(raw),
        "runs": raw,
    }
    write(options.out, result, shown={**result, "runs": len(raw)})


if __name__ == "__main__":
    main()
