"""What is known of the lengths of one group: the common coin of all that estimates lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["GroupLengths", "pooled"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupLengths:
    """The lengths of a group's responses, in tokens, as far as they are known.

    The tokens of unfinished members should be as new as the news of finished ones: after a pause
    they are, and while engines decode they lag by up to a chunk. What lags is taken as looked at
    earlier than it was, and laws come out too short by about as much.

    Attributes:
        launched: its place in the order of launches (a group id will do).
        tokens: int64 [g]; tokens so far where a member has not finished.
        finished: bool [g].
    """

    launched: int
    tokens: NDArray[np.int64]
    finished: NDArray[np.bool_]

    @staticmethod
    def whole(launched: int, lengths: Sequence[int]) -> GroupLengths:
        """A group of which every member has finished."""
        return GroupLengths(
            launched=launched,
            tokens=np.array(lengths, dtype=np.int64),
            finished=np.ones(len(lengths), dtype=np.bool_),
        )

    @property
    def complete(self) -> bool:
        return bool(self.finished.all())


def pooled(groups: Sequence[GroupLengths]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Tokens int64 [n] and finished bool [n] of all members of all groups."""
    if not groups:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_)
    return (
        np.concatenate([group.tokens for group in groups]),
        np.concatenate([group.finished for group in groups]),
    )
