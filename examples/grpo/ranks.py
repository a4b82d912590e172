"""Trains with several ranks: engines on GPUs 0 and 1, a data-parallel trainer on GPUs 2 and 3.

    for gpu in 0 1; do
        CUDA_VISIBLE_DEVICES=$gpu python -m sglang.launch_server --port 3000$gpu \
            --model-path examples/grpo/policy --skip-tokenizer-init &
    done
    CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc-per-node 2 examples/grpo/ranks.py \
        --engine http://127.0.0.1:30000 http://127.0.0.1:30001

Rank 0 has the scheduler. It sends every batch to the other ranks, each rank trains on its share of
the rows, and rank 0 broadcasts the weights to the engines. Without GPUs the ranks use gloo.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from countdown import EOS, problems, question, score
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from aprilsched import DistributedPublisher, Prompt, SamplingParams, SchedulerConfig, SGLangFleet
from aprilsched.fronts.blocking import RolloutScheduler
from aprilsched.trainers.corrections import clipped_loss, importance_weights, interpolated_proximal


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", action="extend", nargs="+", required=True)
    parser.add_argument("--updates", type=int, default=16)
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    backend, device = ("nccl", f"cuda:{os.environ['LOCAL_RANK']}") if gpu else ("gloo", "cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    # The other ranks wait in it while a batch is generated, perhaps longer than nccl's 10 minutes.
    batches = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    policy: Any = AutoModelForCausalLM.from_pretrained(
        Path(__file__).parent / "policy", dtype=torch.float32
    )
    model = DistributedDataParallel(policy.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    with ExitStack() as stack:
        if dist.get_rank() == 0:
            rollouts = stack.enter_context(scheduler(options.engine))
            publisher = DistributedPublisher(policy.named_parameters, backend=backend)
            rollouts.update_weights(publisher)
        for update in range(options.updates):
            sent: list[Any] = [None]
            if dist.get_rank() == 0:
                batch = rollouts.next_batch()
                sent = [(batch.version, batch.to_torch())]
            dist.broadcast_object_list(sent, group=batches)
            start = time.monotonic()
            figures = step(model, optimizer, *sent[0], device)
            if dist.get_rank() == 0:
                seconds = (time.monotonic() - start) * dist.get_world_size()
                rollouts.update_weights(publisher)
                found = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
                print(f"update {update + 1}: {found}, train-gpu-seconds {seconds:.2f}", flush=True)
    dist.destroy_process_group()


def scheduler(engines: list[str]) -> RolloutScheduler:
    prompts = (
        Prompt(input_ids=question(each), metadata={"problem": each})
        for each in problems(1, held_out=False)
    )
    config = SchedulerConfig(
        batch_groups=8, group_size=8, delivery="samples", siblings=4, over_provision=1.5,
        sampling=SamplingParams(max_new_tokens=512, stop_token_ids=(EOS,)),
    )  # fmt: skip
    return RolloutScheduler(
        SGLangFleet(engines),
        prompts,
        reward=lambda rollout, prompt: score(
            rollout.token_ids.tolist(), prompt.metadata["problem"]
        ),
        config=config,
    )


def step(
    model: Any, optimizer: torch.optim.Optimizer, version: int, batch: Any, device: str
) -> dict[str, float]:
    """Train on this rank's rows of the batch; return figures of all rows."""
    rows = slice(dist.get_rank(), None, dist.get_world_size())
    ids, mask, sampled, versions, advantage, attention, rewards = (
        tensor[rows].to(device)
        for tensor in (
            batch.input_ids, batch.loss_mask, batch.logprobs, batch.versions, batch.advantage,
            batch.attention_mask, batch.rewards,
        )
    )  # fmt: skip
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    logprobs = torch.cat([logprobs.new_zeros(len(ids), 1), logprobs], 1)
    proximal = interpolated_proximal(logprobs, sampled, versions, proximal_version=version)
    weights = importance_weights(proximal, sampled, mask, high=2.0)
    losses = clipped_loss(logprobs, proximal, advantage[:, None], mask, weights=weights)
    # DDP takes the mean of the ranks' gradients, so each counts its share of all tokens.
    (losses.sum() / batch.loss_mask.sum().item() * dist.get_world_size()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    fresh = mask & (versions == version)
    differences = (logprobs.detach() - sampled).abs() * fresh
    sums = torch.stack([rewards.sum(), mask.sum(), (mask & ~fresh).sum(), differences.sum()])
    dist.all_reduce(sums)
    reward, tokens, stale, difference = sums.tolist()
    return {
        "reward": reward / len(batch.rewards),
        "off-policy share": stale / tokens,
        # Near 0 if engines and ranks have the same weights.
        "mismatch": difference / max(1.0, tokens - stale),
    }


if __name__ == "__main__":
    main()
