"""The headlines of a report."""

from __future__ import annotations

from typing import Any

from aprilsched.observe.figures.figures import Figure, headlines_in
from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.observe.report.report_data import Headline
from aprilsched.observe.report.words import amount, nats, percent, seconds, signed_percent

# The headlines of the table of figures, in its order.

_UTILIZATION = Figure(
    help="The share of the engines' slots and time in which responses grew or prompts were read.",
    unit="share",
    headline="Engine utilization",
    better="higher",
)


def headlines(summary: RunSummary, utilization: float) -> list[Headline]:
    """Return the headline figures of a run; `utilization` is the busy share of its engines."""
    found = list(headlines_in(summary))
    found.insert(2, ("utilization", _UTILIZATION, utilization))
    notes = _notes(summary)
    return [
        _headline(key, figure, value, notes.get(key, ""))
        for key, figure, value in found
        if key != "rewards.mean" or value is not None
    ]


def _headline(key: str, figure: Figure, value: Any, note: str) -> Headline:
    number: float | None = sum(value.values()) if isinstance(value, dict) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType, reportUnknownVariableType]
    return Headline(
        key=key,
        label=figure.headline,
        value=number,
        text=_text(figure, number),
        explanation=f"{figure.help} {note}".strip(),
        better=figure.better,
        unit=figure.unit,
    )


def _text(figure: Figure, value: float | None) -> str:
    match figure.unit:
        case "share":
            return signed_percent(value) if figure.better == "zero" else percent(value)
        case "seconds":
            return seconds(value)
        case "nats":
            return nats(value)
        case "reward":
            return amount(value, 3)
        case "versions" if isinstance(value, float):
            return f"{value:.2f}"
        case _:
            return amount(value)


def _notes(summary: RunSummary) -> dict[str, str]:
    """Return notes of this run on the meaning of headlines, by key."""
    steady, rollouts = summary.steady_state, summary.rollouts
    reference = {"workload_mean": "the workload's mean", "run_after_burn_in": "the later batches"}
    against = reference.get(summary.bias.bias_reference or "", "the mean")
    parts = ", ".join(f"{name}: {amount(mean, 3)}" for name, mean in summary.rewards.parts.items())
    reasons = ", ".join(f"{name}: {n:,}" for name, n in rollouts.dropped.items())
    return {
        "delivered_tokens_per_s": f"After the start (batches up to {steady.burn_in:,}) "
        f"{amount(steady.delivered_tokens_per_s)}.",
        "staleness_max": f"{summary.staleness_max_trained:,} of those that count in the loss.",
        "rewards.mean": f"Means of its parts: {parts}." if parts else "",
        "rollouts.delivered": f"{rollouts.launched:,} were started; {rollouts.in_flight:,} were in "
        "flight at the end.",
        "rollouts.dropped": f"({reasons})" if reasons else "",
        "tokens.reprefilled": f"{summary.tokens.generated:,} tokens were generated.",
        "seconds.wall": f"On a {summary.clock} clock; an engine was paused for "
        f"{seconds(summary.seconds.pause)} of them.",
        "bias.bias_estimate": f"Held against {against}; short responses come first, so a young run "
        "is negative.",
    }
