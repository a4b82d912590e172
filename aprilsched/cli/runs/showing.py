"""What a command shows: a run in progress as a live view, and pictures and tables at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from aprilsched.cli.runs.config_file import Policy
from aprilsched.cli.runs.setup import Setup
from aprilsched.errors import AprilschedError, MissingExtra
from aprilsched.observe.figures.figures import RunSummary
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.live.live_model import RunFacts
from aprilsched.observe.live.view import LiveView
from aprilsched.observe.log.run import read_run
from aprilsched.simulation.results import BASELINE, FLAT, Comparison, spread_of_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Screen:
    """Where and how a run will be shown; if `compact`, as one line that changes."""

    console: Console
    facts: RunFacts
    compact: bool = False

    def shown(self, figures: LiveFigures) -> LiveView:
        """Return the view of the run with these figures."""
        return LiveView(self.console, self.facts, figures, compact=self.compact)


def screen_of(
    setup: Setup, console: Console, *, title: str, where: str = "", compact: bool = False
) -> Screen:
    """The screen for the run that `setup` describes."""
    facts = RunFacts(
        title=title,
        where=where,
        batches=setup.settings.batches,
        batch_groups=setup.config.batch_groups,
        modelled=setup.clock == "virtual",
    )
    return Screen(console=console, facts=facts, compact=compact)


# --- pictures ------------------------------------------------------------------------------------

# Writes the pictures, reports and traces that a command leaves in its folders.
#
# Invariant: if one of them cannot be made, the command says so in one line and continues, because
# the run itself is complete.


def draw_comparison(
    root: Path, folders: Mapping[str, str], messages: Console, *, each: bool = True
) -> None:
    """Draw comparison.png in `root`.

    With `each`, also draw timeline.png and bias.png in the folder of each policy,
    which takes about two seconds for each policy.
    """
    try:
        from aprilsched.observe import plots
    except MissingExtra as error:
        messages.print(f"No pictures: {error}", soft_wrap=True, highlight=False, markup=False)
        return
    runs = {name: read_run(root / folder) for name, folder in folders.items()}
    plots.save(plots.comparison(runs), root / "comparison.png")
    if not each:
        return
    for name, run in runs.items():
        folder = root / folders[name]
        plots.save(plots.timeline(run, title=name), folder / "timeline.png")
        plots.save(plots.bias(run.summary.bias, title=name), folder / "bias.png")


def leave_report(
    messages: Console, folder: Path, other: Path | None = None, *, out: Path | None = None
) -> None:
    """Write the report of the run in `folder`, with the run `other` side by side if it is given,
    and print its path."""

    def make() -> None:
        from aprilsched.observe.report.page import write_report

        path, _ = write_report(folder, other, out=out)
        messages.print(f"The report is in {path}", soft_wrap=True, highlight=False)

    _attempt("report", make, messages)


def leave_trace(messages: Console, folder: Path) -> None:
    """Write the trace of the run in `folder` for Perfetto, and print its path."""

    def make() -> None:
        from aprilsched.observe.exports.trace import write_trace

        path = write_trace(folder)
        messages.print(f"The trace is in {path}", soft_wrap=True, highlight=False)

    _attempt("trace", make, messages)


def _attempt(what: str, make: Callable[[], None], messages: Console) -> None:
    try:
        make()
    except AprilschedError as error:
        messages.print(f"No {what}: {error}", soft_wrap=True, highlight=False, markup=False)
    except Exception as error:
        text = f"No {what}: {type(error).__name__}: {error}"
        messages.print(text, soft_wrap=True, highlight=False, markup=False)


# --- tables ---------------------------------------------------------------------------------------

# Makes the tables that the commands print at their end; a figure that is None is a dash.


def number(value: float | None, digits: int = 0) -> str:
    """A number with thousands separators."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """A share of 1 in percent."""
    return "-" if value is None else f"{value:.1%}"


def signed_percent(value: float | None) -> str:
    """A difference of two shares of 1 in percent, with its sign."""
    return "-" if value is None else f"{value:+.1%}"


def _pair(forecast: float, outcome: float | None) -> str:
    return f"{percent(forecast)}, {percent(outcome)}"


def run_table(summary: RunSummary) -> Table:
    """A table of the figures of one run."""
    rollouts, tokens, steady = summary.rollouts, summary.tokens, summary.steady_state
    drawn = summary.bias.drawn
    table = Table("figure", "value", title="interrupted run" if summary.interrupted else None)
    rows = {
        "batches": number(summary.batches),
        "rollouts delivered / launched": f"{rollouts.delivered:,} / {rollouts.launched:,}",
        "in flight at the end": number(rollouts.in_flight),
        "dropped": number(sum(rollouts.dropped.values())),
        "lost, duplicated": f"{rollouts.lost}, {rollouts.duplicated}",
        "tokens delivered / generated": f"{tokens.delivered:,} / {tokens.generated:,}",
        "recomputed tokens": number(tokens.reprefilled),
        f"seconds ({summary.clock} clock)": number(summary.seconds.wall, 1),
        "delivered tokens/s": number(summary.delivered_tokens_per_s),
        "efficiency": percent(summary.efficiency),
        "off-policy token share": percent(summary.off_policy_token_share),
        "staleness mean, max": f"{number(summary.staleness_mean, 2)}, {summary.staleness_max}",
        "first-batch length bias": signed_percent(summary.bias.first_batch_length_bias),
        "length bias so far": signed_percent(summary.bias.bias_estimate),
        "drawn mean length": number(None if drawn is None else drawn.mean),
        f"tokens/s after {steady.burn_in} batches": number(steady.delivered_tokens_per_s),
        "efficiency after them": percent(steady.efficiency),
    }
    forecast = steady.forecast
    if forecast is not None:
        rows["efficiency: forecast, outcome"] = _pair(
            forecast.efficiency_forecast, forecast.efficiency
        )
        rows["off-policy share: forecast, outcome"] = _pair(
            forecast.off_policy_token_share_forecast, forecast.off_policy_token_share
        )
    if summary.rewards.mean is not None:
        rows["mean reward"] = number(summary.rewards.mean, 3)
    rows |= {f"mean of {name}": number(mean, 3) for name, mean in summary.rewards.parts.items()}
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def comparison_table(summaries: Mapping[str, RunSummary]) -> Table:
    """A table with one row for each policy. All figures except the first batch's bias are those of
    the steady state."""
    burn_in = max((s.steady_state.burn_in for s in summaries.values()), default=0)
    table = Table(title=f"steady state, after the first {burn_in} batches")
    table.add_column("policy")
    for name in (
        "tokens/s",
        "efficiency",
        "off-policy",
        "seconds a step",
        "p10 to p90",
        "first-batch bias",
    ):
        # A spread of two lines would be read as two figures.
        table.add_column(name, justify="right", no_wrap=name == "p10 to p90")
    for policy, summary in summaries.items():
        steady, spread = summary.steady_state, spread_of_steps(summary)
        steps = summary.steady_steps_s
        table.add_row(
            policy,
            number(steady.delivered_tokens_per_s),
            percent(steady.efficiency),
            percent(steady.off_policy_token_share),
            number(sum(steps) / len(steps) if steps else None, 1),
            "-" if spread is None else f"{spread[0]:.1f} to {spread[1]:.1f}",
            signed_percent(summary.bias.first_batch_length_bias),
        )
    return table


# --- comparison ----------------------------------------------------------------------------------

# Compares the runs of several policies, for comparison.json and for one summary sentence.


def describe(policy: Policy, schedule: str) -> str:
    """What a policy does, and which schedule it chose, if it chose one."""
    text = f"{policy.name}: {policy.what}"
    return f"{text} It chose {schedule}." if schedule else text


def verdict(comparison: Comparison) -> str:
    """Which policy is the best, by which rule, and compared with the synchronous baseline."""
    row = next((row for row in comparison.policies if row.policy == comparison.best), None)
    if row is None:
        return "Too few batches for a steady state: raise --batches."
    text = f"Best: {row.policy}"
    if row.policy != comparison.baseline and row.speedup is not None:
        text += f", {signed_percent(row.speedup - 1)} delivered tokens/s over {BASELINE}"
    return (
        f"{text} ({percent(row.efficiency)} of the bound, {percent(row.off_policy_share)} of its "
        f"tokens off-policy). It is the least stale policy within {FLAT:.0%} of the fastest, "
        f"which is {comparison.fastest}."
    )
