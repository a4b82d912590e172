"""Measures one scheduler over several engines; see engines.md.

    PYTHONPATH=. python experiments/h200/engines.py --out DIRECTORY --list 0,1

The list has the numbers of the GPUs, and may name cells for all engines (0,1=4x64:auto:s0). Two
servers share a GPU, unless there are four GPUs. The engines of each GPU measure their cells at the
same time, and then all of them together. Each cell is a process of its own, so that its CPU time is
the scheduler's, and one that hangs ends alone. A cell that is in the output, and one for which too
little time is left, is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from cells import SHAPES, Labels, Server, arguments, known, measured, note, show
from model import TINY, RandomWeights
from schedules import SERVERS, Cell, engines_of_a_gpu, fleets

from aprilsched import DistributedPublisher, TensorPublisher

KILLED_AT_VERSION = 4
"""An engine is killed soon after this update."""
_SPARE_S = 45.0
"""Seconds that a cell's process may take longer than its batches."""


class Killing(Labels):
    """Publishes labels, and asks for the death of an engine by a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    async def publish(self, version: int, engines: Sequence[Any]) -> Mapping[str, Exception | None]:
        if version == KILLED_AT_VERSION:
            self._file.touch()
        return await super().publish(version, engines)


class FromEachGpu:
    """Brings weights from a copy on each GPU to the engines there, by CUDA IPC.

    NCCL cannot have two ranks on one GPU, so the engines of a shared GPU cannot be in one group.

    Args:
        places: the GPU of each engine's URL.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)
        gpus = sorted(set(places.values()))
        self._publishers = {
            gpu: TensorPublisher(_filled(f"cuda:{number}").named, bucket_bytes=2 * 2**30)
            for number, gpu in enumerate(gpus)
        }

    async def prepare(self, version: int) -> None:
        for publisher in self._publishers.values():
            await publisher.prepare(version)

    async def publish(self, version: int, engines: Sequence[Any]) -> Mapping[str, Exception | None]:
        here: dict[str, list[Any]] = {}
        for engine in engines:
            here.setdefault(self._places[f"http://{engine.name}"], []).append(engine)
        found = await asyncio.gather(
            *(self._publishers[gpu].publish(version, there) for gpu, there in here.items())
        )
        return {name: error for outcomes in found for name, error in outcomes.items()}


def _filled(device: str) -> RandomWeights:
    """Weights as small as those of ``--load-format dummy``: all tokens stay equally likely."""
    weights = RandomWeights(TINY if device == "cpu" else SHAPES["half"], device)
    for tensor in weights.tensors.values():
        tensor.uniform_(-1e-3, 1e-3)
    return weights


def publisher_of(cell: Cell, options: argparse.Namespace) -> Any:
    """Return the publisher of a cell's weights, or None if only labels are published."""
    if cell.arm.endswith(":killed"):
        return Killing(kill_file(options.out))
    if not cell.arm.endswith(":weights"):
        return None
    if options.cpu:
        return DistributedPublisher(_filled("cpu").named, backend="gloo")
    return FromEachGpu(dict(zip(options.urls, options.places, strict=True)))


def kill_file(results: Path) -> Path:
    return results.with_suffix(".kill")


def ended(command: Sequence[str], seconds: float) -> bool:
    """Run a process in a group of its own; return whether it ended within `seconds`."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        process.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def options_of(options: argparse.Namespace) -> Iterator[str]:
    """The options that a cell's process gets from this one."""
    for name in ("seconds", "code", "gpu", "scale"):
        if getattr(options, name):
            yield from (f"--{name}", str(getattr(options, name)))
    if options.cpu:
        yield "--cpu"


def in_turn(
    names: Sequence[str], servers: Sequence[Server], results: Path, options: argparse.Namespace
) -> None:
    """Measure cells on these servers, one after the other."""
    done = {line["cell"] for line in known(results) if "cell" in line and not line["error"]}
    for name in names:
        cell = Cell.of(name)
        wanted = options.seconds or cell.seconds
        left = options.until - time.time()
        if name in done or left < min(wanted, 90.0) + 8.0:
            print(f"{name}: {'measured' if name in done else f'{left:.0f} s left'}", flush=True)
            continue
        for server in servers:
            server.reset()
        limit = min(left, wanted + _SPARE_S)
        command = [
            sys.executable, __file__, "--cell", name, "--out", str(results),
            "--until", str(time.time() + limit - 4.0), "--urls", *(each.url for each in servers),
            "--places", *(each.gpu or "" for each in servers), *options_of(options),
        ]  # fmt: skip
        kill_file(results).unlink(missing_ok=True)
        if cell.arm.endswith(":killed"):
            threading.Thread(
                target=restart, args=(servers[-1], kill_file(results), limit), daemon=True
            ).start()
        if not ended(command, limit):
            print(f"{name}: ended after {limit:.0f} s", flush=True)
        if cell.arm.endswith(":killed"):
            servers[-1].wait(max(1.0, min(120.0, options.until - time.time())))


def restart(server: Server, file: Path, seconds: float) -> None:
    """Kill a server as soon as the file is there, and start it again."""
    until = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.2)
    if file.exists():
        time.sleep(1.5)  # Until the engines generate again.
        server.stop(signal.SIGKILL)
        server.start()


def measure(options: argparse.Namespace) -> None:
    """Start the servers and measure all cells."""
    started_at = time.time()
    numbers, _, names = options.list.partition("=")
    gpus = numbers.split(",")
    each = engines_of_a_gpu(len(gpus))
    servers = [
        Server(options.out / f"server-{gpu}-{number}", SERVERS["half"], options, gpu)
        for gpu in gpus for number in range(each)
    ]  # fmt: skip
    try:
        for server in servers:
            server.wait(max(1.0, min(300.0, options.until - time.time())))
        boot_s = time.time() - started_at
        lists = [[]] * len(gpus) + [names.split(",")] if names else fleets(len(gpus))
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(lambda server: server.warm_up(2 if options.cpu else 60), servers))
            print(f"{len(servers)} servers: up after {boot_s:.0f} s", flush=True)
            note(options.out / "cells.jsonl", boot_s=boot_s,
                 warm_s=time.time() - started_at - boot_s)  # fmt: skip
            list(pool.map(
                lambda number: in_turn(
                    lists[number], servers[number * each : (number + 1) * each],
                    options.out / f"cells-{gpus[number]}.jsonl", options,
                ),
                range(len(gpus)),
            ))  # fmt: skip
        in_turn(lists[-1], servers, options.out / "cells-all.jsonl", options)
    finally:
        for server in servers:
            server.stop()


def main() -> None:
    parser = arguments(description=__doc__)
    parser.add_argument("--list", help="GPU,GPU or GPU,GPU=CELL,CELL")
    parser.add_argument("--cell", help="measure one cell on running servers")
    parser.add_argument("--urls", nargs="+", help="their addresses")
    parser.add_argument("--places", nargs="+", help="their GPUs")
    options = parser.parse_args()
    if options.cell is None:
        options.out.mkdir(parents=True, exist_ok=True)
        measure(options)
        return
    cell = Cell.of(options.cell)
    torch.set_num_threads(1)
    publisher = publisher_of(cell, options)
    line = asyncio.run(measured(cell, options.urls, options, publisher))
    note(options.out, **line, code=options.code, gpu=options.gpu, places=options.places)
    show(line)
    sys.stdout.flush()
    os._exit(0)  # Threads of a broken-off publish must not keep the process.


if __name__ == "__main__":
    main()
