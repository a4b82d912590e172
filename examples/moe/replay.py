"""GRPO on a tiny mixture of experts whose trainer replays the engine's routing.

    python examples/moe/replay.py --out runs/moe
    python -m sglang.launch_server --model-path runs/moe/policy --skip-tokenizer-init \
        --enable-return-routed-experts --dtype float32 --port 30000
    python examples/moe/replay.py --out runs/moe --engine http://127.0.0.1:30000

Without ``--engine`` it writes the policy. With it, it trains, and compares the trainer's
log-probabilities with the engine's before each update: with the routing of the engine, and with
the trainer's own. `make example-moe` does all this on a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from transformers.utils.logging import disable_progress_bar

from aprilsched import (
    Batch,
    DiskPublisher,
    Prompt,
    Rollout,
    SamplingParams,
    SchedulerConfig,
    SGLangFleet,
)
from aprilsched.fronts.blocking import RolloutScheduler
from aprilsched.kernel.values.companions import routed_experts

sys.path.insert(0, str(Path(__file__).parents[1] / "grpo"))
from train import Trainer

LAYERS, EXPERTS, PER_TOKEN, VOCABULARY = 2, 8, 3, 256
BOUND = 1e-4


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", action="extend", nargs="+", help="URL of a server")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument(
        "--gap", type=float, default=1e-5,
        help="difference of the routers' rows of two experts of a pair; 1 for independent rows",
    )  # fmt: skip
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--groups", type=int, default=8, help="prompts in a batch")
    parser.add_argument("--size", type=int, default=8, help="responses of a prompt")
    parser.add_argument("--cap", type=int, default=64, help="tokens of a response")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(given)


# --- the policy and its routers ------------------------------------------------------------------


def write_policy(folder: Path, *, gap: float, seed: int) -> None:
    """Write a random policy whose experts come in pairs that the router can hardly tell apart, as
    those do that were copied from one dense layer. With an odd number of experts for a token, one
    of a pair is always chosen and the other is not."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, moe_intermediate_size=64,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_experts=EXPERTS, num_experts_per_tok=PER_TOKEN, norm_topk_prob=True,
        max_position_embeddings=2048, tie_word_embeddings=False, initializer_range=0.2,
        bos_token_id=1, eos_token_id=0, pad_token_id=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for router in routers(model):
            first, second = router.weight.view(EXPERTS // 2, 2, -1).unbind(1)
            second.copy_(torch.lerp(first, second, gap))
    model.save_pretrained(folder)


def routers(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]


@contextmanager
def replay(model: torch.nn.Module, rows: torch.Tensor) -> Generator[list[torch.Tensor]]:
    """Let the routers choose the experts of `rows`, [tokens, layers, experts per token], and weigh
    them by their own logits, so that these keep their gradient.

    Gives a list that gets, for each layer of each forward pass, whether the router alone would
    have chosen other experts, bool [tokens].
    """
    flips: list[torch.Tensor] = []

    def choose(chosen: torch.Tensor) -> Any:
        def hook(router: Any, given: tuple[torch.Tensor], found: tuple[torch.Tensor, ...]) -> Any:
            logits = F.linear(given[0].reshape(-1, router.hidden_dim), router.weight)
            weights = logits.float().softmax(-1).gather(-1, chosen)
            if router.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            flips.append((found[2].sort(-1).values != chosen.sort(-1).values).any(-1))
            return found[0], weights.to(logits.dtype), chosen

        return hook

    hooks = [
        router.register_forward_hook(choose(rows[:, layer].long()))
        for layer, router in enumerate(routers(model))
    ]
    try:
        yield flips
    finally:
        for hook in hooks:
            hook.remove()


class ReplayTrainer(Trainer):
    """The trainer of examples/grpo. It replays routing, and leaves the routers as they are: in a
    step of training the experts of a pair would become easy to tell apart."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        for router in routers(self.model):
            router.requires_grad_(False)

    def accumulate(self, part: Batch, share: float) -> dict[str, float]:
        rows = part.to_torch(packed=True).companions["routed_experts"]
        with replay(self.model, rows.to(self.device)):
            return super().accumulate(part, share)

    @torch.no_grad()
    def compare(self, batch: Batch) -> dict[str, Any]:
        """How far the ratio of the trainer's to the engine's probability of each token of this
        version is from 1."""
        x = batch.to_torch(packed=True)
        ids, positions = x.input_ids.to(self.device), x.position_ids.to(self.device)
        counts = x.loss_mask & (x.versions == batch.version)
        own = self.logprobs(ids, positions)
        with replay(self.model, x.companions["routed_experts"].to(self.device)) as flips:
            replayed = self.logprobs(ids, positions)
        forwarded = torch.ones(len(ids), dtype=torch.bool)
        forwarded[x.cu_seqlens[1:] - 1] = False  # the last token of a response has no row
        found = {"tokens": int(counts.sum()), "other": int((x.loss_mask & ~counts).sum())}
        found["flips"] = float(torch.stack(flips).cpu()[:, forwarded].float().mean())
        for name, logprobs in (("replayed", replayed), ("own", own)):
            off = ((logprobs.cpu() - x.logprobs)[counts].exp() - 1).abs()
            found[name] = {
                "largest": float(off.max()),
                "mean": float(off.mean()),
                "beyond": float((off > BOUND).float().mean()),
            }
        return found


# --- the run -------------------------------------------------------------------------------------


def prompts(seed: int) -> Iterator[Prompt]:
    draw = random.Random(seed)
    while True:
        yield Prompt(input_ids=[draw.randrange(3, VOCABULARY) for _ in range(8)])


def reward(rollout: Rollout, prompt: Prompt) -> float:
    """The share of even tokens."""
    return float((rollout.token_ids % 2 == 0).mean())


def train(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train, and return the comparison before each update."""
    options.model, options.max_staleness = str(options.out / "policy"), 0
    trainer = ReplayTrainer(options)
    publisher = DiskPublisher(options.out / "weights", save=trainer.model.save_pretrained)
    config = SchedulerConfig(
        batch_groups=options.groups,
        group_size=options.size,
        max_staleness=0,
        companions=(
            routed_experts(layers=LAYERS, per_token=PER_TOKEN, experts=EXPERTS, required=True),
        ),
        sampling=SamplingParams(max_new_tokens=options.cap, stop_token_ids=(0,)),
    )
    found: list[dict[str, Any]] = []
    with RolloutScheduler(
        SGLangFleet(options.engine, stream_interval=16),
        prompts(options.seed),
        reward=reward,
        config=config,
    ) as rollouts:
        rollouts.update_weights(publisher)  # engines may have those of an earlier run
        for update in range(options.updates):
            batch = rollouts.next_batch()
            compared = trainer.compare(batch)
            trained = trainer.accumulate(batch, 1 / options.groups)
            trainer.step()
            mean = trained["reward"] / trained["rollouts"]
            found.append({"update": update, "reward": mean, **compared})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
            rollouts.update_weights(publisher)
    return found


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """The largest distance from 1 before each update, with the engine's routing and without."""
    from aprilsched.observe.report.style import GREY, PALETTE, finish, new_figure, save

    figure = new_figure(7, 4)
    axes = figure.subplots()
    updates = [each["update"] for each in found]
    for name, label, colour in (
        ("own", "the trainer's own routing", PALETTE[1]),
        ("replayed", "the engine's routing, replayed", PALETTE[0]),
    ):
        axes.plot(
            updates, [each[name]["largest"] for each in found], "o-", color=colour, label=label
        )
    axes.axhline(BOUND, color=GREY, linewidth=1, linestyle="--")
    axes.set_yscale("log")
    axes.legend()
    finish(axes, title="", x="updates", y="|ratio - 1|, largest of a batch")
    save(figure, path)


def main() -> None:
    options = arguments()
    disable_progress_bar()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.engine:
        write_policy(options.out / "policy", gap=options.gap, seed=options.seed)
        return
    found = train(options)
    (options.out / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, options.out / "ratios.png")


if __name__ == "__main__":
    main()
