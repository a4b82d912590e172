"""Charts about how far the trainer's log-probabilities are from the engines'.

All of them show k3, the mean of exp(d) - 1 - d over tokens, where d is the trainer's
log-probability minus the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence

from aprilsched.analysis.colours import PALETTE
from aprilsched.analysis.report.figure import Chart, Key, Spec, axis, numbers, text
from aprilsched.analysis.report.report_data import ReportData
from aprilsched.analysis.report.time_charts import label
from aprilsched.analysis.report.words import nats, percent
from aprilsched.telemetry.figures import DifferenceFigures

__all__ = ["by_engine", "by_position", "by_staleness"]

_OF_RUN = (PALETTE[5], PALETTE[0])
"""The colours of A and B."""
_SHOWN_ENGINES = 12


def by_staleness(runs: Sequence[ReportData]) -> Chart:
    """The mismatch, which is all there is at staleness 0, beside that of older tokens."""
    found = _reported(runs)
    rows = [run.alignment.by_age for _, run in found if run.alignment is not None]
    count = max((i + 1 for row in rows for i, each in enumerate(row) if each.tokens), default=1)
    names = [f"{age} or more" if age == len(rows[0]) - 1 else str(age) for age in range(count)]
    return Chart(
        id="alignment-age",
        title=" ".join(_finding(place, runs) for place, _ in found),
        note="At staleness 0 the engine and the trainer have the same weights, so this bar is the "
        "mismatch of two programs. The other bars contain it, together with what the policy has "
        "moved since. No bound on staleness makes the first bar smaller.",
        data=_bars(runs, rows, names),
        layout=_layout("staleness, versions"),
        height=300,
        keys=_keys(runs),
    )


def by_position(runs: Sequence[ReportData]) -> Chart:
    """The mismatch along the response."""
    found = _reported(runs)
    rows = [run.alignment.by_position for _, run in found if run.alignment is not None]
    count = max(1, *map(len, rows))
    # Short names: rotated ones would stand on the axis' title.
    names = [f"{1 << i}" if i < 10 else f"{1 << (i - 10)}k" for i in range(count)]
    said = [
        f"{_whose(place, runs)} tokens differ most from position {1 << most:,} to "
        f"{(2 << most) - 1:,} of the response."
        for (place, _), row in zip(found, rows, strict=True)
        if any(each.k3 for each in row)
        for most in [max(range(len(row)), key=lambda i, row=row: row[i].k3 or 0.0)]
    ]
    return Chart(
        id="alignment-position",
        title=" ".join(said)
        or (
            "Engine and trainer agree at every position."
            if any(each.tokens for row in rows for each in row)
            else "No token of staleness 0 was compared."
        ),
        note="Tokens of staleness 0. Each bar begins at its position in the response, and ends "
        "where the next one begins. A mismatch that grows along the response points to positions "
        "or to the KV cache.",
        data=_bars(runs, rows, names),
        layout=_layout("position in the response, from"),
        height=300,
        keys=_keys(runs),
    )


def by_engine(run: ReportData, prefix: str = "") -> Chart:
    """The mismatch of each engine, the largest first."""
    engines = run.alignment.by_engine if run.alignment is not None else {}
    ranked = sorted(engines.items(), key=lambda item: -(item[1].k3 or 0.0))
    shown = ranked[:_SHOWN_ENGINES]
    title = "No token of staleness 0 was compared."
    if len(ranked) == 1:
        title = f"{ranked[0][0]} differs by {nats(ranked[0][1].k3)}."
    elif ranked:
        (first, most), (last, least) = ranked[0], ranked[-1]
        title = f"{first} differs most, by {nats(most.k3)}; {last} least, by {nats(least.k3)}."
    fewer = f" The {len(shown)} largest of {len(ranked)}." if len(shown) < len(ranked) else ""
    return Chart(
        id=f"alignment-engine{prefix}",
        title=title,
        note="Tokens of staleness 0, by the engine that sampled them. An engine that stands out "
        f"may have other weights, other kernels or another card.{fewer}",
        data=[_bar([name for name, _ in shown], [each for _, each in shown], run.name, PALETTE[0])],
        layout=_layout("engine"),
        height=300,
        of=run.name,
    )


# --- parts ---------------------------------------------------------------------------------------


def _reported(runs: Sequence[ReportData]) -> list[tuple[int, ReportData]]:
    return [(place, run) for place, run in enumerate(runs) if run.alignment is not None]


def _bars(
    runs: Sequence[ReportData], rows: Sequence[Sequence[DifferenceFigures]], names: Sequence[str]
) -> list[Spec]:
    return [
        _bar(
            names,
            row[: len(names)],
            label(place, runs),
            PALETTE[0] if len(runs) == 1 else _OF_RUN[place],
        )
        for (place, _), row in zip(_reported(runs), rows, strict=True)
    ]


def _bar(names: Sequence[str], row: Sequence[DifferenceFigures], name: str, colour: str) -> Spec:
    return {
        "type": "bar",
        "x": [text(each) for each in names[: len(row)]],
        "y": numbers([float("nan") if each.k3 is None else each.k3 for each in row]),
        "name": text(name),
        "marker": {"color": colour},
        "customdata": [
            f"{each.tokens:,} tokens, {percent(each.beyond_share)} of them beyond the bound"
            for each in row
        ],
        "hovertemplate": "%{y:.2~g} nats; %{customdata}",
    }


def _layout(x: str) -> Spec:
    return {
        "barmode": "group",
        "xaxis": axis(x, type="category", fixedrange=True, tickangle=0),
        "yaxis": axis("k3, nats", fixedrange=True, rangemode="tozero", tickformat=".2~e"),
    }


def _keys(runs: Sequence[ReportData]) -> list[Key]:
    if len(runs) == 1:
        return []
    return [Key(label=label(place, runs), colour=_OF_RUN[place]) for place, _ in _reported(runs)]


# --- words ---------------------------------------------------------------------------------------


def _whose(place: int, runs: Sequence[ReportData]) -> str:
    return "The" if len(runs) == 1 else f"{'AB'[place]}'s"


def _finding(place: int, runs: Sequence[ReportData]) -> str:
    found = runs[place].alignment
    who = f"{'AB'[place]}: " if len(runs) > 1 else ""
    if found is None or found.whole.k3 is None:
        return f"{who}No token of staleness 0 was compared."
    return (
        f"{who}With the same weights, engine and trainer differ by {nats(found.whole.k3)}, and "
        f"{percent(found.whole.beyond_share)} of the tokens by more than {found.bound:g} nats."
    )
