"""Measures NVML's utilization of a GPU under loads with very different amounts of useful work.

    python experiments/nvml_utilization/measure.py OUT

needs a CUDA device, torch and the extra "gpu". The loads: nothing; one thread that spins; additions
of single numbers; one decoding step after another of a language model's weight matrices (7 GB of
them), for 1, 16 and 256 sequences; large matrix products. OUT gets samples.jsonl and result.json.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aprilsched.analysis.samples import read_samples
from aprilsched.telemetry.sampling import NVML_UTILIZATION, Sampler
from aprilsched.telemetry.sampling.nvml import Nvml

SECONDS = 10.0
SETTLE_SECONDS = 4.0
"""Of each load, left out: NVML and the clocks follow it with a delay."""
INTERVAL = 0.5
WIDTH, INNER, LAYERS = 4096, 12288, 36


def spin() -> Callable[[], int]:
    """One thread of the whole GPU counts to ten million."""

    def step() -> int:
        torch.cuda._sleep(10_000_000)
        return 0

    return step


def additions() -> Callable[[], int]:
    """Single numbers, a kernel each, a thousand in one graph."""
    one = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(1000):
            one.add_(1)

    def step() -> int:
        graph.replay()
        return 0

    return step


def decoding(batch: int) -> Callable[[], int]:
    """The matrix products of one decoding step for `batch` sequences; a token for each."""
    up = [_matrix(WIDTH, INNER) for _ in range(LAYERS)]
    down = [_matrix(INNER, WIDTH) for _ in range(LAYERS)]
    hidden = _matrix(batch, WIDTH)
    for weights in (up[0], down[0]):
        (_matrix(batch, weights.shape[0]) @ weights).sum()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = hidden
        for first, second in zip(up, down, strict=True):
            state = (state @ first) @ second

    def step() -> int:
        graph.replay()
        return batch

    return step


def products() -> Callable[[], int]:
    """8192 x 8192 x 8192 in bf16: what fills it."""
    left, right = _matrix(8192, 8192), _matrix(8192, 8192)

    def step() -> int:
        left @ right
        return 0

    return step


def _matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) / columns**0.5


LOADS: dict[str, Callable[[], Callable[[], int]] | None] = {
    "nothing": None,
    "one thread that spins": spin,
    "additions of single numbers": additions,
    "decoding, 1 sequence": lambda: decoding(1),
    "decoding, 16 sequences": lambda: decoding(16),
    "decoding, 256 sequences": lambda: decoding(256),
    "matrix products": products,
}


def work(make: Callable[[], Callable[[], int]] | None) -> float:
    """Keep the GPU at it for some seconds; tokens a second."""
    if make is None:
        time.sleep(SECONDS + SETTLE_SECONDS)
        return 0.0
    step = make()
    tokens, began = 0, time.perf_counter()
    while time.perf_counter() - began < SECONDS + SETTLE_SECONDS:
        # Two launches ahead: the GPU never waits for Python.
        events = [torch.cuda.Event() for _ in range(2)]
        for event in events:
            for _ in range(8):
                tokens += step()
            event.record()
        events[0].synchronize()
    torch.cuda.synchronize()
    return tokens / (time.perf_counter() - began)


def cost() -> dict[str, float]:
    """Milliseconds of one sample."""
    nvml = Nvml()
    times = []
    for _ in range(50):
        began = time.perf_counter()
        nvml.sample(0.0)
        times.append(1e3 * (time.perf_counter() - began))
    nvml.close()
    return {"median_ms": float(np.median(times)), "max_ms": max(times)}


async def main(out: Path) -> None:
    loop = asyncio.get_running_loop()
    spans: dict[str, tuple[float, float, float]] = {}
    async with Sampler(out / "samples.jsonl", gpu=True, interval=INTERVAL):
        origin = loop.time()
        for name, make in LOADS.items():
            began = loop.time() - origin
            rate = await asyncio.to_thread(work, make)
            spans[name] = (began + SETTLE_SECONDS, loop.time() - origin, rate)
            torch.cuda.empty_cache()
    (device,) = read_samples(out).devices.values()
    rows: dict[str, dict[str, Any]] = {}
    for name, (start, end, rate) in spans.items():
        within = (device.t >= start) & (device.t < end)
        rows[name] = {
            "samples": int(within.sum()),
            "utilization": round(float(np.nanmean(device.utilization[within])), 3),
            "memory_utilization": round(float(np.nanmean(device.memory_utilization[within])), 3),
            "power_w": round(float(np.nanmean(device.power_w[within])), 1),
            "sm_clock_mhz": round(float(np.nanmean(device.sm_clock_mhz[within]))),
            "tokens_per_s": round(rate),
        }
    result = {
        "device": device.name,
        "power_limit_w": device.power_limit_w,
        "label": NVML_UTILIZATION,
        "loads": rows,
        "sample": cost(),
    }
    text = json.dumps(result, indent=2)
    await asyncio.to_thread((out / "result.json").write_text, text + "\n")
    print(text)


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    asyncio.run(main(Path(sys.argv[1])))
