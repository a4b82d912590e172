"""The figures of a step, as data: each name with its meaning. A step is a delivered batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aprilsched.core.state.ledger import Counters, Ledger
from aprilsched.telemetry.batch_figures import Measured, delivered_tokens_per_s
from aprilsched.telemetry.usage.parts import BUSY, PARTS, Part

__all__ = ["FIGURES", "Moment", "figures_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What is known when a batch is delivered.

    Attributes:
        spent: seconds of all engines since the batch before, by part.
        groups_ready: complete groups that wait for the next batch.
    """

    batch: Measured
    counters: Counters
    ledger: Ledger
    spent: Mapping[Part, float]
    groups_ready: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Figure:
    help: str
    of: Callable[[Moment], float | None]


def _share(moment: Moment, *parts: Part) -> float | None:
    total = sum(moment.spent.values())
    return sum(moment.spent[part] for part in parts) / total if total > 0 else None


def _in_flight(moment: Moment) -> float:
    counters = moment.counters
    return counters.launched - counters.delivered - moment.ledger.rollouts.total()


def _forecast(moment: Moment, name: str) -> float | None:
    return getattr(moment.batch.figures.forecast, name, None)


# fmt: off
_TABLE: dict[str, _Figure] = {
    "batch/seconds": _Figure(
        help="From the delivery before to this one, without the trainer's seconds.",
        of=lambda m: m.batch.figures.seconds),
    "batch/trainer_seconds": _Figure(
        help="In which the engines stood still for the trainer (synchronous pace only).",
        of=lambda m: m.batch.figures.trainer_seconds),
    "batch/tokens_per_s": _Figure(
        help="Sampled tokens over both.",
        of=lambda m: delivered_tokens_per_s([m.batch])),
    "batch/efficiency": _Figure(
        help="T_bound over the seconds; absent without a step-time model.",
        of=lambda m: m.batch.figures.efficiency),
    "batch/forecast_seconds": _Figure(
        help="What automatic scheduling expected of the seconds; absent without a forecast.",
        of=lambda m: _forecast(m, "seconds_forecast")),
    "batch/forecast_efficiency": _Figure(
        help="What it expected of the efficiency.",
        of=lambda m: _forecast(m, "efficiency_forecast")),
    "batch/efficiency_beside_forecast": _Figure(
        help="T_bound over the seconds, by the step times of the forecast.",
        of=lambda m: _forecast(m, "efficiency")),
    "batch/forecast_off_policy_token_share": _Figure(
        help="What it expected of the share of tokens that an older version sampled.",
        of=lambda m: _forecast(m, "off_policy_token_share_forecast")),
    "batch/rollouts": _Figure(
        help="Delivered.",
        of=lambda m: m.batch.figures.rollouts),
    "batch/tokens": _Figure(
        help="Sampled, in delivered rollouts.",
        of=lambda m: m.batch.figures.tokens),
    "batch/mean_length": _Figure(
        help="Of the responses, in tokens.",
        of=lambda m: m.batch.figures.mean_length),
    "batch/max_length": _Figure(
        help="Of the responses, in tokens.",
        of=lambda m: int(m.batch.lengths.max())),
    "batch/length_distance": _Figure(
        help="Kolmogorov's distance of the response lengths from the law that all lengths are "
             "drawn from, 0 to 1.",
        of=lambda m: m.batch.figures.length_distance),
    "batch/iid_length_distance": _Figure(
        help="That distance as expected of as many groups drawn at random.",
        of=lambda m: m.batch.figures.iid_length_distance),
    "batch/version": _Figure(
        help="The policy version that consumes the batch.",
        of=lambda m: m.batch.figures.version),
    "batch/off_policy_token_share": _Figure(
        help="Tokens that an older version sampled.",
        of=lambda m: m.batch.figures.off_policy_token_share),
    "batch/staleness_mean": _Figure(
        help="Consuming version minus sampling version, over tokens.",
        of=lambda m: m.batch.figures.staleness_mean),
    "batch/staleness_max": _Figure(
        help="Of the oldest token.",
        of=lambda m: m.batch.figures.staleness_max),
    "batch/reward": _Figure(
        help="Mean reward of the rollouts; absent without rewards. The mean of each named part of "
             "the reward is beside it as `batch/reward/NAME`.",
        of=lambda m: m.batch.figures.rewards.mean),
    "run/rollouts_in_flight": _Figure(
        help="Launched, and neither delivered nor dropped yet.",
        of=_in_flight),
    "run/groups_ready": _Figure(
        help="Complete groups that wait for the next batch.",
        of=lambda m: m.groups_ready),
    "run/rollouts_dropped": _Figure(
        help="On purpose, so far.",
        of=lambda m: m.ledger.rollouts.total()),
    "run/tokens_generated": _Figure(
        help="So far.",
        of=lambda m: m.counters.tokens_generated),
    "run/tokens_re_prefilled": _Figure(
        help="Context tokens computed again after an interruption, so far.",
        of=lambda m: m.counters.tokens_reprefilled),
    "run/tokens_discarded": _Figure(
        help="Of dropped rollouts, so far.",
        of=lambda m: m.counters.tokens_discarded),
    "engines/busy": _Figure(
        help="Share of the engines' time since the batch before: decoding or reading prompts.",
        of=lambda m: _share(m, *BUSY)),
} | {
    f"engines/{part}": _Figure(help=f"Share of that time. {meaning}",
                               of=lambda m, part=part: _share(m, part))
    for part, meaning in PARTS.items()
}
# fmt: on

FIGURES: dict[str, str] = {name: figure.help for name, figure in _TABLE.items()}
"""Every name with its meaning, in the order in which they are written."""


def figures_of(moment: Moment) -> dict[str, float]:
    """By name; what cannot be known is left out."""
    found = {name: figure.of(moment) for name, figure in _TABLE.items()}
    parts = moment.batch.figures.rewards.parts
    found |= {f"batch/reward/{name}": value for name, value in parts.items()}
    return {name: float(value) for name, value in found.items() if value is not None}
