"""Measures the length bias of a running scheduler, for ``rollouts.bias()`` and for one warning.

Memory is bounded: the length law covers only the responses launched last, and totals are sums.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from aprilsched.kernel.core.lengths.observed import pooled
from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.state.records import group_lengths
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.shell.listener import TokenChunks
from aprilsched.observe.figures.bias_collector import expected_lengths, transient, warning_now

log = logging.getLogger("aprilsched")


@dataclass(frozen=True, kw_only=True, slots=True)
class BiasNow:
    """Shows whether short responses are over-represented in everything delivered so far.

    Attributes:
        delivered_mean: mean length of all delivered responses, in tokens; None without any.
        launched_mean: mean length of the responses launched last, in tokens, estimated by the
            scheduler from finished and unfinished ones; None until a response has finished. Prompts
            that were generated again count each time.
        length_bias: delivered_mean / launched_mean - 1; None if one of them is unknown.
        transient: the part of `length_bias` that disappears when the responses in flight are
            delivered; see :mod:`aprilsched.observe.figures.bias_collector`.
        dropped_tokens: number of dropped tokens, by reason.
        warning: the drops that select long responses, and the least size of their lasting effect;
            None if there are none.
    """

    delivered_mean: float | None
    launched_mean: float | None
    length_bias: float | None
    transient: float | None
    dropped_tokens: dict[str, int]
    warning: str | None


class LiveBias:
    """A listener that measures the bias; it reads the scheduler's `state`."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._delivered = 0
        self._tokens = 0
        self._warned = False

    def on_facts(self, facts: Sequence[of.Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, of.BatchDelivered) and not fact.again:
                self._delivered += len(fact.rollouts)
                self._tokens += sum(rollout.tokens for rollout in fact.rollouts)
            elif isinstance(fact, of.GroupDropped | of.PromptRefused) and not self._warned:
                warning = self._warning()
                if warning is not None:
                    self._warned = True
                    log.warning("%s", warning)

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        pass

    def now(self) -> BiasNow:
        """Return the figures at this time."""
        in_flight = self._state.in_flight
        open_groups = [group_lengths(group) for group in in_flight.training_groups()]
        law = self._state.expectations.observed.law([g for g in open_groups if not g.complete])
        launched = None if law is None else law.mean()
        delivered = self._tokens / self._delivered if self._delivered else None
        bias = passing = None
        if law is not None and launched and delivered is not None:
            bias = delivered / launched - 1
            final = expected_lengths(law, *pooled(open_groups))
            _, passing = transient(final, self._delivered, launched)
        return BiasNow(
            delivered_mean=delivered,
            launched_mean=launched,
            length_bias=bias,
            transient=passing,
            dropped_tokens={
                str(reason): n for reason, n in sorted(in_flight.ledger.tokens.items())
            },
            warning=self._warning(),
        )

    def _warning(self) -> str | None:
        return warning_now(self._state.in_flight.ledger, self._delivered, self._tokens)
