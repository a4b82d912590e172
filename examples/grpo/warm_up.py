"""Makes the policy of this folder from random weights: python warm_up.py OUT [--steps 4000]

The policy is a Qwen3 of 0.8 million parameters. It learns to write attempts in the form of
countdown.py whose choices are random, to judge them, and to give up at some rate, so it solves what
guessing solves. That is what GRPO begins with. Half of the rows are whole responses. The other half
are drills of one to three attempts, in which only the verdicts count, because a small model needs
many of them to compare two numbers.

It took four and a half minutes with an H100, most of it in the Python that makes the rows.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from countdown import (
    ATTEMPT,
    EOS,
    EQUALS,
    LARGEST_ASKED,
    MINUS,
    NO,
    NUMBER,
    PAD,
    PLUS,
    QUIT,
    THEN,
    TIMES,
    YES,
    Problem,
    problems,
    question,
    result,
)
from transformers import Qwen3Config, Qwen3ForCausalLM

LONGEST = 512
WIDTHS = (32, 64, 96, 128, 192, 256, 384, 640)
TOKENS = 8192
"""Of a batch. Its rows have about the same length."""
PEAK = 3e-3
MUON = 0.02
VERDICT = 5.0
"""Weight of a verdict in the loss. Other tokens have 1."""
_WARM = 40

Row = tuple[list[int], list[float]]
"""Tokens, and the weight of each in the loss."""


def attempt(draw: random.Random, numbers: tuple[int, ...]) -> tuple[list[int], int]:
    """A random attempt, without the target and the verdict, and what it reaches."""
    while True:
        rest = draw.choice(numbers)
        low, high = (n for n in numbers if n != rest)
        op, op2 = draw.choice((PLUS, MINUS, TIMES)), draw.choice((PLUS, MINUS, TIMES))
        first = result(high, op, low)
        if first is None:
            continue
        d, e = max(first, rest), min(first, rest)
        second = result(d, op2, e)
        if second is None:
            continue
        n = [NUMBER + each for each in (rest, high, low, first, d, e, second)]
        return [n[0], n[1], op, n[2], EQUALS, n[3], THEN, n[4], op2, n[5], EQUALS, n[6]], second


def response(draw: random.Random, problem: Problem) -> Row:
    """A whole response, of a writer with some rate of giving up."""
    numbers, target = problem
    patience = 0.02 * 20 ** draw.random()
    tokens: list[int] = []
    while len(tokens) < LONGEST:
        tried, reached = attempt(draw, numbers)
        tokens += [*tried, NUMBER + target]
        if reached == target:
            tokens += [YES, EOS]
            break
        if draw.random() < patience:
            tokens += [QUIT, EOS]
            break
        tokens.append(NO)
    asked = question(problem)
    weights = [VERDICT if token in (NO, YES, QUIT) else 1.0 for token in tokens]
    return asked + tokens, [0.0] * len(asked) + weights


def drill(draw: random.Random) -> Row:
    """One to three attempts, of which the last is right because the target is chosen so."""
    while True:
        numbers = tuple(sorted(draw.sample(range(1, LARGEST_ASKED + 1), 3)))
        tries = [attempt(draw, numbers) for _ in range(draw.randint(1, 3))]
        target = tries[-1][1]
        if target >= 10 and target not in numbers:
            break
    tokens = question((numbers, target))
    weights = [0.0] * len(tokens)
    for tried, reached in tries:
        tokens += [*tried, NUMBER + target, YES if reached == target else NO]
        weights += [0.0] * (ATTEMPT - 1) + [1.0, VERDICT]
        if reached == target:
            break
    return tokens, weights


def batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    draw, asked = random.Random(seed), problems(seed, held_out=False)
    shelves: dict[int, list[Row]] = {width: [] for width in WIDTHS}
    while True:
        row = drill(draw) if draw.random() < 0.5 else response(draw, next(asked))
        width = next(width for width in WIDTHS if len(row[0]) <= width)
        shelf = shelves[width]
        shelf.append(row)
        if len(shelf) == TOKENS // width:
            tokens = torch.full((len(shelf), width), PAD)
            weights = torch.zeros(len(shelf), width)
            for place, (ids, counts) in enumerate(shelf):
                tokens[place, : len(ids)] = torch.tensor(ids)
                weights[place, : len(counts)] = torch.tensor(counts)
            shelves[width] = []
            yield tokens, weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(options.seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
            num_attention_heads=2, num_key_value_heads=1, head_dim=64, tie_word_embeddings=True,
            max_position_embeddings=4096, eos_token_id=EOS, pad_token_id=PAD,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        )
    ).to(device)  # fmt: skip
    matrices = [p for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() < 2 or "embed" in n]
    # AdamW on the matrices too takes several times as many steps.
    muon = torch.optim.Muon(matrices, lr=MUON, momentum=0.95, weight_decay=0.0)
    adam = torch.optim.AdamW(others, lr=PEAK, betas=(0.9, 0.98), weight_decay=0.0)
    losses: list[float] = []
    for step, (tokens, weights) in zip(range(options.steps), batches(options.seed), strict=False):
        done = step / options.steps
        rate = min(1.0, (step + 1) / _WARM) * (1 if done < 0.6 else max(0.02, (1 - done) / 0.4))
        for optimizer, peak in ((muon, MUON), (adam, PEAK)):
            optimizer.param_groups[0]["lr"] = peak * rate
        tokens, weights = tokens.to(device), weights[:, 1:].to(device)
        with torch.autocast(device, torch.bfloat16):
            logits = model(input_ids=tokens[:, :-1]).logits
        each = F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none")
        loss = (each * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adam.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {sum(losses[-100:]) / 100:.4f}", flush=True)
    model.save_pretrained(options.out)


if __name__ == "__main__":
    main()
