"""Tests the toy model: a token depends on everything that it should, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from aprilsched.simulation.engine.toy_model import ContextState, ToyModel, sampling_key
from aprilsched.types import Float32Array, Int32Array, SamplingParams

MODEL = ToyModel(32_000)
CONTEXT = np.arange(100, 140, dtype=np.int32)


def state_of(context: Int32Array, key: int, seed: int = 7) -> ContextState:
    hashed = MODEL.absorb(0, context[:-1], key)
    return ContextState(hash=hashed, last=int(context[-1]), length=len(context), seed=seed)


def sample(context: Int32Array, count: int = 30, key: int = 1, seed: int = 7) -> Int32Array:
    return MODEL.sample([state_of(context, key, seed)], [count], key)[0][0]


def test_vector_and_scalar_paths_give_equal_bits() -> None:
    rng = np.random.default_rng(0)
    contexts = [rng.integers(0, 32_000, 1 + i * 2, dtype=np.int32) for i in range(40)]
    counts = [int(n) for n in rng.integers(0, 50, 40)]
    together = [state_of(c, 3, seed) for seed, c in enumerate(contexts)]
    alone = [state_of(c, 3, seed) for seed, c in enumerate(contexts)]
    blocks = MODEL.sample(together, counts, 3)
    for block, moved, state, count in zip(blocks, together, alone, counts, strict=True):
        ((ids, logprobs),) = MODEL.sample([state], [count], 3)
        assert np.array_equal(block[0], ids)
        assert np.array_equal(block[1], logprobs)
        assert (moved.hash, moved.last, moved.length) == (state.hash, state.last, state.length)


def test_types_and_ranges() -> None:
    contexts = [np.array([i], dtype=np.int32) for i in range(64)]
    blocks: list[tuple[Int32Array, Float32Array]] = MODEL.sample(
        [state_of(c, 1) for c in contexts], [200] * 64, 1
    )
    ids = np.concatenate([b[0] for b in blocks])
    logprobs = np.concatenate([b[1] for b in blocks])
    assert ids.dtype == np.int32
    assert logprobs.dtype == np.float32
    assert ids.min() >= 0
    assert ids.max() < 32_000
    assert logprobs.min() > -8
    assert logprobs.max() < 0
    assert logprobs.mean() == pytest.approx(-4, abs=0.1)
    assert len(np.unique(ids)) > 9_000


def test_weights_matter_through_the_cache_and_through_the_step() -> None:
    fresh = sample(CONTEXT, key=2)
    stale_cache = state_of(CONTEXT, key=1)
    stale = MODEL.sample([stale_cache], [30], 2)[0][0]
    assert (fresh == sample(CONTEXT, key=1)).sum() <= 1
    assert (stale == fresh).sum() <= 1


def test_greedy_ignores_the_seed_and_sampling_does_not() -> None:
    greedy = SamplingParams(temperature=0.0, sampling_seed=1)
    assert sampling_key(greedy, "a") == sampling_key(SamplingParams(temperature=0.0), "b")
    seeded = SamplingParams(sampling_seed=1)
    assert sampling_key(seeded, "a") == sampling_key(seeded, "b")
    assert sampling_key(seeded, "a") != sampling_key(SamplingParams(sampling_seed=2), "a")
    unseeded = SamplingParams()
    assert sampling_key(unseeded, "a") == sampling_key(unseeded, "a")
    assert sampling_key(unseeded, "a") != sampling_key(unseeded, "b")
    assert (sample(CONTEXT, seed=1) == sample(CONTEXT, seed=2)).sum() <= 1


def test_absorbing_in_pieces_is_absorbing_at_once() -> None:
    tokens = np.arange(10_000, dtype=np.int32)
    whole = MODEL.absorb(0, tokens, 5)
    assert MODEL.absorb(MODEL.absorb(0, tokens[:4097], 5), tokens[4097:], 5) == whole
    assert MODEL.absorb(whole, tokens[:0], 5) == whole


def test_a_vocabulary_needs_two_tokens() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        ToyModel(1)
