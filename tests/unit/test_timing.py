"""Tests the step-time model: closed forms, the bound, and its error on an H200."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from aprilsched.errors import ConfigError
from aprilsched.kernel.engines.base import GenerationRequest
from aprilsched.planning.step_times.model import H200_QWEN3_4B, H200_QWEN3_4B_LINEAR, StepTimeModel
from aprilsched.simulation.engine import Batcher, SimConfig
from aprilsched.types import SamplingParams
from tests.support.table import each_row

T = H200_QWEN3_4B_LINEAR


R = H200_QWEN3_4B
EXPERTS = StepTimeModel(
    t0=6.4e-3, t1=15e-6, t2=34e-9, prefill_pass=44e-3, prefill_rate=66e3,
    t0_experts=10.8e-3, expert_share=1 / 16,
)  # fmt: skip
DRAFTING = replace(R, tokens_per_step=((1, 4.0), (33, 2.0), (257, 1.0)))
MODELS = each_row(
    "model", [T, R, EXPERTS, DRAFTING], ids=["linear", "refined", "experts", "drafting"]
)


@each_row(("batch", "kv", "steps"), [(1, 9, 1), (8, 64, 100), (512, 900_000, 777)])
def test_decode_seconds_is_the_sum_of_single_steps(batch: int, kv: int, steps: int) -> None:
    total = sum(T.t0 + T.t1 * batch + T.t2 * (kv + i * batch) for i in range(steps))
    assert T.decode_seconds(batch, kv, steps) == pytest.approx(total, rel=1e-12)


@MODELS
@each_row("batch", [1, 8, 9, 10, 256, 257, 512])
def test_decode_seconds_adds_up_with_every_term(model: StepTimeModel, batch: int) -> None:
    total = sum(model.step_seconds(batch, 5000 + i * batch) for i in range(300))
    assert model.decode_seconds(batch, 5000, 300) == pytest.approx(total, rel=1e-12)


@MODELS
@each_row("batch", [1, 7, 256, 257, 512])
@each_row("steps", [0, 1, 2, 1000, 100_000])
def test_steps_within_inverts_decode_seconds(model: StepTimeModel, batch: int, steps: int) -> None:
    seconds = model.decode_seconds(batch, 1000, steps)
    assert model.steps_within(batch, 1000, seconds) == steps
    assert model.steps_within(batch, 1000, math.nextafter(seconds, -1)) == max(0, steps - 1)


def test_few_sequences_read_as_slowly_as_those_that_fill_the_bandwidth() -> None:
    own = R.step_seconds(1, 0)
    assert R.step_seconds(1, 5000) - own == pytest.approx(R.t2 * 5000 * R.fill)
    assert R.step_seconds(9, 45_000) - R.step_seconds(9, 0) == pytest.approx(R.t2 * 45_000)
    assert R.step_seconds(100, 45_000) - R.step_seconds(100, 0) == pytest.approx(R.t2 * 45_000)


def test_only_wide_batches_pay_more_for_a_step() -> None:
    assert R.step_seconds(256, 0) == pytest.approx(R.t0 + R.t1 * 256)
    assert R.step_seconds(257, 0) == pytest.approx(R.t0 + R.t1 * 257 + R.t0_wide)


def test_small_batches_of_a_mixture_of_experts_read_few_of_them() -> None:
    """Of 16 experts of which each sequence uses one at random, two sequences use 31 / 16."""
    read = [EXPERTS.step_seconds(batch, 0) - EXPERTS.t1 * batch for batch in (1, 2, 512)]
    shares = (1 / 16, 31 / 256, 1.0)
    assert read == pytest.approx([6.4e-3 + 10.8e-3 * share for share in shares])
    assert EXPERTS.token_seconds(512) == pytest.approx(EXPERTS.t1 + 17.2e-3 / 512)


def test_a_step_of_speculative_decoding_gives_tokens_by_the_batch() -> None:
    batches = (0.5, 1, 17, 33, 145, 257, 512)
    assert [DRAFTING.tokens(batch) for batch in batches] == [4, 4, 3, 2, 1.5, 1, 1]
    assert replace(R, tokens_per_step=((8, 2.5),)).tokens(512) == 2.5
    assert DRAFTING.step_seconds(17, 900) == pytest.approx(R.step_seconds(17, 900) / 3)
    assert DRAFTING.token_seconds(512) == R.token_seconds(512) / 4
    for batch in (1, 33, 512):
        own = DRAFTING.step_seconds(batch, 100 * batch) / batch
        assert own >= DRAFTING.bound_seconds([100], [1], 512)


@each_row(
    "pairs",
    [((1, 0.5),), ((2, 2.0), (1, 3.0)), ((0, 2.0),), ((1, math.nan),), ((1, math.inf),), (3,), 3],
)
def test_other_tokens_per_step_are_refused(pairs: object) -> None:
    with pytest.raises(ConfigError, match="tokens_per_step must be pairs of a growing batch"):
        replace(R, tokens_per_step=pairs)  # type: ignore[arg-type]


# Decode windows of the server's log: running requests, context tokens in use at the window's end,
# tokens per second, and how far the linear model is from them.
WINDOWS = [
    (1, 5449, 168.94, -0.34),
    (3, 17_065, 504.76, -0.25),
    (8, 26_302, 1575.77, -0.03),
    (64, 9_792, 14_147.3, +0.06),
    (256, 257_009, 14_175.96, -0.01),
    (512, 76_800, 36_651.17, -0.09),
]


@each_row(("running", "kv", "rate", "linear_miss"), WINDOWS)
def test_logged_windows(running: int, kv: int, rate: float, linear_miss: float) -> None:
    start = kv - 39 * running
    seconds = 40 * running / rate
    assert T.decode_seconds(running, start, 40) / seconds - 1 == pytest.approx(
        linear_miss, abs=0.01
    )
    assert R.decode_seconds(running, start, 40) == pytest.approx(seconds, rel=0.05)


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


# Separate runs of 256 new tokens with short contexts on one H200: requests, milliseconds a step,
# and the relative error of the fitted model. The time is wall time over tokens, prefill included;
# the simulated figure is decoding only: in the first server's log, 18 passes while 512 requests
# arrived took half a second more than their steps, 2 ms for each of 256 tokens. Decode windows of
# the same 512 requests are within 3 % of the refined model and 7 to 10 % above the linear one.
MEASURED = [
    (1, 3.56, +0.03),
    (8, 3.90, -0.02),
    (32, 4.48, -0.06),
    (64, 5.08, -0.06),
    (128, 6.58, -0.10),
    (256, 11.42, -0.28),
    (512, 17.01, -0.25),
]


@each_row(("requests", "measured_ms", "miss"), MEASURED)
def test_separate_decode_runs(requests: int, measured_ms: float, miss: float) -> None:
    batcher = Batcher(SimConfig(timing=T, make_tokens=False))
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
