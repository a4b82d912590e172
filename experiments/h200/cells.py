"""Measures cells on one GPU's SGLang server, one after the other.

    PYTHONPATH=. python experiments/h200/cells.py --out DIRECTORY --cells april:0:0.25,auto:20:1

See README.md in this folder. A cell that is in the output is not run again,
and one for which too little time is left is left out, so the same command continues the experiment
until no cell is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(HERE), str(ROOT / "experiments" / "refit" / "gpu")]

from model import (  # noqa: E402
    QWEN3_4B,
    QWEN3_8B,
    QWEN3_30B_A3B,
    TINY,
    RandomWeights,
    write_config,
)
from schedules import KV_TOKENS, MAX_RUNNING, PACED, Cell, Meter  # noqa: E402

from aprilsched import RolloutScheduler, SGLangFleet  # noqa: E402
from aprilsched.kernel.engines.http import HttpLimits  # noqa: E402
from aprilsched.observe.sampling import Sampler  # noqa: E402

GIB = 2**30
SHAPES = {"4b": QWEN3_4B, "8b": QWEN3_8B, "moe": QWEN3_30B_A3B}
MEMORY = {"moe": 0.87}
"""Share of the GPU's memory for weights and KV, if it is not 0.75."""
Kind = tuple[str, int, tuple[str, ...]]
"""Shape, GPUs and further arguments of a server."""


class Server:
    """One SGLang server with random weights, in a process group of its own, or one that an earlier
    process has left in this folder."""

    def __init__(self, folder: Path, options: argparse.Namespace, kind: Kind) -> None:
        shape, gpus, more = kind
        self._process: subprocess.Popen[bytes] | None = None
        self.folder, self.log = folder, folder / f"server-{shape}.log"
        left = folder / "server.json"
        if left.exists():
            known = json.loads(left.read_text())
            self.url, self.pid = known["url"], known["pid"]
            if known["kind"] == [shape, gpus, list(more)]:
                return
            self.stop()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = 20_000 + probe.getsockname()[1] % 10_000
        self.url = f"http://127.0.0.1:{port}"
        cpu = options.cpu
        # Servers that one scheduler uses must serve the same path.
        model = write_config(TINY if cpu else SHAPES[shape], folder.parent / f"model-{shape}")
        settings = {
            "--model-path": model, "--load-format": "dummy", "--host": "127.0.0.1", "--port": port,
            "--dtype": "float32" if cpu else "bfloat16", "--weight-version": "0",
            "--attention-backend": "torch_native" if cpu else "triton",
            "--max-running-requests": MAX_RUNNING, "--stream-interval": 64,
            "--max-total-tokens": 131_072 if cpu else KV_TOKENS,
            "--mem-fraction-static": 0.3 if cpu else MEMORY.get(shape, 0.75),
            "--random-seed": 1, "--tensor-parallel-size": gpus,
        }  # fmt: skip
        flags = ["--skip-tokenizer-init", "--incremental-streaming-output"]
        flags += ["--skip-server-warmup"]
        command = [sys.executable, "-m", "sglang.launch_server"]
        environment = dict(os.environ)
        if cpu:
            command = [options.server_python, str(ROOT / "tests/sglang/launch_cpu_server.py")]
            flags += ["--device", "cpu", "--disable-overlap-schedule"]
            environment.pop("PYTHONPATH", None)
        else:
            flags += ["--sampling-backend", "pytorch", "--grammar-backend", "none"]
            flags += ["--cuda-graph-max-bs-decode", "512"]
            flags += ["--cuda-graph-backend-prefill", "disabled"]
            if gpus > 1:
                flags += ["--disable-custom-all-reduce"]
            flags += more
        command += [str(part) for pair in settings.items() for part in pair] + flags
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=environment, start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid
        left.write_text(json.dumps({"url": self.url, "pid": self.pid, "kind": kind}))

    def wait(self, seconds: float) -> None:
        """Wait until it generates."""
        until = time.monotonic() + seconds
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}
        while time.monotonic() < until:
            if self._process is not None and self._process.poll() is not None:
                break
            try:
                self.call("/generate", **body)
                return
            except OSError:
                time.sleep(0.5)
        (self.folder / "server.json").unlink(missing_ok=True)
        raise RuntimeError(f"no server:\n{self.log.read_text(errors='replace')[-6000:]}")

    def call(self, path: str, **body: Any) -> None:
        request = urllib.request.Request(  # noqa: S310
            self.url + path, data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
            answer.read()

    def warm_up(self, scale: float) -> None:
        """Run every size of batch once, so that no cell pays for what is compiled at first use."""
        for running in (1, 64, 256, MAX_RUNNING):
            self.call("/generate", input_ids=[[5, 6, 7] * 20] * running,
                      sampling_params={"max_new_tokens": max(2, int(200 * scale)),
                                       "ignore_eos": True})  # fmt: skip

    def reset(self) -> None:
        """Empty it, and label its weights as those of version 0."""
        self.call("/continue_generation")
        self.call("/abort_request", rid="", abort_all=True)
        until = time.monotonic() + 60
        while True:
            try:
                self.call("/flush_cache")
                break
            except urllib.error.HTTPError:  # What was aborted is still running.
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        self.call("/update_weight_version", new_version="0", abort_all_requests=True)

    def stop(self) -> None:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.pid, kind)
                time.sleep(5)
            except ProcessLookupError:
                break
        (self.folder / "server.json").unlink(missing_ok=True)


def other(folder: Path, options: argparse.Namespace, kind: Kind) -> Server:
    """The server of another process, when that process has measured all its cells."""
    while not (folder / "ended").exists():
        if time.time() > options.until:
            raise RuntimeError(f"the cells in {folder} have not ended")
        time.sleep(0.2)
    if not (folder / "server.json").exists():
        raise RuntimeError(f"the server of {folder} is gone")
    return Server(folder, options, kind)


class Labels:
    """Publishes a new version that has the old weights: only its label goes to the engines."""

    async def prepare(self, version: int) -> None:
        """Nothing to do."""

    async def publish(self, version: int, engines: Sequence[Any]) -> Mapping[str, Exception | None]:
        for engine in engines:
            await engine.begin_update()
            await engine.end_update(version)
        return {engine.name: None for engine in engines}


def moved_weights() -> Any:
    """Publishes 8 GB of weights from the same GPU's memory (CUDA IPC)."""
    from aprilsched.kernel.weights.tensor import TensorPublisher

    weights = RandomWeights(QWEN3_4B, "cuda:0")
    weights.draw(11)
    return TensorPublisher(weights.named, bucket_bytes=2 * GIB)


async def drive(cell: Cell, urls: list[str], meter: Meter, until: float) -> None:
    """Take the cell's batches, train on each for its time, and update."""
    publisher = moved_weights() if cell.variant == "moved" else Labels()
    limits = HttpLimits(max_connections=4096 if cell.variant == "single" else 0)
    async with RolloutScheduler(
        SGLangFleet(urls, stream_interval=64, limits=limits), cell.workload, config=cell.config,
        planner=cell.planner(), listeners=[meter],
    ) as rollouts:  # fmt: skip
        async with asyncio.timeout(until - time.time()):
            for _ in range(cell.batches):
                taken: Any = None
                if cell.streamed:
                    async for taken in rollouts.stream():
                        await asyncio.sleep(cell.train_seconds / 32 * len(taken.groups))
                else:
                    taken = await rollouts.next_batch()
                    await asyncio.sleep(cell.train_seconds)
                taken.acknowledge()
                await rollouts.update_weights(publisher)


async def measured(cell: Cell, urls: list[str], until: float) -> dict[str, Any]:
    """One cell; what there is of it if the time ends first."""
    meter, error = Meter(cell), ""
    started_at = time.time()
    try:
        await drive(cell, urls, meter, until)
    except TimeoutError:
        error = "the time ended"
    except Exception as found:
        error = f"{type(found).__name__}: {found}"
        traceback.print_exc()
    return {
        "kind": "cell", "cell": cell.name, "began": started_at, "seconds": time.time() - started_at,
        "error": error, "batches": meter.rows(), "chosen": meter.chosen, "pace_chosen": PACED,
        "config": str(cell.config),
    }  # fmt: skip


def known(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def run(options: argparse.Namespace, names: Iterable[str], server: Server) -> None:
    results = options.out / "cells.jsonl"
    expected = {row["cell"]: row["seconds"] for row in known_predictions()}
    earlier = known(results)
    done = {line["cell"] for line in earlier if line.get("kind") == "cell" and not line["error"]}
    sampler = nullcontext()
    if options.nvml:
        sampler = Sampler(options.out / "samples.jsonl", gpu=not options.cpu or None)
    note(results, kind="samples", gpu=options.nvml)
    async with sampler:
        for name in names:
            left = options.until - time.time()
            needed = 1.1 * expected.get(name, 0.0) + 5
            if name in done or (left < needed and not options.partial):
                print(f"{name}: {'done' if name in done else f'{needed:.0f} s needed'}", flush=True)
                continue
            if left < 20:
                break
            cell, servers = Cell.of(name), [server]
            if cell.engines == 2:
                servers.append(await asyncio.to_thread(other, options.also, options, cell.server))
            for each in servers:
                await asyncio.to_thread(each.reset)
            line = await measured(cell, [each.url for each in servers], options.until)
            note(results, **line, code=options.code, gpu=options.gpu)
            kept = line["batches"]
            mean = sum(row["step_s"] for row in kept) / max(1, len(kept))
            print(f"{name}: {len(kept)} batches of {mean:.2f} s, {line['error']}", flush=True)


def refit(options: argparse.Namespace, server: Server) -> None:
    """Compare DistributedPublisher with bare broadcasts, from the other GPU (experiments/refit)."""
    script = ROOT / "experiments" / "refit" / "gpu" / "phase.py"
    server.reset()
    for phase in ("nccl", "nccl_reference"):
        if options.until - time.time() < 45:
            return
        command = [sys.executable, script, phase, "--url", server.url, "--seconds", "25", "--out",
                   options.out / "refit.jsonl"]  # fmt: skip
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"}
        try:
            subprocess.run(list(map(str, command)), env=environment, timeout=60, check=False)
        except subprocess.TimeoutExpired:
            return


def known_predictions() -> list[dict[str, Any]]:
    path = HERE / "predictions.json"
    return json.loads(path.read_text()) if path.exists() else []


def note(path: Path, **line: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"at": round(time.time(), 2), **line}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", required=True, help="SCHEDULE:TRAINER:SCALE,…")
    parser.add_argument(
        "--until", type=float, default=time.time() + 86_400, help="Unix time of the end"
    )
    parser.add_argument("--partial", action="store_true", help="begin cells that cannot end")
    parser.add_argument("--code", default="", help="commit of the code, for the results")
    parser.add_argument("--gpu", default="", help="name of the GPU, for the results")
    parser.add_argument("--also", type=Path, help="folder of the other server of two engines")
    parser.add_argument("--nvml", action="store_true", help="sample the GPUs meanwhile")
    parser.add_argument("--stays", action="store_true", help="leave the server for another call")
    parser.add_argument("--refit", action="store_true", help="then time refits from the other GPU")
    parser.add_argument("--cpu", action="store_true", help="a tiny server, without a GPU")
    parser.add_argument("--server-python", help="its Python")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "ended").unlink(missing_ok=True)
    server: Server | None = None
    try:
        for kind, names in groupby(options.cells.split(","), lambda name: Cell.of(name).server):
            started_at = time.time()
            server = Server(options.out, options, kind)
            server.wait(400)
            booted = time.time() - started_at
            server.warm_up(0.02 if options.cpu else 0.3)
            note(options.out / "cells.jsonl", kind="boot", server=kind, seconds=booted,
                 warm_s=time.time() - started_at - booted)  # fmt: skip
            asyncio.run(run(options, names, server))
        if options.refit and server is not None:
            refit(options, server)
    finally:
        if server is not None and not options.stays:
            server.stop()
        (options.out / "ended").touch()


if __name__ == "__main__":
    main()
