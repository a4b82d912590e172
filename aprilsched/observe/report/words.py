"""Turns figures and settings into words: the headlines of a report, and what ran."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from aprilsched.observe.figures.figures import Figure, Unit, headlines_in
from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.observe.report.report_data import Headline

_MINUTE, _HOUR = 60, 3600

_UTILIZATION = Figure(
    help="The share of the engines' slots and time in which responses grew or prompts were read.",
    unit="share",
    headline="Engine utilization",
    better="higher",
)


def written(value: float | None, unit: Unit = "", *, signed: bool = False) -> str:
    """Return a figure as text; with `signed`, as a difference."""
    if value is None:
        return "unknown"
    if signed:
        sign, size = "\N{MINUS SIGN}" if value < 0 else "+", abs(value)
        return f"{sign}{100 * size:.1f} %" if unit == "share" else sign + written(size, unit)
    match unit:
        case "share" if 0 < value < 0.0005:
            return "< 0.1 %"
        case "share":
            return f"{100 * value:.{0 if value >= 0.0995 or value == 0 else 1}f} %"
        case "seconds" if value < _MINUTE:
            return f"{value:.2g} s" if value < 1 else f"{value:.1f} s"
        case "seconds" if value < 2 * _HOUR:
            return f"{int(value // _MINUTE)} min {int(value % _MINUTE)} s"
        case "seconds":
            return f"{value / _HOUR:,.1f} h"
        case "nats":
            return f"{value:.2g} nats"
        case "reward":
            return f"{value:,.3f}"
        case "versions" if isinstance(value, float):
            return f"{value:.2f}"
        case _:
            return f"{value:,.0f}"


percent = partial(written, unit="share")

_SHOWN = (
    "batch_groups",
    "group_size",
    "delivery",
    "siblings",
    "stop",
    "over_provision",
    "refill",
    "straggler",
    "pace",
    "max_staleness",
)
"""The settings of the scheduler that a report lists."""


def ran(config: Mapping[str, Any], summary: RunSummary) -> list[str]:
    """Return what ran, in sentences, without settings that `config` lacks."""
    if not config:
        return [f"Engines: {summary.engines:,}.", f"Batches: {summary.batches:,} delivered."]
    scheduler, names = config.get("scheduler", {}), config.get("engine", [])
    engines = ", ".join(map(str, names[:4])) + ("" if len(names) <= 4 else ", …")
    if names == ["sim"]:
        engines = f"embedded, modelled on {config.get('model') or 'one H200 with a 4B model'}"
    took = config.get("train_seconds")
    trainer = f"; the trainer takes {took:g} s for each" if took else ""
    workload = f"built-in workload ({_settings(config.get('workload', {}))})"
    usual = {"siblings": "half of the group"} if scheduler.get("delivery") == "samples" else {}
    known = {**usual, **scheduler}
    shown = _settings({name: known[name] for name in _SHOWN if name in known})
    return [
        f"Engines: {summary.engines:,} ({engines}), on a {summary.clock} clock.",
        f"Batches: {summary.batches:,} delivered{trainer}.",
        f"Scheduler: {shown}.",
        f"Prompts: {config.get('prompts') or workload}, seed {config.get('seed')}.",
    ]


def _settings(table: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} = {f'({_settings(value)})' if isinstance(value, dict) else value}"  # pyright: ignore[reportUnknownArgumentType]
        for name, value in table.items()
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
        text=written(number, figure.unit, signed=figure.better == "zero"),
        explanation=f"{figure.help} {note}".strip(),
        better=figure.better,
        unit=figure.unit,
    )


def _notes(summary: RunSummary) -> dict[str, str]:
    """Return notes of this run on the meaning of headlines, by key."""
    steady, rollouts = summary.steady_state, summary.rollouts
    reference = {"workload_mean": "the workload's mean", "run_after_burn_in": "the later batches"}
    against = reference.get(summary.bias.bias_reference or "", "the mean")
    parts = ", ".join(
        f"{name}: {written(mean, 'reward')}" for name, mean in summary.rewards.parts.items()
    )
    reasons = ", ".join(f"{name}: {n:,}" for name, n in rollouts.dropped.items())
    return {
        "delivered_tokens_per_s": f"After the start (batches up to {steady.burn_in:,}) "
        f"{written(steady.delivered_tokens_per_s)}.",
        "staleness_max": f"{summary.staleness_max_trained:,} of those that count in the loss.",
        "rewards.mean": f"Means of its parts: {parts}." if parts else "",
        "rollouts.delivered": f"{rollouts.launched:,} were started; {rollouts.in_flight:,} were in "
        "flight at the end.",
        "rollouts.dropped": f"({reasons})" if reasons else "",
        "tokens.reprefilled": f"{summary.tokens.generated:,} tokens were generated.",
        "seconds.wall": f"On a {summary.clock} clock; an engine was paused for "
        f"{written(summary.seconds.pause, 'seconds')} of them.",
        "bias.bias_estimate": f"Held against {against}; short responses come first, so a young run "
        "is negative.",
    }
