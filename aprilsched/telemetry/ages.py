"""How old the tokens of a rollout are, from its runs of one version.

Exact, and without a look at the single tokens: a rollout of thousands of them has a few runs.
"""

from __future__ import annotations

from typing import NamedTuple

from aprilsched.core.messages.facts import DeliveredRollout
from aprilsched.types import NO_VERSION

__all__ = ["Ages", "ages_of", "sampled_tokens"]


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


def ages_of(rollout: DeliveredRollout, version: int) -> Ages:
    """The ages when `version` consumes the rollout."""
    sampled = off_policy = total = oldest = oldest_trained = 0
    # What is masked is whatever is older than some version, so it is taken from the oldest run on.
    masked = rollout.masked
    segments = sorted(rollout.segments, key=_version) if masked else rollout.segments
    for start, end, sampled_under, _ in segments:
        if sampled_under == NO_VERSION:
            continue
        tokens = end - start
        sampled += tokens
        is_masked = 0 < tokens <= masked
        if is_masked:
            masked -= tokens
        # Of a newer version than the trainer's, which somebody else has loaded: not negative.
        age = max(0, version - sampled_under)
        total += age * tokens
        off_policy += tokens if sampled_under != version else 0
        if age > 0:
            oldest = max(oldest, age)
            if age > oldest_trained and not is_masked:
                oldest_trained = age
    return Ages(sampled, off_policy, total, oldest, oldest_trained, rollout.masked)


def sampled_tokens(rollout: DeliveredRollout) -> int:
    """Tokens of the response that a policy sampled."""
    return sum([end - start for start, end, version, _ in rollout.segments if version >= 0])


def _version(segment: tuple[int, int, int, str | None]) -> int:
    return segment[2]
