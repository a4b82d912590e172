"""Collects what is needed to measure the length bias of a run: laws, transient, staleness, drops.

Invariant: every training rollout that was launched is in exactly one of three places here:
delivered, open (in flight, or waiting for its batch), or dropped. The drawn law is estimated from
all three, so a response counts whether or not the schedule delivered it. Dropped rollouts of an
evaluation cannot be told apart in the ledger, and count as dropped training rollouts. Of a prompt
that was generated again, because its tokens became too stale, the first responses count for the
drawn law up to where they were stopped, and the later ones from there on. Otherwise prompts of long
responses, which are generated again more often, would count more than others.

Work is done for each rollout that is sent, finishes or is dropped, and for each batch, but not for
single tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.lengths.groups import GroupLengths, entry_after, pooled
from aprilsched.core.lengths.identity import batches_until, bias_without, expected_lengths
from aprilsched.core.lengths.kaplan_meier import KaplanMeier, kaplan_meier
from aprilsched.core.messages.facts import DeliveredRollout
from aprilsched.core.state.ledger import Ledger
from aprilsched.telemetry.batch_figures import Measured
from aprilsched.telemetry.censoring import Drop, Drops, censoring
from aprilsched.telemetry.figures import BiasFigures, TransientFigures
from aprilsched.telemetry.laws import deciles, in_flight_figures, law_figures, sample_law

__all__ = ["BiasCollector", "running_bias", "transient_by_batch"]

_GOAL = 0.01


class BiasCollector:
    """Collects what :meth:`figures` needs during a run."""

    def __init__(self) -> None:
        self.finished: set[int] = set()
        """Ids of the rollouts whose response has ended and that are neither delivered nor
        dropped."""
        self.newest = -1
        """Largest id of a launched rollout; ids follow the order of launches."""
        self.again: dict[int, int] = {}
        """For each group that came in the place of another one of the same prompt, that group."""
        self._drops = Drops()
        self._newest: list[int] = []
        """Value of `newest` at the delivery of each batch."""
        self._groups: list[NDArray[np.int64]] = []
        """Group id of each delivered rollout, for each batch."""
        self._delivered = 0
        self._delivered_tokens = 0

    def deliver(self, rollouts: Sequence[DeliveredRollout], measured: Measured) -> None:
        self._newest.append(self.newest)
        self._groups.append(np.array([r.group_id for r in rollouts], dtype=np.int64))
        self._delivered += len(rollouts)
        self._delivered_tokens += measured.length
        self.finished.difference_update(rollout.rollout_id for rollout in rollouts)

    def drop(self, ledger: Ledger, *, warn: bool) -> None:
        """Take new entries of the ledger, and warn if the drops censor lengths."""
        self._drops.take(ledger, self.finished)
        if warn:
            self._drops.warn(ledger, self._delivered, self._delivered_tokens)

    def restart(self, gone: Collection[int]) -> None:
        """Continue with the ledger of another process, which resumes the run.

        Args:
            gone: ids of the rollouts that were delivered or dropped before.
        """
        # All other rollouts are launched again as restored.
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
        """Add the estimates of this collector to `basis`.

        Args:
            open_groups: lengths of the training groups that are not delivered.
        """
        self._drops.take(ledger, self.finished)
        lengths = _joined([batch.lengths for batch in batches])
        tokens, finished = pooled(open_groups)
        owners, entered = _joined(self._groups), self._entered()
        law = self._law(lengths, owners, open_groups, entered)
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
            length_distance_by_batch=basis.length_distance_by_batch,
            iid_length_distance_by_batch=basis.iid_length_distance_by_batch,
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
            censoring=censoring(
                [drop for drop in self._drops.taken if drop.entry.group_id not in self.again],
                law,
                lengths.size + tokens.size,
                again=lengths[np.isin(owners, list(entered))],
            ),
        )

    def _entered(self) -> dict[int, NDArray[np.int64]]:
        """For each group that came in another one's place the number of tokens from which on each
        of its members counts for the drawn law, int64 [g]."""
        if not self.again:
            return {}
        members: dict[int, list[Drop]] = {}
        for drop in self._drops.taken:
            members.setdefault(drop.entry.group_id, []).append(drop)
        entered: dict[int, NDArray[np.int64]] = {}
        for group, former in sorted(self.again.items()):
            if former not in members:
                continue
            tokens = np.array([drop.entry.tokens for drop in members[former]], dtype=np.int64)
            ended = np.array([drop.finished for drop in members[former]], dtype=np.bool_)
            since = entry_after(tokens, ended)
            entered[group] = np.maximum(since, entered.get(former, 0))
        return entered

    def _law(
        self,
        lengths: NDArray[np.int64],
        owners: NDArray[np.int64],
        open_groups: Sequence[GroupLengths],
        entered: dict[int, NDArray[np.int64]],
    ) -> KaplanMeier | None:
        """The law of the lengths of all launched responses; None until one response has ended."""
        tokens, finished = pooled(open_groups)
        drops = self._drops.taken
        dropped = np.array([drop.entry.tokens for drop in drops], dtype=np.int64)
        ended = np.array([drop.finished for drop in drops], dtype=np.bool_)
        seen = np.concatenate((lengths, tokens, dropped))
        censored = np.concatenate((np.zeros(lengths.size, dtype=np.bool_), ~finished, ~ended))
        if censored.all():
            return None
        holders = [np.full(len(group.tokens), group.launched) for group in open_groups]
        groups = [drop.entry.group_id for drop in drops]
        since = _since(np.concatenate((owners, _joined(holders), groups)).astype(int), entered)
        return kaplan_meier(np.where(censored, seen, np.maximum(seen, 1)), censored, since)

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


def _since(groups: NDArray[np.int64], entered: dict[int, NDArray[np.int64]]) -> NDArray[np.int64]:
    """The entry of each response, whose group is in `groups`; the responses of a group follow each
    other in the order of its members."""
    since = np.zeros(groups.size, dtype=np.int64)
    order = np.argsort(groups, kind="stable")
    at = np.searchsorted(groups[order], list(entered))
    for begin, (group, own) in zip(at.tolist(), entered.items(), strict=True):
        places = order[begin : begin + own.size]
        places = places[groups[places] == group]
        since[places] = own[: places.size]
    return since


def _joined(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def running_bias(lengths: Sequence[NDArray[np.int64]], mean: float) -> list[float]:
    """Relative bias of the delivered lengths after each batch.

    This is the mean length of all responses delivered so far, divided by `mean`, minus 1.

    Args:
        lengths: for each batch the lengths of its responses, int64 [n].
    """
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
    """The transient part of the bias after each of the batches, -I * (l / mu - 1) / (K * N).

    The responses that were in flight after a batch are known afterwards: they were launched before,
    and were delivered later or not at all.

    Args:
        lengths: for each batch the final lengths of its responses, int64 [n].
        groups: for each batch the groups of its responses, int64 [n].
        newest: for each batch the largest id that was launched when the batch was delivered; ids
            follow the order of launches.
        open_lengths, open_groups: lengths float64 [m] (known or expected) and groups int64 [m] of
            the responses that were never delivered.
        mean: mu, the mean of the drawn lengths.
    """
    final = np.concatenate((*lengths, open_lengths)).astype(np.float64)
    group = np.concatenate((*groups, open_groups))
    order = np.argsort(group, kind="stable")
    excess = np.concatenate(([0.0], np.cumsum(final[order] / mean - 1)))
    launched = excess[np.searchsorted(group[order], np.asarray(newest), side="right")]
    delivered = np.cumsum([float((batch / mean - 1).sum()) for batch in lengths])
    counts = np.cumsum([batch.size for batch in lengths])
    return [float(value) for value in -(launched - delivered) / counts]
