"""Measures how fast each way of refitting is on real GPUs.

    python measure.py --out DIRECTORY [--device cpu --tiny] [--seconds 540]

It boots one server and runs the phases one after another, each in a process of its own with a time
limit. If a phase fails, all earlier measurements are in DIRECTORY/results.jsonl. See README.md in
this folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from model import QWEN3_4B, TINY, write_config
from server import GpuServer, Server, tiny_server

HERE = Path(__file__).parent
PHASES = {
    "tensor": 110.0,
    "disk": 120.0,
    "nccl": 120.0,
}
"""Seconds that each may take at most, in the order in which they run."""
_RESERVE = 12.0
"""Left at the end to stop the server and to write."""
_REBOOT = 170.0
_START_UP = 25.0
"""Of a phase's limit, what it may spend on imports and on its last repeat."""


class Run:
    """The results file and the clock."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.started = float(os.environ.get("MEASURE_STARTED", time.time()))
        self.results = given.out / "results.jsonl"

    def left(self) -> float:
        """Seconds until everything has to be over."""
        return self.started + self.given.seconds - time.time() - _RESERVE

    def write(self, kind: str, **row: Any) -> None:
        """Append a row."""
        row = {"kind": kind, "at": round(time.time(), 3), **row}
        with self.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    def phase(self, name: str, url: str) -> bool:
        """Run one phase; whether it ended well."""
        limit = min(PHASES[name], self.left())
        if limit < 20.0:
            self.write("skipped", phase=name, text=f"{self.left():.0f} s are left")
            return True
        command = [
            sys.executable, str(HERE / "phase.py"), name, "--url", url,
            "--out", str(self.results), "--device", self.given.device,
            "--repeats", str(self.given.repeats), "--seconds", str(limit - _START_UP),
            *(["--tiny"] if self.given.tiny else []),
        ]  # fmt: skip
        started = time.monotonic()
        with (self.given.out / "phases.log").open("ab") as log:
            child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                code: int | str = child.wait(limit)
            except subprocess.TimeoutExpired:
                code = "timeout"
            finally:
                child.kill()
                child.wait()
        self.write("phase", phase=name, ended=code, seconds=round(time.monotonic() - started, 1))
        return code == 0

    def facts(self) -> None:
        """The machine and the software."""
        row: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count()}
        for package in ("torch", "sglang", "transformers", "safetensors", "checkpoint-engine"):
            with contextlib.suppress(PackageNotFoundError):
                row[package] = version(package)
        for name, command in (
            (
                "gpus",
                ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv"],
            ),
            ("topology", ["nvidia-smi", "topo", "-m"]),
        ):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=20, check=False
                )
                row[name] = done.stdout.strip()
        row["environment"] = {
            k: v for k, v in os.environ.items() if k.startswith(("NCCL", "SGLANG"))
        }
        self.write("machine", **row)


@contextlib.contextmanager
def booted(run: Run, number: int) -> Iterator[Server]:
    """A server that answers, or the reason why there is none in the results."""
    out: Path = run.given.out
    log = out / f"server-{number}.log"
    server: Server
    if run.given.device == "cpu":
        server = tiny_server(write_config(TINY, out / "model"), log)
    else:
        shape = TINY if run.given.tiny else QWEN3_4B
        server = GpuServer(write_config(shape, out / "model"), log)
    started = time.monotonic()
    try:
        server.start(min(240.0, run.left()))
        run.write("boot", seconds=round(time.monotonic() - started, 1))
        yield server
    finally:
        server.stop()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=540.0, help="everything is over by then")
    parser.add_argument("--phases", nargs="*", default=list(PHASES))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    given.out = given.out.resolve()
    run = Run(given)
    run.facts()
    waiting = list(given.phases)
    boots = 0
    while waiting and (boots == 0 or run.left() > _REBOOT):
        boots += 1
        try:
            with booted(run, boots) as server:
                while waiting:
                    well = run.phase(waiting.pop(0), server.url)
                    # A refit that broke off may have left the server in it for ever.
                    if not well and not server.generates():
                        run.write("note", text="the server does not answer any more")
                        break
        except Exception as error:
            run.write("error", error=f"{type(error).__name__}: {error}"[-3000:])
            if boots > 1:
                break
    for name in waiting:
        run.write("skipped", phase=name, text="no server")
    run.write("end", seconds=round(time.time() - run.started, 1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
