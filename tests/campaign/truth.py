"""Determines which weights sampled each token, independently of the engine and the scheduler.

The toy model of the embedded engine is replaced by one whose logprobs are the version of the
weights that it samples with. So each token carries its true version through every attempt, partial
rollout, store and resumed run, and no records of requests and positions are needed. Token ids are
those of the toy model and depend on the whole context, so a token that is lost, doubled or swapped
changes all later ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np

from aprilsched.kernel.values.companions import Companion
from aprilsched.simulation.engine.toy_model import (
    ContextState,
    ToyModel,
    adapted_key,
    sampling_key,
    toy_masks,
    toy_rows,
    weights_key_of_version,
)
from aprilsched.types import (
    NO_VERSION,
    Float32Array,
    Int32Array,
    Prompt,
    Rollout,
    SamplingParams,
    derived_seed,
)

COMPANIONS = (Companion("routed_experts", "uint8", (3, 2)), Companion("sampling_mask"))
MOST_VERSIONS = 400
CONTENT = "weights of version {}"
"""Content of the weights file of a version; servers start with version 0."""
_UNIT = 64.0
"""Logprobs are -(version + 1) / 64, which float32 holds exactly."""


class TruthModel(ToyModel):
    """The toy model whose logprobs encode the version of its weights."""

    def sample(
        self, states: Sequence[ContextState], counts: Sequence[int], key: int
    ) -> list[tuple[Int32Array, Float32Array]]:
        text = np.float32(-(_version_of(key) + 1) / _UNIT)
        blocks = super().sample(states, counts, key)
        return [(ids, np.full(len(ids), text, dtype=np.float32)) for ids, _ in blocks]


def true_versions(logprobs: Float32Array, sampled: np.ndarray) -> Int32Array:
    """Return the version that sampled each token, int32 [n]; -1 for tokens that were not
    sampled."""
    found = np.rint(-logprobs * _UNIT).astype(np.int32) - 1
    return np.where(sampled, found, NO_VERSION).astype(np.int32)


def file_key(version: int) -> int:
    """Return the embedded engine's key for the weights of `version`, loaded from a file."""
    if version == 0:
        return weights_key_of_version(0)
    return zlib.crc32(CONTENT.format(version).encode())


@cache
def _versions(key: Callable[[int], int]) -> dict[int, int]:
    return {key(version): version for version in range(MOST_VERSIONS)}


@cache
def _version_of(key: int) -> int:
    whole = _versions(weights_key_of_version)
    for known in (whole, _versions(file_key)):
        if key in known:
            return known[key]
    for adapter_key, adapter in whole.items():
        for base_key in whole:
            if adapted_key(base_key, adapter_key) == key:
                return adapter
    raise LookupError(f"no version has the weights key {key}")


_MOST_AGAIN = 20


def sampling_of(rollout: Rollout, prompt: Prompt, size: int) -> list[SamplingParams]:
    """Return how a response of one turn may have been sampled in a group of `size`: a member that
    replaces a lost one has another seed."""
    sampling = prompt.sampling
    if isinstance(sampling, tuple):
        sampling = sampling[rollout.index]
    if not isinstance(sampling, SamplingParams):
        raise TypeError("every prompt of the campaign has sampling parameters")
    if sampling is not prompt.sampling or sampling.sampling_seed is None or size == 1:
        return [sampling]
    seeds = [derived_seed(sampling.sampling_seed, rollout.group_id, rollout.index)]
    for again in range(1, _MOST_AGAIN):
        seeds.append(derived_seed(seeds[-1], again))
    return [replace(sampling, sampling_seed=seed) for seed in seeds]


def is_right(
    rollout: Rollout,
    sampling: SamplingParams,
    model: ToyModel,
    key: Callable[[int], int] = weights_key_of_version,
) -> bool:
    """Return whether each token follows from its context under the weights of its true version,
    whose key is `key(version)`. For schedules that recompute a context under new weights, without
    adapters. Every turn was sampled with the seed of `sampling`."""
    context = np.concatenate((rollout.prompt_ids, rollout.token_ids))
    versions = true_versions(rollout.logprobs, rollout.versions != NO_VERSION)
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(rollout)]
    for start, end in pairwise(edges):
        if start == end or versions[start] == NO_VERSION:
            continue
        weights, known = key(int(versions[start])), len(rollout.prompt_ids)
        known += start
        state = ContextState(
            hash=model.absorb(0, context[: known - 1], weights),
            last=int(context[known - 1]),
            length=known,
            seed=sampling_key(sampling, ""),
        )
        ((tokens, _),) = model.sample([state], [end - start], weights)
        if not np.array_equal(tokens, rollout.token_ids[start:end]):
            return False
    return True


def wrong_rows(
    rollout: Rollout, truth: Int32Array, key: Callable[[int], int] = weights_key_of_version
) -> str:
    """Return what is wrong with the companion rows, or "" if nothing is.

    A row marked as exact must come from the pass that sampled its token; `truth` has the true
    versions of the tokens."""
    prompt, tokens = len(rollout.prompt_ids), len(rollout)
    sampled = truth != NO_VERSION
    for companion in rollout.companions.values():
        name, exact = companion.companion.name, companion.exact
        context = companion.companion.per == "context"
        if len(companion.rows) != tokens + (prompt - 1 if context else 0):
            return f"has {len(companion.rows)} rows of {name}"
        if context:
            keys = np.array([key(max(0, int(v))) for v in truth], dtype=np.uint64)
            positions = np.arange(prompt - 1, prompt + tokens - 1)
            right = toy_rows(companion.companion, positions, keys)
            same = (companion.rows.values[prompt - 1 :] == right.values).all((1, 2))
        else:
            right = toy_masks(companion.companion, rollout.token_ids)
            same = np.array(
                [np.array_equal(companion.rows.row(i), right.row(i)) for i in range(tokens)]
            )
        if (wrong := np.flatnonzero(exact & sampled & ~same)).size:
            return f"has the {name} of another pass at {wrong.size} tokens, first {wrong[0]}"
    return ""
