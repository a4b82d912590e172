"""Collects what is needed to measure the length bias of a run: laws, transient, staleness, drops.

Invariant: every training rollout that was launched is in exactly one of three places here:
delivered, open (in flight, or waiting for its batch), or dropped. The drawn law is estimated from
all three, so a response counts whether or not the schedule delivered it. Of a prompt that was
generated again, because its tokens became too stale, the first responses count for the drawn law up
to where they were stopped, and the later ones from there on. Otherwise prompts of long responses,
which are generated again more often, would count more than others.

Work is done for each rollout that is sent, finishes or is dropped, and for each batch, but not for
single tokens.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.lengths.laws import KaplanMeier, kaplan_meier
from aprilsched.core.lengths.observed import GroupLengths, entry_after, pooled
from aprilsched.core.messages.facts import DeliveredRollout, DroppedRollout
from aprilsched.core.state.ledger import Ledger, Reason
from aprilsched.telemetry.figures import (
    Ages,
    BiasFigures,
    CensoringFigures,
    DecileFigures,
    DropFigures,
    Figures,
    InFlightFigures,
    LawFigures,
    Measured,
    TransientFigures,
)

# Computes the effect of a schedule on the mean length, by a conservation identity.
#
# Of n responses with mean length mu, let m not be among the delivered ones (in flight, or
# dropped), with mean final length l. The sum of all lengths is n * mu, so the delivered ones have
# exactly
#
#     mean / mu - 1 = -m * (l / mu - 1) / (n - m)
#
# If the m responses are in flight and the policy does not change, m stays bounded while n - m
# grows, so the bias is a transient. If they are dropped, m grows with n, and the bias stays. A
# bias is a share of mu: 0 is none, and -0.1 is 10 % short.


def bias_without(absent: int, absent_mean: float, present: int, mean: float) -> float:
    """The bias of the `present` responses if `absent` others have the mean length `absent_mean`.

    `mean` is the mean of the law; lengths are in tokens. The bias is 0 if nothing is present or
    absent.
    """
    if not absent or not present or not mean:
        return 0.0
    return -absent * (absent_mean / mean - 1) / present


def expected_lengths(
    law: KaplanMeier, tokens: NDArray[np.int64], finished: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Expected final lengths, float64 [n]: the length of a finished response, and tokens plus
    E[rest | tokens] of an unfinished one."""
    return np.where(finished, tokens, tokens + law.residual_mean(tokens))


def transient(final: NDArray[np.float64], delivered: int, mean: float) -> tuple[float, float]:
    """The mean of the `final` lengths float64 [n] of the responses in flight (`mean`, if there are
    none), and the bias of the `delivered` responses that comes of their absence."""
    expected = float(final.mean()) if final.size else mean
    return expected, bias_without(final.size, expected, delivered, mean)


def entered_lengths(
    again: Mapping[int, int], members: Mapping[int, GroupLengths]
) -> dict[int, NDArray[np.int64]]:
    """For each group that came in another one's place the number of tokens from which on each of
    its members counts for the drawn law, int64 [g].

    Args:
        again: for each such group the former one of its prompt.
        members: the former groups; of one that is not known here nothing follows.
    """
    entered: dict[int, NDArray[np.int64]] = {}
    for group, former in sorted(again.items()):
        before = members.get(former)
        if before is not None:
            since = entry_after(before.tokens, before.finished)
            earlier = entered.get(former, np.zeros_like(since))
            size = min(since.size, earlier.size)
            entered[group] = np.maximum(since[:size], earlier[:size])
    return entered


# --- figures -------------------------------------------------------------------------------------

# Turns length laws into figures, and computes staleness by length. The functions are pure.

_CURVE_POINTS = 240
_DECILES = 10


def law_figures(law: KaplanMeier) -> LawFigures:
    """The figures of an estimated law."""
    p50, p90, p99 = (float(quantile) for quantile in law.quantile([0.5, 0.9, 0.99]))
    lengths, longer = _curve(law)
    return LawFigures(
        mean=law.mean(),
        p50=p50,
        p90=p90,
        p99=p99,
        lengths=lengths.tolist(),
        longer=[float(f"{share:.7g}") for share in longer.tolist()],
        responses=law.observations,
        unresolved=law.tail,
    )


def _curve(law: KaplanMeier) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The survival function, thinned to what a screen can show."""
    known = law.survival > 0
    lengths, longer = np.append(1, law.lengths[known]), np.append(1.0, law.survival[known])
    if lengths.size <= _CURVE_POINTS:
        return lengths, longer
    right, down = np.log(lengths), -np.log(longer)
    way = right / max(1.0, float(right[-1])) + down / max(1.0, float(down[-1]))
    chosen = np.searchsorted(way, np.linspace(0, float(way[-1]), _CURVE_POINTS))
    kept = np.unique(np.minimum(chosen, lengths.size - 1))
    return lengths[kept], longer[kept]


def sample_law(lengths: NDArray[np.int64]) -> LawFigures | None:
    """The figures of the lengths int64 [n] of responses that have all ended; None if there is none.

    A response without tokens (its episode has only tokens of the environment) counts as one token.
    """
    if not lengths.size:
        return None
    return law_figures(kaplan_meier(np.maximum(lengths, 1), np.zeros(lengths.size, dtype=np.bool_)))


def in_flight_figures(
    law: KaplanMeier, tokens: NDArray[np.int64], finished: NDArray[np.bool_]
) -> InFlightFigures:
    """The figures of responses with lengths int64 [n] so far, of which bool [n] have ended."""
    final = expected_lengths(law, tokens, finished)
    some = tokens.size > 0
    return InFlightFigures(
        rollouts=tokens.size,
        unfinished=int((~finished).sum()),
        mean_tokens_so_far=float(tokens.mean()) if some else 0.0,
        expected_mean_length=float(final.mean()) if some else 0.0,
    )


def deciles(lengths: NDArray[np.int64], ages: NDArray[np.int64]) -> DecileFigures | None:
    """Staleness by length; None for fewer than 10 responses.

    Both arguments have one entry for each response: its length, int64 [n], and the ages of its
    tokens, int64 [n, 6], with the columns of :class:`~aprilsched.telemetry.figures.Ages`.
    """
    if lengths.size < _DECILES:
        return None
    parts = np.array_split(np.argsort(lengths, kind="stable"), _DECILES)
    sums = [Ages(*ages[part].sum(axis=0).tolist()) for part in parts]
    return DecileFigures(
        mean_length=[float(lengths[part].mean()) for part in parts],
        staleness_mean=[each.total / max(1, each.sampled) for each in sums],
        off_policy_token_share=[each.off_policy / max(1, each.sampled) for each in sums],
    )


# --- censoring -----------------------------------------------------------------------------------

# Measures whether a schedule drops long responses, and warns about it.
#
# A long response has more time to become too old or to fail than a short one, so such drops change
# the lengths that are delivered. A group that the user's accept function rejects was dropped by
# choice: its effect is computed, and there is no warning.

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
"""Number of drops before a warning. One long response that is dropped is no pattern."""
_LEAST_EFFECT = 0.001
_LEAST_EFFECT_OF_LUCK = 0.02
"""Effect of generating prompts again that is no longer taken for chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """A dropped rollout, its tokens so far, and whether its response had ended."""

    rollout_id: int
    group_id: int
    reason: str
    tokens: int
    finished: bool


def _lengths_of(drops: Sequence[Drop]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The tokens of dropped rollouts, int64 [n], and which responses had ended, bool [n]."""
    tokens = np.array([drop.tokens for drop in drops], dtype=np.int64)
    return tokens, np.array([drop.finished for drop in drops], dtype=np.bool_)


def warning_now(ledger: Ledger, delivered: int, delivered_tokens: int) -> str | None:
    """The warning about a run with these drops and deliveries; None if there is none."""
    reasons = sorted(reason for reason in ledger.rollouts if reason in CENSORS)
    rollouts = sum(ledger.rollouts[reason] for reason in reasons)
    tokens = sum(ledger.tokens[reason] for reason in reasons)
    if not delivered or rollouts < _ENOUGH:
        return None
    so_far, mean = tokens / rollouts, delivered_tokens / delivered
    drawn = (tokens + delivered_tokens) / (rollouts + delivered)
    effect = bias_without(rollouts, so_far, delivered, drawn)
    if so_far <= mean or effect >= -_LEAST_EFFECT:
        return None
    return warning_of(reasons, rollouts, effect)


def censoring(
    drops: Sequence[Drop],
    law: KaplanMeier | None,
    kept: int,
    again: NDArray[np.int64],
) -> CensoringFigures:
    """The effect of `drops` on the `kept` other rollouts of a run with this length law.

    `again` has the lengths that were delivered in the place of dropped ones which were generated
    again, int64 [n]. Their prompts are not missing, so what counts is how much shorter these
    responses are than the dropped ones would have become.

    If no response of some length has ended, the law does not say how long the dropped responses
    would have become. The effects are then lower bounds.
    """
    by_reason: dict[str, list[Drop]] = {}
    for drop in drops:
        by_reason.setdefault(drop.reason, []).append(drop)
    figures = {
        reason: _figures(found, law, kept, again if reason == Reason.BEGUN_AGAIN else None)
        for reason, found in sorted(by_reason.items())
    }
    policies = [reason for reason, found in figures.items() if _censors(reason, found)]
    effects = [effect for reason in policies if (effect := figures[reason].effect) is not None]
    effect = sum(effects) if effects else None
    rollouts = sum(figures[reason].rollouts for reason in policies)
    return CensoringFigures(
        policies=policies,
        by_reason=figures,
        effect=effect,
        warning=warning_of(policies, rollouts, effect) if policies else None,
    )


def warning_of(reasons: Sequence[str], rollouts: int, effect: float | None) -> str:
    """One sentence that says what censors lengths, how much, and what to change."""
    size = "" if effect is None else f" by at least {abs(effect):.1%}"
    shift = "longer" if effect is not None and effect > 0 else "shorter"
    return (
        f"{rollouts} rollouts were dropped ({', '.join(reasons)}), which makes what is delivered "
        f"{shift}{size} for good; raise max_staleness or set its rule to mask or finish for "
        "stale ones, and mend the cause of failed ones."
    )


def _figures(
    drops: Sequence[Drop], law: KaplanMeier | None, kept: int, again: NDArray[np.int64] | None
) -> DropFigures:
    """The figures of `drops` for one reason; `again` is None unless they were generated again."""
    tokens, finished = _lengths_of(drops)
    final: float | None = None
    effect: float | None = None
    if law is not None:
        final = float(expected_lengths(law, tokens, finished).mean())
        if again is None and kept:
            effect = bias_without(len(drops), final, kept, law.mean())
        elif again is not None and again.size and kept:
            effect = again.size * (float(again.mean()) - final) / (kept * law.mean())
    return DropFigures(
        rollouts=len(drops),
        tokens=int(tokens.sum()),
        expected_mean_length=final,
        effect=effect,
    )


def _censors(reason: str, figures: DropFigures) -> bool:
    if reason == Reason.BEGUN_AGAIN:
        return (figures.effect or 0.0) < -_LEAST_EFFECT_OF_LUCK
    if reason not in CENSORS:
        return False
    # An eviction selects long responses in any case; a failure may hit any response.
    return reason == Reason.STALE or (figures.effect or 0.0) < -_LEAST_EFFECT


# --- collector -----------------------------------------------------------------------------------

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
        self._drops: list[Drop] = []
        self._newest: list[int] = []
        """Value of `newest` at the delivery of each batch."""
        self._groups: list[NDArray[np.int64]] = []
        """Group id of each delivered rollout, for each batch."""

    def deliver(self, rollouts: Sequence[DeliveredRollout]) -> None:
        self._newest.append(self.newest)
        self._groups.append(np.array([r.group_id for r in rollouts], dtype=np.int64))
        self.finished.difference_update(rollout.rollout_id for rollout in rollouts)

    def drop(self, group_id: int, rollouts: Iterable[DroppedRollout]) -> None:
        """Take rollouts of a group that were dropped."""
        for each in rollouts:
            self._drops.append(
                Drop(
                    rollout_id=each.rollout_id,
                    group_id=group_id,
                    reason=each.reason,
                    tokens=each.tokens,
                    finished=each.rollout_id in self.finished,
                )
            )

    def restore(self, rollout_ids: Collection[int]) -> None:
        """Take back the drops of rollouts that are launched again, because they were not saved."""
        self._drops = [drop for drop in self._drops if drop.rollout_id not in rollout_ids]

    def restart(self, gone: Collection[int]) -> None:
        """Continue with what another process tells, which resumes the run.

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
        """The length bias of what was delivered in `batches`.

        Args:
            burn_in: number of batches before the steady state.
            workload_mean: mean length of the workload, if it is known beforehand.
            open_groups: lengths of the training groups that are not delivered.
        """
        lengths = _joined([batch.lengths for batch in batches])
        tokens, finished = pooled(open_groups)
        owners, entered = _joined(self._groups), self._entered()
        law = self._law(lengths, owners, open_groups, entered)
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
            drawn=None if law is None else law_figures(law),
            delivered=sample_law(lengths),
            in_flight=None if law is None else in_flight_figures(law, tokens, finished),
            transient=self._transient(law, workload_mean, batches, open_groups),
            by_length_decile=None
            if not batches
            else deciles(lengths, np.concatenate([batch.ages for batch in batches])),
            dropped_tokens={str(reason): n for reason, n in sorted(ledger.tokens.items())},
            censoring=censoring(
                [drop for drop in self._drops if drop.group_id not in self.again],
                law,
                lengths.size + tokens.size,
                again=lengths[np.isin(owners, list(entered))],
            ),
        )

    def _entered(self) -> dict[int, NDArray[np.int64]]:
        """See :func:`entered_lengths`; groups that came in another one's place are dropped ones."""
        members: dict[int, list[Drop]] = {}
        for drop in self._drops if self.again else ():
            members.setdefault(drop.group_id, []).append(drop)
        former: dict[int, GroupLengths] = {}
        for group, drops in members.items():
            tokens, finished = _lengths_of(drops)
            former[group] = GroupLengths(launched=group, tokens=tokens, finished=finished)
        return entered_lengths(self.again, former)

    def _law(
        self,
        lengths: NDArray[np.int64],
        owners: NDArray[np.int64],
        open_groups: Sequence[GroupLengths],
        entered: dict[int, NDArray[np.int64]],
    ) -> KaplanMeier | None:
        """The law of the lengths of all launched responses; None until one response has ended."""
        tokens, finished = pooled(open_groups)
        dropped, ended = _lengths_of(self._drops)
        seen = np.concatenate((lengths, tokens, dropped))
        censored = np.concatenate((np.zeros(lengths.size, dtype=np.bool_), ~finished, ~ended))
        if censored.all():
            return None
        holders = [np.full(len(group.tokens), group.launched) for group in open_groups]
        groups = [drop.group_id for drop in self._drops]
        since = _since(np.concatenate((owners, _joined(holders), groups)).astype(int), entered)
        return kaplan_meier(np.where(censored, seen, np.maximum(seen, 1)), censored, since)

    def _transient(
        self,
        law: KaplanMeier | None,
        known: float | None,
        batches: Sequence[Measured],
        open_groups: Sequence[GroupLengths],
    ) -> TransientFigures | None:
        if law is None or not batches:
            return None
        mean = law.mean() if known is None else known
        final = expected_lengths(law, *pooled(open_groups))
        lengths = [batch.lengths for batch in batches]
        delivered = sum(each.size for each in lengths)
        _, predicted = transient(final, delivered, mean)
        measured = running_bias(lengths, mean)
        owners = [np.full(len(group.tokens), group.launched) for group in open_groups]
        # With as many in flight the transient falls as 1 / batches.
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
