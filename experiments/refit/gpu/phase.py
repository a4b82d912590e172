"""Runs one phase in a process of its own, so that a trainer that hangs or dies ends only its phase.

    python phase.py NAME --url URL --out results.jsonl [--device cpu] [--tiny]

Rows go to the results as they are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from model import QWEN3_4B, TINY, RandomWeights
from refits import SEEDS, Refitter, known_answers, open_engine

GIB = 2**30
MIB = 2**20
WARM_UPS = 1


class Phase:
    """What every phase has: the settings, the results and a count of versions."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.cuda = given.device == "cuda"
        self.config = TINY if given.tiny else QWEN3_4B
        self.buckets = [MIB // 4, MIB] if given.tiny else [512 * MIB, 64 * MIB, 2 * GIB]
        self.deadline = time.monotonic() + given.seconds

    def write(self, kind: str, **row: Any) -> None:
        """Append a row, on the disk at once."""
        row = {"kind": kind, "phase": self.given.name, "at": round(time.time(), 3), **row}
        with self.given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    def on(self, gpu: int) -> str:
        """The name of a GPU; the last one there is, if that one is not."""
        return f"cuda:{min(gpu, torch.cuda.device_count() - 1)}" if self.cuda else "cpu"

    def time_left(self) -> float:
        return self.deadline - time.monotonic()

    async def repeat(self, way: str, weights: RandomWeights, publisher: Any, **facts: Any) -> None:
        """Warm-ups and repeats of one way of refitting, by turns with two policies."""
        engine = await open_engine(self.given.url)
        state = self.given.out.with_name("answers.json")
        known = known_answers(state)
        refitter = Refitter(engine, self.given.url, known)
        version = await engine.version()
        slowest = 0.0
        try:
            for number in range(-WARM_UPS, self.given.repeats):
                if self.time_left() < 1.5 * slowest + 2.0:
                    self.write("note", way=way, text=f"stopped before repeat {number}", **facts)
                    break
                started = time.monotonic()
                version += 1
                seed = SEEDS[version % len(SEEDS)]
                weights.draw(seed)
                row = await refitter.once(publisher, version, seed, weights.bytes)
                self.write("refit", way=way, repeat=number, warm_up=number < 0, **facts, **row)
                state.write_text(json.dumps(known))
                slowest = max(slowest, time.monotonic() - started)
        finally:
            await engine.close()

    # --- the phases ----------------------------------------------------------------------------

    async def tensor(self) -> None:
        """CUDA IPC, the trainer on the engine's GPU; in a dry run, host memory shared by name."""
        from aprilsched.kernel.weights import tensor

        if not self.cuda:
            stand_in()
            torch.multiprocessing.set_sharing_strategy("file_system")
            tensor.require_cuda = lambda bucket: None
            patches = importlib.import_module("sglang.srt.utils.patch_torch")
            patches.monkey_patch_torch_reductions = lambda: None  # it is for CUDA tensors only
        TensorPublisher = tensor.TensorPublisher
        weights = RandomWeights(self.config, self.on(0))
        for size in self.buckets:
            publisher = TensorPublisher(weights.named, bucket_bytes=size)
            await self.repeat("tensor", weights, publisher, bucket_bytes=size)

    async def nccl(self) -> None:
        """Broadcasts, the trainer on a GPU of its own."""
        from aprilsched.kernel.weights.distributed import DistributedPublisher

        if self.cuda and torch.cuda.device_count() < 2:
            self.write("note", text="skipped: NCCL wants a GPU for each rank, and there is one")
            return
        backend = "nccl" if self.cuda else "gloo"
        weights = RandomWeights(self.config, self.on(1))
        for size in self.buckets:
            publisher = DistributedPublisher(
                weights.named,
                backend=backend,
                bucket_bytes=size,
                device=self.on(1),
                timeout_s=30.0,
            )
            try:
                await self.repeat(backend, weights, publisher, bucket_bytes=size)
            finally:
                await publisher.aclose()

    async def disk(self) -> None:
        """A directory of safetensors, written by the trainer and read by the engine."""
        from aprilsched.kernel.weights.disk import DiskPublisher

        weights = RandomWeights(self.config, self.on(0))
        place = self._place(weights.bytes)
        facts = {"place": str(place.parent)}
        try:
            publisher = DiskPublisher(place, weights.save, keep=1)
            await self.repeat("disk", weights, publisher, **facts)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _place(self, size: int) -> Path:
        """Memory where both the old and the new version fit, the disk otherwise."""
        shm = Path("/dev/shm")  # noqa: S108
        roomy = shm.is_dir() and shutil.disk_usage(shm).free > 2.3 * size
        return (shm if roomy else Path(tempfile.gettempdir())) / f"refit-{os.getpid()}"


def stand_in() -> None:
    """What SGLang's import wants and a machine without a GPU cannot give."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests" / "sglang"))
    import stand_ins  # pyright: ignore[reportMissingImports]

    stand_ins.install()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=("tensor", "nccl", "disk"))
    parser.add_argument("--url", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=120.0, help="start no repeat after them")
    given = parser.parse_args()
    phase = Phase(given)
    try:
        asyncio.run(getattr(phase, given.name)())
    except BaseException as error:
        traceback.print_exc()
        phase.write("error", error=f"{type(error).__name__}: {error}"[:2000])
        sys.stdout.flush()
        # A thread that hangs in a collective must not keep the process.
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
