"""Tests advantages: the formula, missing rewards, and a scale that never explodes."""

from __future__ import annotations

import numpy as np
import pytest

from aprilsched import Batch, advantages
from aprilsched.errors import ConfigError
from aprilsched.types import Group, Prompt, Rollout, Sample, Sibling

PROMPT = Prompt(input_ids=np.array([5, 6], dtype=np.int32))


def rollout(number: int, reward: float | None, group_id: int = 0) -> Rollout:
    return Rollout(
        rollout_id=number,
        group_id=group_id,
        index=number,
        prompt_ids=PROMPT.input_ids,
        token_ids=np.array([1], dtype=np.int32),
        logprobs=np.array([-1.0], dtype=np.float32),
        versions=np.array([0], dtype=np.int32),
        loss_mask=np.array([True]),
        segments=(),
        versions_exact=True,
        finish_reason="stop",
        reward=reward,
    )


def group(group_id: int, *rewards: float | None) -> Group:
    members = [rollout(10 * group_id + n, reward, group_id) for n, reward in enumerate(rewards)]
    return Group(group_id=group_id, prompt=PROMPT, rollouts=tuple(members))


def sample(group_id: int, reward: float, *siblings: float | None) -> Sample:
    return Sample(
        rollout=rollout(group_id, reward, group_id),
        prompt=PROMPT,
        siblings=tuple(
            Sibling(rollout_id=100 + n, index=n, reward=each) for n, each in enumerate(siblings)
        ),
    )


def batch(*units: Group | Sample) -> Batch:
    return Batch(index=0, version=0, units=units)


def test_the_baseline_of_a_group_leaves_the_rollout_out():
    found = advantages(batch(group(1, 1.0, 0.0, 0.5)))
    assert found == pytest.approx([1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5])


def test_the_baseline_of_a_sample_is_the_mean_of_its_siblings():
    found = advantages(batch(sample(1, 1.0, 0.0, 0.5), sample(2, 0.0, 1.0, 1.0)))
    assert found == pytest.approx([0.75, -1.0])


def test_the_scale_leaves_the_own_group_out():
    units = sample(1, 9.0, 0.0, 2.0), sample(2, 0.0, 1.0, 1.0), sample(2, 1.0, 0.0, 1.0)
    plain, scaled = advantages(batch(*units)), advantages(batch(*units), scale="std")
    # The variances of the siblings are 2, 0 and 0.5.
    assert plain / scaled == pytest.approx([np.sqrt(0.25), np.sqrt(2.0), np.sqrt(2.0)])


def test_siblings_that_agree_do_not_explode():
    found = advantages(batch(sample(1, 1.0, 0.0, 0.0), sample(2, 0.0, 1.0, 1.0)), scale="std")
    assert found == pytest.approx([1.0, -1.0])


def test_one_group_with_variance_in_a_large_batch_is_not_divided():
    rng = np.random.default_rng(0)
    alike = [group(number, *[1.0] * 8) for number in range(40)]
    for _ in range(20):
        units = batch(*alike[:7], group(7, *rng.random(8)), *alike[8:])
        assert (advantages(units, scale="std")[56:64] == advantages(units)[56:64]).all()


def test_a_rollout_without_siblings_has_no_advantage():
    assert np.isnan(advantages(batch(sample(1, 1.0)))).all()


@pytest.mark.parametrize("unit", [group(1, 1.0, None), sample(1, 1.0, 0.5, None)])
def test_a_missing_reward_is_refused(unit: Group | Sample):
    with pytest.raises(ConfigError, match="has no reward, so there is no baseline"):
        advantages(batch(unit))


def test_tensors_have_baselines_and_advantages():
    torch = pytest.importorskip("torch")
    for packed in (False, True):
        tensors = batch(sample(1, 1.0, 0.0, 0.5), sample(2, 0.0, 1.0, 1.0)).to_torch(packed=packed)
        assert torch.equal(tensors.baseline, torch.tensor([0.25, 1.0]))
        assert torch.equal(tensors.advantage, torch.tensor([0.75, -1.0]))
    unscored = batch(group(1, None, 1.0)).to_torch()
    assert torch.isnan(unscored.advantage).all()
