"""What staleness costs a policy, with generation taken out: many policies are trained at once.

    PYTHONPATH=.:examples/grpo python experiments/learning/usefulness.py --out usefulness.jsonl \\
        --block lag

All policies of a block have the architecture and the first weights of examples/grpo's, are trained
for the same number of updates with the loss of examples/grpo/train.py, and differ in one thing.
They stand in one tensor for each weight, with a first dimension for the policy, so one process
samples and trains all of them at the speed of one. There is no server: which policy sampled a
token is decided here, exactly.

- ``lag``: every token is sampled by the policy of so many updates ago.
- ``carry``: so many times the batch is kept open, the first groups that end are the batch, and
  the others go on under the next policy, with their keys and values kept or computed again.
- ``likeness``: four batches are sampled by one policy and trained on one after the other, sorted
  by length or mixed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from countdown import ATTEMPT, EOS, PAD, Problem, problems, question, score
from safetensors.torch import load_file
from torch.nn.functional import scaled_dot_product_attention, silu
from train import token_losses

POLICY = Path(__file__).resolve().parents[2] / "examples" / "grpo" / "policy"
HEADS, KEY_HEADS, WIDTH, LAYERS, EPSILON, THETA = 2, 1, 64, 4, 1e-6, 10_000.0
ASKED = len(question(((1, 2, 3), 10)))
_LOOK = 16
"""Decode steps between two looks whether the batch is complete: each look waits for the GPU."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What one policy is trained with."""

    block: str
    seed: int
    lag: int = 0
    open: float = 1.0
    """Groups that are open for a batch, as a ratio to the batch."""
    kept: bool = False
    """Whether keys and values of carried responses are kept at an update."""
    corrected: bool = True
    """Decoupled PPO with truncated weights, or PPO's clip around the sampling policy."""
    sorted: bool = False
    """Whether batches are cut from four of them by length."""


def conditions(block: str, seeds: Sequence[int]) -> list[Condition]:
    both = (True, False)
    if block == "lag":
        return [
            Condition(block=block, seed=seed, lag=lag, corrected=corrected)
            for lag in (0, 1, 2, 4, 8, 16) for corrected in both for seed in seeds
        ]  # fmt: skip
    if block == "carry":
        return [
            Condition(block=block, seed=seed, open=ratio, kept=kept, corrected=corrected)
            for ratio, kept in ((1.5, False), (2.0, False), (3.0, False), (2.0, True), (3.0, True))
            for corrected in both for seed in seeds
        ]  # fmt: skip
    return [
        Condition(block=block, seed=seed, sorted=by_length, corrected=corrected)
        for by_length in both for corrected in both for seed in seeds
    ]  # fmt: skip


# --- the policies --------------------------------------------------------------------------------

Weights = dict[str, torch.Tensor]


def first_weights(count: int, device: str) -> Weights:
    """The weights of examples/grpo's policy, once for each of so many policies: [E, …]."""
    loaded = load_file(POLICY / "model.safetensors", device=device)
    return {
        name.removeprefix("model."): tensor.float().expand(count, *tensor.shape).clone()
        for name, tensor in loaded.items()
    }


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm of [E, B, T, …, d] with weights [E, d]."""
    weight = weight.view(weight.shape[0], *(1 for _ in range(x.dim() - 2)), weight.shape[1])
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[E, B, T, i] times [E, o, i]."""
    rows = x.flatten(1, 2)
    return torch.bmm(rows, weight.transpose(1, 2)).unflatten(1, x.shape[1:3])


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [E, B, T, H, d] at positions [E, B, T]."""
    half = WIDTH // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = positions[..., None, None] * THETA**-steps
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Cache:
    """Keys and values of all sequences, by layer: [E, B, T, H, d]."""

    def __init__(self, policies: int, sequences: int, length: int, device: str) -> None:
        shape = (LAYERS, 2, policies, sequences, length, KEY_HEADS, WIDTH)
        self.entries = torch.zeros(shape, device=device)


def logits_of(
    weights: Weights,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    *,
    cache: Cache | None = None,
    upto: int = 0,
) -> torch.Tensor:
    """Logits [E, B, T, V] of tokens [E, B, T].

    Without a cache the tokens are whole sequences from position 0. With one they are single tokens
    (T is 1) at any positions below `upto`, whose keys and values are written into the cache; or
    whole sequences, which fill it.
    """
    policies, sequences, length = tokens.shape
    whole = length > 1
    index = torch.arange(policies, device=tokens.device)[:, None, None]
    x = weights["embed_tokens.weight"][index, tokens]
    if cache is not None and not whole:
        row = torch.arange(sequences, device=tokens.device)[None, :]
        seen = torch.arange(upto, device=tokens.device) <= positions  # [E, B, upto]
    for layer in range(LAYERS):
        of = {
            name.split(".", 2)[2]: tensor
            for name, tensor in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        h = _norm(x, of["input_layernorm.weight"])
        q, k, v = (
            _linear(h, of[f"self_attn.{n}_proj.weight"]).unflatten(-1, (-1, WIDTH)) for n in "qkv"
        )
        q = _rotate(_norm(q, of["self_attn.q_norm.weight"]), positions)
        k = _rotate(_norm(k, of["self_attn.k_norm.weight"]), positions)
        if cache is not None:
            keys, values = cache.entries[layer]
            if whole:
                keys[:, :, :length], values[:, :, :length] = k, v
            else:
                at = positions[..., 0]
                keys[index[..., 0], row, at], values[index[..., 0], row, at] = (
                    k[:, :, 0],
                    v[:, :, 0],
                )
        if cache is None or whole:
            heads = (each.flatten(0, 1).transpose(1, 2) for each in (q, k, v))
            mixed = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            mixed = mixed.transpose(1, 2).unflatten(0, (policies, sequences))
        else:
            keys, values = keys[:, :, :upto, 0], values[:, :, :upto, 0]
            scores = torch.einsum("ebhd,ebtd->ebht", q[:, :, 0], keys) / WIDTH**0.5
            shares = scores.masked_fill(~seen[:, :, None], float("-inf")).softmax(-1)
            mixed = torch.einsum("ebht,ebtd->ebhd", shares, values)[:, :, None]
        x = x + _linear(mixed.flatten(-2), of["self_attn.o_proj.weight"])
        h = _norm(x, of["post_attention_layernorm.weight"])
        gated = silu(_linear(h, of["mlp.gate_proj.weight"])) * _linear(h, of["mlp.up_proj.weight"])
        x = x + _linear(gated, of["mlp.down_proj.weight"])
    return _linear(_norm(x, weights["norm.weight"]), weights["embed_tokens.weight"])


# --- sampling ------------------------------------------------------------------------------------


class Slots:
    """The responses that are open or complete: `slots` for each policy, in groups of `size`."""

    def __init__(self, policies: int, groups: int, size: int, cap: int, device: str) -> None:
        self.size, self.device = size, device
        self.length = ASKED + cap
        shape = (policies, groups * size, self.length)
        self.tokens = torch.full(shape, PAD, device=device)
        self.logprobs = torch.zeros(shape, device=device)
        self.versions = torch.zeros(shape, device=device, dtype=torch.int32)
        self.ends = torch.zeros(shape[:2], device=device, dtype=torch.long)
        self.done = torch.ones(shape[:2], device=device, dtype=torch.bool)
        self.cache = Cache(policies, groups * size, self.length, device)
        self.problems: list[list[Problem]] = [[((1, 2, 3), 10)] * groups for _ in range(policies)]
        self.since = torch.zeros((policies, groups), dtype=torch.long)
        """The update at which each group was started, to break ties."""

    def start(self, policy: int, group: int, problem: Problem, update: int) -> None:
        """Begin a group in place of one that was delivered."""
        rows = slice(group * self.size, (group + 1) * self.size)
        self.problems[policy][group] = problem
        self.since[policy, group] = update
        self.tokens[policy, rows] = PAD
        self.tokens[policy, rows, :ASKED] = torch.tensor(question(problem), device=self.device)
        self.ends[policy, rows] = ASKED
        self.done[policy, rows] = False

    def recompute(self, weights: Weights, kept: torch.Tensor | None = None) -> None:
        """Compute the keys and values of everything but the last tokens; not of `kept` policies."""
        upto = int(self.ends.max())
        before = None if kept is None else self.cache.entries[:, :, kept].clone()
        positions = torch.arange(upto, device=self.device).expand(*self.ends.shape, upto)
        for rows in torch.arange(self.tokens.shape[1], device=self.device).split(64):
            part = Cache.__new__(Cache)
            part.entries = self.cache.entries[:, :, :, int(rows[0]) : int(rows[-1]) + 1]
            logits_of(weights, self.tokens[:, rows, :upto], positions[:, rows], cache=part)
        if before is not None:
            self.cache.entries[:, :, kept] = before

    def generate(self, weights: Weights, version: torch.Tensor, wanted: torch.Tensor) -> None:
        """Sample until each policy has so many complete groups, or none is open."""
        position = torch.arange(self.length, device=self.device)
        for step in range(self.length):
            if step % _LOOK == 0:
                ended = self.done & (self.ends > 0)
                groups = ended.unflatten(1, (-1, self.size)).all(2).sum(1)
                full = (groups >= wanted)[:, None]
                if bool((full | self.done.all(1, keepdim=True)).all()):
                    return
                upto = min(self.length, int(self.ends.max()) + _LOOK)
            runs = ~self.done & ~full
            last = (self.ends - 1).clamp(min=0)
            fed = self.tokens.gather(2, last[..., None])
            logits = logits_of(weights, fed, last[..., None], cache=self.cache, upto=upto)[:, :, 0]
            found = logits.log_softmax(-1)
            drawn = (found - (-torch.rand_like(found).log()).log()).argmax(-1)
            here = (position == self.ends[..., None]) & runs[..., None]
            self.tokens = torch.where(here, drawn[..., None], self.tokens)
            chosen = found.gather(2, drawn[..., None])
            self.logprobs = torch.where(here, chosen, self.logprobs)
            self.versions = torch.where(here, version[:, None, None], self.versions)
            self.ends += runs
            self.done |= runs & ((drawn == EOS) | (self.ends >= self.length))

    def rewards(self) -> torch.Tensor:
        """The reward of each complete response, [E, slots] on the CPU."""
        tokens, ends = self.tokens.cpu(), self.ends.cpu()
        tail = ATTEMPT + 3
        starts = (ends - tail).clamp(min=ASKED)
        index = (starts[..., None] + torch.arange(tail)).clamp(max=self.length - 1)
        tails, counts = tokens.gather(2, index).tolist(), (ends - starts).tolist()
        return torch.tensor([
            [
                score(row[:count], self.problems[policy][slot // self.size])
                for slot, (row, count) in enumerate(zip(rows, lengths, strict=True))
            ]
            for policy, (rows, lengths) in enumerate(zip(tails, counts, strict=True))
        ])  # fmt: skip


# --- training ------------------------------------------------------------------------------------


class Ensemble:
    """Policies with an AdamW each, in one tensor for each weight."""

    def __init__(self, policies: int, device: str, lr: float) -> None:
        self.weights = first_weights(policies, device)
        for tensor in self.weights.values():
            tensor.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(
            self.weights.values(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0
        )

    def copy(self) -> Weights:
        return {name: tensor.detach().clone() for name, tensor in self.weights.items()}

    def step(self) -> None:
        """Clip the gradient of each policy by its own norm, and take a step."""
        squares = sum(w.grad.square().flatten(1).sum(1) for w in self.weights.values())
        factor = (1 / (squares.sqrt() + 1e-6)).clamp(max=1)
        for tensor in self.weights.values():
            tensor.grad *= factor.view(-1, *(1 for _ in tensor.shape[1:]))
        self._optimizer.step()
        self._optimizer.zero_grad()


class Batch:
    """Groups of each policy that are trained on together, as whole sequences [E, B, T]."""

    def __init__(self, slots: Slots, groups: torch.Tensor, rewards: torch.Tensor) -> None:
        """`groups` [E, G] are numbers of groups; `rewards` those of all slots."""
        self.size, device = slots.size, slots.device
        size = self.size
        rows = (groups[..., None] * size + torch.arange(size)).flatten(1)
        self.rewards = rewards.gather(1, rows)
        grouped = self.rewards.unflatten(1, (-1, size))
        advantages = (grouped - grouped.mean(2, keepdim=True)) / (
            grouped.std(2, keepdim=True) + 1e-4
        )
        self.advantages = advantages.flatten(1).to(device)
        rows = rows.to(device)
        self.ends = slots.ends.gather(1, rows)
        upto = int(self.ends.max())
        wide = rows[..., None].expand(-1, -1, upto)
        self.tokens = slots.tokens[..., :upto].gather(1, wide)
        self.sampled = slots.logprobs[..., :upto].gather(1, wide)
        self.versions = slots.versions[..., :upto].gather(1, wide)
        position = torch.arange(upto, device=device)
        self.counts = (position >= ASKED) & (position < self.ends[..., None])
        self.share = 1 / self.counts.unflatten(1, (-1, size)).sum((2, 3)).repeat_interleave(size, 1)

    def backward(self, weights: Weights, at: torch.Tensor, corrected: torch.Tensor,
                 update: int, micro: int) -> dict[str, torch.Tensor]:  # fmt: skip
        """Add the gradient of some responses `at` [n] of each policy; returns sums by policy."""
        # Sorted by length and cut into parts, the parts are not much wider than their responses.
        order = self.ends[:, at].argsort(1, descending=True)
        rows = at[order]
        found: dict[str, torch.Tensor] = {}
        groups = len(at) / self.size
        for part in rows.split(micro, 1):
            upto = int(self.ends.gather(1, part).max())
            wide = part[..., None].expand(-1, -1, upto)
            tokens, sampled, versions, counts = (
                each[..., :upto].gather(1, wide)
                for each in (self.tokens, self.sampled, self.versions, self.counts)
            )
            positions = torch.arange(upto, device=tokens.device).expand_as(tokens)
            logits = logits_of(weights, tokens, positions)[:, :, :-1]
            now = logits.log_softmax(-1).gather(3, tokens[:, :, 1:, None])[..., 0]
            now = torch.cat([torch.zeros_like(now[..., :1]), now], 2)
            advantages = self.advantages.gather(1, part)[..., None].expand_as(now)
            # Without corrections the trust region is around the policy that sampled the token,
            # as if every token were of the version that the step begins with.
            claimed = torch.where(corrected[:, None, None], versions, update)
            losses, _ = token_losses(now, sampled, claimed, advantages, counts,
                                     version=update, max_staleness=1_000)  # fmt: skip
            shares = self.share.gather(1, part)
            ((losses.sum(2) * shares).sum() / groups).backward()
            with torch.no_grad():
                ages = (update - versions) * counts
                ratio = torch.where(counts, (now - sampled).exp(), 1.0)
                for name, value in (
                    ("tokens", counts), ("stale", ages > 0), ("ages", ages),
                    ("surprise", -sampled * counts), ("ratio_squares", (ratio - 1) ** 2),
                    ("clipped", ((ratio < 0.8) | (ratio > 1.28)) & counts),
                ):  # fmt: skip
                    found[name] = found.get(name, 0) + value.double().sum((1, 2))
        return found


# --- a block -------------------------------------------------------------------------------------


class Block:
    """All conditions of a block, trained together."""

    def __init__(self, which: list[Condition], given: argparse.Namespace) -> None:
        self.which, self.given, device = which, given, given.device
        self.ensemble = Ensemble(len(which), device, given.lr)
        self.four = 4 if which[0].block == "likeness" else 1
        """Batches that one policy samples before the first of them is trained on."""
        most = max(condition.open for condition in which)
        self.slots = Slots(len(which), round(most * self.four * given.groups), given.size,
                           given.cap, device)  # fmt: skip
        self.streams = [problems(1000 + c.seed, held_out=False) for c in which]
        self.corrected = torch.tensor([c.corrected for c in which], device=device)
        self.kept = torch.tensor([c.kept for c in which], device=device)
        self.past: deque[Weights] = deque([self.ensemble.copy()], max(c.lag for c in which) + 1)
        self.lags = torch.tensor([c.lag for c in which], device=device)
        self.held = list(islice(problems(10_007, held_out=True), given.held_out))

    def sampling_weights(self, update: int) -> tuple[Weights, torch.Tensor]:
        """The weights that sample now, and their versions."""
        versions = (update - self.lags).clamp(min=0)
        if int(self.lags.max()) == 0:
            return self.past[-1], versions.int()
        stacked = {name: tensor.clone() for name, tensor in self.past[-1].items()}
        for policy, version in enumerate(versions.tolist()):
            if version != update:
                for name, tensor in self.past[-1 - (update - version)].items():
                    stacked[name][policy] = tensor[policy]
        return stacked, versions.int()

    def fill(self, update: int) -> None:
        """Start groups in all places that are free."""
        free = self.slots.ends.view(len(self.which), -1, self.slots.size)[:, :, 0].eq(0).cpu()
        for policy, condition in enumerate(self.which):
            places = round(condition.open * self.four * self.given.groups)
            for group in range(places):
                if free[policy, group]:
                    self.slots.start(policy, group, next(self.streams[policy]), update)

    def batches(self, update: int) -> Iterator[Batch]:
        """Sample what the next updates are trained on."""
        groups, slots = self.given.groups, self.slots
        self.fill(update)
        weights, versions = self.sampling_weights(update)
        with torch.no_grad():
            carried = update > 0 and max(c.open for c in self.which) > 1
            slots.recompute(weights, self.kept if carried else None)
            if carried and bool(self.kept.any()):
                self._prefill_new(weights)
            wanted = torch.tensor([
                groups if c.open > 1 else groups * self.four for c in self.which
            ], device=slots.device)  # fmt: skip
            slots.generate(weights, versions, wanted)
        rewards = slots.rewards()
        done = slots.done.unflatten(1, (-1, slots.size)).all(2).cpu()
        started = slots.ends.view(len(self.which), -1, slots.size)[:, :, 0].gt(0).cpu()
        # The oldest of the complete groups are delivered first.
        rank = torch.where(done & started, slots.since, 1 << 30).float()
        rank += torch.rand(rank.shape) * 0.5
        order = rank.argsort(1)[:, : groups * self.four]
        if self.four > 1:
            means = slots.ends.double().unflatten(1, (-1, slots.size)).mean(2).cpu()
            for policy, condition in enumerate(self.which):
                if condition.sorted:
                    by_length = order[policy][means[policy, order[policy]].argsort()]
                    # The four batches come in a random order, so that none is always the last.
                    parts = torch.stack(by_length.split(groups))[torch.randperm(self.four)]
                    order[policy] = parts.flatten()
        for part in order.split(groups, 1):
            yield Batch(slots, part, rewards)
        for policy, rows in enumerate(order.tolist()):
            for group in rows:
                slots.ends[policy, group * slots.size : (group + 1) * slots.size] = 0
                slots.done[policy, group * slots.size : (group + 1) * slots.size] = True

    def _prefill_new(self, weights: Weights) -> None:
        """The prompts of new groups get keys and values of the present weights everywhere."""
        slots = self.slots
        positions = torch.arange(ASKED, device=slots.device).expand(*slots.ends.shape, ASKED)
        part, new = Cache.__new__(Cache), slots.ends == ASKED
        part.entries = torch.zeros_like(slots.cache.entries[:, :, :, :, :ASKED])
        logits_of(weights, slots.tokens[..., :ASKED], positions, cache=part)
        old = slots.cache.entries[:, :, :, :, :ASKED]
        slots.cache.entries[:, :, :, :, :ASKED] = torch.where(
            new[None, None, :, :, None, None, None], part.entries, old
        )

    def held_out(self) -> list[float]:
        """The share of held-out problems that each policy solves."""
        given, policies = self.given, len(self.which)
        slots = Slots(policies, len(self.held), 1, given.cap, given.device)
        for group, problem in enumerate(self.held):
            slots.tokens[:, group, :ASKED] = torch.tensor(question(problem), device=given.device)
            for policy in range(policies):
                slots.problems[policy][group] = problem
        slots.ends[:] = ASKED
        slots.done[:] = False
        with torch.no_grad():
            weights = self.past[-1]
            slots.recompute(weights)
            everything = torch.full((policies,), len(self.held) + 1, device=given.device)
            slots.generate(weights, torch.zeros(policies, device=given.device).int(), everything)
        return slots.rewards().mean(1).tolist()

    def run(self) -> Iterator[list[dict[str, Any]]]:
        """Train; gives a line of each policy after each evaluation and update."""
        given, update = self.given, 0
        half = given.groups * given.size // 2
        while True:
            yield self._lines(update, held_out=self.held_out())
            if update >= given.updates:
                return
            target = update + given.evaluate_every
            while update < target:
                for batch in self.batches(update):
                    found: dict[str, torch.Tensor] = {}
                    for at in torch.arange(2 * half, device=given.device).split(half):
                        sums = batch.backward(self.ensemble.weights, at, self.corrected, update,
                                              given.micro)  # fmt: skip
                        found = {name: found.get(name, 0) + value for name, value in sums.items()}
                        self.ensemble.step()
                    update += 1
                    self.past.append(self.ensemble.copy())
                    figures = {name: value.tolist() for name, value in found.items()}
                    lengths = (batch.ends - ASKED).double()
                    figures |= {
                        "reward": batch.rewards.mean(1).tolist(),
                        "length": lengths.mean(1).tolist(),
                        "length_sd": lengths.std(1).tolist(),
                    }
                    yield self._lines(update, **figures)

    def _lines(self, update: int, **figures: list[float]) -> list[dict[str, Any]]:
        return [
            {
                **vars(condition),
                "lr": self.given.lr,
                "update": update,
                **{name: round(values[policy], 6) for name, values in figures.items()},
            }
            for policy, condition in enumerate(self.which)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--block", choices=("lag", "carry", "likeness"), required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--evaluate-every", type=int, default=4)
    parser.add_argument("--held-out", type=int, default=192)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--cap", type=int, default=512)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--micro", type=int, default=16, help="responses of a policy at once")
    parser.add_argument("--until", type=float, default=float("inf"), help="Unix time of the end")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    torch.manual_seed(hash(tuple(given.seeds)) % 1000)
    block = Block(conditions(given.block, given.seeds), given)
    started_at = time.monotonic()
    with given.out.open("a") as file:
        for lines in block.run():
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            if "held_out" in lines[0]:
                mean = sum(line["held_out"] for line in lines) / len(lines)
                at = round(time.monotonic() - started_at, 1)
                print(given.block, at, lines[0]["update"], round(mean, 3), flush=True)
            if time.time() > given.until:
                break


if __name__ == "__main__":
    main()
