"""Measures the highest throughput of the links, on the same machine in the same run."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

__all__ = ["broadcast", "copy", "read_files"]

REPEATS = 10
_WARM_UP = 3
_CHUNK = 16 * 2**20


def _best_and_median(once: Callable[[], None], size: int, device: str) -> dict[str, float]:
    """GB/s of `once`, which moves `size` bytes (each counted once)."""
    seconds: list[float] = []
    for number in range(_WARM_UP + REPEATS):
        _settle(device)
        started = time.perf_counter()
        once()
        _settle(device)
        if number >= _WARM_UP:
            seconds.append(time.perf_counter() - started)
    seconds.sort()
    return {
        "best_gb_s": size / seconds[0] / 1e9,
        "median_gb_s": size / seconds[len(seconds) // 2] / 1e9,
        "bytes": size,
        "repeats": REPEATS,
    }


def _settle(device: str) -> None:
    if device.startswith("cuda"):
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)


def copy(source: str, target: str, size: int) -> dict[str, float]:
    """A plain copy of one tensor from `source` to `target`."""
    of = torch.ones(size, dtype=torch.uint8, device=source)
    to = torch.empty(size, dtype=torch.uint8, device=target)

    def once() -> None:
        to.copy_(of, non_blocking=True)

    return _best_and_median(once, size, target)


def read_files(paths: list[Path], threads: int) -> dict[str, float]:
    """Read whole files, as they are cached now, with so many threads."""
    size = sum(path.stat().st_size for path in paths)
    parts: list[tuple[Path, int, int]] = []
    for path in paths:
        length = path.stat().st_size
        step = max(_CHUNK, -(-length // threads))
        parts += [(path, start, min(step, length - start)) for start in range(0, length, step)]

    def read(part: tuple[Path, int, int]) -> None:
        path, start, length = part
        buffer = memoryview(bytearray(_CHUNK))
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while length > 0:
                got = file.readinto(buffer[: min(_CHUNK, length)])
                if not got:
                    break
                length -= got

    def once() -> float:
        started = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, parts))
        return time.perf_counter() - started

    seconds = sorted(once() for _ in range(3))
    return {
        "best_gb_s": size / seconds[0] / 1e9,
        "median_gb_s": size / seconds[1] / 1e9,
        "bytes": size,
        "threads": threads,
        "repeats": 3,
    }


def broadcast(backend: str, size: int, limit: float) -> dict[str, float]:
    """A broadcast of one tensor between two processes, from the second GPU to the first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--backend", backend, "--bytes", str(size)]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank)], env=env, stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    try:
        answers = [rank.communicate(timeout=limit)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return json.loads(answers[0].splitlines()[-1])


def _rank(backend: str, rank: int, size: int) -> None:
    from datetime import timedelta

    from torch import distributed

    # Rank 0, the trainer's, is on the last GPU and the engine's on the first.
    device = "cpu"
    if backend == "nccl":
        device = f"cuda:{torch.cuda.device_count() - 1 if rank == 0 else 0}"
        torch.cuda.set_device(device)
    distributed.init_process_group(backend, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    tensor = torch.full((size,), rank, dtype=torch.uint8, device=device)

    def once() -> None:
        distributed.broadcast(tensor, src=0)

    result = _best_and_median(once, size, device)
    assert int(tensor[-1]) == 0, "the broadcast brought nothing"
    if rank == 0:
        print(json.dumps(result), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    given = parser.parse_args()
    _rank(given.backend, given.rank, given.bytes)
