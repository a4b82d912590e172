"""The task and the loss of examples/grpo; tests/sglang/test_grpo.py runs the whole trainer."""

# pyright: basic
# The type checker cannot resolve the example's module.
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import Batch, Group, Prompt, Rollout
from aprilsched.types import Segment

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    sys.path.insert(0, str(EXAMPLE))
    import countdown  # pyright: ignore[reportMissingImports]
    import train  # pyright: ignore[reportMissingImports]

    yield argparse.Namespace(countdown=countdown, train=train)
    sys.path.remove(str(EXAMPLE))
    for name in ("countdown", "train"):
        del sys.modules[name]


def attempt(task: Any, *numbers: int, target: int) -> list[int]:
    """``rest a + b = c ; c - rest = d target``."""
    rest, a, b, c, d = (task.NUMBER + n for n in numbers)
    text = task.NUMBER + target
    sums = [rest, a, task.PLUS, b, task.EQUALS, c, task.THEN, c, task.MINUS, rest, task.EQUALS]
    return [*sums, d, text]


def test_only_a_right_last_attempt_that_claims_to_be_right_is_rewarded(example: Any):
    task = example.countdown
    problem = ((3, 7, 12), 16)
    right = attempt(task, 3, 12, 7, 19, 16, target=16)
    wrong = attempt(task, 7, 12, 3, 15, 8, target=16)
    ends = [task.YES, task.EOS]
    assert task.score([*right, *ends], problem) == 1
    assert task.score([*wrong, task.NO, *right, *ends], problem) == 1
    for response in (
        [*wrong, *ends],  # does not reach the target
        [*right, task.QUIT, task.EOS],
        [*right, task.YES],  # cut off
        [*wrong, *right, *ends],  # two attempts without a verdict in between
        attempt(task, 3, 12, 7, 20, 17, target=16) + ends,  # computes wrongly
        attempt(task, 4, 12, 7, 19, 15, target=16) + ends,  # takes another number
        [],
    ):
        assert task.score(response, problem) == 0
    assert task.score([*right, *ends], ((3, 7, 12), 17)) == 0


def test_no_numbers_are_both_held_out_and_trained_on(example: Any):
    numbers = [
        {numbers for numbers, _ in islice(example.countdown.problems(seed, held_out=held), 300)}
        for seed, held in ((1, False), (1, True))
    ]
    assert not numbers[0] & numbers[1]
    assert all(len(found) > 30 for found in numbers)


def test_prompts_of_the_example_survive_a_store(example: Any):
    prompt = next(example.train.prompts(1))
    assert json.loads(json.dumps(prompt.metadata)) == prompt.metadata


def test_mixing_a_batch_keeps_each_of_its_units(example: Any):
    prompt = Prompt(input_ids=np.array([1]))
    units = tuple(Group(group_id=n, prompt=prompt, rollouts=()) for n in range(20))
    found = example.train.mixed(Batch(index=3, version=0, units=units))
    assert [each.group_id for each in found.units] != list(range(20))
    assert set(found.units) == set(units)


def test_packed_responses_do_not_attend_to_each_other_and_the_loss_has_a_gradient(
    example: Any, tmp_path: Path
):
    import torch

    options = argparse.Namespace(
        model=str(EXAMPLE / "policy"), out=tmp_path, lr=1e-3, max_staleness=4
    )
    trainer = example.train.Trainer(options)
    trainer.model.to("cpu")
    trainer.device = "cpu"
    task = example.countdown
    asked = task.question(((3, 7, 12), 16))
    right = [*attempt(task, 3, 12, 7, 19, 16, target=16), task.YES, task.EOS]
    rollouts = tuple(
        _rollout(trainer, torch, asked, response, index, reward)
        for index, (response, reward) in enumerate(((right, 1.0), (right[:6], 0.0)))
    )
    group = Group(group_id=1, prompt=Prompt(input_ids=np.array(asked)), rollouts=rollouts)
    figures = trainer.accumulate(Batch(index=0, version=0, units=(group,)), 1.0)
    assert figures["mismatch"] / figures["fresh"] < 1e-5
    assert figures["fresh"] == figures["tokens"] == len(right) + 6
    assert figures["reward"] / figures["rollouts"] == 0.5
    assert figures["stale"] == figures["inexact"] == 0
    before = trainer.logprobs(*_row(torch, asked + right))[len(asked) :].sum()
    trainer.step()
    # The response with the higher reward has become more probable.
    assert trainer.logprobs(*_row(torch, asked + right))[len(asked) :].sum() > before


def _row(torch: Any, tokens: list[int]) -> tuple[Any, Any]:
    return torch.tensor(tokens), torch.arange(len(tokens))


def _rollout(
    trainer: Any, torch: Any, asked: list[int], response: list[int], index: int, reward: float
) -> Rollout:
    """A response with the logprobs that it has alone, without another one in its row."""
    found = trainer.logprobs(*_row(torch, asked + response))[len(asked) :].detach().numpy()
    count = len(response)
    return Rollout(
        rollout_id=index,
        group_id=1,
        index=index,
        prompt_ids=np.array(asked, dtype=np.int32),
        token_ids=np.array(response, dtype=np.int32),
        logprobs=found,
        versions=np.zeros(count, dtype=np.int32),
        loss_mask=np.ones(count, dtype=np.bool_),
        segments=(Segment(start=0, end=count, version=0, engine="engine"),),
        versions_exact=True,
        finish_reason="stop",
        reward=reward,
    )


def test_groups_of_one_backward_pass_count_as_they_do_alone(example: Any, tmp_path: Path):
    import torch

    options = argparse.Namespace(
        model=str(EXAMPLE / "policy"), out=tmp_path, lr=1e-3, max_staleness=4
    )
    trainer = example.train.Trainer(options)
    trainer.model.to("cpu")
    trainer.device = "cpu"
    task = example.countdown
    asked = task.question(((3, 7, 12), 16))
    right = [*attempt(task, 3, 12, 7, 19, 16, target=16), task.YES, task.EOS]
    groups = tuple(
        Group(
            group_id=1,
            prompt=Prompt(input_ids=np.array(asked)),
            rollouts=tuple(
                _rollout(trainer, torch, asked, right[:length], index, reward)
                for index, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
            ),
        )
        # A group of long responses, one of short ones, and one without a gradient.
        for lengths, rewards in (((15, 14), (1.0, 0.0)), ((3, 4), (0.0, 1.0)), ((5, 6), (1.0, 1.0)))
    )
    gradients: list[Any] = []
    for parts in ([groups], [groups[:1], groups[1:2], groups[2:]]):
        for part in parts:
            trainer.accumulate(Batch(index=0, version=0, units=part), 1 / 3)
        gradients.append([weights.grad.clone() for weights in trainer.model.parameters()])
        trainer.optimizer.zero_grad()
    for together, alone in zip(*gradients, strict=True):
        torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-3)
