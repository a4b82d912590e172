"""Charts that compare the engines' log-probabilities with the trainer's.

All charts show k3, the mean of exp(d) - 1 - d over tokens, where d is the trainer's log-probability
minus the engine's. They include the runs whose trainer reported.
"""

from __future__ import annotations

from collections.abc import Sequence

from aprilsched.observe.figures.run_figures import AlignmentFigures, DifferenceFigures
from aprilsched.observe.report.batch_charts import colour_of
from aprilsched.observe.report.chart_model import Axis, Chart, Series
from aprilsched.observe.report.report_data import RunReport
from aprilsched.observe.report.time_charts import SHOWN_ENGINES
from aprilsched.observe.report.words import percent, written

_MISMATCH = Axis(label="k3, nats", unit="nats", from_zero=True)
_NOTHING = "No token of staleness 0 was compared."


def by_staleness(runs: Sequence[RunReport]) -> Chart:
    """Draw the mismatch by staleness; at staleness 0 it is engine-trainer mismatch only."""
    found = _reported(runs)
    rows = [figures.by_staleness for _, figures in found]
    count = max((i + 1 for row in rows for i, each in enumerate(row) if each.tokens), default=1)
    last = min(map(len, rows)) - 1
    names = [f"{k} or more" if k == last else str(k) for k in range(count)]
    return Chart(
        id="alignment-staleness",
        title=" ".join(f"{run.who}{_finding(figures)}" for run, figures in found),
        note="At staleness 0 the engine and the trainer have the same weights, so this bar is the "
        "mismatch of two programs. The other bars contain it, together with what the policy has "
        "moved since. No bound on staleness makes the first bar smaller.",
        series=[_bars(run, names, row) for (run, _), row in zip(found, rows, strict=True)],
        x=Axis(label="staleness, versions", categories=True),
        y=_MISMATCH,
        legend=len(runs) > 1,
    )


def _finding(found: AlignmentFigures) -> str:
    if found.whole.k3 is None:
        return _NOTHING
    return (
        f"With the same weights, engine and trainer differ by {written(found.whole.k3, 'nats')}, "
        f"and {percent(found.whole.beyond_share)} of the tokens by more than {found.bound:g} nats."
    )


def by_position(runs: Sequence[RunReport]) -> Chart:
    """Draw the mismatch along the response."""
    rows = [(run, figures.by_position) for run, figures in _reported(runs)]
    count = max(1, *(len(row) for _, row in rows))
    # Short names; rotated ones would overlap the axis title.
    names = [f"{1 << i}" if i < 10 else f"{1 << (i - 10)}k" for i in range(count)]
    title: list[str] = []
    for run, row in rows:
        mismatch = [each.k3 or 0.0 for each in row]
        if any(mismatch):
            most = mismatch.index(max(mismatch))
            title.append(
                f"{run.whose.capitalize()} tokens differ most from position {1 << most:,} to "
                f"{(2 << most) - 1:,} of the response."
            )
    compared = any(each.tokens for _, row in rows for each in row)
    agree = "Engine and trainer agree at every position." if compared else _NOTHING
    return Chart(
        id="alignment-position",
        title=" ".join(title) or agree,
        note="Tokens of staleness 0. Each bar starts at its position in the response, and ends "
        "at the next one. A mismatch that grows along the response points to positions "
        "or to the KV cache.",
        series=[_bars(run, names, row) for run, row in rows],
        x=Axis(label="position in the response, from", categories=True),
        y=_MISMATCH,
        legend=len(runs) > 1,
    )


def by_engine(run: RunReport, found: AlignmentFigures) -> Chart:
    """Draw the mismatch of each engine, the largest first."""
    ranked = sorted(found.by_engine.items(), key=lambda item: -(item[1].k3 or 0.0))
    shown = ranked[:SHOWN_ENGINES]
    differs = [f"{name} differs by {written(each.k3, 'nats')}" for name, each in ranked]
    fewer = f" The {len(shown)} largest of {len(ranked)}." if len(shown) < len(ranked) else ""
    return Chart(
        id=f"alignment-engine{run.suffix}",
        title=f"{'; '.join(dict.fromkeys([*differs[:1], *differs[-1:]]))}." if ranked else _NOTHING,
        note="Tokens of staleness 0, by the engine that sampled them. An engine that stands out "
        f"may have other weights, other kernels or another card.{fewer}",
        series=[_bars(run, [name for name, _ in shown], [each for _, each in shown])],
        x=Axis(label="engine", categories=True),
        y=_MISMATCH,
        legend=False,
        of=run.figures.name,
    )


def _reported(runs: Sequence[RunReport]) -> list[tuple[RunReport, AlignmentFigures]]:
    """Return the runs whose trainers reported, with their figures."""
    return [(run, found) for run in runs if (found := run.summary.alignment) is not None]


def _bars(run: RunReport, names: Sequence[str], row: Sequence[DifferenceFigures]) -> Series:
    return Series(
        kind="bar",
        name=run.label,
        x=names[: len(row)],
        y=[float("nan") if each.k3 is None else each.k3 for each in row[: len(names)]],
        colour=colour_of(run),
        hover_text=[
            f"{each.tokens:,} tokens, {percent(each.beyond_share)} of them beyond the bound"
            for each in row[: len(names)]
        ],
        hover="%{y:.2~g} nats; %{customdata}",
    )
