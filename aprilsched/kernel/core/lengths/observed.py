"""Keeps the lengths that a run has observed, and draws groups like the observed ones."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.core.lengths.distributions import KaplanMeier, kaplan_meier
from aprilsched.kernel.core.lengths.log_lengths import normal_cdf, normal_quantile

# The lengths of one group so far, which are the input of all length estimates.

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupLengths:
    """The lengths of a group's responses so far, in tokens.

    The tokens of unfinished members should be as recent as the ends of finished ones. After a pause
    they are; while engines decode, they lag by up to a chunk. The responses then appear to be
    observed only up to an earlier time, and estimated distributions are too short by about that
    lag.

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
        """Return a group whose members have all finished."""
        return GroupLengths(
            launched=launched,
            tokens=np.array(lengths, dtype=np.int64),
            finished=np.ones(len(lengths), dtype=np.bool_),
        )

    @property
    def complete(self) -> bool:
        return bool(self.finished.all())


def pooled(groups: Sequence[GroupLengths]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the tokens, int64 [n], of all members, and whether they are final, bool [n]."""
    if not groups:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_)
    return (
        np.concatenate([group.tokens for group in groups]),
        np.concatenate([group.finished for group in groups]),
    )


def padded(
    rows: Sequence[Sequence[int] | NDArray[Any]], fill: int, kind: type[T], size: int | None = None
) -> NDArray[T]:
    """Return rows of different lengths as one array, padded with `fill` or cut.

    The width is the longest row, or `size`.
    """
    size = max(map(len, rows), default=0) if size is None else size
    table = np.full((len(rows), size), fill, dtype=kind)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row[:size]
    return table


DEFAULT_WINDOW = 4096
"""Number of responses that are kept: 16 batches of 32 groups of 8. This suffices for a 99th
percentile, and still follows a drift."""

_RESAMPLES = 16
"""Number of batches that are drawn for the expected distance of one batch. The mean has an error of
6 %, and less when averaged over several batches."""


class ObservedLengths:
    """The groups that have ended: the last `window` responses of them in the order of launches.

    Open groups are not stored; callers pass them in their current state.

    Raises:
        ValueError: if `window` is below 1.
    """

    def __init__(self, *, window: int = DEFAULT_WINDOW) -> None:
        if window < 1:
            raise ValueError(f"window is {window}; give at least 1 response.")
        self._window = window
        self._size = 0
        self._heap: list[tuple[int, int, GroupLengths]] = []
        """A heap of groups with the earliest launch on top; the second number breaks ties."""
        self._added = 0

    def __len__(self) -> int:
        """Return the number of stored responses."""
        return self._size

    def add_group(self, group: GroupLengths) -> None:
        """Add a group that has ended: complete, or dropped with its tokens so far."""
        self._added += 1
        heapq.heappush(self._heap, (group.launched, self._added, group))
        self._size += len(group.tokens)
        while self._size - len(self._heap[0][2].tokens) >= self._window:
            self._size -= len(heapq.heappop(self._heap)[2].tokens)

    def cohort(self, open_groups: Sequence[GroupLengths] = ()) -> list[GroupLengths]:
        """Return the latest groups, oldest first, with at least `window` responses in total.

        There are fewer responses if fewer are known.
        """
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

    def distribution(self, open_groups: Sequence[GroupLengths] = ()) -> KaplanMeier | None:
        """Return the length distribution, or None until one response has finished."""
        tokens, finished = pooled(self.cohort(open_groups))
        return kaplan_meier(tokens, ~finished) if finished.any() else None

    def shared_log_variance(self) -> float | None:
        """See :func:`~aprilsched.kernel.core.lengths.observed.shared_log_variance`."""
        return shared_log_variance([group for _, _, group in self._heap])

    def iid_distance(self, count: int, *, seed: int = 0) -> float | None:
        """See :func:`~aprilsched.kernel.core.lengths.observed.iid_distance`."""
        return iid_distance([group for _, _, group in self._heap], count, seed=seed)

    def draw_groups(
        self,
        count: int,
        *,
        group_size: int | None,
        open_groups: Sequence[GroupLengths] = (),
        most: int | None = None,
        seed: int = 0,
    ) -> NDArray[np.int64]:
        """Return lengths int64 [count, group_size] of groups like those in the cohort.

        Without `group_size` each group keeps its size. The second dimension is then the largest
        size, and smaller groups have 0 for absent members.

        Whole groups are resampled, so that the members keep their correlation. The length of an
        unfinished member is drawn from the distribution given its tokens so far; otherwise the
        resampled groups would be too short. (This draw ignores its siblings, which weakens the
        correlation.) A member that has not run is drawn given its siblings. From a group with more
        members the first ones are used; smaller groups are skipped. The draws are a function of the
        arguments.

        `most` is the largest possible number of tokens of a response. With it, the distribution's
        tail is guessed
        (:meth:`~aprilsched.kernel.core.lengths.distributions.KaplanMeier.completed`). Without it,
        members that are longer than any finished one end with the next token.

        Raises:
            ValueError: if nothing has finished, or if no group has `group_size` members.
        """
        cohort = self.cohort(open_groups)
        dist = self._distribution_of_prompts(cohort)
        if group_size is not None:
            cohort = [group for group in cohort if len(group.tokens) >= group_size]
        if dist is None or not cohort:
            raise ValueError(
                f"no group of {group_size} has been seen, or nothing has finished; draw later."
            )
        if most is not None:
            dist = dist.completed(most)
        places = resampled(len(cohort), count, seed=seed)
        size = group_size or max(len(group.tokens) for group in cohort)
        tokens = padded([group.tokens for group in cohort], 0, np.int64, size)[places]
        finished = padded([group.finished for group in cohort], True, np.bool_, size)[places]
        drawn = dist.residual_quantile(hashed_uniforms(tokens.shape, seed=seed + 1), tokens)
        lengths: NDArray[np.int64] = np.where(finished, tokens, drawn)
        unknown = (tokens == 0) & ~finished
        if unknown.any():
            lengths = np.where(unknown, self._siblings(dist, lengths, tokens > 0, seed), lengths)
        return lengths

    def _siblings(
        self, dist: KaplanMeier, lengths: NDArray[np.int64], known: NDArray[np.bool_], seed: int
    ) -> NDArray[np.int64]:
        """Draw lengths of members that have not run, int64 [groups, members].

        They are conditional on the lengths of the siblings that are `known`. The model is a
        Gaussian copula in which every member has the distribution as marginal, and the correlation
        within a group is the share w of the log variance: given k siblings whose normal scores have
        the mean m, the group's level is normal with the mean k w m / (1 + (k - 1) w) and the
        variance w (1 - w) / (1 + (k - 1) w), and a member is normal around that with the variance 1
        - w.
        """
        shared = self.shared_log_variance()
        w = min(max(0.5 if shared is None else shared, 0.0), 1.0)
        below = 1 - (dist.survival_at(lengths - 1) + dist.survival_at(lengths)) / 2
        scores = np.where(known, normal_quantile(below), 0.0)
        ran = known.sum(axis=1, keepdims=True)
        spread = 1 + (ran - 1) * w
        level = w * scores.sum(axis=1, keepdims=True) / spread
        groups = normal_quantile(hashed_uniforms((len(lengths), 1), seed=seed + 2))
        level = level + np.sqrt(w * (1 - w) / spread) * groups
        own = normal_quantile(hashed_uniforms(lengths.shape, seed=seed + 3))
        return dist.quantile(normal_cdf(level + math.sqrt(1 - w) * own))

    @staticmethod
    def _distribution_of_prompts(cohort: Sequence[GroupLengths]) -> KaplanMeier | None:
        """Return the length distribution, from one response per prompt if not all of them have run.

        A rule that defers groups runs all members of the groups that it expects to be short, and a
        single member of the others. The pooled responses would then be too short.
        """
        tokens, finished = pooled(cohort)
        if not finished.any():
            return None
        if ((tokens == 0) & ~finished).any():
            first = np.array([group.tokens[0] for group in cohort], dtype=np.int64)
            ended = np.array([group.finished[0] for group in cohort], dtype=np.bool_)
            if ended.any():
                return kaplan_meier(first, ~ended)
        return kaplan_meier(tokens, ~finished)


_WEYL = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def hashed_uniforms(shape: tuple[int, ...], *, seed: int) -> NDArray[np.float64]:
    """Return uniform random numbers in (0, 1) of this shape.

    The generator is SplitMix64 (Steele, Lea and Flood, 2014).
    """
    count = math.prod(shape)
    key = _mixed(np.array([seed % 2**64], dtype=np.uint64) * _WEYL + _WEYL)
    words = _mixed(np.arange(1, count + 1, dtype=np.uint64) * _WEYL + key)
    # With 52 bits and a half, no number is 0 or 1, whose quantiles under an unbounded distribution
    # are infinite.
    return (((words >> np.uint64(12)).astype(np.float64) + 0.5) / 2**52).reshape(shape)


def resampled(population: int, count: int, *, seed: int) -> NDArray[np.int64]:
    """Return indices int64 [count] below `population`, each equally often, in random order.

    This is systematic resampling: each index occurs floor or ceil of count / population times. So
    the mean of the resample has no random error against the mean of the population, while
    neighbours in the order are as independent as in independent draws.
    """
    uniform = hashed_uniforms((count + 1,), seed=seed)
    places = np.floor((np.arange(count) + uniform[0]) * population / count).astype(np.int64)
    return np.minimum(places, population - 1)[np.argsort(uniform[1:], kind="stable")]


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def iid_distance(groups: Sequence[GroupLengths], count: int, *, seed: int = 0) -> float | None:
    """Return the expected Kolmogorov distance of `count` random groups from all lengths.

    It is the mean over 16 resamples of whole groups (the bootstrap of Efron, 1979, by clusters), so
    it includes the correlation within groups, which makes the distance larger than for the same
    number of independent responses, 0.869 / sqrt(n). Only complete groups are used. None if there
    are none, or if `count` is 0.
    """
    rows: list[NDArray[np.int64]] = [group.tokens for group in groups if group.complete]
    if not rows or count < 1:
        return None
    dist: NDArray[np.int64] = np.sort(np.concatenate(rows))
    places = np.floor(hashed_uniforms((_RESAMPLES, count), seed=seed) * len(rows)).astype(np.int64)
    found: list[float] = []
    for drawn in places:
        sample: NDArray[np.int64] = np.sort(np.concatenate([rows[int(place)] for place in drawn]))
        # Both distributions are step functions, so the largest difference is at a step of the
        # sample.
        differ = [
            float(np.abs(_up_to(sample, sample, side) - _up_to(dist, sample, side)).max())
            for side in _SIDES
        ]
        found.append(max(differ))
    return sum(found) / len(found)


_SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")


def _up_to(
    sample: NDArray[np.int64], at: NDArray[np.int64], side: Literal["left", "right"]
) -> NDArray[np.float64]:
    """Return the share of a sorted sample up to each length; below it for "left"."""
    return np.searchsorted(sample, at, side=side) / len(sample)


def shared_log_variance(groups: Sequence[GroupLengths]) -> float | None:
    """Return the share of the log lengths' variance between groups, 0 to 1; None if unknown.

    One-way analysis of variance with random group effects (Searle, Casella and McCulloch, 1992,
    section 3.6), of the complete groups with members k, sizes g_i and N responses:

        share = b / (b + w),  w = SSW / (N - k),  b = max(0, (SSB / (k - 1) - w) / g0),
        g0 = (N - sum g_i**2 / N) / (k - 1)

    Incomplete groups are left out, so while many are open the share describes the shorter ones. At
    least 2 groups and one of 2 members are needed.
    """
    if not groups:
        return None
    tokens, finished = pooled(groups)
    ends = np.cumsum([len(group.tokens) for group in groups])
    starts = np.concatenate(([0], ends[:-1]))
    complete = np.logical_and.reduceat(finished, starts)
    sizes = (ends - starts)[complete].astype(np.float64)
    count, total = len(sizes), float(sizes.sum())
    if count < 2 or total <= count:
        return None
    logs = np.log(np.maximum(tokens, 1))
    means = np.add.reduceat(logs, starts)[complete] / sizes
    squares = np.add.reduceat(logs**2, starts)[complete]
    grand = float((sizes * means).sum()) / total
    within = max(0.0, float((squares - sizes * means**2).sum())) / (total - count)
    between = float((sizes * (means - grand) ** 2).sum()) / (count - 1)
    size = (total - float((sizes**2).sum()) / total) / (count - 1)
    shared = max(0.0, (between - within) / size)
    return shared / (shared + within) if shared + within > 0 else None
