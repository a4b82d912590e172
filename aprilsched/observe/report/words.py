"""Describes configurations and figures in words, for people who have not read the code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from aprilsched.kernel.core.policies.straggler import BEHAVIOURS
from aprilsched.observe.figures.run_figures import RunSummary

_MINUTE, _HOUR = 60, 3600


def percent(share: float | None) -> str:
    """Format a percentage, with one decimal below 10 %."""
    if share is None:
        return "unknown"
    if 0 < share < 0.0005:
        return "< 0.1 %"
    digits = 0 if abs(share) >= 0.0995 or share == 0 else 1
    return f"{100 * share:.{digits}f} %"


def signed_percent(share: float | None) -> str:
    """Format a difference, with its sign."""
    return "unknown" if share is None else f"{100 * share:+.1f} %".replace("-", "\N{MINUS SIGN}")


def amount(number: float | None, digits: int = 0) -> str:
    """Format a number with thousands separators."""
    return "unknown" if number is None else f"{number:,.{digits}f}"


def nats(value: float | None) -> str:
    """Format a divergence, which is mostly far below 1."""
    return "unknown" if value is None else f"{value:.2g} nats"


def seconds(value: float | None) -> str:
    """Format a time with a suitable unit."""
    if value is None:
        return "unknown"
    if value < _MINUTE:
        return f"{value:.2g} s" if value < 1 else f"{value:.1f} s"
    if value < 2 * _HOUR:
        return f"{int(value // _MINUTE)} min {int(value % _MINUTE)} s"
    return f"{value / _HOUR:,.1f} h"


def ran(config: Mapping[str, Any], summary: RunSummary) -> list[str]:
    """Describe the configuration in sentences, without settings that it lacks."""
    scheduler: dict[str, Any] = config.get("scheduler", {})
    sentences = [
        _engines(config, summary),
        _batches(scheduler, summary),
        _policy(scheduler),
        _stragglers(scheduler),
        _pace(config, scheduler),
        _staleness(scheduler),
        _prompts(config),
    ]
    return [sentence for sentence in sentences if sentence]


def _engines(config: Mapping[str, Any], summary: RunSummary) -> str:
    names: list[Any] = config.get("engine", [])
    if names == ["sim"]:
        count = _several(summary.engines, "embedded engine")
        clock = ", on a virtual clock" if summary.clock == "virtual" else ""
        return f"Engines: {count} (modelled on one H200 with a 4B model){clock}."
    shown = ", ".join(str(name) for name in names[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"Engines: {_several(len(names), 'SGLang server')} ({shown}{more})."


def _batches(scheduler: Mapping[str, Any], summary: RunSummary) -> str:
    groups, size = scheduler.get("batch_groups"), scheduler.get("group_size")
    delivered = f"{_several(summary.batches, 'batch', 'batches')} delivered"
    unit, stop = _rule(scheduler.get("stop", "groups"))
    if unit != "groups":
        full = f"{_plain(stop['amount'])} {unit}" if "amount" in stop else unit
        return f"Batches: full by {full}; {delivered}."
    if not isinstance(groups, int) or not isinstance(size, int):
        return f"Batches: {delivered}."
    if any(batch.rollouts != size * batch.groups for batch in summary.per_batch):
        return (
            f"Batches: {groups} prompts, each with {size} responses or a number of its own; "
            f"{delivered}."
        )
    return (
        f"Batches: {groups} prompts with {size} responses each ({groups * size:,} responses); "
        f"{delivered}."
    )


def _policy(scheduler: Mapping[str, Any]) -> str:
    ratio = scheduler.get("over_provision")
    refill, settings = _rule(scheduler.get("refill"))
    if ratio == "auto":
        return "Policy: the scheduler chooses how much to start, and when, while the run goes on."
    much = f"{_counted(ratio, 'batch', 'batches')} of prompts"
    match refill:
        case "wave" if ratio == 1:
            return "Policy: start one batch of prompts and wait for every last response."
        case "wave":
            return f"Policy: start up to {much}, hand over the first batch that is complete."
        case "pool":
            by = _counted(settings.get("together"), "prompt", "prompts")
            return f"Policy: keep {much} generating at any time, refilled {by} at a time."
        case "buckets":
            return (
                "Policy: keep more prompts open than run, and run those of similar expected length "
                "together."
            )
        case "tail":
            return (
                f"Policy: let {much} race for each batch, and gather the losers in batches without "
                "a race."
            )
        case _:
            return ""


def _stragglers(scheduler: Mapping[str, Any]) -> str:
    if scheduler.get("over_provision") == 1 and scheduler.get("refill") == "wave":
        return ""  # none is left unfinished
    descriptions = {str(name): behaviour.description for name, behaviour in BEHAVIOURS.items()}
    return descriptions.get(str(scheduler.get("straggler")), "")


_PACES = {
    "synchronous": "synchronous; engines wait while the trainer trains.",
    "asynchronous": "asynchronous; engines generate while the trainer trains.",
    "auto": "synchronous at first, and chosen again during the run.",
}


def _pace(config: Mapping[str, Any], scheduler: Mapping[str, Any]) -> str:
    took, pace = config.get("train_seconds"), _PACES.get(str(scheduler.get("pace")))
    trainer = f"The trainer takes {_plain(took)} s a batch." if took else ""
    return f"Pace: {pace} {trainer}".rstrip() if pace else trainer


def _staleness(scheduler: Mapping[str, Any]) -> str:
    given = scheduler.get("max_staleness")
    if given is None:
        return "Staleness: no bound."
    rule, settings = _rule(given)
    bound = _counted(settings.get("bound", given), "version", "versions")
    return f"Staleness: at most {bound} (rule: {rule if settings else 'mask'})."


def _prompts(config: Mapping[str, Any]) -> str:
    seed = config.get("seed")
    if config.get("prompts") is not None:
        return f"Prompts: {config['prompts']}."
    workload: dict[str, Any] = config.get("workload", {})
    lengths = f"median {_plain(workload.get('median'))} tokens"
    if "cap" in workload:
        lengths += f", at most {_plain(workload['cap'])}"
    return f"Prompts: the built-in long-tail workload ({lengths}), seed {seed}."


def _rule(given: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the name or number of a policy, and its settings."""
    if isinstance(given, Mapping):
        table = cast("Mapping[str, Any]", given)
        return table.get("rule"), table
    return given, {}


def _counted(value: Any, one: str, many: str) -> str:
    return f"{_plain(value)} {one if value == 1 else many}"


def _plain(value: Any) -> str:
    """Format a number without needless decimals."""
    return f"{value:,.10g}" if isinstance(value, int | float) else str(value)


def _several(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
