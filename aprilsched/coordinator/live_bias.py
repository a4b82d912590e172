"""Measures the length bias of a running scheduler: for ``rollouts.bias()`` and for one warning.

Its memory is bounded, however long the run is: laws are those of the latest responses, and totals
are sums. (The command line's summary keeps every batch instead and has more figures.)
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.lengths.laws import KaplanMeier, kaplan_meier
from aprilsched.core.lengths.observed import NEVER, GroupLengths, pooled
from aprilsched.core.messages import facts as of
from aprilsched.core.state.records import group_lengths
from aprilsched.core.state.state import SchedulerState
from aprilsched.telemetry.base import TokenChunks
from aprilsched.telemetry.bias_collector import (
    entered_lengths,
    expected_lengths,
    in_flight_figures,
    law_figures,
    sample_law,
    transient,
    warning_now,
)
from aprilsched.telemetry.figures import InFlightFigures, LawFigures

log = logging.getLogger("aprilsched")

_RECENT_BATCHES = 16
"""Number of batches whose lengths make the law of delivered lengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BiasNow:
    """Shows whether short responses are over-represented in what was delivered so far.

    Attributes:
        drawn: the law that lengths are drawn from, as the Kaplan-Meier estimate over the groups
            that were launched last; responses in flight are censored. None until a response has
            ended.
        delivered: the law of the lengths in the last batches.
        length_bias: mean delivered length / mean drawn length - 1, over all delivered responses.
        transient: the part of `length_bias` that will go away when the responses in flight are
            delivered; see :mod:`aprilsched.telemetry.bias_collector`.
        in_flight: number and expected lengths of the responses in flight.
        dropped_tokens: number of dropped tokens, by reason.
        warning: what makes the other part permanent, with the size of the effect; None if nothing
            does.
    """

    drawn: LawFigures | None
    delivered: LawFigures | None
    length_bias: float | None
    transient: float | None
    in_flight: InFlightFigures | None
    dropped_tokens: dict[str, int]
    warning: str | None


class LiveBias:
    """A listener that measures the bias; it reads the scheduler's `state`."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._recent: deque[NDArray[np.int64]] = deque(maxlen=_RECENT_BATCHES)
        self._again: dict[int, int] = {}
        """For each group that came in another one's place, that other one."""
        self._delivered = 0
        self._tokens = 0
        self._warned = False

    def on_facts(self, facts: Sequence[of.Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, of.BatchDelivered) and not fact.again:
                lengths = np.array([rollout.tokens for rollout in fact.rollouts], dtype=np.int64)
                self._recent.append(lengths)
                self._delivered += lengths.size
                self._tokens += int(lengths.sum())
            elif isinstance(fact, of.GroupLaunched):
                if fact.again is not None:
                    self._again[fact.group_id] = fact.again
            elif isinstance(fact, of.GroupDropped | of.PromptRefused) and not self._warned:
                warning = self._warning()
                if warning is not None:
                    self._warned = True
                    log.warning("%s", warning)

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        pass

    def now(self) -> BiasNow:
        """The figures at this time."""
        in_flight = self._state.in_flight
        open_groups = [group_lengths(group) for group in in_flight.training_groups()]
        incomplete = [group for group in open_groups if not group.complete]
        law = self._law(incomplete)
        tokens, finished = pooled(open_groups)
        mean = None if law is None else law.mean()
        bias = in_flight_bias = None
        if law is not None and mean and self._delivered:
            bias = self._tokens / self._delivered / mean - 1
            final = expected_lengths(law, tokens, finished)
            _, in_flight_bias = transient(final, self._delivered, mean)
        recent = np.concatenate(self._recent) if self._recent else np.empty(0, dtype=np.int64)
        return BiasNow(
            drawn=None if law is None else law_figures(law),
            delivered=sample_law(recent),
            length_bias=bias,
            transient=in_flight_bias,
            in_flight=None if law is None else in_flight_figures(law, tokens, finished),
            dropped_tokens={
                str(reason): n for reason, n in sorted(in_flight.ledger.tokens.items())
            },
            warning=self._warning(),
        )

    def _law(self, incomplete: list[GroupLengths]) -> KaplanMeier | None:
        """The law that lengths are drawn from. The responses of a prompt that was generated again
        count from where its former ones were stopped (delayed entry): they are there because those
        were long, and what the former ones had shown counts already."""
        cohort = self._state.expectations.observed.cohort(incomplete)
        tokens, finished = pooled(cohort)
        if not finished.any():
            return None
        known = {group.launched: group for group in cohort}
        self._again = {g: former for g, former in self._again.items() if g in known}
        entered = entered_lengths(self._again, known)
        since: list[NDArray[np.int64]] = []
        for group in cohort:
            size = len(group.tokens)
            # If the former one is not among the groups that count, this prompt does not either.
            unknown = np.full(size, NEVER if group.launched in self._again else 0)
            since.append(entered.get(group.launched, unknown)[:size])
        entry = np.concatenate(since)
        if not (finished & (tokens > entry)).any():
            return self._state.expectations.observed.law(incomplete)
        return kaplan_meier(tokens, ~finished, entry)

    def _warning(self) -> str | None:
        return warning_now(self._state.in_flight.ledger, self._delivered, self._tokens)
