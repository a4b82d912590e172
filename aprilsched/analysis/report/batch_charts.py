"""Draws the charts about batches: how long, how old and how biased their responses are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from aprilsched.analysis.colours import AGE_COLOURS, PALETTE
from aprilsched.analysis.report.figure import Chart, Key, Spec, axis, numbers, text
from aprilsched.analysis.report.report_data import LengthCurve, ReportData
from aprilsched.analysis.report.time_charts import label
from aprilsched.analysis.report.words import amount, percent, signed_percent
from aprilsched.telemetry.figures import ForecastFigures

__all__ = [
    "ages",
    "ages_by_batch",
    "bias",
    "deciles",
    "distances",
    "forecasts",
    "lengths",
    "versions",
]

_OF_RUN = (PALETTE[5], PALETTE[0])
"""The colours of the runs A and B."""
_DRAWN = ("@muted", PALETTE[4])
_EQUAL = 0.01
"""A bias below this share of the mean length counts as none."""


def lengths(runs: Sequence[ReportData]) -> Chart:
    """Draw delivered lengths and the law that they are drawn from. Both axes are logarithmic."""
    data: list[Spec] = []
    keys: list[Key] = []
    for place, run in enumerate(runs):
        who = f"{'AB'[place]}: " if len(runs) > 1 else ""
        curves = [
            ("drawn", "drawn (estimated)", _DRAWN[place], 5.0, "solid"),
            ("delivered", "delivered", _OF_RUN[place], 2.2, "solid"),
            ("first", "of these, the first batch", _OF_RUN[place], 1.4, "dot"),
        ]
        for name, what, colour, width, dash in curves:
            curve = run.lengths.get(name)
            if curve is not None:
                data.append(_survival(curve, f"{who}{what}", colour, width, dash))
                keys.append(
                    Key(label=f"{who}{what}", colour=colour, line=True, dashed=dash == "dot")
                )
    return Chart(
        id="lengths",
        title=" ".join(_law(place, runs) for place in range(len(runs))),
        note="The share of responses that are longer than a length; both axes are logarithmic. "
        "Drawn is what the policy would have produced: an estimate (Kaplan and Meier) that counts "
        "what never finished. Where delivered lies below drawn, long responses are missing.",
        data=data,
        layout={
            "xaxis": _length_axis(runs),
            "yaxis": axis(
                "share of longer responses, %", type="log", fixedrange=True, dtick=1,
                tickformat="~g",
            ),
            "hovermode": "closest",
        },
        height=400,
        keys=keys,
    )  # fmt: skip


def ages(runs: Sequence[ReportData]) -> Chart:
    """Draw the delivered tokens by staleness."""
    most = max((_last(run.staleness.tokens_by_age) for run in runs), default=0)
    names = _numbered(most, first=0, last=len(AGE_COLOURS) - 1)
    share = runs[0].headline("off_policy_token_share").value
    mean = runs[0].headline("staleness_mean").value or 0.0
    title = (
        f"{percent(share)} of the delivered tokens came from an older policy; on average a token "
        f"was {mean:.2f} versions old."
    )
    if len(runs) > 1:
        other = runs[1].headline("off_policy_token_share").value
        title = (
            f"{percent(share)} of A's tokens and {percent(other)} of B's came from an older policy."
        )
    return Chart(
        id="ages",
        title=title,
        note="Staleness: policy versions between the one that sampled a token and the one that "
        "trains on it. 0 is on-policy.",
        data=_grouped(runs, [run.staleness.tokens_by_age for run in runs], names, AGE_COLOURS),
        layout=_grouped_layout("staleness, versions", "delivered tokens, %"),
        height=300,
        keys=_run_keys(runs),
    )


def versions(runs: Sequence[ReportData]) -> Chart:
    """Draw the delivered responses by the number of versions that sampled them."""
    counts = [run.staleness.responses_by_versions for run in runs]
    names = _numbered(max(map(_last, counts), default=0), first=1, last=len(AGE_COLOURS))
    said = [
        f"{percent(sum(count[1:]))} of {_whose(i, runs)} responses"
        for i, count in enumerate(counts)
    ]
    return Chart(
        id="versions",
        title=f"{' and '.join(said)} were sampled by more than one policy version.",
        note="A response that is carried over an update goes on under new weights; each of its "
        "tokens knows its own version.",
        data=_grouped(runs, counts, names, AGE_COLOURS),
        layout=_grouped_layout("versions that sampled the response", "delivered responses, %"),
        height=300,
        keys=_run_keys(runs),
    )


def ages_by_batch(run: ReportData, prefix: str = "") -> Chart:
    """Draw the ages of each batch's tokens as stacked bars."""
    ledger = run.staleness
    stale = [100 * (1 - share) for share in ledger.by_batch[0]] if ledger.by_batch else []
    late = stale[-max(1, len(stale) // 4) :]
    title = "No batch was delivered."
    if stale:
        title = (
            f"The first batch is {stale[0]:.0f} % off-policy, the last quarter of them "
            f"{np.mean(late):.0f} %."
        )
    together = run.staleness.batches
    some = len(together) > 1 and together[1] - together[0] > 1
    names = _numbered(_last([sum(row) for row in ledger.by_batch]), first=0, last=5)
    return Chart(
        id=f"batches{prefix}",
        title=title,
        note="Each bar is a batch, divided by the staleness of its tokens."
        if not some
        else "Each bar is some batches together, divided by the staleness of their tokens.",
        data=[
            {
                "type": "bar",
                "x": numbers([batch + 1 for batch in together]),
                "y": numbers([100 * share for share in ledger.by_batch[age]]),
                "name": _age(name),
                "marker": {"color": AGE_COLOURS[age], "line": {"width": 0}},
                "hovertemplate": "%{y:.1f} %",
            }
            for age, name in enumerate(names)
            if ledger.by_batch
        ],
        layout={
            "barmode": "stack",
            "bargap": 0.12,
            "xaxis": axis("batch", tickformat="d"),
            "yaxis": axis("% of its tokens", range=[0, 100], fixedrange=True),
            "hovermode": "x unified",
        },
        height=300,
        keys=[Key(label=_age(name), colour=AGE_COLOURS[a]) for a, name in enumerate(names)],
        of=run.name,
    )


def bias(runs: Sequence[ReportData]) -> Chart:
    """Draw the length bias of everything delivered so far, by batch: as measured, and as the
    responses in flight predict it."""
    data: list[Spec] = []
    keys: list[Key] = []
    for place, run in enumerate(runs):
        found = run.bias.transient
        if found is None:
            continue
        who = f"{'AB'[place]}: " if len(runs) > 1 else ""
        one = PALETTE[0] if len(runs) == 1 else _OF_RUN[place]
        for name, values, colour, dash in (
            ("measured", found.measured_by_batch, one, "solid"),
            ("foretold by what is in flight", found.predicted_by_batch, PALETTE[1], "dash"),
        ):
            if dash == "dash" and len(runs) > 1:
                continue
            at = _evenly(len(values))
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": numbers(at + 1),
                    "y": numbers(100 * np.asarray(values, dtype=np.float64)[at]),
                    "line": {"width": 2.2, "color": colour, "dash": dash},
                    "name": f"{who}{name}",
                    "hovertemplate": "%{y:+.1f} %",
                }
            )
            keys.append(Key(label=f"{who}{name}", colour=colour, line=True, dashed=dash == "dash"))
    return Chart(
        id="bias",
        title=" ".join(_transient(place, runs) for place in range(len(runs))),
        note=f"The mean length of everything delivered so far, against {_mean(runs)}. "
        "Short responses finish first, so a run begins below 0; what is in flight brings it back. "
        "A gap that stays is a censor.",
        data=data,
        layout={
            "xaxis": axis("batches delivered", tickformat="d"),
            "yaxis": axis("off the mean length, %", fixedrange=True, zeroline=True),
            "hovermode": "x unified",
        },
        height=320,
        keys=keys,
    )


def distances(runs: Sequence[ReportData]) -> list[Chart]:
    """Draw the distance of each batch's lengths from the drawn law, with what is expected of a
    batch drawn at random. Older logs do not have it; there is no chart then."""
    data: list[Spec] = []
    keys: list[Key] = []
    said: list[str] = []
    for place, run in enumerate(runs):
        own = run.bias.length_distance_by_batch
        usual = run.bias.iid_length_distance_by_batch
        pairs = [(a, b) for a, b in zip(own, usual, strict=True) if a is not None and b is not None]
        if not pairs:
            continue
        mean, expected = np.mean(pairs, axis=0)
        said.append(
            f"the lengths of {_whose(place, runs)} batches are {mean:.2f} off the drawn law on "
            f"average, where batches drawn at random would be {expected:.2f} off"
        )
        who = f"{'AB'[place]}: " if len(runs) > 1 else ""
        one = PALETTE[0] if len(runs) == 1 else _OF_RUN[place]
        for name, values, dash in (("batch", own, "solid"), ("drawn at random", usual, "dash")):
            at = [i for i in _evenly(len(values)).tolist() if values[i] is not None]
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": numbers([i + 1 for i in at]),
                    "y": numbers([values[i] or 0.0 for i in at]),
                    "line": {"width": 2.2, "color": one, "dash": dash},
                    "name": f"{who}{name}",
                    "hovertemplate": "%{y:.3f}",
                }
            )
            keys.append(Key(label=f"{who}{name}", colour=one, line=True, dashed=dash == "dash"))
    if not said:
        return []
    title = "; ".join(said)
    chart = Chart(
        id="distances",
        title=f"{title[0].upper()}{title[1:]}.",
        note="Kolmogorov's distance: the largest difference between the shares of responses up to "
        "a length, in the batch and in the law that all lengths are drawn from (estimated when the "
        "batch was delivered). Batches that are all short or all long are far from it.",
        data=data,
        layout={
            "xaxis": axis("batch", tickformat="d"),
            "yaxis": axis("distance from the drawn law", fixedrange=True, rangemode="tozero"),
            "hovermode": "x unified",
        },
        height=300,
        keys=keys,
    )
    return [chart]


def forecasts(run: ReportData, who: str, prefix: str = "") -> Chart | None:
    """Draw the efficiency that automatic scheduling forecast for each batch beside what happened.
    There is no chart of a run without forecasts."""
    ledger = run.forecasts
    if ledger is None:
        return None
    at = numbers([index + 1 for index in ledger.batches])
    outcomes = [figures.efficiency for figures in ledger.by_batch]
    known = [(n, e) for n, e in zip(ledger.batches, outcomes, strict=True) if e is not None]
    return Chart(
        id=f"forecasts{prefix}",
        title=_how_right(ledger.steady, who),
        note="The line is the forecast of the schedule in force, which changes with each choice of "
        "a schedule. A point is a batch. A forecast is for the mean of many batches, whose single "
        "ones scatter; where points lie below the line on average, it was too good.",
        data=[
            {
                "type": "scatter",
                "mode": "lines",
                "x": at,
                "y": numbers([100 * figures.efficiency_forecast for figures in ledger.by_batch]),
                "line": {"width": 2.2, "color": PALETTE[0], "shape": "hv"},
                "name": "forecast",
                "text": [text(figures.schedule) for figures in ledger.by_batch],
                "hovertemplate": "%{y:.1f} %<br>%{text}",
            },
            {
                "type": "scatter",
                "mode": "markers",
                "x": numbers([index + 1 for index, _ in known]),
                "y": numbers([100 * efficiency for _, efficiency in known]),
                "marker": {"size": 6, "color": PALETTE[5]},
                "name": "outcome",
                "hovertemplate": "%{y:.1f} %",
            },
        ],
        layout={
            "xaxis": axis("batch", tickformat="d"),
            "yaxis": axis("T_bound / time, %", fixedrange=True, rangemode="tozero"),
            "hovermode": "x unified",
        },
        height=300,
        keys=[
            Key(label="forecast", colour=PALETTE[0], line=True),
            Key(label="outcome", colour=PALETTE[5]),
        ],
    )


def _how_right(steady: ForecastFigures | None, who: str) -> str:
    if steady is None or steady.efficiency is None:
        return "No batch after the burn-in had a forecast."
    off = steady.efficiency / steady.efficiency_forecast - 1
    return (
        f"{percent(steady.efficiency_forecast)} of the bound were forecast for {who} batches after "
        f"the burn-in, and {percent(steady.efficiency)} came: {signed_percent(off)}."
    )


def deciles(runs: Sequence[ReportData]) -> Chart:
    """Draw the mean staleness of ten classes of length."""
    found = [(place, run.bias.by_length_decile) for place, run in enumerate(runs)]
    known = [(place, figures) for place, figures in found if figures is not None]
    said = [
        f"the longest tenth of {_whose(place, runs)} responses is {long:.1f} versions old, the "
        f"shortest {short:.1f}"
        for place, figures in known
        for short, long in [(figures.staleness_mean[0], figures.staleness_mean[-1])]
    ]
    title = "; ".join(said) or "too few responses were delivered to tell"
    return Chart(
        id="deciles",
        title=f"{title[0].upper()}{title[1:]}.",
        note="Delivered responses in ten classes of equal number by their length.",
        data=[
            {
                "type": "bar",
                "x": list(range(1, 11)),
                "y": numbers(figures.staleness_mean),
                "name": text(label(place, runs)),
                "marker": {"color": PALETTE[2] if len(runs) == 1 else _OF_RUN[place]},
                "customdata": [amount(length) for length in figures.mean_length],
                "hovertemplate": "%{y:.2f} versions; mean length %{customdata} tokens",
            }
            for place, figures in known
        ],
        layout={
            "barmode": "group",
            "xaxis": axis("tenths of the responses, shortest first", dtick=1),
            "yaxis": axis("mean staleness, versions", fixedrange=True),
        },
        height=320,
        keys=_run_keys(runs),
    )


# --- parts ---------------------------------------------------------------------------------------


def _survival(curve: LengthCurve, name: str, colour: str, width: float, dash: str) -> Spec:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": numbers(curve.lengths),
        "y": numbers([100 * share for share in curve.longer]),
        "line": {"width": width, "color": colour, "shape": "hv", "dash": dash},
        "name": text(name),
        "hovertemplate": "%{y:.3g} % are longer than %{x:,.0f} tokens",
    }


def _grouped(
    runs: Sequence[ReportData],
    shares: Sequence[Sequence[float]],
    names: Sequence[str],
    colours: Sequence[str],
) -> list[Spec]:
    return [
        {
            "type": "bar",
            "x": list(names),
            "y": numbers([100 * share for share in shares[place][: len(names)]]),
            "name": text(label(place, runs)),
            "marker": {"color": list(colours[: len(names)]) if len(runs) == 1 else _OF_RUN[place]},
            "text": [percent(share) for share in shares[place][: len(names)]],
            "textposition": "outside",
            "cliponaxis": False,
            "hovertemplate": "%{x}: %{y:.1f} %",
        }
        for place in range(len(runs))
    ]


def _grouped_layout(x: str, y: str) -> Spec:
    return {
        "barmode": "group",
        "xaxis": axis(x, type="category", fixedrange=True),
        "yaxis": axis(y, fixedrange=True, rangemode="tozero"),
        "uniformtext": {"mode": "hide", "minsize": 9},
    }


def _run_keys(runs: Sequence[ReportData]) -> list[Key]:
    if len(runs) == 1:
        return []
    return [Key(label=label(i, runs), colour=_OF_RUN[i]) for i in range(len(runs))]


def _numbered(count: int, *, first: int, last: int) -> list[str]:
    """ "0", "1", …; the last of all classes has all that are larger."""
    return [f"{n} or more" if n == last else str(n) for n in range(first, first + count)]


def _last(shares: Sequence[float]) -> int:
    """The entries up to the last one that is not 0; at least one."""
    return max((i + 1 for i, share in enumerate(shares) if share), default=1)


def _evenly(count: int, at_most: int = 240) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.unique(np.linspace(0, max(0, count - 1), min(count, at_most)).astype(np.int64))


def _length_axis(runs: Sequence[ReportData]) -> Spec:
    """The axis from the shortest response to the longest, with ticks at 1, 2, 5, 10, …"""
    curves = [curve for run in runs for curve in run.lengths.values() if len(curve.lengths) > 1]
    least = min((curve.lengths[1] for curve in curves), default=1.0)
    most = max((curve.lengths[-1] for curve in curves), default=10.0)
    ticks = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]
    shown = [tick for tick in ticks if 0.8 * least <= tick <= 1.2 * most]
    return axis(
        "response length, tokens",
        type="log",
        range=[math.log10(0.8 * least), math.log10(1.15 * most)],
        tickvals=shown,
        ticktext=[amount(tick) for tick in shown],
    )


def _age(name: str) -> str:
    return {"0": "on-policy", "1": "1 version old"}.get(name, f"{name} versions old")


# --- words ---------------------------------------------------------------------------------------


def _whose(place: int, runs: Sequence[ReportData]) -> str:
    return "the" if len(runs) == 1 else f"{'AB'[place]}'s"


def _law(place: int, runs: Sequence[ReportData]) -> str:
    run = runs[place]
    who = f"{'AB'[place]}: " if len(runs) > 1 else ""
    drawn, delivered = run.lengths.get("drawn"), run.lengths.get("delivered")
    if drawn is None or delivered is None:
        return f"{who}Nothing was delivered, so there are no lengths to compare."
    off = delivered.mean / drawn.mean - 1
    means = f"mean {amount(delivered.mean)} against {amount(drawn.mean)} tokens"
    if abs(off) < _EQUAL:
        return f"{who}Delivered responses are as long as those drawn ({means})."
    longer = "longer" if off > 0 else "shorter"
    return f"{who}Delivered responses are {percent(abs(off))} {longer} than those drawn ({means})."


def _mean(runs: Sequence[ReportData]) -> str:
    found = [run.bias.transient for run in runs if run.bias.transient is not None]
    if len(found) != 1:
        return "the mean of its workload, or of what was drawn"
    what = "the workload's own mean" if found[0].reference == "workload_mean" else "the mean drawn"
    return f"{what} ({amount(found[0].mean)} tokens)"


def _transient(place: int, runs: Sequence[ReportData]) -> str:
    run = runs[place]
    who = f"{'AB'[place]}: " if len(runs) > 1 else ""
    found, censored = run.bias.transient, run.bias.censoring.policies
    if found is None:
        return f"{who}No batch was delivered, so there is no bias to speak of."
    off = signed_percent(found.measured)
    if censored:
        return f"{who}The length bias is {off}, and part of it stays: responses were dropped."
    if abs(found.measured) < _EQUAL:
        return f"{who}The length bias is {off}: what the trainer got is not too short."
    further = found.further_batches_to_1_percent
    if further == 0:
        return f"{who}The length bias is {off}, more than what is in flight explains."
    more = f"{further:,} more {'batch' if further == 1 else 'batches'}"
    return f"{who}The length bias is {off} so far; it is below 1 % after {more}."
