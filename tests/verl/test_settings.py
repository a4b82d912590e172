"""Configurations of verl that would give wrong or lost rollouts are refused with one sentence."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aprilsched import SchedulerConfig
from aprilsched.config import Dispatch
from aprilsched.errors import ConfigError
from aprilsched.trainers.verl import AgentLoopManager, _settings

pytest.importorskip("verl", reason="verl is not installed; use make test-verl")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("trainer.use_v1=False", "set it to True"),
        ("trainer.v1.trainer_mode=sync", 'set it to "separate_async"'),
        ("trainer.v1.trainer_mode=colocate_async", 'set it to "separate_async"'),
        ("actor_rollout_ref.hybrid_engine=True", "set it to False"),
        ("actor_rollout_ref.rollout.name=vllm", "set it to sglang"),
        ("actor_rollout_ref.rollout.enable_rollout_routing_replay=True", "set its companions"),
        (
            "actor_rollout_ref.rollout.disaggregation.enabled=True",
            "would need a prefill and a decode server",
        ),
        ("actor_rollout_ref.model.lora_rank=8", "set model.lora.merge=True"),
    ],
)
def test_what_cannot_be_served_is_refused(
    configure: Callable[..., Any], change: str, sentence: str
):
    with pytest.raises(ConfigError, match=sentence):
        AgentLoopManager.create(config=configure(change), llm_client=None)


SINGLE = (
    "algorithm.adv_estimator=aprilsched",
    "trainer.v1.sampler.custom_sampler.path=pkg://aprilsched.trainers.verl",
    "trainer.v1.sampler.custom_sampler.name=sample_buffer",
)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (("algorithm.adv_estimator=grpo",), "set algorithm.adv_estimator=aprilsched"),
        (("trainer.v1.sampler.custom_sampler.name=Other",), "and name=sample_buffer"),
        (("algorithm.filter_groups.enable=True",), "it judges whole groups"),
        (("algorithm.use_kl_in_reward=True",), "the penalty is not in the siblings' rewards"),
    ],
)
def test_what_changes_a_samples_advantage_is_refused(
    configure: Callable[..., Any], changes: tuple[str, ...], sentence: str
):
    own = SchedulerConfig(delivery="samples")
    assert _settings(configure(*SINGLE), own).delivery == "samples"
    with pytest.raises(ConfigError, match=sentence):
        _settings(configure(*SINGLE, *changes), own)


def test_rewards_computed_after_sampling_are_refused_with_samples(configure: Callable[..., Any]):
    manager = type(
        "Single", (AgentLoopManager,), {"scheduler": SchedulerConfig(delivery="samples")}
    )
    with pytest.raises(ConfigError, match="computes rewards after sampling"):
        manager.create(config=configure(*SINGLE), llm_client=None)


def test_settings_that_verl_decides_are_refused(configure: Callable[..., Any]):
    for own in (SchedulerConfig(max_staleness=2), SchedulerConfig(over_provision=2.0)):
        with pytest.raises(ConfigError, match="verl decides it"):
            _settings(configure(), own)


def test_other_settings_are_kept(configure: Callable[..., Any]):
    own = SchedulerConfig(dispatch=Dispatch(max_in_flight=7))
    settings = _settings(configure("actor_rollout_ref.rollout.n=3"), own)
    assert settings.dispatch.max_in_flight == 7
    assert settings.group_size == 3
    assert settings.straggler == "abort"
    assert settings.sampling.max_new_tokens == 1000
