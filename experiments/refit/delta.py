"""Measures updates that write only what changed, against whole checkpoints, on a CPU server.

    PYTHONPATH=. python experiments/refit/delta.py --out experiments/refit

See README.md in this folder. ``--table`` prints the table of the rows that are there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aprilsched import DeltaPublisher, DiskPublisher
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.testing.contract import PROMPT, greedy, whole
from experiments.refit.gpu.model import TINY, RandomWeights
from tests.sglang.recorded import sequence_scores
from tests.sglang.server import CpuServer

MODEL: dict[str, Any] = {
    **TINY,
    "head_dim": 64,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "max_window_layers": 6,
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "num_key_value_heads": 4,
    "torch_dtype": "bfloat16",
    "vocab_size": 4096,
}
SHARES = (0.01, 0.03, 0.3)
REPEATS = 3
TOKENS = 60


async def measure(folder: Path, out: Path) -> None:
    weights, other = RandomWeights(MODEL, "cpu"), RandomWeights(MODEL, "cpu")
    weights.draw(0)
    weights.save(folder / "start")
    whole_publisher = DiskPublisher(folder / "whole", weights.save)
    delta_publisher = DeltaPublisher(
        folder / "shared",
        weights.named,
        config=folder / "start" / "config.json",
        local=folder / "local",
    )
    rows: list[dict[str, Any]] = []
    responses: list[Any] = []
    checkpoints: list[Path] = []
    with CpuServer(folder / "start", folder / "log.txt") as server:
        server.wait_ready()
        engine = SGLangEngine(server.url)
        await engine.open()
        # The first full file and a share of everything: the copies in host memory begin here.
        plan = [("delta", 1.0)] + [("delta", share) for share in SHARES for _ in range(REPEATS)]
        plan += [("whole", share) for share in SHARES for _ in range(REPEATS)]
        for version, (way, share) in enumerate(plan, 1):
            other.draw(version)
            for name, tensor in weights.tensors.items():
                chosen = torch.rand(tensor.shape) < share
                tensor[chosen] = other.tensors[name][chosen]
            publisher: Any = delta_publisher if way == "delta" else whole_publisher
            started = time.perf_counter()
            await publisher.prepare(version)
            prepared = time.perf_counter()
            await engine.pause("retract")
            await engine.flush()
            paused = time.perf_counter()
            outcomes = await publisher.publish(version, [engine])
            loaded = time.perf_counter()
            await engine.resume()
            assert outcomes == {engine.name: None}
            stream = await whole(engine, greedy(TOKENS))
            responses.append((PROMPT, np.array(stream.ids, np.int32), stream.logprobs))
            weights.save(folder / f"version-{version}")
            checkpoints.append(folder / f"version-{version}")
            files = (folder / "whole").rglob(f"version-{version:08d}/*.safetensors")
            rows.append(
                {
                    "way": way,
                    "share": share,
                    "bytes": publisher.written_bytes
                    if way == "delta"
                    else sum(file.stat().st_size for file in files),
                    "weights_bytes": weights.bytes,
                    "prepare_s": prepared - started,
                    "publish_s": loaded - paused,
                }
            )
        await engine.close()
    scored = sequence_scores(checkpoints, [each[:2] for each in responses], folder)
    for index, (row, (_, _, logprobs)) in enumerate(zip(rows, responses, strict=True)):
        row["logprob_error"] = float(np.abs(logprobs - scored[index][index]).max())
        if index:
            previous = scored[index - 1][index]
            row["error_under_the_version_before"] = float(np.abs(logprobs - previous).max())
    (out / "delta.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(out: Path) -> str:
    """The medians of the rows; the first full file has a line of its own."""
    rows = [json.loads(line) for line in (out / "delta.jsonl").read_text().splitlines()]
    lines = [
        "| way | changed | bytes of the weights | prepare | publish | error | before |",
        "|---|---|---|---|---|---|---|",
    ]
    for way, share in dict.fromkeys((row["way"], row["share"]) for row in rows):
        found = [row for row in rows if (row["way"], row["share"]) == (way, share)]
        size = statistics.median(row["bytes"] / row["weights_bytes"] for row in found)
        prepare, publish = (
            statistics.median(row[key] for row in found) for key in ("prepare_s", "publish_s")
        )
        error = max(row["logprob_error"] for row in found)
        before = [row.get("error_under_the_version_before", 0.0) for row in found]
        seconds = f"{prepare:.2f} s | {publish:.2f} s"
        errors = f"{error:.0e} | {min(before):.2g}"
        lines.append(f"| {way} | {share:.0%} | {size:.1%} | {seconds} | {errors} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if not given.table:
        folder = Path(tempfile.mkdtemp())
        try:
            asyncio.run(measure(folder, given.out))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print(table(given.out))


if __name__ == "__main__":
    main()
