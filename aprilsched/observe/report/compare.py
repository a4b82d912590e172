"""Compares two runs: each figure of both, the difference, and which is better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aprilsched.observe.report.report_data import Headline, ReportData
from aprilsched.observe.report.words import percent, written

_EQUAL = 0.005
"""A difference below this share of the larger figure counts as none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A figure of the runs A and B."""

    label: str
    explanation: str
    a: str
    b: str
    difference: str
    """B minus A."""
    ratio: float | None
    """B divided by A; None if the ratio is meaningless."""
    verdict: Literal["better", "worse", "same", ""]
    """Whether B is better or worse than A; empty if neither value is better."""


def differences(a: ReportData, b: ReportData) -> list[Difference]:
    """Return the differences of all headline figures that both runs have."""
    # The seconds of different amounts of work cannot be compared.
    unlike = a.headline("rollouts.delivered").value != b.headline("rollouts.delivered").value
    others = {figure.key: figure for figure in b.headlines}
    return [
        _difference(mine, others[mine.key], judged=not (unlike and mine.key == "seconds.wall"))
        for mine in a.headlines
        if mine.key in others
    ]


def verdict(a: ReportData, b: ReportData) -> str:
    """Return one sentence: how much faster B is, and at what cost."""
    mine, other = (
        a.headline("delivered_tokens_per_s").value,
        b.headline("delivered_tokens_per_s").value,
    )
    stale = [run.headline("off_policy_token_share").value for run in (a, b)]
    price = f"{percent(stale[1])} of B's tokens are off-policy, {percent(stale[0])} of A's."
    if not mine or other is None:
        return f"Speeds cannot be compared. {price}"
    change = other / mine - 1
    if abs(change) < _EQUAL:
        return f"B is as fast as A. {price}"
    faster = "more" if change > 0 else "fewer"
    return (
        f"Over the whole run, B delivers {percent(abs(change))} {faster} tokens per second than A. "
        f"{price}"
    )


def _difference(a: Headline, b: Headline, *, judged: bool) -> Difference:
    known = a.value is not None and b.value is not None
    change = (b.value or 0.0) - (a.value or 0.0) if known else None
    text = written(change, a.unit, signed=True)
    return Difference(
        label=a.label,
        explanation=a.explanation if a.explanation == b.explanation else "",
        a=a.text,
        b=b.text,
        difference=text.replace(" %", " points"),
        ratio=_ratio(a, b),
        verdict=_better_or_worse(a, b) if judged else "",
    )


def _ratio(a: Headline, b: Headline) -> float | None:
    if not a.value or b.value is None or a.better == "zero":
        return None
    return b.value / a.value


def _better_or_worse(a: Headline, b: Headline) -> Literal["better", "worse", "same", ""]:
    if a.better is None or a.value is None or b.value is None:
        return ""
    mine, other = a.value, b.value
    if a.better == "zero":
        mine, other = abs(mine), abs(other)
    if abs(other - mine) <= _EQUAL * max(abs(mine), abs(other)):
        return "same"
    return "better" if (other > mine) == (a.better == "higher") else "worse"
