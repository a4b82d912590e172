"""Measures cells on one GPU's SGLang server, one after the other.

    PYTHONPATH=. python experiments/h200/cells.py --out DIRECTORY --list 0=wave@2.0:s0,auto:s0

See README.md in this folder. A cell that is in the output is not run again, and one for which too
little time is left is left out, so the same command continues the experiment until no cell is
missing.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(HERE), str(ROOT / "experiments" / "refit" / "gpu")]

from model import QWEN3_30B_A3B, TINY, write_config  # noqa: E402
from schedules import (  # noqa: E402
    CLIP,
    KV_TOKENS,
    LISTS,
    MAX_RUNNING,
    SCALE,
    SECONDS,
    VOCABULARY,
    Cell,
    Meter,
    figures,
)

from aprilsched import Batch, Prompt, Rollout, RolloutScheduler, SGLangFleet  # noqa: E402
from aprilsched.planning import Planner  # noqa: E402


class Server:
    """One SGLang server with random weights, in a process group of its own."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.log = folder / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = 20_000 + probe.getsockname()[1] % 10_000
        self.url = f"http://127.0.0.1:{port}"
        cpu = options.cpu
        settings = {
            "--model-path": write_config(TINY if cpu else QWEN3_30B_A3B, folder / "model"),
            "--load-format": "dummy", "--host": "127.0.0.1", "--port": port,
            "--dtype": "float32" if cpu else "bfloat16", "--weight-version": "0",
            "--attention-backend": "torch_native" if cpu else "triton",
            "--max-running-requests": MAX_RUNNING, "--stream-interval": 64,
            "--max-total-tokens": 131_072 if cpu else KV_TOKENS,
            "--mem-fraction-static": 0.3 if cpu else 0.87, "--random-seed": 1,
            "--decode-log-interval": 40,
        }  # fmt: skip
        flags = ["--skip-tokenizer-init", "--incremental-streaming-output"]
        flags += ["--skip-server-warmup"]
        command = [sys.executable, "-m", "sglang.launch_server"]
        environment = {**os.environ, "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": str(CLIP)}
        if cpu:
            command = [options.server_python, str(ROOT / "tests/sglang/launch_cpu_server.py")]
            flags += ["--device", "cpu", "--disable-overlap-schedule"]
            environment.pop("PYTHONPATH", None)
        else:
            flags += ["--sampling-backend", "pytorch", "--grammar-backend", "none"]
            flags += ["--cuda-graph-max-bs-decode", "512"]
            flags += ["--cuda-graph-backend-prefill", "disabled"]
        command += [str(part) for pair in settings.items() for part in pair] + flags
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=environment, start_new_session=True,
            )  # fmt: skip

    def wait(self, seconds: float) -> None:
        """Wait until it generates."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._process.poll() is None:
            try:
                self.call("/generate", input_ids=[5, 6], sampling_params={"max_new_tokens": 2})
                return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"no server:\n{self.log.read_text(errors='replace')[-6000:]}")

    def call(self, path: str, **body: Any) -> None:
        request = urllib.request.Request(  # noqa: S310
            self.url + path, data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
            answer.read()

    def warm_up(self, tokens: int) -> None:
        """Run every size of batch once, so that no cell pays for what is compiled at first use."""
        for running in (1, 8, 64, 256, MAX_RUNNING):
            self.call("/generate", input_ids=[[5, 6, 7] * 20] * running,
                      sampling_params={"max_new_tokens": tokens, "ignore_eos": True})  # fmt: skip

    def reset(self) -> None:
        """Empty it, and label its weights as those of version 0."""
        self.call("/continue_generation")
        self.call("/abort_request", rid="", abort_all=True)
        until = time.monotonic() + 60
        while True:
            try:
                self.call("/flush_cache")
                break
            except urllib.error.HTTPError:  # Aborted requests are still running.
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        self.call("/update_weight_version", new_version="0", abort_all_requests=True)

    def stop(self) -> None:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, kind)
                self._process.wait(10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


class Labels:
    """Publishes a new version that has the old weights: only its label goes to the engines."""

    async def prepare(self, version: int) -> None:
        """Nothing to do."""

    async def publish(self, version: int, engines: Sequence[Any]) -> Mapping[str, Exception | None]:
        for engine in engines:
            await engine.begin_update()
            await engine.end_update(version)
        return {engine.name: None for engine in engines}


class Checks:
    """Counts what must not happen in the batches of a cell."""

    def __init__(self, ends: frozenset[int]) -> None:
        self.found = {"unfinished": 0, "doubled": 0, "few_siblings": 0}
        self._ends = ends
        self._seen: set[int] = set()

    def take(self, batch: Batch) -> None:
        for unit in batch.units:
            siblings = getattr(unit, "siblings", None)
            self.found["few_siblings"] += siblings is not None and len(siblings) != 4
            for rollout in unit.rollouts:
                stops = self._ends.union(unit.prompt.sampling[rollout.index].stop_token_ids)
                whole = len(rollout) == unit.prompt.sampling[rollout.index].max_new_tokens
                self.found["unfinished"] += not whole and int(rollout.token_ids[-1]) not in stops
                self.found["doubled"] += rollout.rollout_id in self._seen
                self._seen.add(rollout.rollout_id)


def rewarded(rollout: Rollout, prompt: Prompt) -> float:
    """Return the same for each response; samples are delivered when they have rewards."""
    return 0.0


async def drive(cell: Cell, server: Server, options: argparse.Namespace, meter: Meter) -> Checks:
    """Take the cell's batches, with an update after each and no trainer."""
    cpu = options.cpu
    model = TINY if cpu else QWEN3_30B_A3B
    checks = Checks(frozenset((model["eos_token_id"], model["bos_token_id"])))
    prompts = cell.workload(model["vocab_size"] if cpu else VOCABULARY, options.scale)
    # The planner of a run learns the step times.
    async with RolloutScheduler(
        SGLangFleet([server.url], stream_interval=64), prompts, reward=rewarded,
        config=cell.config, planner=Planner(max_running=MAX_RUNNING), listeners=[meter],
    ) as rollouts:  # fmt: skip
        started_at = time.monotonic()
        async with asyncio.timeout(options.until - time.time()):
            while cell.continues(len(meter.ends), time.monotonic() - started_at, options.seconds):
                batch = await rollouts.next_batch()
                checks.take(batch)
                await rollouts.update_weights(Labels())
    return checks


async def measured(cell: Cell, server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """One cell, or the part of it that was measured until the time ended."""
    meter: Meter | None = None
    error, wrong = "", dict[str, int]()
    started_at, cpu_s = time.time(), time.process_time()
    try:
        meter = Meter(cell)
        wrong = (await drive(cell, server, options, meter)).found
    except TimeoutError:
        error = "the time ended"
    except Exception as found:
        error = f"{type(found).__name__}: {found}"
        traceback.print_exc()
    return {
        "cell": cell.name, "started": round(started_at, 1), "error": error, "wrong": wrong,
        "seconds": round(time.time() - started_at, 2),
        "cpu_s": round(time.process_time() - cpu_s, 2),
        "schedule": meter.chosen[-1] if meter and meter.chosen else "",
        "batches": meter.rows() if meter else [],
    }  # fmt: skip


def known(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def note(path: Path, **line: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def run(options: argparse.Namespace, server: Server) -> None:
    """Measure each cell that is not in the results."""
    results = options.out / "cells.jsonl"
    done = {line["cell"] for line in known(results) if "cell" in line and not line["error"]}
    number, _, names = options.list.partition("=")
    for name in names.split(",") if names else LISTS[int(number)]:
        left = options.until - time.time()
        if name in done or left < min(options.seconds, 45.0):
            print(f"{name}: {'measured' if name in done else f'{left:.0f} s left'}", flush=True)
            continue
        cell = Cell.of(name)
        server.reset()
        line = asyncio.run(measured(cell, server, options))
        note(results, **line, code=options.code, gpu=options.gpu)
        rows = line["batches"][cell.burn_in :]
        found = figures(rows) if rows else {}
        shown = {key: round(found[key], 2) for key in ("generated_s", "age") if key in found}
        print(f"{name}: {len(rows)} batches, {shown} {line['wrong']} {line['error']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--list", required=True, help="NUMBER of LISTS, or NUMBER=ARM:sSEED,…")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a cell")
    parser.add_argument(
        "--until", type=float, default=time.time() + 86_400, help="Unix time of the end"
    )
    parser.add_argument("--code", default="", help="commit of the code, for the results")
    parser.add_argument("--gpu", default="", help="name of the GPU, for the results")
    parser.add_argument("--scale", type=float, default=SCALE, help="of lengths and their limit")
    parser.add_argument("--cpu", action="store_true", help="a tiny server, without a GPU")
    parser.add_argument("--server-python", help="its Python")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    started_at = time.time()
    server = Server(options.out, options)
    try:
        server.wait(400)
        booted = time.time() - started_at
        server.warm_up(2 if options.cpu else 60)
        note(options.out / "cells.jsonl", boot_s=booted, warm_s=time.time() - started_at - booted)
        print(f"up after {booted:.0f} s", flush=True)
        run(options, server)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
