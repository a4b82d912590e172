"""Makes the policies of this experiment from random weights.

    python policy.py OUT --kind moe --seconds 120 --boots RANDOM

A policy learns to write attempts in the form of task.py whose choices are random, to judge them,
and to give up at some rate, so it solves what guessing solves. Both kinds have 31 million
parameters: the dense one uses them all for a token, the mixture of experts 6 million.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from task import EOS, PAD, rows
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

_COMMON: Mapping[str, Any] = {
    "vocab_size": 256, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}  # fmt: skip
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    "intermediate_size": 256, "norm_topk_prob": True, "router_aux_loss_coef": 0.01,
}  # fmt: skip
_TINY: Mapping[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32,
}  # fmt: skip
CONFIGS = {
    "dense": Qwen3Config(**_COMMON, intermediate_size=4096),
    "moe": Qwen3MoeConfig(**_COMMON, **_EXPERTS),
    "moe-tiny": Qwen3MoeConfig(**{**_COMMON, **_EXPERTS, **_TINY}),
}
"""The kinds of policies; the last one is for a CPU."""
LONGEST = 3072
"""Tokens of the longest row."""
PEAK, MUON = 3e-3, 0.02
_WARM = 40


def every_expert(
    self: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The experts' output [N, H] in two products, with a weight of 0 for those not chosen.

    With experts as small as these this is several times as fast as one after the other.
    """
    experts = self.gate_up_proj.shape[0]
    of_each = weights.new_zeros(len(hidden), experts).scatter(1, chosen, weights)
    both = F.linear(hidden, self.gate_up_proj.flatten(0, 1))
    gate, up = both.unflatten(1, (experts, 2, -1)).unbind(2)
    inner = (F.silu(gate) * up * of_each[..., None].to(up.dtype)).flatten(1)
    return F.linear(inner, self.down_proj.transpose(0, 1).flatten(1))


def with_every_expert(model: Any) -> Any:
    """The model, whose mixtures compute :func:`every_expert`."""
    for module in model.modules():
        if isinstance(module, Qwen3MoeExperts):
            module.forward = MethodType(every_expert, module)
    return model


def write(model: Any, folder: Path | str) -> None:
    """Write the weights in bfloat16 under the names that servers read, and the configuration."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    received: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().to(torch.bfloat16).cpu()
        stem, _, kind = name.rpartition(".experts.")
        if not stem:
            received[name] = tensor
            continue
        for expert, own in enumerate(tensor):
            parts = {"down_proj": own} if kind == "down_proj" else dict(
                zip(("gate_proj", "up_proj"), own.chunk(2), strict=True)
            )  # fmt: skip
            received |= {
                f"{stem}.experts.{expert}.{part}.weight": value.contiguous()
                for part, value in parts.items()
            }
    save_file(received, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)


def write_whole(model: Any, folder: Path) -> None:
    """:func:`write`, so that whoever waits for the folder finds it complete."""
    part = folder.with_name(folder.name + ".part")
    write(model, part)
    part.rename(folder)


def fresh(kind: str, seed: int) -> Any:
    """A policy with random weights."""
    torch.manual_seed(seed)
    return with_every_expert(AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32))


# --- the supervised stage ------------------------------------------------------------------------


class Muon:
    """Muon for matrices, and for the experts' stacks of them, which torch's own does not take."""

    def __init__(self, matrices: Sequence[torch.nn.Parameter], lr: float) -> None:
        self.param_groups = [{"lr": lr}]
        self._all = [(matrix, torch.zeros_like(matrix)) for matrix in matrices]

    @torch.no_grad()
    def step(self) -> None:
        for matrix, momentum in self._all:
            momentum.lerp_(matrix.grad, 0.05)
            update = matrix.grad.lerp(momentum, 0.95).bfloat16()
            tall = update.shape[-2] > update.shape[-1]
            x = update.mT if tall else update
            x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
            for _ in range(5):
                square = x @ x.mT
                x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
            scale = max(1, update.shape[-2] / update.shape[-1]) ** 0.5
            matrix.add_(x.mT if tall else x, alpha=-self.param_groups[0]["lr"] * scale)


def batches(seed: int, device: str, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of similar lengths, of about so many tokens: three batches of responses to one of
    drills."""
    source = torch.Generator(device).manual_seed(seed)
    pool = 2048 if device == "cuda" else 64
    number = 0
    while True:
        drill = number % 4 == 3
        number += 1
        if drill:
            ids, weights, _ = rows(source, tokens // 59, LONGEST, drill=True)
            yield ids, weights
            continue
        ids, weights, lengths = rows(source, pool, LONGEST, drill=False)
        order, parts, first = lengths.argsort(), list[torch.Tensor](), 0
        widths = lengths[order].tolist()
        for last in range(1, len(widths) + 1):
            if last == len(widths) or widths[last] * (last + 1 - first) > tokens:
                parts.append(order[first:last])
                first = last
        for place, at in enumerate(torch.randperm(len(parts)).tolist()):
            part = parts[at]
            width = int(lengths[part].max())
            yield ids[part, :width], weights[part, :width]
            if place % 3 == 2:
                yield rows(source, tokens // 59, LONGEST, drill=True)[:2]


def supervise(model: Any, options: argparse.Namespace) -> None:
    """Train for a time; the learning rate falls during the last two fifths of it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).train()
    inner = {name: parameter for name, parameter in model.named_parameters()
             if parameter.dim() > 1
             and not any(part in name for part in ("embed", "lm_head", "mlp.gate."))}  # fmt: skip
    others = [p for n, p in model.named_parameters() if n not in inner]
    muon = Muon(list(inner.values()), MUON)
    adam = torch.optim.AdamW(others, lr=PEAK, betas=(0.9, 0.98), weight_decay=0.0)
    mixed = model.config.model_type == "qwen3_moe"
    losses, started_at = list[torch.Tensor](), time.monotonic()
    for step, (ids, weights) in enumerate(batches(options.seed, device, options.tokens)):
        done = (time.monotonic() - started_at) / options.seconds
        if done >= 1:
            break
        rate = min(1.0, (step + 1) / _WARM) * (1 if done < 0.6 else max(0.02, (1 - done) / 0.4))
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = MUON * rate, PEAK * rate
        with torch.autocast(device, torch.bfloat16):
            found = model(input_ids=ids[:, :-1], use_cache=False,
                          **({"output_router_logits": True} if mixed else {}))  # fmt: skip
        each = F.cross_entropy(found.logits.float().transpose(1, 2), ids[:, 1:], reduction="none")
        counts = weights[:, 1:]
        loss = (each * counts).sum() / counts.sum()
        losses.append(loss.detach())
        if mixed:
            loss = loss + model.config.router_aux_loss_coef * found.aux_loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adam.step()
        model.zero_grad(set_to_none=True)
        if (step + 1) % options.every == 0:
            mean = float(torch.stack(losses[-options.every :]).mean())
            line = {"policy": options.kind, "step": step + 1, "loss": round(mean, 4),
                    "seconds": round(done * options.seconds, 1)}  # fmt: skip
            print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=CONFIGS, default="moe")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--boots", type=Path, help="also write random weights: a server may boot")
    parser.add_argument("--tokens", type=int, default=32_768, help="of a batch")
    parser.add_argument("--every", type=int, default=100, help="steps between two lines")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = fresh(options.kind, options.seed)
    if options.boots is not None:
        write_whole(model, options.boots)
    if options.seconds:
        supervise(model, options)
    write_whole(model, options.out)


if __name__ == "__main__":
    main()
