"""The larger policies of experiments/learning_moe: their task, and their trainer."""

# pyright: basic
# The experiments are no modules that the checker finds.
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
from aprilsched.companions import CompanionRows, Rows, routed_experts
from aprilsched.types import Segment

torch: Any = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / each for each in ("experiments/learning_moe", "experiments/learning",
                                    "examples/moe", "examples/grpo")]  # fmt: skip
NAMES = ("mixture", "policy", "task", "campaign", "replay", "train", "countdown")
EXPERTS = routed_experts(layers=2, per_token=2, experts=16)


@pytest.fixture(scope="module")
def study() -> Iterator[Any]:
    """The modules of the experiment, which are forgotten afterwards."""
    # Here, because its import takes seconds in each process that collects tests.
    pytest.importorskip("transformers")
    before = list(sys.path)
    sys.path[:0] = map(str, FOLDERS)
    import mixture  # pyright: ignore[reportMissingImports]
    import policy  # pyright: ignore[reportMissingImports]
    import task  # pyright: ignore[reportMissingImports]

    yield argparse.Namespace(mixture=mixture, policy=policy, task=task)
    sys.path[:] = before
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("drill", [False, True])
def test_rows_to_learn_from_are_right_where_they_say_so(study: Any, drill: bool):
    source = torch.Generator().manual_seed(1)
    tokens, weights, lengths = study.task.rows(source, 32, 400, drill=drill)
    verdicts = 0
    for row, counts, length in zip(tokens, weights, lengths.tolist(), strict=True):
        numbers = tuple(n - 128 for n in row[1:5].tolist())
        problem = (numbers, int(row[6]) - 16)
        assert study.task.question(problem) == row[: study.task.QUESTION].tolist()
        claims = row[length - 2] == 9
        right = study.task.score(row[study.task.QUESTION : length].tolist(), problem)
        assert right == float(claims)
        verdicts += int(right)
        assert not counts[length:].any()
        assert not counts[: study.task.QUESTION].any()
        wrong = row[study.task.QUESTION : length].clone()
        wrong[-4] += 1  # what the last attempt reaches
        assert study.task.score(wrong.tolist(), problem) == 0
    assert verdicts == len(tokens) if drill else 0 < verdicts < len(tokens)


def test_no_numbers_are_both_held_out_and_trained_on(study: Any):
    found = [
        {numbers for numbers, _ in islice(study.task.problems(seed, held_out=held), 60)}
        for seed, held in ((1, False), (1, True))
    ]
    assert not found[0] & found[1]


def _trainer(study: Any, folder: Path, *, replays: bool, clips: bool = False) -> Any:
    options = argparse.Namespace(model=str(folder / "policy"), out=folder, lr=1e-3, max_staleness=4)
    trainer = study.mixture.LargerTrainer(options, replays=replays, clips=clips)
    trainer.model.to("cpu")
    trainer.device = "cpu"
    return trainer


def _batch(trainer: Any, *, moved: int) -> Batch:
    """Two responses with the rows and log-probabilities of the policy itself; `moved` passes of the
    first one have other experts in one layer."""
    rollouts: list[Rollout] = []
    draw = np.random.default_rng(0)
    for index, count in enumerate((9, 30)):
        ids = torch.from_numpy(draw.integers(16, 120, 4 + count))
        routers = [m for m in trainer.model.modules() if type(m).__name__.endswith("TopKRouter")]
        chosen: list[Any] = []
        hooks = [
            router.register_forward_hook(lambda _, __, out, into=chosen: into.append(out[2]))
            for router in routers
        ]
        logprobs = trainer.logprobs(ids, torch.arange(len(ids))).detach()[4:]
        for hook in hooks:
            hook.remove()
        rows = torch.stack(chosen, 1)[:-1].to(torch.uint8).numpy()
        if not index:
            others = [[e for e in range(16) if e not in row][:2] for row in rows[:, 1].tolist()]
            rows[4 : 4 + moved, 1] = np.array(others, dtype=np.uint8)[4 : 4 + moved]
        exact = np.ones(count, dtype=np.bool_)
        rollouts.append(
            Rollout(
                rollout_id=index, group_id=1, index=index, reward=float(index),
                prompt_ids=ids[:4].numpy().astype(np.int32), finish_reason="stop",
                token_ids=ids[4:].numpy().astype(np.int32), logprobs=logprobs.numpy(),
                versions=np.array([1] * (count - 5) + [2] * 5, dtype=np.int32),
                versions_exact=True,
                loss_mask=np.ones(count, dtype=np.bool_), stale_keys=index == 1,
                segments=(Segment(start=0, end=count, version=1, engine="engine"),),
                companions={"routed_experts": CompanionRows(EXPERTS, Rows(rows), exact)},
            )
        )  # fmt: skip
    prompt = Prompt(input_ids=np.arange(1, 5, dtype=np.int32))
    group = Group(group_id=1, prompt=prompt, rollouts=tuple(rollouts))
    return Batch(index=2, version=2, groups=(group,))


def test_the_trainer_replays_measures_and_goes_on(study: Any, tmp_path: Path):
    study.policy.write(study.policy.fresh("moe-tiny", 0), tmp_path / "policy")
    trainer = _trainer(study, tmp_path, replays=True)
    plain = _trainer(study, tmp_path, replays=False)
    batch = _batch(trainer, moved=3)
    trainer.updates = plain.updates = 2
    for each, moved in ((plain, False), (trainer, True)):
        # Padding and neighbours change nothing: the ratio is 1 but for the rows that were moved.
        figures = each.accumulate(batch, 1.0)
        assert (figures["ratio_squares"] > 1e-8) == moved
        each.step()
    found = trainer.measured()["measured"]
    assert found["inexact_rows"] == 0
    # The first response has 4 tokens of the version before, the second 25, whose keys its last 5
    # tokens attend to.
    assert [row[:3] for row in found["flips"]] == [[0, 0, 5], [0, 1, 5], [1, 0, 29]]
    assert sum(row[3] for row in found["flips"]) >= 3
    own = [row for row in found["own"] if row[3]]
    replayed = {tuple(row[:3]) for row in found["replayed"] if row[3]}
    assert own == []
    assert replayed
    assert all(moved for *_, moved in replayed)
    trainer.updates += 1
    trainer.save()
    again = _trainer(study, tmp_path, replays=True)
    assert again.updates == 3
    for mine, theirs in zip(trainer._tensors(), again._tensors(), strict=True):
        assert torch.equal(mine, theirs)
    for each in (trainer, again):
        each.accumulate(batch, 1.0)
        each.step()
    for mine, theirs in zip(trainer._tensors(), again._tensors(), strict=True):
        assert torch.equal(mine, theirs)
    lines = (tmp_path / "ratios.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == [2, 2, 3, 3]


def test_the_clip_around_the_sampling_policy_stops_what_has_moved(study: Any, tmp_path: Path):
    study.policy.write(study.policy.fresh("moe-tiny", 0), tmp_path / "policy")
    clipped = _trainer(study, tmp_path, replays=False, clips=True)
    decoupled = _trainer(study, tmp_path, replays=False)
    # Tokens of age 1 that are 1.5 times as probable now, and one that is as probable as it was.
    sampled, counts = torch.full((4,), -2.0), torch.ones(4, dtype=torch.bool)
    for trainer, moves in ((clipped, [False, False, False, True]), (decoupled, [True] * 4)):
        now = torch.tensor([-1.6, -1.6, -1.6, -2.0], requires_grad=True)
        losses, _ = trainer.token_losses(
            now, sampled, torch.ones(4, dtype=torch.int32), torch.ones(4), counts,
            version=2, max_staleness=4,
        )  # fmt: skip
        losses.sum().backward()
        assert (now.grad != 0).tolist() == moves
