"""Measures a colocated trainer: in each step the engine sleeps and then gets new weights.

    SCRIPT=sleep.py bash experiments/refit/gpu/run.sh DIRECTORY

The scheduler runs as in a real training, with stragglers. In each sleep the memory that the engine
released is really allocated, filled and freed; then the weights are loaded by handle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import QWEN3_4B, RandomWeights, write_config
from server import GpuServer

from aprilsched import (
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SGLangFleet,
    TensorPublisher,
)

SEEDS = (11, 22)
STEPS = 6
GIB = 2**30
LONGEST = 3_000


def used_gib() -> float:
    """Memory in use on the first GPU, by everybody."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024


def prompts() -> list[Prompt]:
    """Long tails: one group in four is an order of magnitude longer."""
    rng = np.random.default_rng(5)
    made: list[Prompt] = []
    for index in range(400):
        length = LONGEST if index % 4 == 0 else int(rng.integers(100, 400))
        sampling = SamplingParams(max_new_tokens=length, ignore_eos=True)
        made.append(Prompt(input_ids=rng.integers(3, 1000, 64).astype(np.int32), sampling=sampling))
    return made


def train(gib: float) -> None:
    """Take so much of the GPU's memory, write to all of it, give it back."""
    block = torch.empty(int(gib * GIB), dtype=torch.uint8, device="cuda:0")
    block.fill_(1)
    torch.cuda.synchronize()
    del block
    torch.cuda.empty_cache()


async def run(url: str, write: Any) -> None:
    weights = RandomWeights(QWEN3_4B, "cuda:0")
    weights.draw(SEEDS[0])
    publisher = TensorPublisher(weights.named, bucket_bytes=2 * GIB)
    config = SchedulerConfig(
        batch_groups=8, group_size=4, over_provision=2.0, straggler="abort", refill="wave"
    )
    async with RolloutScheduler(SGLangFleet([url]), prompts(), config=config) as rollouts:
        for step in range(STEPS):
            batch = await rollouts.next_batch()
            row: dict[str, Any] = {
                "step": step,
                "version": batch.version,
                "in_flight": len(rollouts.state.in_flight.rollouts),
                "awake_gib": used_gib(),
            }
            started = time.perf_counter()
            async with rollouts.asleep():
                row["fall_asleep_s"] = time.perf_counter() - started
                row["asleep_gib"] = used_gib()
                await asyncio.to_thread(train, row["awake_gib"] - row["asleep_gib"] - 2)
                weights.draw(SEEDS[(step + 1) % 2])
                started = time.perf_counter()
                await rollouts.update_weights(publisher)
                row["update_s"] = time.perf_counter() - started
                row["refitted_gib"] = used_gib()
                started = time.perf_counter()
            row["wake_s"] = time.perf_counter() - started
            row["several_versions"] = sum(
                len({s.version for s in rollout.segments}) > 1 for rollout in batch.rollouts
            )
            write("sleep", **row)
        in_flight = rollouts.state.in_flight
        write(
            "books",
            launched=in_flight.counters.launched,
            delivered=in_flight.counters.delivered,
            in_flight=len(in_flight.rollouts),
            dropped=in_flight.ledger.total,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    results = out / "sleep.jsonl"

    def write(kind: str, **row: Any) -> None:
        with results.open("a") as file:
            file.write(json.dumps({"kind": kind, **row}) + "\n")
        print(json.dumps({"kind": kind, **row}), flush=True)

    server = GpuServer(
        write_config(QWEN3_4B, out / "model"), out / "server-sleep.log", "--enable-memory-saver"
    )
    try:
        started = time.monotonic()
        server.start(240.0)
        write("boot", seconds=round(time.monotonic() - started, 1))
        asyncio.run(asyncio.wait_for(run(server.url, write), 200.0))
    except BaseException as error:
        traceback.print_exc()
        write("error", error=f"{type(error).__name__}: {error}"[:2000])
    finally:
        server.stop()


if __name__ == "__main__":
    main()
