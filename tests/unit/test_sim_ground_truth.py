"""Compares the simulated engine with two schedules measured on an H200 (SGLang 0.5.17, 4B shape).

Both ran the built-in workload's law (batches of 32 groups of 8). The measured lengths are another
draw, so means over seeds and steps are compared. Tolerances are stated where they are used.
`experiments/ground_truth` has these and more schedules.
"""

from __future__ import annotations

import numpy as np
import pytest

from aprilsched.timing.model import H200_QWEN3_4B, H200_QWEN3_4B_LINEAR, StepTimeModel
from experiments.ground_truth.schedules import pool, waves

SEEDS = range(4)
MODELS = pytest.mark.parametrize("timing", [H200_QWEN3_4B_LINEAR, H200_QWEN3_4B])


@MODELS
def test_waves_of_64_groups_take_what_they_took(timing: StepTimeModel) -> None:
    runs = np.array([waves(seed, 6, timing) for seed in SEEDS])
    seconds, rate, prefilled, _ = runs[:, 1:].mean(axis=(0, 1))
    assert seconds == pytest.approx(np.mean([21.9, 22.1, 22.9]), rel=0.10)
    assert rate == pytest.approx(np.mean([12_193, 12_070, 10_789]), rel=0.10)
    assert prefilled == pytest.approx(np.mean([118_000, 148_000, 143_000]), rel=0.25)
    assert runs[:, 0, 0].mean() == pytest.approx(25.1, rel=0.20)


@MODELS
def test_a_pool_of_320_takes_what_it_took(timing: StepTimeModel) -> None:
    runs = np.array([pool(seed, 5, 320, timing) for seed in SEEDS])
    seconds, rate, _, cached = runs[:, 1:].mean(axis=(0, 1))
    assert seconds == pytest.approx(np.mean([23.0, 21.2, 19.6, 25.9]), rel=0.10)
    assert rate == pytest.approx(np.mean([12_758, 12_181, 11_926, 11_453]), rel=0.10)
    assert cached == pytest.approx(np.mean([275_000, 279_000, 293_000, 330_000]), rel=0.10)
    assert runs[:, 0, 0].mean() == pytest.approx(37.5, rel=0.20)
