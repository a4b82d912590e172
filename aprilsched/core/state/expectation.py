"""How many further tokens a response is expected to need.

The law of lengths is estimated from the run so far, with unfinished responses as censored ones. A
group's finished members are evidence for the others. On the scale of log lengths, let a share w of
the variance be common to a group, and let k finished siblings have a mean log length that is d
above the law's. Then the expected log length of a member is w * k / (w * k + 1 - w) * d above the
law's, which is the posterior mean of a normal random effect. The law is stretched by the
exponential of that.

A request's own limit is not used: workloads with lengths drawn beforehand give each request its
length as its limit, and a policy that used it would know what no policy can know.
"""

from __future__ import annotations

import math

import numpy as np

from aprilsched.core.lengths.kaplan_meier import KaplanMeier
from aprilsched.core.lengths.log_law import LogLaw
from aprilsched.core.lengths.observed import ObservedLengths
from aprilsched.core.state.lifecycle import GENERATING
from aprilsched.core.state.records import GroupRecord, RequestRecord

__all__ = ["Expectations"]

_SHARED = 0.5
"""Share of the log variance within a group while it cannot be estimated."""


class Expectations:
    """The lengths seen in the run, and what they say about responses that still generate."""

    def __init__(self) -> None:
        self.observed = ObservedLengths()
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

    def log_law(self) -> LogLaw:
        """The law of log lengths, for :mod:`~aprilsched.core.lengths.log_law`."""
        if self._stale:
            self._estimate()
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

    def remaining(self, request: RequestRecord) -> float:
        """Expected number of tokens to the end of the response; 0 while no length is known."""
        if self._stale:
            self._estimate()
        if self._law is None:
            return 0.0
        stretch = self._stretch(request.rollout.group)
        so_far = len(request.rollout.log)
        return stretch * float(self._law.residual_mean(so_far / stretch))

    def ends_within(self, request: RequestRecord, tokens: int) -> float:
        """Probability that the response ends within `tokens` further tokens; 0 while no length is
        known."""
        if self._stale:
            self._estimate()
        if self._law is None:
            return 0.0
        stretch = self._stretch(request.rollout.group)
        so_far = len(request.rollout.log)
        now, then = self._law.survival_at(np.array([so_far, so_far + tokens]) / stretch)
        return float(1 - then / now) if now > 0 else 1.0

    def _stretch(self, group: GroupRecord) -> float:
        finished = [len(m.log) for m in group.members if m.state not in GENERATING]
        if not finished:
            return 1.0
        above = sum(math.log(max(n, 1)) for n in finished) / len(finished) - self._mean_log
        weight = self._shared * len(finished)
        return math.exp(weight / (weight + 1 - self._shared) * above)

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
