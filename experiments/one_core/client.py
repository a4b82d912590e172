"""One measurement: the scheduler of client_cost on many engines, in this process alone.

Its arguments are one JSON object. It prints one, with CPU and wall seconds. With `profile` it
prints the functions on which the time was spent instead, from samples of the stack that a timer of
CPU time takes; unlike a tracing profiler this does not make short functions look expensive.
With `control` it measures calls to all engines instead of rollouts.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import aprilsched

sys.path.append(str(Path(aprilsched.__file__).resolve().parents[1] / "experiments/client_cost"))

import clients

_SAMPLE_SECONDS = 0.002
_ROWS = 28


class Profile:
    """Samples of the stack, by a timer of this process's CPU time."""

    def __init__(self) -> None:
        self.samples = 0
        self.own: Counter[str] = Counter()
        self.with_callees: Counter[str] = Counter()

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._take)
        signal.setitimer(signal.ITIMER_PROF, _SAMPLE_SECONDS, _SAMPLE_SECONDS)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _take(self, _: int, frame: FrameType | None) -> None:
        self.samples += 1
        seen: set[str] = set()
        innermost = True
        while frame is not None:
            name = _name(frame)
            self.own[name] += innermost
            innermost = False
            if name not in seen:
                seen.add(name)
                self.with_callees[name] += 1
            frame = frame.f_back

    def table(self) -> list[tuple[str, float, float]]:
        """Functions with their own share of the samples, and that with all that they called."""
        return [
            (name, own / self.samples, self.with_callees[name] / self.samples)
            for name, own in self.own.most_common(_ROWS)
        ]


def _name(frame: FrameType) -> str:
    code = frame.f_code
    where = code.co_filename.replace("\\", "/")
    for folder in (
        "/site-packages/",
        f"/python{sys.version_info.major}.{sys.version_info.minor}/",
        "/experiments/",
        "/aprilsched/",
    ):
        where = where.rsplit(folder, 1)[-1]
    return f"{where} {code.co_qualname}"


async def rollouts(given: dict[str, Any]) -> dict[str, Any]:
    """Take all batches of a run."""
    events = tokens = count = 0
    begun = time.process_time()
    running = clients.scheduler(
        given["urls"],
        in_flight=given["in_flight"],
        rollouts=given["rollouts"],
        tokens=given["tokens"],
    )
    profile = Profile()
    async with running as scheduler:
        opened = time.process_time() - begun
        if given["profile"]:
            profile.start()
        cpu, wall = time.process_time(), time.perf_counter()
        async for batch in scheduler:
            count += sum(1 for _ in batch.rollouts)
            tokens += batch.tokens
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        profile.stop()
    events = tokens // given["event_tokens"]
    return {
        "cpu_s": cpu,
        "wall_s": wall,
        "open_cpu_s": opened,
        "rollouts": count,
        "tokens": tokens,
        "events": events,
        "cpu_us_per_event": cpu / events * 1e6,
        "share_of_a_core": cpu / wall,
        "tokens_per_s": tokens / wall,
        "tokens_per_cpu_s": tokens / cpu,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **({"profile": profile.table()} if given["profile"] else {}),
    }


async def control(given: dict[str, Any]) -> dict[str, Any]:
    """Open a scheduler on the engines, ask each for its load, and update each once."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text("{}")
        (Path(folder) / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
        fleet = aprilsched.SGLangFleet(given["urls"])
        publisher = aprilsched.DiskPublisher(folder)
        begun = time.process_time(), time.perf_counter()
        running = clients.scheduler([], in_flight=8, rollouts=0, fleet=fleet)
        async with running as scheduler:
            found["open"] = _since(begun)
            begun = time.process_time(), time.perf_counter()
            await asyncio.gather(*(engine.load() for engine in fleet.engines))
            found["load"] = _since(begun)
            begun = time.process_time(), time.perf_counter()
            await scheduler.update_weights(publisher)
            found["update"] = _since(begun)
    found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def _since(begun: tuple[float, float]) -> dict[str, float]:
    return {
        "cpu_s": time.process_time() - begun[0],
        "wall_s": time.perf_counter() - begun[1],
    }


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    given = json.loads(sys.argv[1])
    given["urls"] = [f"http://127.0.0.1:{port}" for port in given["ports"]]
    print(json.dumps(asyncio.run((control if given["control"] else rollouts)(given))))
