"""Tests the fit that follows the step times of a live engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
import pytest

from aprilsched.errors import ConfigError
from aprilsched.planning.step_times import Observation, OnlineFit
from aprilsched.planning.step_times.model import H200_QWEN3_4B, H200_QWEN3_4B_LINEAR, StepTimeModel
from aprilsched.planning.step_times.online import LEAST
from tests.support.table import each_row

PRIOR = H200_QWEN3_4B_LINEAR
OTHER = replace(PRIOR, t0=6e-3, t1=2.2e-5, t2=3e-8, prefill_pass=30e-3, prefill_rate=35_000.0)
PLACES = [(4, 20_000), (60, 30_000), (200, 60_000), (300, 300_000), (512, 150_000)]


def seen(model: StepTimeModel, rng: np.random.Generator, noise: float) -> Observation:
    """An observation of 40 steps of a random batch, with up to two prefill passes."""
    running = float(rng.integers(1, 513)) if rng.random() < 0.5 else 512 ** rng.uniform(0, 1)
    kv = running * float(rng.uniform(50, 2000))
    passes = int(rng.integers(0, 3))
    prefilled = int(passes * rng.integers(10, 8000))
    seconds = 40 * model.step_seconds(running, kv)
    seconds += passes * model.prefill_pass + prefilled / model.prefill_rate
    seconds *= 1 + noise * float(rng.standard_normal())
    return Observation(
        running=running,
        kv_tokens=kv,
        seconds_per_step=seconds / 40,
        seconds=seconds,
        prefill_passes=passes,
        prefilled_tokens=prefilled,
    )


def slower(observation: Observation, factor: float) -> Observation:
    return replace(
        observation,
        seconds=factor * observation.seconds,
        seconds_per_step=factor * observation.seconds_per_step,
    )


def worst(model: StepTimeModel, true: StepTimeModel) -> float:
    """The largest relative error of a step at a few places."""
    ratios = [model.step_seconds(b, kv) / true.step_seconds(b, kv) - 1 for b, kv in PLACES]
    return float(np.abs(ratios).max())


def test_without_observations_it_is_the_prior() -> None:
    assert OnlineFit(PRIOR).model == PRIOR


@each_row("seed", range(3))
def test_a_true_model_is_found_from_noisy_windows(seed: int) -> None:
    rng, online = np.random.default_rng(seed), OnlineFit(PRIOR)
    assert worst(PRIOR, OTHER) > 0.25
    for _ in range(200):
        online.observe(seen(OTHER, rng, 0.03))
    assert worst(online.model, OTHER) < 0.06
    assert online.model.prefill_seconds(8000) == pytest.approx(OTHER.prefill_seconds(8000), rel=0.1)
    assert online.windows == 200


def test_a_change_is_followed_within_a_few_memories() -> None:
    rng, online = np.random.default_rng(1), OnlineFit(PRIOR, memory=20)
    changed = replace(OTHER, t0=3e-3, t2=8e-8)
    for _ in range(100):
        online.observe(seen(OTHER, rng, 0.02))
    assert worst(online.model, changed) > 0.3
    for _ in range(120):
        online.observe(seen(changed, rng, 0.02))
    assert worst(online.model, changed) < 0.06


@each_row("prior", [PRIOR, H200_QWEN3_4B])
def test_no_coefficient_is_ever_negative(prior: StepTimeModel) -> None:
    rng, online = np.random.default_rng(2), OnlineFit(prior, memory=10)
    none = replace(prior, t0=0.0, t0_wide=0.0, prefill_pass=0.0)
    touched = False
    for _ in range(300):
        online.observe(seen(none, rng, 0.3))
        values = [getattr(online.model, field.name) for field in fields(StepTimeModel)]
        assert all(value >= 0 for value in values if value != ())
        touched |= online.model.t0 == 0 or online.model.prefill_pass == 0
        assert (online.model.t0_wide > 0) <= (prior.t0_wide > 0)
    assert touched


EXPERTS = replace(
    H200_QWEN3_4B, t0=17.8e-3, t1=1.5e-5, t2=3.2e-8, t0_wide=0.0, prefill_pass=41e-3,
    prefill_rate=70_000.0,
)  # fmt: skip
"""About the steps of Qwen3-30B-A3B, which hardly depend on the batch."""


def first_batch(count: int) -> Iterator[Observation]:
    """Windows of a batch of a mixture of experts that shrinks, a fifth of them disturbed."""
    rng = np.random.default_rng(4)
    for place in range(count):
        running = 512 - 400 * place / count
        seconds = 100 * EXPERTS.step_seconds(running, 850 * running)
        seconds *= 1 + 0.02 * rng.standard_normal() + (rng.random() < 0.2) * rng.uniform(0.5, 5)
        yield Observation(
            running=running,
            kv_tokens=850 * running,
            seconds_per_step=seconds / 100,
            seconds=seconds,
        )


def test_a_mixture_of_experts_is_known_after_its_first_batch() -> None:
    online = OnlineFit(H200_QWEN3_4B)
    for window in first_batch(40):
        online.observe(window)
    for running in (128, 256, 512):
        took = EXPERTS.step_seconds(running, 850 * running)
        assert H200_QWEN3_4B.step_seconds(running, 850 * running) < 0.8 * took
        assert online.model.step_seconds(running, 850 * running) == pytest.approx(took, rel=0.03)


@each_row("factor", [1000.0, 0.001])
@each_row("others", [30, 100])
def test_one_wild_window_hardly_moves_the_model(factor: float, others: int) -> None:
    rng = np.random.default_rng(3)
    online = OnlineFit(PRIOR)
    online.observe(slower(seen(PRIOR, rng, 0.0), factor))
    assert online.model == PRIOR
    for _ in range(others):
        online.observe(seen(PRIOR, rng, 0.01))
    assert 0 < worst(online.model, PRIOR) < 0.02


@each_row(
    "change",
    [
        {"seconds": 0.0},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"running": 0.0},
        {"seconds_per_step": 0.0},
        {"seconds_per_step": float("nan")},
        {"seconds_per_step": 1e9},
    ],
)
def test_windows_without_information_do_not_count(change: dict[str, float]) -> None:
    online = OnlineFit(PRIOR)
    rng = np.random.default_rng(0)
    for _ in range(LEAST):
        online.observe(replace(seen(OTHER, rng, 0.0), **change))
    assert (online.windows, online.model) == (0, PRIOR)
    for _ in range(LEAST):
        online.observe(seen(OTHER, rng, 0.0))
    assert online.windows == LEAST
    assert online.model != PRIOR


@each_row("name", ["prior_weight", "memory"])
def test_settings_are_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        OnlineFit(PRIOR, **{name: 0})
