"""Trains with TRL's AsyncGRPOTrainer on rollouts from SGLang servers.

    pip install '.[trl]' kernels
    python -m sglang.launch_server --model-path Qwen/Qwen3-0.6B --port 30000
    python examples/trl_async_grpo.py --engine http://127.0.0.1:30000 --model Qwen/Qwen3-0.6B

The trainer itself needs a GPU with CUDA: TRL 1.16 loads FlashAttention's kernel for it, and asks
the CUDA device for its name. The servers may be anywhere.

Everything that is particular to aprilsched is in the call of RolloutWorker. With ``--streamed`` the
trainer works on each group while the others are generated, and trains on no stale token.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from aprilsched import DistributedPublisher, SchedulerConfig, SGLangFleet
from aprilsched.trainers.trl import RolloutWorker, StreamedSteps


class StreamedTrainer(StreamedSteps, AsyncGRPOTrainer):
    """TRL's trainer, which takes a batch group by group."""


def right(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    """1 for a response with the sum in it."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(str(number) in text) for text, number in zip(texts, answer, strict=True)]


def brief(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Up to 0.1 for a short response."""
    return [0.1 / (1 + len(ids) / 100) for ids in completion_ids]


def sums() -> Dataset:
    pairs = [(a, b) for a in range(10, 30) for b in range(10, 30)]
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": a + b}
            for a, b in pairs
        ]
    )


def main() -> AsyncGRPOTrainer:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--engine", action="extend", nargs="+", required=True, help="URL of an SGLang server"
    )
    parser.add_argument("--model", required=True, help="the model of the servers")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--streamed", action="store_true", help="train on groups as they come")
    parser.add_argument("--out", default="runs/trl")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    args = AsyncGRPOConfig(
        output_dir=options.out,
        max_steps=options.steps,
        save_steps=min(50, options.steps),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        num_generations=4,
        max_completion_length=256,
        # Versions, from the oldest token to the step that trains on it.
        max_staleness=0 if options.streamed else 4,
        token_budget=0,  # a step takes a fixed number of rollouts
        learning_rate=1e-5,
        bf16=gpu,
        use_cpu=not gpu,
    )
    dataset = sums()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    worker = RolloutWorker(
        SGLangFleet(options.engine),
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        reward_funcs=[right, brief],
        config=SchedulerConfig(
            over_provision=1.0 if options.streamed else 2.0,
            straggler="retract",
            pace="asynchronous",
        ),
        streamed=options.streamed,
        publisher=partial(DistributedPublisher, backend="nccl" if gpu else "gloo"),
    )
    trainer = (StreamedTrainer if options.streamed else AsyncGRPOTrainer)(
        options.model,
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        rollout_worker=worker,
        weight_transfer=worker,
        callbacks=[worker.callback],
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
