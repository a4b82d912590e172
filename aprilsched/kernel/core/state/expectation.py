"""How many further tokens a response is expected to need.

The law of lengths is estimated from the run so far, with unfinished responses as censored ones. A
group's finished members are evidence for the others, and so is what is remembered of earlier epochs
of its prompt (:mod:`aprilsched.kernel.core.lengths.observed`). On the scale of log lengths, let a
share w of the variance s be common to a group, and let k finished siblings have a mean log length
that is d above the law's. Then the expected log length of a member is w * k / (w * k + 1 - w) * d
above the law's, which is the posterior mean of a normal random effect. If earlier epochs say that
it is m above the law's, with variance v, it is (m / v + k * d / ((1 - w) s)) / (1 / v + k / ((1 -
w) s)) above it. The law is stretched by the exponential of that.

:meth:`Expectations.rest` gives the expected number of steps to the end of each of some groups,
whether they have tokens or not. Whatever orders groups by length uses it, for example
``state.expectations.rest(list(state.in_flight.training_groups()))`` in a step.

A request's own limit is not used: workloads with lengths drawn beforehand give each request its
length as its limit, and a policy that used it would know what no policy can know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.core.lengths.laws import KaplanMeier
from aprilsched.kernel.core.lengths.log_law import Levels, LogLaw, rest_of_groups
from aprilsched.kernel.core.lengths.memory import LengthMemory, Remembered
from aprilsched.kernel.core.lengths.observed import DEFAULT_WINDOW, ObservedLengths
from aprilsched.kernel.core.state.records import (
    GENERATING,
    GroupRecord,
    RequestRecord,
    group_lengths,
    member_tokens,
)

_SHARED = 0.5
"""Share of the log variance within a group while it cannot be estimated."""


class Expectations:
    """The lengths seen in the run, and what they say about responses that still generate.

    Args:
        version: gives the policy version in force, by which the age of what is remembered counts.
    """

    def __init__(self, version: Callable[[], int] = int) -> None:
        self.observed = ObservedLengths()
        self.memory = LengthMemory()
        """The lengths of earlier epochs, by the key of the prompt."""
        self.prompt_tokens: float | None = None
        """The mean length of the prompts of the last responses; None before the first group has
        ended. What is in flight does not say it: after a batch that was waited for, that is
        nothing."""
        self.spare_tokens = 0.0
        """The mean number of tokens by which these responses ended before their limits."""
        self._prompts = 0
        """Number of responses behind it, up to as many as lengths are kept of."""
        self._version = version
        self._law: KaplanMeier | None = None
        self._mean_log = 0.0
        self._deviation_log = 1.0
        self._limit = 1
        """The most tokens that any response may have."""
        self._shared = _SHARED
        self._stale = True

    @property
    def limit(self) -> int:
        """The most tokens that any response launched so far may have."""
        return self._limit

    def note_limit(self, tokens: int) -> None:
        """Note that a response with this limit was launched."""
        self._limit = max(self._limit, tokens)

    def note_prompts(self, group: GroupRecord) -> None:
        """Note the lengths of the prompts in a group, since episodes may have different ones, and
        what its responses leave of their limits."""
        members, prompts, spare = group.members, self.prompt_tokens or 0.0, self.spare_tokens
        self._prompts = min(self._prompts + len(members), DEFAULT_WINDOW)
        more = sum(len(member.prompt_ids) - prompts for member in members)
        self.prompt_tokens = prompts + more / self._prompts
        ended = (member for member in members if member.state not in GENERATING)
        left = (member.sampling.max_new_tokens - member.log.size for member in ended)
        self.spare_tokens = spare + sum(max(0, tokens) - spare for tokens in left) / self._prompts

    def log_law(self) -> LogLaw:
        """The law of log lengths, for :mod:`~aprilsched.kernel.core.lengths.laws`."""
        self._fresh_law()
        return self._log_law()

    def _log_law(self) -> LogLaw:
        """The law as it was last estimated."""
        if self._law is None:
            return LogLaw()
        return LogLaw.estimated(
            mean=self._mean_log,
            deviation=self._deviation_log,
            shared=self._shared,
            cap=float(self._limit),
        )

    def renew(self) -> None:
        """Estimate the law again when it is next needed, because a batch was delivered."""
        self._stale = True

    def remember(self, group: GroupRecord) -> Remembered | None:
        """Remember the lengths of a group that has ended, under the key of its prompt. Returns the
        new record; None if the prompt has no key."""
        if group.prompt.key is None:
            return None
        # The law is not estimated for this: it would stay that of the first group until the first
        # batch is full.
        return self.memory.note(
            group.prompt.key, group_lengths(group), self._log_law(), self._version()
        )

    def levels(self, groups: Sequence[GroupRecord]) -> Levels:
        """What earlier epochs say of the level of each group."""
        keys = [group.prompt.key for group in groups]
        return self.memory.levels(keys, self.log_law(), self._version())

    def explained(self, groups: Sequence[GroupRecord]) -> float:
        """The share of the variance common to a prompt's log lengths that earlier epochs are
        expected to explain, as a mean over the groups; 0 where they say nothing."""
        # The law is not estimated for this: the decisions of the next batch are made with the law
        # that is estimated when the first of them is made.
        law = self._log_law()
        common = law.shared * law.deviation**2
        if not groups or common <= 0:
            return 0.0
        keys = [group.prompt.key for group in groups]
        levels = self.memory.levels(keys, law, self._version())
        return 1 - float(levels.variance.mean()) / common

    def rest(self, groups: Sequence[GroupRecord]) -> NDArray[np.float64]:
        """Expected number of steps to the end of the longest member of each group, float64 [G]; 0
        for a complete group.

        The evidence is the run's law, the members so far, finished or not, and the same prompt's
        lengths in earlier epochs, which count for less the older they are. A group that has no
        token and whose prompt was not seen before has the expectation of the law.
        """
        tokens, finished = member_tokens(groups)
        return rest_of_groups(tokens, finished, self.log_law(), self.levels(groups))

    def remaining(self, request: RequestRecord) -> float:
        """Expected number of tokens to the end of the response; 0 while no length is known."""
        return 0.0 if self._fresh_law() is None else float(self.work([request])[0])

    def work(self, requests: Sequence[RequestRecord]) -> NDArray[np.float64]:
        """Expected number of tokens to the end of each response, float64 [n], as
        :meth:`remaining` gives it; 1 for each while no length is known."""
        law = self._fresh_law()
        if law is None:
            return np.ones(len(requests))
        groups = {r.rollout.group.group_id: r.rollout.group for r in requests}
        stretches = {group_id: self._stretch(group) for group_id, group in groups.items()}
        stretch = np.array([stretches[r.rollout.group.group_id] for r in requests])
        so_far = np.array([r.rollout.log.size for r in requests], dtype=np.float64)
        return stretch * law.residual_mean(so_far / stretch)

    def distances(
        self, delivered: Sequence[GroupRecord], flight: Iterable[GroupRecord]
    ) -> tuple[float, float] | None:
        """How far the lengths of a batch are from the law that all lengths are drawn from, as
        Kolmogorov distances: that of the batch, and the one that is expected of a batch of groups
        drawn at random. None for a batch of less than two groups, which is no sample of a law.

        Args:
            delivered: the groups of the batch.
            flight: all groups in flight. Incomplete ones with tokens are censored observations.
        """
        # A stream delivers single groups; asking all groups in flight for each is quadratic.
        if len(delivered) < 2:
            return None
        groups = [group_lengths(group) for group in flight if not group.complete]
        law = self.observed.law([group for group in groups if group.tokens.any()])
        lengths = [group_lengths(group).tokens for group in delivered]
        if law is None:
            return None
        usual = self.observed.iid_distance(len(lengths), seed=delivered[0].group_id)
        return None if usual is None else (law.distance(np.concatenate(lengths)), usual)

    def _stretch(self, group: GroupRecord) -> float:
        finished = [m.log.size for m in group.members if m.state not in GENERATING]
        key = group.prompt.key
        if key is not None and self.memory.knows(key):
            return self._stretch_remembered(group, finished)
        if not finished:
            return 1.0
        above = sum(math.log(max(n, 1)) for n in finished) / len(finished) - self._mean_log
        weight = self._shared * len(finished)
        return math.exp(weight / (weight + 1 - self._shared) * above)

    def _stretch_remembered(self, group: GroupRecord, finished: list[int]) -> float:
        law, levels = self._log_law(), self.levels([group])
        mean, variance = float(levels.mean[0, 0]) - law.mean, float(levels.variance[0, 0])
        own = (1 - law.shared) * law.deviation**2
        above = sum(math.log(max(n, 1)) - law.mean for n in finished)
        return math.exp((mean / variance + above / own) / (1 / variance + len(finished) / own))

    def _fresh_law(self) -> KaplanMeier | None:
        """The law, estimated again if a batch was delivered since; None while no length is
        known."""
        if self._stale:
            self._estimate()
        return self._law

    def _estimate(self) -> None:
        self._stale = False
        self._law = self.observed.law()
        if self._law is None:
            return
        mass = -np.diff(self._law.survival, prepend=1.0)
        logs = np.log(self._law.lengths)
        self._mean_log = float((mass * logs).sum() / mass.sum())
        variance = float((mass * (logs - self._mean_log) ** 2).sum() / mass.sum())
        self._deviation_log = variance**0.5
        shared = self.observed.shared_log_variance()
        # Below 1, because at 1 a single sibling would decide everything.
        self._shared = _SHARED if shared is None else min(shared, 0.95)
