"""Checks that every delivered token is what the weights of its version sample after its context.

The embedded engine's toy model computes this: its tokens and logprobs depend on the whole context,
the weights and the seed. So a token that was lost, doubled, swapped or given a wrong version
changes all later ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from aprilsched.engines.sim.toy_model import (
    ContextState,
    ToyModel,
    sampling_key,
    weights_key_of_version,
)
from aprilsched.types import Prompt, Rollout, SamplingParams

__all__ = ["CONTENT", "is_right", "weights_key"]

CONTENT = "weights of version {}"
"""Of the file of a version; version 0 is what an engine starts with."""


def weights_key(version: int) -> int:
    """What the embedded engine calls the weights of `version`."""
    if version == 0:
        return weights_key_of_version(0)
    return zlib.crc32(CONTENT.format(version).encode())


def is_right(
    rollout: Rollout, prompt: Prompt, model: ToyModel, key: Callable[[int], int] = weights_key
) -> bool:
    """Whether all its tokens are. For schedules that recompute a context under new weights."""
    if not isinstance(prompt.sampling, tuple):
        raise TypeError("the workload gives every response parameters of its own")
    sampling: SamplingParams = prompt.sampling[rollout.index]
    if len(rollout) != sampling.max_new_tokens or rollout.finish_reason != "length":
        return False
    context = np.concatenate((rollout.prompt_ids, rollout.token_ids))
    edges = [0, *(np.flatnonzero(np.diff(rollout.versions)) + 1).tolist(), len(rollout)]
    for start, end in pairwise(edges):
        weights, known = key(int(rollout.versions[start])), len(rollout.prompt_ids) + start
        state = ContextState(
            hash=model.absorb(0, context[: known - 1], weights),
            last=int(context[known - 1]),
            length=known,
            seed=sampling_key(sampling, ""),
        )
        ((tokens, logprobs),) = model.sample([state], [end - start], weights)
        if not np.array_equal(tokens, rollout.token_ids[start:end]):
            return False
        if not np.array_equal(logprobs, rollout.logprobs[start:end]):
            return False
    return True
