"""The time model: closed forms, the bound, and how far it is from what one H200 did."""

from __future__ import annotations

import math

import numpy as np
import pytest

from aprilsched.engines.base import GenerationRequest
from aprilsched.engines.sim import H200_QWEN3_4B, Batcher, SimConfig
from aprilsched.types import SamplingParams

T = H200_QWEN3_4B


@pytest.mark.parametrize(("batch", "kv", "steps"), [(1, 9, 1), (8, 64, 100), (512, 900_000, 777)])
def test_decode_seconds_is_the_sum_of_single_steps(batch: int, kv: int, steps: int) -> None:
    total = sum(T.t0 + T.t1 * batch + T.t2 * (kv + i * batch) for i in range(steps))
    assert T.decode_seconds(batch, kv, steps) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("batch", [1, 7, 512])
@pytest.mark.parametrize("steps", [0, 1, 2, 1000, 100_000])
def test_steps_within_inverts_decode_seconds(batch: int, steps: int) -> None:
    seconds = T.decode_seconds(batch, 1000, steps)
    assert T.steps_within(batch, 1000, seconds) == steps
    assert T.steps_within(batch, 1000, math.nextafter(seconds, -1)) == max(0, steps - 1)


def test_prefill_pays_for_every_pass() -> None:
    assert T.prefill_seconds(1) == pytest.approx(18.9e-3 + 1 / 59_900)
    assert T.prefill_seconds(8192) == pytest.approx(18.9e-3 + 8192 / 59_900)
    assert T.prefill_seconds(8193) == pytest.approx(2 * 18.9e-3 + 8193 / 59_900)


def test_bound_of_one_response_is_its_decoding_alone_with_the_weights_shared() -> None:
    steps = T.decode_seconds(1, 100, 1000)
    assert T.bound_seconds([100], [1000], 1) == pytest.approx(steps, rel=1e-4)
    shared = T.bound_seconds([100], [1000], 512)
    assert shared == pytest.approx(steps - T.t0 * 1000 * (1 - 1 / 512), rel=1e-3)


def test_bound_of_the_example_workload() -> None:
    mean, cv2, samples = 1029.0, 0.98, 256
    lengths = np.full(samples, mean)
    spread = T.t2 * samples * mean**2 * cv2 / 2  # equal lengths lack the variance's reads
    bound = T.bound_seconds(np.full(samples, 8), lengths, 512) + spread
    assert bound == pytest.approx(16.8, rel=0.01)


def test_bound_refuses_arrays_of_different_lengths() -> None:
    with pytest.raises(ValueError, match="one for each"):
        T.bound_seconds([1, 2], [3], 8)


# Separate runs of 256 new tokens with short contexts on one H200, milliseconds a step, and where
# the fitted model is beside them. It misses the two largest batches by a quarter; windows of
# 40 steps logged by the same servers at 235 running requests (100 to 300 tokens of context each)
# had 8.5 ms, which the model meets, so there the separate runs and the logs disagree.
MEASURED = [
    (1, 3.56, +0.03),
    (8, 3.90, -0.02),
    (32, 4.48, -0.06),
    (64, 5.08, -0.06),
    (128, 6.58, -0.10),
    (256, 11.42, -0.28),
    (512, 17.01, -0.25),
]


@pytest.mark.parametrize(("requests", "measured_ms", "miss"), MEASURED)
def test_separate_decode_runs(requests: int, measured_ms: float, miss: float) -> None:
    batcher = Batcher(SimConfig(make_tokens=False))
    sampling = SamplingParams(max_new_tokens=256, ignore_eos=True)
    prompt = np.zeros(8, dtype=np.int32)
    for i in range(requests):
        request = GenerationRequest(request_id=f"{i:04}", input_ids=prompt, sampling=sampling)
        batcher.submit(request, 0.0)
    while (due := batcher.next_event_time()) is not None:
        batcher.advance(due)
    step_ms = 1e3 * batcher.counters.decode_seconds / batcher.counters.steps
    assert batcher.counters.steps == 255
    assert step_ms / measured_ms - 1 == pytest.approx(miss, abs=0.015)
    if requests <= 128:
        assert step_ms == pytest.approx(measured_ms, rel=0.10)
