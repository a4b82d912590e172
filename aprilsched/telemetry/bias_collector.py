"""What a run says about its own bias: laws, the transient, staleness by length, censors.

Invariant: every training rollout that was launched is in exactly one of three places here:
delivered, open (in flight, or waiting for its batch), or dropped. The drawn law is estimated
from all three, so a response counts whether or not the schedule let it through. (What was
dropped of an evaluation cannot be told apart in the ledger and counts among the dropped.)

Work is done for each rollout that is sent, finishes or is dropped, and for each batch; nothing
is done for a token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.lengths.groups import GroupLengths, pooled
from aprilsched.core.lengths.identity import batches_until, bias_without, expected_lengths
from aprilsched.core.lengths.kaplan_meier import KaplanMeier, kaplan_meier
from aprilsched.core.messages.facts import DeliveredRollout
from aprilsched.core.state.ledger import Ledger
from aprilsched.telemetry.batch_figures import Measured
from aprilsched.telemetry.censoring import Drops, censoring
from aprilsched.telemetry.figures import BiasFigures, TransientFigures
from aprilsched.telemetry.laws import deciles, in_flight_figures, law_figures, sample_law

__all__ = ["BiasCollector", "running_bias", "transient_by_batch"]

_GOAL = 0.01


class BiasCollector:
    """Gathers what :meth:`figures` needs while a run goes on."""

    def __init__(self) -> None:
        self.finished: set[int] = set()
        """The rollouts that are generated to their end, and neither delivered nor dropped yet."""
        self.newest = -1
        """The largest id among the rollouts launched; ids follow the order of launches."""
        self._drops = Drops()
        self._newest: list[int] = []
        """The newest rollout's id at each delivery."""
        self._groups: list[NDArray[np.int64]] = []
        """The group of each delivered rollout, by batch."""
        self._delivered = 0
        self._delivered_tokens = 0

    def deliver(self, rollouts: Sequence[DeliveredRollout], measured: Measured) -> None:
        self._newest.append(self.newest)
        self._groups.append(np.array([r.group_id for r in rollouts], dtype=np.int64))
        self._delivered += len(rollouts)
        self._delivered_tokens += measured.length
        self.finished.difference_update(rollout.rollout_id for rollout in rollouts)

    def drop(self, ledger: Ledger, *, warn: bool) -> None:
        """Something went to the ledger; warn if that censors lengths."""
        self._drops.take(ledger, self.finished)
        if warn:
            self._drops.warn(ledger, self._delivered, self._delivered_tokens)

    def restart(self, gone: Collection[int]) -> None:
        """The run goes on in another process, with its own ledger; `gone` has the rollouts that
        were delivered or dropped before."""
        # What else is there is launched again.
        self.finished.intersection_update(gone)
        self.newest = max(gone, default=-1)
        self._drops = Drops()

    def figures(
        self,
        basis: BiasFigures,
        batches: Sequence[Measured],
        open_groups: Sequence[GroupLengths],
        ledger: Ledger,
    ) -> BiasFigures:
        """`basis` and what is estimated here. `open_groups`: training groups not delivered."""
        self._drops.take(ledger, self.finished)
        lengths = _joined([batch.lengths for batch in batches])
        tokens, finished = pooled(open_groups)
        law = self._law(lengths, tokens, finished)
        known = basis.workload_mean_length
        mean = known if known is not None or law is None else law.mean()
        return BiasFigures(
            first_batch_length_bias=basis.first_batch_length_bias,
            bias_estimate=basis.bias_estimate,
            bias_reference=basis.bias_reference,
            workload_mean_length=basis.workload_mean_length,
            long_run_mean_length=basis.long_run_mean_length,
            delivered_mean_length=basis.delivered_mean_length,
            delivered_mean_length_by_batch=basis.delivered_mean_length_by_batch,
            drawn=None if law is None else law_figures(law),
            delivered=sample_law(lengths),
            in_flight=None if law is None else in_flight_figures(law, tokens, finished),
            transient=self._transient(law, mean, known is not None, batches, open_groups),
            by_length_decile=deciles(
                lengths,
                _joined([batch.sampled_by_rollout for batch in batches]),
                _joined([batch.off_policy_by_rollout for batch in batches]),
                _joined([batch.staleness_by_rollout for batch in batches]),
            ),
            dropped_tokens={str(reason): n for reason, n in sorted(ledger.tokens.items())},
            censoring=censoring(self._drops.taken, law, lengths.size + tokens.size),
        )

    def _law(
        self, lengths: NDArray[np.int64], tokens: NDArray[np.int64], finished: NDArray[np.bool_]
    ) -> KaplanMeier | None:
        """Of all that was launched; None until one response has finished."""
        drops = self._drops.taken
        dropped = np.array([drop.entry.tokens for drop in drops], dtype=np.int64)
        ended = np.array([drop.finished for drop in drops], dtype=np.bool_)
        seen = np.concatenate((lengths, tokens, dropped))
        censored = np.concatenate((np.zeros(lengths.size, dtype=np.bool_), ~finished, ~ended))
        if censored.all():
            return None
        return kaplan_meier(np.where(censored, seen, np.maximum(seen, 1)), censored)

    def _transient(
        self,
        law: KaplanMeier | None,
        mean: float | None,
        known: bool,
        batches: Sequence[Measured],
        open_groups: Sequence[GroupLengths],
    ) -> TransientFigures | None:
        if law is None or not mean or not batches:
            return None
        tokens, finished = pooled(open_groups)
        final = expected_lengths(law, tokens, finished)
        expected = float(final.mean()) if final.size else mean
        lengths = [batch.lengths for batch in batches]
        measured = running_bias(lengths, mean)
        owners = [np.full(len(group.tokens), group.launched) for group in open_groups]
        return TransientFigures(
            predicted=bias_without(final.size, expected, self._delivered, mean),
            measured=measured[-1],
            mean=mean,
            reference="workload_mean" if known else "drawn",
            predicted_by_batch=transient_by_batch(
                lengths=lengths,
                groups=self._groups,
                newest=self._newest,
                open_lengths=final,
                open_groups=_joined(owners),
                mean=mean,
            ),
            measured_by_batch=measured,
            further_batches_to_1_percent=max(
                0,
                batches_until(
                    _GOAL,
                    in_flight=final.size,
                    excess=expected / mean - 1,
                    per_batch=self._delivered / len(batches),
                )
                - len(batches),
            ),
        )


def _joined(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def running_bias(lengths: Sequence[NDArray[np.int64]], mean: float) -> list[float]:
    """Mean length of all delivered up to each batch / `mean` - 1; `lengths` int64 [n] by batch."""
    totals = np.cumsum([float(batch.sum()) for batch in lengths])
    counts = np.cumsum([batch.size for batch in lengths])
    return [float(value) for value in totals / (counts * mean) - 1]


def transient_by_batch(
    *,
    lengths: Sequence[NDArray[np.int64]],
    groups: Sequence[NDArray[np.int64]],
    newest: Sequence[int],
    open_lengths: NDArray[np.float64],
    open_groups: NDArray[np.int64],
    mean: float,
) -> list[float]:
    """-I * (l / mu - 1) / (K * N) after each of the batches.

    What was in flight after a batch is known afterwards: launched until then, and delivered
    later or not at all.

    Args:
        lengths, groups: for each batch the final length, int64 [n], and the group, int64 [n], of
            its responses.
        newest: the largest id launched when the batch was delivered; ids follow the order of
            launches.
        open_lengths, open_groups: float64 [m] and int64 [m], of what was never delivered; the
            lengths known or expected.
        mean: mu.
    """
    final = np.concatenate((*lengths, open_lengths)).astype(np.float64)
    group = np.concatenate((*groups, open_groups))
    order = np.argsort(group, kind="stable")
    excess = np.concatenate(([0.0], np.cumsum(final[order] / mean - 1)))
    launched = excess[np.searchsorted(group[order], np.asarray(newest), side="right")]
    delivered = np.cumsum([float((batch / mean - 1).sum()) for batch in lengths])
    counts = np.cumsum([batch.size for batch in lengths])
    return [float(value) for value in -(launched - delivered) / counts]
