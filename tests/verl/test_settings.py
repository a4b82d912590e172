"""Configurations of verl that would give wrong or lost rollouts are refused with one sentence."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aprilsched import SchedulerConfig
from aprilsched.config import Dispatch, Staleness
from aprilsched.errors import ConfigError
from aprilsched.trainers.verl import AgentLoopManager, _settings, open_control_calls

pytest.importorskip("verl", reason="verl is not installed; use make test-verl")


@pytest.mark.lacks(
    "LoRA adapters",
    adapter="verl",
    why="Requests would not name the adapter, unless model.lora.merge=True.",
)
@pytest.mark.lacks(
    "prefill and decode apart",
    adapter="verl",
    why="The prefill server of SGLang 0.5.23 keeps KV of old weights in a pause.",
)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("trainer.use_v1=False", "set it to True"),
        ("trainer.v1.trainer_mode=sync", 'set it to "separate_async"'),
        ("trainer.v1.trainer_mode=colocate_async", 'set it to "separate_async"'),
        ("actor_rollout_ref.hybrid_engine=True", "set it to False"),
        ("actor_rollout_ref.rollout.name=trtllm", "must be sglang or vllm"),
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


SAMPLER = (
    "trainer.v1.sampler.custom_sampler.path=pkg://aprilsched.trainers.verl",
    "trainer.v1.sampler.custom_sampler.name=scheduled_batches",
)
SINGLE = (*SAMPLER, "algorithm.adv_estimator=aprilsched")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (("algorithm.adv_estimator=grpo",), "set algorithm.adv_estimator=aprilsched"),
        (("trainer.v1.sampler.custom_sampler.name=Other",), "and name=scheduled_batches"),
        (("algorithm.filter_groups.enable=True",), "verl's own sampler would filter"),
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


@pytest.mark.lacks("rolling refits", adapter="verl", why="verl loads all servers at once.")
def test_settings_that_need_batches_of_the_scheduler(configure: Callable[..., Any]):
    for own in (
        SchedulerConfig(max_staleness=2),
        SchedulerConfig(over_provision="auto"),
        SchedulerConfig(pace="asynchronous"),
    ):
        with pytest.raises(ConfigError, match="and name=scheduled_batches"):
            _settings(configure(), own)
        settings = _settings(configure(*SAMPLER), own)
        assert settings.batch_groups == 4
        assert settings.over_provision == own.over_provision
        assert settings.pace == own.pace
    for own in (
        SchedulerConfig(batch_groups=3),
        SchedulerConfig(refit="rolling", pace="asynchronous", straggler="run"),
    ):
        with pytest.raises(ConfigError, match="verl decides it"):
            _settings(configure(*SAMPLER), own, held=True)


def test_the_bound_on_staleness_is_that_of_verl_or_stricter(configure: Callable[..., Any]):
    for strategy, rule in (("drop", "evict"), ("wait", "finish")):
        chosen = f"trainer.v1.sampler.max_off_policy_strategy={strategy}"
        settings = _settings(configure(*SAMPLER, chosen), SchedulerConfig())
        staleness = settings.policies.staleness
        assert (staleness.bound, staleness.rule) == (7, rule)
    strict = _settings(configure(*SAMPLER), SchedulerConfig(max_staleness=3))
    assert strict.policies.staleness == Staleness(bound=3)
    with pytest.raises(ConfigError, match="must be below trainer"):
        _settings(configure(*SAMPLER), SchedulerConfig(max_staleness=8))
    unbound = "trainer.v1.sampler.max_off_policy_threshold=null"
    free = _settings(configure(*SAMPLER, unbound), SchedulerConfig(max_staleness=None))
    assert free.policies.staleness.bound is None


@pytest.mark.lacks(
    "in_place",
    engine="SGLang",
    adapter="verl",
    why="verl flushes after the load, and SGLang refuses to flush under running requests.",
)
def test_requests_wait_in_servers_that_verl_leaves_alone(configure: Callable[..., Any]):
    """`free_cache_engine` releases the cache in every update, also under requests."""
    kept = "actor_rollout_ref.rollout.free_cache_engine=False"
    vllm = "actor_rollout_ref.rollout.name=vllm"
    retract, in_place = SchedulerConfig(), SchedulerConfig(straggler="in_place")
    assert _settings(configure(), retract, held=True).straggler == "abort"
    assert _settings(configure(kept), retract).straggler == "abort"
    assert _settings(configure(kept), retract, held=True).straggler == "retract"
    assert _settings(configure(kept, vllm), in_place, held=True).straggler == "in_place"
    for changes, held, sentence in (
        ((kept,), True, "flushes the cache of an SGLang server"),
        ((vllm,), True, "free_cache_engine=False"),
        ((kept, vllm), False, "python -m aprilsched.trainers.verl"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            _settings(configure(*changes), in_place, held=held)


def test_vllm_servers_get_their_control_calls(configure: Callable[..., Any]):
    config = configure("actor_rollout_ref.rollout.name=vllm")
    open_control_calls(config)
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.VLLM_SERVER_DEV_MODE == "1"
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.enable_scale_out is True


def test_other_settings_are_kept(configure: Callable[..., Any]):
    own = SchedulerConfig(dispatch=Dispatch(max_in_flight=7))
    settings = _settings(configure("actor_rollout_ref.rollout.n=3"), own)
    assert settings.dispatch.max_in_flight == 7
    assert settings.group_size == 3
    assert settings.straggler == "abort"
    assert settings.sampling.max_new_tokens == 1000
