"""How old the tokens of a rollout are, from its runs of one version.

Exact, and without a look at the single tokens: a rollout of thousands of them has a few runs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from aprilsched.types import NO_VERSION, Rollout

__all__ = ["Ages", "ages_of"]


class Ages(NamedTuple):
    """Of the tokens that a policy sampled; ages are in versions.

    `oldest_trained` is the largest age among those that count in the loss, `masked` how many do
    not.
    """

    sampled: int
    off_policy: int
    total: int
    oldest: int
    oldest_trained: int
    masked: int


def ages_of(rollout: Rollout, version: int) -> Ages:
    """The ages when `version` consumes the rollout."""
    sampled = off_policy = total = oldest = oldest_trained = 0
    trained = int(np.count_nonzero(rollout.loss_mask))
    for run in rollout.segments:
        if run.version == NO_VERSION:
            continue
        tokens = run.end - run.start
        sampled += tokens
        # Of a newer version than the trainer's, which somebody else has loaded: not negative.
        age = max(0, version - run.version)
        total += age * tokens
        off_policy += tokens if run.version != version else 0
        if age > 0:
            oldest = max(oldest, age)
            if age > oldest_trained and rollout.loss_mask[run.start : run.end].any():
                oldest_trained = age
    return Ages(sampled, off_policy, total, oldest, oldest_trained, sampled - trained)
