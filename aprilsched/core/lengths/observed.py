"""The running record of the lengths of a run, and groups like those in it.

Invariant: the record is a cohort by launch: the groups launched last, whether complete, dropped
or still open. A window by completion would be none: the long responses that were launched
before it would be in it and the short ones not.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.lengths.draws import hashed_uniforms, resampled
from aprilsched.core.lengths.groups import GroupLengths, pooled
from aprilsched.core.lengths.kaplan_meier import KaplanMeier, kaplan_meier
from aprilsched.core.lengths.variance import shared_log_variance

__all__ = ["DEFAULT_WINDOW", "ObservedLengths"]

DEFAULT_WINDOW = 4096
"""Responses: 16 batches of 32 groups of 8. Enough for a 99th percentile, few enough for drift."""


class ObservedLengths:
    """Groups that have ended, the last `window` responses of them in the order of launches.

    Groups that are still open are not held; callers pass them as they are now.

    Raises:
        ValueError: if `window` is below 1.
    """

    def __init__(self, *, window: int = DEFAULT_WINDOW) -> None:
        if window < 1:
            raise ValueError(f"window is {window}; give at least 1 response.")
        self._window = window
        self._size = 0
        self._heap: list[tuple[int, int, GroupLengths]] = []
        """The one launched first is on top; the second number breaks ties."""
        self._added = 0

    def __len__(self) -> int:
        """Responses held."""
        return self._size

    def add_group(self, group: GroupLengths) -> None:
        """A group has ended: complete, or dropped with the tokens that it had."""
        self._added += 1
        heapq.heappush(self._heap, (group.launched, self._added, group))
        self._size += len(group.tokens)
        while self._size - len(self._heap[0][2].tokens) >= self._window:
            self._size -= len(heapq.heappop(self._heap)[2].tokens)

    def cohort(self, open_groups: Sequence[GroupLengths] = ()) -> list[GroupLengths]:
        """The groups launched last, oldest first: at least `window` responses if there are."""
        ended = [group for _, _, group in self._heap]
        newest_first = sorted([*ended, *open_groups], key=lambda g: g.launched, reverse=True)
        taken: list[GroupLengths] = []
        size = 0
        for group in newest_first:
            if size >= self._window:
                break
            taken.append(group)
            size += len(group.tokens)
        return taken[::-1]

    def law(self, open_groups: Sequence[GroupLengths] = ()) -> KaplanMeier | None:
        """The law that lengths are drawn from; None until one response has finished."""
        tokens, finished = pooled(self.cohort(open_groups))
        return kaplan_meier(tokens, ~finished) if finished.any() else None

    def shared_log_variance(self) -> float | None:
        """See :func:`~aprilsched.core.lengths.variance.shared_log_variance`."""
        return shared_log_variance([group for _, _, group in self._heap])

    def draw_groups(
        self,
        count: int,
        *,
        group_size: int,
        open_groups: Sequence[GroupLengths] = (),
        seed: int = 0,
    ) -> NDArray[np.int64]:
        """Lengths int64 [count, group_size] of groups like those in the cohort.

        Whole groups are resampled, so that what their members have in common stays. What had
        not finished is drawn from the law given its tokens so far: without that, resampled
        groups would be too short by those still open. (It is drawn without a look at its
        siblings, which blurs what they share.) A group of more members gives its first ones;
        smaller ones are passed over. The draws are a function of the arguments.

        Raises:
            ValueError: if nothing has finished, or no group has `group_size` members.
        """
        cohort = self.cohort(open_groups)
        law = self.law(open_groups)
        cohort = [group for group in cohort if len(group.tokens) >= group_size]
        if law is None or not cohort:
            raise ValueError(
                f"no group of {group_size} has been seen, or nothing has finished; draw later."
            )
        places = resampled(len(cohort), count, seed=seed)
        tokens = np.stack([group.tokens[:group_size] for group in cohort])[places]
        finished = np.stack([group.finished[:group_size] for group in cohort])[places]
        drawn = law.residual_quantile(hashed_uniforms(tokens.shape, seed=seed + 1), tokens)
        return np.where(finished, tokens, drawn)
