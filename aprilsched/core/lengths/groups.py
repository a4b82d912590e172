"""The lengths of one group so far, which all estimates of lengths take as their input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["NEVER", "GroupLengths", "entry_after", "pooled"]

NEVER = 2**62
"""A number of tokens that no response has."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupLengths:
    """The lengths of a group's responses so far, in tokens.

    The tokens of unfinished members should be as recent as the ends of finished ones. After a pause
    they are; while engines decode, they are up to a chunk too few. The responses then seem to have
    been observed up to an earlier time, and estimated laws are too short by about that much.

    Attributes:
        launched: its position in the order of launches, for example its group id.
        tokens: int64 [g], length of each finished member, and tokens so far of each other one.
        finished: bool [g].
    """

    launched: int
    tokens: NDArray[np.int64]
    finished: NDArray[np.bool_]

    @staticmethod
    def whole(launched: int, lengths: Sequence[int]) -> GroupLengths:
        """A group whose members have all finished."""
        return GroupLengths(
            launched=launched,
            tokens=np.array(lengths, dtype=np.int64),
            finished=np.ones(len(lengths), dtype=np.bool_),
        )

    @property
    def complete(self) -> bool:
        return bool(self.finished.all())


def pooled(groups: Sequence[GroupLengths]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The tokens, int64 [n], and whether they are final, bool [n], of all members of all groups."""
    if not groups:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_)
    return (
        np.concatenate([group.tokens for group in groups]),
        np.concatenate([group.finished for group in groups]),
    )


def entry_after(tokens: NDArray[np.int64], finished: NDArray[np.bool_]) -> NDArray[np.int64]:
    """From which number of tokens on the members of a group count for the drawn law, int64 [g], if
    the group comes in the place of another one of its prompt with these `tokens`, int64 [g], whose
    members had `finished`, bool [g].

    That is where the former group was stopped. A member that had no token then was not sampled
    before, so it counts from its beginning; if nothing that had begun was stopped, everything that
    can be known of the others is known already.
    """
    begun = finished | (tokens > 0)
    stopped = int(tokens[begun & ~finished].max(initial=-1))
    return np.where(begun, NEVER if stopped < 0 else stopped, 0)
