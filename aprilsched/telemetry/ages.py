"""Computes the staleness of a rollout's tokens from its segments.

The figures are exact, although the single tokens are not looked at: a rollout of thousands of
tokens has only a few segments of one version each.
"""

from __future__ import annotations

from typing import NamedTuple

from aprilsched.core.messages.facts import DeliveredRollout
from aprilsched.types import NO_VERSION

__all__ = ["Ages", "ages_of", "sampled_tokens"]


class Ages(NamedTuple):
    """Figures about the sampled tokens of a rollout; ages are in versions.

    Attributes:
        oldest_trained: largest age among the tokens that count in the loss.
        masked: number of tokens that do not count in the loss.
    """

    sampled: int
    off_policy: int
    total: int
    oldest: int
    oldest_trained: int
    masked: int


def ages_of(rollout: DeliveredRollout, version: int) -> Ages:
    """The ages of a rollout's tokens if the policy `version` is trained on it."""
    sampled = off_policy = total = oldest = oldest_trained = 0
    # The masked tokens are those older than some version, so they are subtracted from the oldest
    # segments first.
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
        # The tokens may be of a newer version than the trainer's, which somebody else has loaded.
        # Their age is then 0 and not negative.
        age = max(0, version - sampled_under)
        total += age * tokens
        off_policy += tokens if sampled_under != version else 0
        if age > 0:
            oldest = max(oldest, age)
            if age > oldest_trained and not is_masked:
                oldest_trained = age
    return Ages(sampled, off_policy, total, oldest, oldest_trained, rollout.masked)


def sampled_tokens(rollout: DeliveredRollout) -> int:
    """Number of tokens of the response that a policy sampled."""
    return sum([end - start for start, end, version, _ in rollout.segments if version >= 0])


def _version(segment: tuple[int, int, int, str | None]) -> int:
    return segment[2]
