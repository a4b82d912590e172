"""Trains with TorchRL's GRPOLoss, MCAdvantage and ReplayBuffer on rollouts from SGLang servers.

    pip install '.[torchrl]' transformers
    python -m sglang.launch_server --model-path Qwen/Qwen3-0.6B --port 30000
    python examples/torchrl_grpo.py --engine http://127.0.0.1:30000 --model Qwen/Qwen3-0.6B

Everything that is particular to aprilsched is in the last function.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import AutoModelForCausalLM, AutoTokenizer

from aprilsched import DiskPublisher, Prompt, SamplingParams, SchedulerConfig, Score, SGLangFleet
from aprilsched.fronts.blocking import RolloutScheduler
from aprilsched.trainers.torchrl import fill

GROUPS, SIZE = 4, 4
"""A batch has 4 prompts with 4 responses each."""


def sums(tokenizer: Any) -> Iterator[Prompt]:
    for a, b in cycle((a, b) for a in range(10, 30) for b in range(10, 30)):
        question = [{"role": "user", "content": f"What is {a} + {b}?"}]
        ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        yield Prompt(input_ids=ids, metadata={"answer": a + b})


def grpo(model: Any, tokenizer: Any) -> tuple[GRPOLoss, ReplayBuffer]:
    """TorchRL's loss on the model, and a buffer for one batch that computes the advantages."""
    actor = TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode="tokens",
        generate=False,
        return_log_probs=True,
        pad_output=False,
    )
    buffer = ReplayBuffer(
        storage=LazyStackStorage(GROUPS * SIZE),
        sampler=SamplerWithoutReplacement(),
        batch_size=8,
    )
    buffer.append_transform(MCAdvantage(grpo_size=SIZE, prompt_key="group_id"))
    return GRPOLoss(actor, clip_epsilon=(0.2, 0.28), entropy_bonus=False), buffer


def main() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--engine", action="extend", nargs="+", required=True, help="URL of an SGLang server"
    )
    parser.add_argument("--model", required=True, help="the model of the servers")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--weights", default="runs/torchrl", help="a folder the servers can read")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model.to(device).eval()  # dropout would change the ratios
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    loss, buffer = grpo(model, tokenizer)

    def score(rollout: Any, prompt: Prompt) -> Score:
        """1 for a response with the sum in it, and up to 0.1 for a short one."""
        right = str(prompt.metadata["answer"]) in tokenizer.decode(rollout.token_ids)
        parts = {"right": float(right), "brief": 0.1 / (1 + len(rollout) / 100)}
        return Score(reward=sum(parts.values()), parts=parts)

    config = SchedulerConfig(
        batch_groups=GROUPS,
        group_size=SIZE,
        over_provision=2.0,
        straggler="retract",
        pace="asynchronous",
        max_staleness=3,  # versions, from the oldest token to the step that trains on it
        sampling=SamplingParams(max_new_tokens=256),
    )
    publisher = DiskPublisher(options.weights, save=model.save_pretrained)
    fleet = SGLangFleet(options.engine)
    with RolloutScheduler(fleet, sums(tokenizer), reward=score, config=config) as rollouts:
        rollouts.update_weights(publisher)  # engines may have those of an earlier run
        for batch in islice(rollouts, options.steps):
            buffer.empty()
            fill(buffer, batch)
            for data in buffer:
                loss(data.to(device)).loss_objective.backward()
                optimizer.step()
                optimizer.zero_grad()
            rewards = [rollout.reward or 0.0 for rollout in batch.rollouts]
            print(f"batch {batch.index}: mean reward {sum(rewards) / len(rewards):.3f}")
            rollouts.update_weights(publisher)
        return rollouts.version


if __name__ == "__main__":
    main()
