"""Expected remaining length of responses.

The length distribution is estimated from the run so far, with unfinished responses as censored
observations. A group's finished members are evidence for the others, and so are the
lengths of its prompt in earlier epochs (:mod:`aprilsched.kernel.core.lengths.observed`).

The model is a normal random effect on log lengths. A share w of the variance s is common to a
group. If k finished siblings have a mean log length of d above the distribution's mean, the
posterior mean of a member is w * k / (w * k + 1 - w) * d above it. If earlier epochs estimate the
group's level at m above the distribution's mean, with variance v, the posterior mean is (m / v + k
* d / ((1 - w) s)) / (1 / v + k / ((1 - w) s)) above it. The distribution is stretched by the
exponential of that shift.

:meth:`Expectations.rest` returns the expected number of steps to the end of each group, with or
without tokens. Steps that order groups by length use it, for example
``state.expectations.rest(list(state.in_flight.training_groups()))``.

A request's own limit is not used: workloads with lengths drawn in advance set each request's limit
to its length, and a policy that used it would see the future.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.core.lengths.distributions import KaplanMeier
from aprilsched.kernel.core.lengths.log_lengths import Levels, LogLengths, rest_of_groups
from aprilsched.kernel.core.lengths.memory import LengthMemory, Remembered
from aprilsched.kernel.core.lengths.observed import DEFAULT_WINDOW, ObservedLengths
from aprilsched.kernel.core.state.records import (
    GENERATING,
    GroupRecord,
    RequestRecord,
    RolloutRecord,
    group_lengths,
    member_tokens,
)

_SHARED = 0.5
"""Share of the log variance within a group while it cannot be estimated."""


class Expectations:
    """The lengths seen in the run, and the expected rest of responses that still generate.

    Args:
        version: returns the policy version in force, which determines the age of earlier lengths.
    """

    def __init__(self, version: Callable[[], int] = int) -> None:
        self.observed = ObservedLengths()
        self.memory = LengthMemory()
        """Lengths of earlier epochs, by the key of the prompt."""
        self.prompt_tokens: float | None = None
        """Mean prompt length of the latest responses; None before the first group has ended. The
        groups in flight cannot replace it: after a synchronous batch there may be none."""
        self.spare_tokens = 0.0
        """Mean number of tokens left to the limit when these responses ended."""
        self._prompts = 0
        """Number of responses in these means, at most `DEFAULT_WINDOW`."""
        self._version = version
        self._distribution: KaplanMeier | None = None
        self._mean_log = 0.0
        self._deviation_log = 1.0
        self.ignores_ends = False
        """Whether the responses launched last have ``ignore_eos``."""
        self.limit = 1
        """Largest number of tokens that any response launched so far may have."""
        self._shared = _SHARED
        self._stale = True

    def note_limit(self, tokens: int) -> None:
        """Record the limit of a launched response."""
        self.limit = max(self.limit, tokens)

    def note_prompts(self, members: Sequence[RolloutRecord]) -> None:
        """Update the running means `prompt_tokens` and `spare_tokens` with ended rollouts.

        Each member of a group counts by itself, because the prompts of episodes may differ.
        """
        prompts, spare = self.prompt_tokens or 0.0, self.spare_tokens
        if not members:
            return  # all of them were split off or delivered as single samples
        self._prompts = min(self._prompts + len(members), DEFAULT_WINDOW)
        more = sum([len(member.prompt_ids) - prompts for member in members])
        self.prompt_tokens = prompts + more / self._prompts
        ended = (member for member in members if member.state not in GENERATING)
        left = (member.sampling.max_new_tokens - member.log.size for member in ended)
        self.spare_tokens = spare + sum(max(0, tokens) - spare for tokens in left) / self._prompts

    def log_lengths(self) -> LogLengths:
        """Return the distribution of log lengths, estimated again if out of date."""
        self._fresh_distribution()
        return self._log_lengths()

    def _log_lengths(self) -> LogLengths:
        """Return the distribution as last estimated."""
        if self._distribution is None:
            return LogLengths()
        return LogLengths.estimated(
            mean=self._mean_log,
            deviation=self._deviation_log,
            shared=self._shared,
            cap=float(self.limit),
        )

    def renew(self) -> None:
        """Mark the distribution as out of date after a delivery."""
        self._stale = True

    def remember(self, group: GroupRecord) -> Remembered | None:
        """Remember the lengths of an ended group under the key of its prompt.

        Return the new record; None if the prompt has no key.
        """
        if group.prompt.key is None:
            return None
        # No new estimate here: the distribution of the first group alone would stay in force until
        # the first batch is full.
        return self.memory.note(
            group.prompt.key, group_lengths(group), self._log_lengths(), self._version()
        )

    def levels(self, groups: Sequence[GroupRecord]) -> Levels:
        """Return each group's level of log lengths as estimated from earlier epochs."""
        keys = [group.prompt.key for group in groups]
        return self.memory.levels(keys, self.log_lengths(), self._version())

    def explained(self, groups: Sequence[GroupRecord]) -> float:
        """Return the share of the prompts' common log variance that earlier epochs explain.

        It is an expected value, and a mean over the groups; 0 without earlier epochs.
        """
        # No new estimate here: the first decision of the next batch makes the estimate that all its
        # decisions use.
        dist = self._log_lengths()
        common = dist.shared * dist.deviation**2
        if not groups or common <= 0:
            return 0.0
        keys = [group.prompt.key for group in groups]
        levels = self.memory.levels(keys, dist, self._version())
        return 1 - float(levels.variance.mean()) / common

    def rest(self, groups: Sequence[GroupRecord]) -> NDArray[np.float64]:
        """Return the expected steps to the end of each group's longest member, float64 [G].

        A complete group has 0. The evidence is the distribution of the run, the members so far,
        finished or not, and the same prompt's lengths in earlier epochs, with a weight that falls
        with their age. A group without tokens whose prompt is new has the distribution's
        expectation.
        """
        tokens, finished = member_tokens(groups)
        return rest_of_groups(tokens, finished, self.log_lengths(), self.levels(groups))

    def remaining(self, request: RequestRecord) -> float:
        """Return the expected tokens to the end of the response; 0 while no length is known."""
        return 0.0 if self._fresh_distribution() is None else float(self.work([request])[0])

    def work(self, requests: Sequence[RequestRecord]) -> NDArray[np.float64]:
        """Return the expected tokens to the end of each response, float64 [n].

        It equals :meth:`remaining`, but is 1 for each response while no length is known.
        """
        dist = self._fresh_distribution()
        if dist is None:
            return np.ones(len(requests))
        groups = {r.rollout.group.group_id: r.rollout.group for r in requests}
        stretches = {group_id: self._stretch(group) for group_id, group in groups.items()}
        stretch = np.array([stretches[r.rollout.group.group_id] for r in requests])
        so_far = np.array([r.rollout.log.size for r in requests], dtype=np.float64)
        return stretch * dist.residual_mean(so_far / stretch)

    def distances(
        self,
        delivered: Sequence[GroupRecord],
        flight: Iterable[GroupRecord],
        *,
        unit_size: float | None = None,
    ) -> tuple[float, float] | None:
        """Return the Kolmogorov distance of a batch's lengths from the distribution of all lengths.

        The second number is the distance expected of whole groups with as many responses, drawn at
        random. None for a batch of fewer than two groups or samples, which is too small a sample,
        and while no length is known.

        Args:
            delivered: the groups of the batch, or its single samples.
            unit_size: number of single samples in a whole group; None if the batch has groups.
            flight: all groups in flight. Incomplete ones with tokens are censored observations.
        """
        # A stream delivers single groups; a scan of all groups in flight for each is quadratic.
        if len(delivered) < 2:
            return None
        groups = [group_lengths(group) for group in flight if not group.complete]
        dist = self.observed.distribution([group for group in groups if group.tokens.any()])
        if dist is None:
            return None
        lengths = [max(member.log.size, 1) for group in delivered for member in group.members]
        count = len(delivered) if unit_size is None else max(1, round(len(delivered) / unit_size))
        usual = self.observed.iid_distance(count, seed=delivered[0].group_id)
        return None if usual is None else (dist.distance(np.array(lengths, dtype=np.int64)), usual)

    def _stretch(self, group: GroupRecord) -> float:
        finished = [m.log.size for m in group.members if m.state not in GENERATING]
        if group.ended:  # some may have left as single samples
            finished = [each.tokens for each in group.ended.values()]
        key = group.prompt.key
        if key is not None and self.memory.knows(key):
            return self._stretch_remembered(group, finished)
        if not finished:
            return 1.0
        above = sum(math.log(max(n, 1)) for n in finished) / len(finished) - self._mean_log
        weight = self._shared * len(finished)
        return math.exp(weight / (weight + 1 - self._shared) * above)

    def _stretch_remembered(self, group: GroupRecord, finished: list[int]) -> float:
        dist, levels = self._log_lengths(), self.levels([group])
        mean, variance = float(levels.mean[0, 0]) - dist.mean, float(levels.variance[0, 0])
        own = (1 - dist.shared) * dist.deviation**2
        above = sum(math.log(max(n, 1)) - dist.mean for n in finished)
        return math.exp((mean / variance + above / own) / (1 / variance + len(finished) / own))

    def _fresh_distribution(self) -> KaplanMeier | None:
        """Return the distribution, re-estimated if out of date; None while no length is known."""
        if self._stale:
            self._estimate()
        return self._distribution

    def _estimate(self) -> None:
        self._stale = False
        self._distribution = self.observed.distribution()
        if self._distribution is None:
            return
        mass = -np.diff(self._distribution.survival, prepend=1.0)
        logs = np.log(self._distribution.lengths)
        self._mean_log = float((mass * logs).sum() / mass.sum())
        variance = float((mass * (logs - self._mean_log) ** 2).sum() / mass.sum())
        self._deviation_log = variance**0.5
        shared = self.observed.shared_log_variance()
        # Below 1, because at 1 a single sibling would determine the expectation.
        self._shared = _SHARED if shared is None else min(shared, 0.95)
