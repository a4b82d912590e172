"""Charts that compare the engines' log-probabilities with the trainer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aprilsched.observe.figures.run_figures import AlignmentFigures, DifferenceFigures
from aprilsched.observe.report.batch_charts import colour_of
from aprilsched.observe.report.chart_model import PALETTE, Axis, Chart, Series
from aprilsched.observe.report.report_data import RunReport
from aprilsched.observe.report.time_charts import SHOWN_ENGINES
from aprilsched.observe.report.words import nats, percent

# All charts show k3, the mean of exp(d) - 1 - d over tokens, where d is the trainer's
# log-probability minus the engine's. They include the runs whose trainer reported.

_MISMATCH = Axis(label="k3, nats", unit="nats", from_zero=True)


def by_staleness(runs: Sequence[RunReport]) -> Chart:
    """Draw the mismatch by staleness; at staleness 0 it is engine-trainer mismatch only."""
    rows = {run: found.by_age for run, found in _reported(runs).items()}
    count = max(
        (i + 1 for row in rows.values() for i, each in enumerate(row) if each.tokens), default=1
    )
    last = min(len(row) for row in rows.values()) - 1
    names = [f"{age} or more" if age == last else str(age) for age in range(count)]
    return Chart(
        id="alignment-age",
        title=" ".join(_finding(run, found) for run, found in _reported(runs).items()),
        note="At staleness 0 the engine and the trainer have the same weights, so this bar is the "
        "mismatch of two programs. The other bars contain it, together with what the policy has "
        "moved since. No bound on staleness makes the first bar smaller.",
        series=_bars(rows, names),
        x=Axis(label="staleness, versions", categories=True),
        y=_MISMATCH,
        legend=len(runs) > 1,
    )


def _finding(run: RunReport, found: AlignmentFigures) -> str:
    if found.whole.k3 is None:
        return f"{run.who}No token of staleness 0 was compared."
    return (
        f"{run.who}With the same weights, engine and trainer differ by {nats(found.whole.k3)}, and "
        f"{percent(found.whole.beyond_share)} of the tokens by more than {found.bound:g} nats."
    )


def by_position(runs: Sequence[RunReport]) -> Chart:
    """Draw the mismatch along the response."""
    rows = {run: found.by_position for run, found in _reported(runs).items()}
    count = max(1, *map(len, rows.values()))
    # Short names; rotated ones would overlap the axis title.
    names = [f"{1 << i}" if i < 10 else f"{1 << (i - 10)}k" for i in range(count)]
    statements: list[str] = []
    for run, row in rows.items():
        mismatch = [each.k3 or 0.0 for each in row]
        if any(mismatch):
            most = mismatch.index(max(mismatch))
            statements.append(
                f"{run.whose.capitalize()} tokens differ most from position {1 << most:,} to "
                f"{(2 << most) - 1:,} of the response."
            )
    if not statements:
        compared = any(each.tokens for row in rows.values() for each in row)
        statements.append(
            "Engine and trainer agree at every position."
            if compared
            else "No token of staleness 0 was compared."
        )
    return Chart(
        id="alignment-position",
        title=" ".join(statements),
        note="Tokens of staleness 0. Each bar begins at its position in the response, and ends "
        "where the next one begins. A mismatch that grows along the response points to positions "
        "or to the KV cache.",
        series=_bars(rows, names),
        x=Axis(label="position in the response, from", categories=True),
        y=_MISMATCH,
        legend=len(runs) > 1,
    )


def by_engine(run: RunReport, found: AlignmentFigures) -> Chart:
    """Draw the mismatch of each engine, the largest first."""
    ranked = sorted(found.by_engine.items(), key=lambda item: -(item[1].k3 or 0.0))
    shown = ranked[:SHOWN_ENGINES]
    title = "No token of staleness 0 was compared."
    if len(ranked) == 1:
        title = f"{ranked[0][0]} differs by {nats(ranked[0][1].k3)}."
    elif ranked:
        (first, most), (last, least) = ranked[0], ranked[-1]
        title = f"{first} differs most, by {nats(most.k3)}; {last} least, by {nats(least.k3)}."
    fewer = f" The {len(shown)} largest of {len(ranked)}." if len(shown) < len(ranked) else ""
    name = run.figures.name
    return Chart(
        id=f"alignment-engine{run.suffix}",
        title=title,
        note="Tokens of staleness 0, by the engine that sampled them. An engine that stands out "
        f"may have other weights, other kernels or another card.{fewer}",
        series=[_bar([name for name, _ in shown], [each for _, each in shown], name, PALETTE[0])],
        x=Axis(label="engine", categories=True),
        y=_MISMATCH,
        legend=False,
        of=name,
    )


def _reported(runs: Sequence[RunReport]) -> dict[RunReport, AlignmentFigures]:
    """Return the alignment figures of the runs whose trainers reported."""
    return {run: found for run in runs if (found := run.summary.alignment) is not None}


def _bars(
    rows: Mapping[RunReport, Sequence[DifferenceFigures]], names: Sequence[str]
) -> list[Series]:
    return [_bar(names, row[: len(names)], run.label, colour_of(run)) for run, row in rows.items()]


def _bar(names: Sequence[str], row: Sequence[DifferenceFigures], name: str, colour: str) -> Series:
    return Series(
        kind="bar",
        name=name,
        x=names[: len(row)],
        y=[float("nan") if each.k3 is None else each.k3 for each in row],
        colour=colour,
        hover_text=[
            f"{each.tokens:,} tokens, {percent(each.beyond_share)} of them beyond the bound"
            for each in row
        ],
        hover="%{y:.2~g} nats; %{customdata}",
    )
