"""Measures whether a schedule drops long responses, and warns about it.

A long response has more time to become too old or to fail than a short one, so such drops change
the lengths that are delivered. A group that the user's accept function rejects was dropped by
choice: its effect is computed, and there is no warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.lengths.identity import bias_without, expected_lengths
from aprilsched.core.lengths.kaplan_meier import KaplanMeier
from aprilsched.core.state.ledger import Entry, Ledger, Reason
from aprilsched.telemetry.figures import CensoringFigures, DropFigures

__all__ = ["CENSORS", "Drop", "Drops", "censoring", "warning_now", "warning_of"]

log = logging.getLogger("aprilsched")

CENSORS = frozenset(
    {
        Reason.STALE,
        Reason.OUTRACED,
        Reason.FAILED,
        Reason.SIBLING_FAILED,
        Reason.EPISODE_FAILED,
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
    """A dropped rollout, and whether its response had ended."""

    entry: Entry
    finished: bool


class Drops:
    """Takes each entry of a ledger once, and gives the warning once.

    A ledger keeps only its latest entries, so it must be read from time to time.
    """

    def __init__(self) -> None:
        self.taken: list[Drop] = []
        self._seen = 0
        self._warned = False

    def take(self, ledger: Ledger, finished: set[int]) -> None:
        """Take the new entries; `finished` has the ids of the rollouts whose response had ended."""
        # A resumed scheduler may have fewer entries than the log, because it has not saved all of
        # them.
        undone = max(0, self._seen - ledger.total)
        del self.taken[len(self.taken) - undone :]
        new = min(max(0, ledger.total - self._seen), len(ledger.entries))
        self._seen = ledger.total
        for entry in list(islice(reversed(ledger.entries), new))[::-1]:
            self.taken.append(Drop(entry=entry, finished=entry.rollout_id in finished))

    def warn(self, ledger: Ledger, delivered: int, delivered_tokens: int) -> None:
        """Warn once if the dropped responses were longer so far than the delivered ones."""
        if self._warned:
            return
        warning = warning_now(ledger, delivered, delivered_tokens)
        if warning is not None:
            self._warned = True
            log.warning("%s", warning)


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
    again: NDArray[np.int64] | None = None,
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
        by_reason.setdefault(str(drop.entry.reason), []).append(drop)
    figures = {
        reason: _figures(found, law, kept)
        if reason != Reason.BEGUN_AGAIN
        else _figures_of_again(found, law, kept, again)
        for reason, found in sorted(by_reason.items())
    }
    policies = [reason for reason, found in figures.items() if _censors(reason, found)]
    effect = _together({reason: figures[reason] for reason in policies})
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
    race = "leave TailBatching(responses=1) for outraced ones, " * (Reason.OUTRACED in reasons)
    return (
        f"{rollouts} rollouts were dropped ({', '.join(reasons)}), which makes what is delivered "
        f"{shift}{size} for good; {race}raise max_staleness or set its rule to mask or finish for "
        "stale ones, and mend the cause of failed ones."
    )


def _figures(drops: Sequence[Drop], law: KaplanMeier | None, kept: int) -> DropFigures:
    tokens = np.array([drop.entry.tokens for drop in drops], dtype=np.int64)
    finished = np.array([drop.finished for drop in drops], dtype=np.bool_)
    final = None if law is None else float(expected_lengths(law, tokens, finished).mean())
    effect = None
    if law is not None and final is not None and kept > 0:
        effect = bias_without(len(drops), final, kept, law.mean())
    return DropFigures(
        rollouts=len(drops),
        tokens=int(tokens.sum()),
        expected_mean_length=final,
        effect=effect,
    )


def _figures_of_again(
    drops: Sequence[Drop], law: KaplanMeier | None, kept: int, again: NDArray[np.int64] | None
) -> DropFigures:
    figures = _figures(drops, law, kept)
    effect, final = None, figures.expected_mean_length
    if law is not None and final is not None and again is not None and again.size and kept:
        effect = again.size * (float(again.mean()) - final) / (kept * law.mean())
    return replace(figures, effect=effect)


def _censors(reason: str, figures: DropFigures) -> bool:
    if reason == Reason.BEGUN_AGAIN:
        return (figures.effect or 0.0) < -_LEAST_EFFECT_OF_LUCK
    if reason not in CENSORS:
        return False
    # An eviction and a race select long responses in any case; a failure may hit any response.
    return reason in (Reason.STALE, Reason.OUTRACED) or (figures.effect or 0.0) < -_LEAST_EFFECT


def _together(figures: Mapping[str, DropFigures]) -> float | None:
    effects = [found.effect for found in figures.values() if found.effect is not None]
    return sum(effects) if effects else None
