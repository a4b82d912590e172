"""Measures the length bias of a run: delivered against launched lengths, the transient, drops.

Of n responses with mean length mu, let m not be delivered (in flight, or dropped), with mean final
length l. The sum of all lengths is n * mu, so the delivered ones have exactly

    mean / mu - 1 = -m * (l / mu - 1) / (n - m)

If the m responses are in flight and the policy does not change, m stays bounded while n - m grows,
so the bias is a transient. If they are dropped, m grows with n, and the bias stays. A bias is a
share of mu: 0 means unbiased, and -0.1 means 10 % too short.

Every launched training rollout is delivered, open (in flight, or waiting for its batch) or dropped.
The distribution of launched lengths is the Kaplan-Meier estimate from all three. If a prompt was
generated again, only its last responses count.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.core.lengths.distributions import KaplanMeier, kaplan_meier
from aprilsched.kernel.core.lengths.observed import GroupLengths, pooled
from aprilsched.kernel.core.messages.facts import DeliveredRollout, DroppedRollout
from aprilsched.kernel.core.state.ledger import Ledger, Reason
from aprilsched.observe.figures.figures import Figures, Measured
from aprilsched.observe.figures.run_figures import (
    BiasFigures,
    CensoringFigures,
    LengthFigures,
    TransientFigures,
)


def bias_without(absent: int, absent_mean: float, present: int, mean: float) -> float:
    """Return the bias of `present` responses if `absent` others have mean length `absent_mean`.

    `mean` is the mean of the distribution; lengths are in tokens. The bias is 0 if nothing is
    present or absent.
    """
    if not absent or not present or not mean:
        return 0.0
    return -absent * (absent_mean / mean - 1) / present


def expected_lengths(
    dist: KaplanMeier, tokens: NDArray[np.int64], finished: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return the expected final lengths, float64 [n]: the length of a finished response, and tokens
    plus E[rest | tokens] of an unfinished one."""
    return np.where(finished, tokens, tokens + dist.residual_mean(tokens))


_CURVE_POINTS = 240


def length_figures(dist: KaplanMeier) -> LengthFigures:
    """Return the figures of an estimated distribution."""
    p50, p90, p99 = (float(quantile) for quantile in dist.quantile([0.5, 0.9, 0.99]))
    lengths, longer = _curve(dist)
    return LengthFigures(
        mean=dist.mean(),
        p50=p50,
        p90=p90,
        p99=p99,
        lengths=lengths.tolist(),
        longer=[float(f"{share:.7g}") for share in longer.tolist()],
        responses=dist.observations,
        unresolved=dist.tail,
    )


def _curve(dist: KaplanMeier) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the survival function, thinned to the resolution of a screen."""
    known = dist.survival > 0
    lengths, longer = np.append(1, dist.lengths[known]), np.append(1.0, dist.survival[known])
    if lengths.size <= _CURVE_POINTS:
        return lengths, longer
    right, down = np.log(lengths), -np.log(longer)
    way = right / max(1.0, float(right[-1])) + down / max(1.0, float(down[-1]))
    chosen = np.searchsorted(way, np.linspace(0, float(way[-1]), _CURVE_POINTS))
    kept = np.unique(np.minimum(chosen, lengths.size - 1))
    return lengths[kept], longer[kept]


def sample_distribution(lengths: NDArray[np.int64]) -> LengthFigures | None:
    """Return the figures of the lengths int64 [n] of finished responses, or None without any.

    A response without sampled tokens (its episode contains only environment tokens) counts as one
    token.
    """
    if not lengths.size:
        return None
    return length_figures(
        kaplan_meier(np.maximum(lengths, 1), np.zeros(lengths.size, dtype=np.bool_))
    )


CENSORS = frozenset(
    {
        Reason.STALE,
        Reason.FAILED,
        Reason.SIBLING_FAILED,
        Reason.EPISODE_FAILED,
        Reason.MEMBER_LOST,
    }
)
"""Reasons of drops that may hit long responses more often than short ones."""

_ENOUGH = 8
"""Number of drops before a warning. A single dropped long response is not a pattern."""
_LEAST_EFFECT = 0.001
"""Size of an effect, as a share of the mean length, that is worth a warning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """A dropped rollout, its tokens so far, and whether its response had ended."""

    rollout_id: int
    tokens: int
    finished: bool


def warning_now(ledger: Ledger, delivered: int, delivered_tokens: int) -> str | None:
    """Return a warning if the drops in `ledger` select long responses, or None.

    Dropped responses count with the tokens that they had, so the effect is a lower bound.
    """
    return censoring(ledger, delivered, delivered_tokens).warning


def censoring(ledger: Ledger, delivered: int, delivered_tokens: int) -> CensoringFigures:
    """Compare the dropped responses with those delivered; see :func:`warning_now`."""
    reasons = sorted(reason for reason in ledger.rollouts if reason in CENSORS)
    rollouts = sum(ledger.rollouts[reason] for reason in reasons)
    tokens = sum(ledger.tokens[reason] for reason in reasons)
    if not delivered or rollouts < _ENOUGH:
        return CensoringFigures(policies=[])
    so_far, launched = tokens / rollouts, (tokens + delivered_tokens) / (rollouts + delivered)
    effect = bias_without(rollouts, so_far, delivered, launched)
    if effect >= -_LEAST_EFFECT:
        return CensoringFigures(policies=[])
    return CensoringFigures(
        policies=[str(reason) for reason in reasons],
        effect=effect,
        warning=f"{rollouts} rollouts were dropped ({', '.join(reasons)}), which makes delivered "
        f"responses at least {-effect:.1%} too short for good; raise max_staleness or set its rule "
        "to mask or finish for stale ones, and fix the cause of failed ones.",
    )


_GOAL = 0.01
"""Size of the transient, as a share of the mean length, below which it counts as over."""


class BiasCollector:
    """Collects what :meth:`figures` needs during a run."""

    def __init__(self) -> None:
        self.finished: set[int] = set()
        """Ids of the rollouts with a finished response that are neither delivered nor dropped."""
        self.newest = -1
        """Largest id of a launched rollout; ids follow the order of launches."""
        self._drops: list[Drop] = []
        self._newest: list[int] = []
        """Value of `newest` at the delivery of each batch."""
        self._groups: list[NDArray[np.int64]] = []
        """Group id of each delivered rollout, for each batch."""

    def deliver(self, rollouts: Sequence[DeliveredRollout]) -> None:
        self._newest.append(self.newest)
        self._groups.append(np.array([r.group_id for r in rollouts], dtype=np.int64))
        self.finished.difference_update(rollout.rollout_id for rollout in rollouts)

    def drop(self, rollouts: Iterable[DroppedRollout]) -> None:
        """Record rollouts of a group that were dropped, unless their prompt is generated again."""
        self._drops += [
            Drop(
                rollout_id=each.rollout_id,
                tokens=each.tokens,
                finished=each.rollout_id in self.finished,
            )
            for each in rollouts
            if each.reason != Reason.BEGUN_AGAIN
        ]

    def restore(self, rollout_ids: Collection[int]) -> None:
        """Undo the drops of rollouts that are launched again, because they were not saved."""
        self._drops = [drop for drop in self._drops if drop.rollout_id not in rollout_ids]

    def restart(self, gone: Collection[int]) -> None:
        """Continue with the facts of another process, which resumes the run.

        Args:
            gone: ids of the rollouts that were delivered or dropped before.
        """
        # All other rollouts are launched again as restored.
        self.finished.intersection_update(gone)
        self.newest = max(gone, default=-1)

    def figures(
        self,
        batches: Sequence[Measured],
        burn_in: int,
        workload_mean: float | None,
        open_groups: Sequence[GroupLengths],
        ledger: Ledger,
    ) -> BiasFigures:
        """Return the length bias of the responses delivered in `batches`.

        Args:
            burn_in: number of batches before the steady state.
            workload_mean: mean length of the workload; None if unknown beforehand.
            open_groups: lengths of the training groups that are not delivered.
        """
        lengths = _joined([batch.lengths for batch in batches])
        tokens, finished = pooled(open_groups)
        dist = self._distribution(lengths, tokens, finished)
        means = [
            Figures.over(part).mean_length for part in (batches[:1], batches, batches[burn_in:])
        ]
        first, overall, long_run = means
        reference = long_run if workload_mean is None else workload_mean
        kind = "run_after_burn_in" if workload_mean is None else "workload_mean"
        known = overall is not None and reference is not None
        return BiasFigures(
            first_batch_length_bias=_excess(first, long_run),
            bias_estimate=_excess(overall, reference),
            bias_reference=kind if known else None,
            workload_mean_length=workload_mean,
            long_run_mean_length=long_run,
            delivered_mean_length=overall,
            delivered_mean_length_by_batch=[float(batch.lengths.mean()) for batch in batches],
            drawn=None if dist is None else length_figures(dist),
            delivered=sample_distribution(lengths),
            transient=self._transient(dist, workload_mean, batches, open_groups),
            dropped_tokens={str(reason): n for reason, n in sorted(ledger.tokens.items())},
            censoring=censoring(ledger, lengths.size, int(lengths.sum())),
        )

    def _distribution(
        self, lengths: NDArray[np.int64], tokens: NDArray[np.int64], finished: NDArray[np.bool_]
    ) -> KaplanMeier | None:
        """Return the length distribution of all launched responses, or None until one has ended."""
        dropped = np.array([drop.tokens for drop in self._drops], dtype=np.int64)
        ended = np.array([drop.finished for drop in self._drops], dtype=np.bool_)
        seen = np.concatenate((lengths, tokens, dropped))
        censored = np.concatenate((np.zeros(lengths.size, dtype=np.bool_), ~finished, ~ended))
        if censored.all():
            return None
        return kaplan_meier(np.where(censored, seen, np.maximum(seen, 1)), censored)

    def _transient(
        self,
        dist: KaplanMeier | None,
        known: float | None,
        batches: Sequence[Measured],
        open_groups: Sequence[GroupLengths],
    ) -> TransientFigures | None:
        if dist is None or not batches:
            return None
        mean = dist.mean() if known is None else known
        final = expected_lengths(dist, *pooled(open_groups))
        lengths = [batch.lengths for batch in batches]
        delivered = sum(each.size for each in lengths)
        expected = float(final.mean()) if final.size else mean
        predicted = bias_without(final.size, expected, delivered, mean)
        measured = running_bias(lengths, mean)
        owners = [np.full(len(group.tokens), group.launched) for group in open_groups]
        # At a constant number of requests in flight, the transient falls as 1 / batches.
        needed = math.ceil(abs(predicted) / _GOAL * len(batches))
        return TransientFigures(
            predicted=predicted,
            measured=measured[-1],
            mean=mean,
            reference="drawn" if known is None else "workload_mean",
            predicted_by_batch=transient_by_batch(
                lengths=lengths,
                groups=self._groups,
                newest=self._newest,
                open_lengths=final,
                open_groups=_joined(owners),
                mean=mean,
            ),
            measured_by_batch=measured,
            further_batches_to_1_percent=max(0, needed - len(batches)),
        )


def _excess(value: float | None, reference: float | None) -> float | None:
    return None if value is None or not reference else value / reference - 1


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
    """Return the transient part of the bias after each of the batches, -I * (l / mu - 1) / (K * N).

    The responses in flight after a batch are known in hindsight: they were launched before it, and
    delivered later or never.

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
