"""Trains with OpenRLHF's asynchronous trainer on rollouts that aprilsched schedules.

    pip install '.[openrlhf]'
    VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-0.6B --tokens-only --port 8000
    python examples/openrlhf_async.py --engine http://127.0.0.1:8000 --weights /shared/weights \\
        --model Qwen/Qwen3-0.6B

The servers are vLLM 0.32 or later, in an environment of their own. All further arguments are
OpenRLHF's. Everything that is particular to aprilsched is the call of ``openrlhf.main()``.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aprilsched import SchedulerConfig, VLLMFleet
from aprilsched.trainers import openrlhf


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """1 for a response with the sum in it; OpenRLHF loads this file for it."""
    found = [
        float(label in query[len(prompt) :])
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]
    return {"rewards": torch.tensor(found), "scores": torch.tensor(found)}


def write_sums(path: Path) -> None:
    pairs = [(a, b) for a in range(10, 30) for b in range(10, 30)]
    rows = [{"input": f"What is {a} + {b}?", "sum": str(a + b)} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--engine", action="extend", nargs="+", required=True, help="URLs of vLLM servers"
    )
    parser.add_argument("--weights", required=True, help="folder that the servers see too")
    parser.add_argument("--model", required=True, help="the model of the servers")
    parser.add_argument("--out", type=Path, default=Path("runs/openrlhf"))
    options, of_openrlhf = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    data = options.out / "sums.jsonl"
    write_sums(data)
    sys.argv[1:] = [
        *("--actor.model_name_or_path", options.model),
        *("--actor.num_gpus_per_node", "1"),
        *("--vllm.num_engines", "1"),
        *("--data.prompt_dataset", str(data), "--data.label_key", "sum"),
        *("--data.max_len", "1024"),
        *("--reward.remote_url", str(Path(__file__).resolve())),
        *("--rollout.batch_size", "32", "--rollout.n_samples_per_prompt", "8"),
        *("--rollout.micro_batch_size", "8", "--rollout.max_new_tokens", "512"),
        *("--train.batch_size", "256", "--train.micro_batch_size", "8"),
        *("--algo.advantage.estimator", "group_norm", "--algo.kl.init_coef", "0"),
        *("--algo.advantage.is_correction_level", "token"),
        "--train.async_enable",
        "--train.partial_rollout_enable",
        *("--ckpt.output_dir", str(options.out / "model")),
        *("--ckpt.path", str(options.out / "checkpoints")),
        *of_openrlhf,
    ]
    openrlhf.main(
        partial(VLLMFleet, options.engine),
        options.weights,
        config=SchedulerConfig(over_provision=2.0, straggler="retract", pace="asynchronous"),
    )


if __name__ == "__main__":
    main()
