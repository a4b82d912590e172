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
sys.path += [str(HERE), *(str(HERE.parent / name) for name in ("refit/gpu", "learning"))]

from model import QWEN3_0_6B, QWEN3_4B, QWEN3_30B_A3B, TINY, write_config  # noqa: E402
from schedules import SERVERS, VOCABULARY, Cell, Meter, figures  # noqa: E402
from schedules import Server as Kind  # noqa: E402

from aprilsched import Batch, Prompt, Rollout, RolloutScheduler, SGLangFleet  # noqa: E402
from aprilsched.errors import EngineError  # noqa: E402
from aprilsched.planning import Planner  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "mixture": QWEN3_30B_A3B, "half": {**QWEN3_30B_A3B, "num_hidden_layers": 24},
    "dense": QWEN3_4B, "0.6B": QWEN3_0_6B,
}  # fmt: skip


class Server:
    """One SGLang server with random weights, in a process group of its own.

    Args:
        folder: for its log and its model.
        kind: its shape, its memory and how it reserves it.
        gpu: the GPU that it has for itself or shares; None for the one that this process sees.
        options: of the program.
    """

    def __init__(
        self, folder: Path, kind: Kind, options: argparse.Namespace, gpu: str | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log, self.gpu, self.kind = folder / "server.log", gpu, kind
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = 20_000 + probe.getsockname()[1] % 10_000
        self.url = f"http://127.0.0.1:{port}"
        cpu = options.cpu
        settings = {
            "--model-path": write_config(
                TINY if cpu else SHAPES[kind.shape], folder.parent / f"model-{kind.shape}"
            ),
            "--load-format": "dummy", "--host": "127.0.0.1", "--port": port,
            "--dtype": "float32" if cpu else "bfloat16", "--weight-version": "0",
            "--attention-backend": "torch_native" if cpu else "triton",
            "--max-running-requests": kind.max_running, "--stream-interval": 64,
            "--max-total-tokens": 32_768 if cpu else kind.kv_tokens,
            "--mem-fraction-static": 0.3 if cpu else 0.87, "--random-seed": 1,
            "--decode-log-interval": 40, "--schedule-conservativeness": kind.conservativeness,
        }  # fmt: skip
        flags = ["--skip-tokenizer-init", "--incremental-streaming-output"]
        flags += ["--skip-server-warmup"]
        command = [sys.executable, "-m", "sglang.launch_server"]
        environment = {**os.environ, "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": str(kind.clip)}
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        if cpu:
            command = [options.server_python, str(ROOT / "tests/sglang/launch_cpu_server.py")]
            flags += ["--device", "cpu", "--disable-overlap-schedule"]
            environment.pop("PYTHONPATH", None)
        else:
            flags += ["--sampling-backend", "pytorch", "--grammar-backend", "none"]
            flags += ["--cuda-graph-max-bs-decode", str(kind.max_running)]
            flags += ["--cuda-graph-backend-prefill", "disabled"]
        command += [str(part) for pair in settings.items() for part in pair] + flags
        self._command, self._environment = command, environment
        self.start()

    def start(self) -> None:
        """Start its process, also after :meth:`stop`, at the same address."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=self._environment, start_new_session=True,
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
        for running in (1, 8, 64, 256, self.kind.max_running):
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

    def stop(self, *signals: signal.Signals) -> None:
        """End its process group, by SIGTERM and then SIGKILL unless others are named."""
        for kind in signals or (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, kind)
                self._process.wait(10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


RECOVERED_S = 20.0
"""A cell in which an engine was killed ends so long after the engine has returned."""


class Labels:
    """Publishes a new version that has the old weights: only its label goes to the engines."""

    async def prepare(self, version: int) -> None:
        """Nothing to do."""

    def holds(self, version: int) -> bool:
        """Return True: a label can be sent to one engine after the other."""
        return True

    async def publish(self, version: int, engines: Sequence[Any]) -> Mapping[str, Exception | None]:
        outcomes: dict[str, Exception | None] = {}
        for engine in engines:
            outcomes[engine.name] = None
            try:
                await engine.begin_update()
                await engine.end_update(version)
            except EngineError as error:
                outcomes[engine.name] = error
        return outcomes


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


async def drive(
    cell: Cell, urls: Sequence[str], options: argparse.Namespace, meter: Meter, publisher: Any
) -> Checks:
    """Take the cell's batches, with an update after each and no trainer."""
    cpu, server = options.cpu, SERVERS[cell.server]
    model = TINY if cpu else SHAPES[server.shape]
    checks = Checks(frozenset((model["eos_token_id"], model["bos_token_id"])))
    prompts = cell.workload(model["vocab_size"] if cpu else VOCABULARY, options.scale)
    # The planner of a run learns the step times.
    async with RolloutScheduler(
        SGLangFleet(urls, stream_interval=64), prompts, reward=rewarded, config=cell.config,
        planner=Planner(max_running=server.max_running), listeners=[meter],
    ) as rollouts:  # fmt: skip
        started_at = time.monotonic()
        async with asyncio.timeout(options.until - time.time()):
            limit = options.seconds or cell.seconds
            while cell.continues(len(meter.ends), time.monotonic() - started_at, limit):
                if meter.has_recovered(RECOVERED_S):
                    break
                batch = await rollouts.next_batch()
                checks.take(batch)
                await rollouts.update_weights(publisher)
    return checks


async def measured(
    cell: Cell, urls: Sequence[str], options: argparse.Namespace, publisher: Any = None
) -> dict[str, Any]:
    """One cell, or the part of it that was measured until the time ended."""
    meter: Meter | None = None
    error, wrong = "", dict[str, int]()
    started_at, cpu_s = time.time(), time.process_time()
    try:
        meter = Meter(cell)
        wrong = (await drive(cell, urls, options, meter, publisher or Labels())).found
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
        "events": meter.events if meter else [], "batches": meter.rows() if meter else [],
    }  # fmt: skip


def known(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def note(path: Path, **line: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def show(line: dict[str, Any]) -> None:
    """Print a cell's figures in one line."""
    rows = line["batches"][Cell.of(line["cell"]).burn_in :]
    found = figures(rows) if rows else {}
    shown = {key: round(found[key], 2) for key in ("generated_s", "staleness") if key in found}
    print(
        f"{line['cell']}: {len(rows)} batches, {shown} {line['wrong']} {line['error']}", flush=True
    )


def run(options: argparse.Namespace) -> None:
    """Measure each cell that is not in the results, on a server of its kind."""
    results = options.out / "cells.jsonl"
    done = {line["cell"] for line in known(results) if "cell" in line and not line["error"]}
    running: tuple[str, Server] | None = None
    try:
        for name in options.list.partition("=")[2].split(","):
            cell = Cell.of(name)
            is_up = running is not None and running[0] == cell.server
            left = options.until - time.time() - (0 if is_up else BOOT_SECONDS)
            if name in done or left < min(options.seconds or cell.seconds, 45.0):
                print(f"{name}: {'measured' if name in done else f'{left:.0f} s left'}", flush=True)
                continue
            if running is None or running[0] != cell.server:
                if running is not None:
                    running[1].stop()
                running = cell.server, booted(options, cell.server)
            running[1].reset()
            line = asyncio.run(measured(cell, [running[1].url], options))
            note(results, **line, code=options.code, gpu=options.gpu)
            show(line)
    finally:
        if running is not None:
            running[1].stop()


BOOT_SECONDS = 60.0
"""At least, of a server of another kind."""


def booted(options: argparse.Namespace, kind: str) -> Server:
    """Start a server and wait until it generates at full speed."""
    started_at = time.time()
    server = Server(options.out / kind, SERVERS[kind], options)
    try:
        server.wait(max(1.0, min(400.0, options.until - started_at)))
        boot_s = time.time() - started_at
        server.warm_up(2 if options.cpu else 60)
    except BaseException:
        server.stop()
        raise
    note(options.out / "cells.jsonl", boot_s=boot_s, kind=kind,
         warm_s=time.time() - started_at - boot_s)  # fmt: skip
    print(f"{kind}: up after {boot_s:.0f} s", flush=True)
    return server


def arguments(**more: Any) -> argparse.ArgumentParser:
    """The options of every program here, which stops its servers also on SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(**more)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, help="of a cell, in the place of its own")
    parser.add_argument(
        "--until", type=float, default=time.time() + 86_400, help="Unix time of the end"
    )
    parser.add_argument("--code", default="", help="commit of the code, for the results")
    parser.add_argument("--gpu", default="", help="name of the GPU, for the results")
    parser.add_argument("--scale", type=float, help="of lengths and their limit")
    parser.add_argument("--cpu", action="store_true", help="a tiny server, without a GPU")
    parser.add_argument("--server-python", help="its Python")
    return parser


def main() -> None:
    parser = arguments(description=__doc__)
    parser.add_argument("--list", required=True, help="NUMBER=ARM:sSEED,…")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    run(options)


if __name__ == "__main__":
    main()
