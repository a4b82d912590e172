"""Every metric as data: its name, kind, unit, labels and meaning. The reference is made from it.

Invariants, checked by a test: names follow the convention of Prometheus (the prefix, base units,
the unit at the end, `_total` for counters), and only metrics of the table are exposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["METRICS", "Kind", "Metric", "Unit"]

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Unit: TypeAlias = Literal["", "ratio", "seconds", "tokens", "versions"]

_SHORT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_LONG_SECONDS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_LENGTHS = tuple(float(2**power) for power in range(4, 18))
_VERSIONS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A metric; `buckets` are the upper edges of a histogram, without the infinite one."""

    name: str
    kind: Kind
    help: str
    unit: Unit = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


# fmt: off
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        # --- rollouts and tokens ---------------------------------------------------------------
        Metric(name="aprilsched_rollouts_launched_total", kind="counter",
               help="Rollouts launched, those of evaluations included."),
        Metric(name="aprilsched_rollouts_delivered_total", kind="counter",
               help="Rollouts handed to the trainer, in batches and evaluations."),
        Metric(name="aprilsched_rollouts_dropped_total", kind="counter", labels=("reason",),
               help="Rollouts dropped on purpose, by the ledger's reason."),
        Metric(name="aprilsched_rollouts_in_flight", kind="gauge",
               help="Rollouts launched, and neither delivered nor dropped yet."),
        Metric(name="aprilsched_groups_ready", kind="gauge",
               help="Complete groups that wait for their batch."),
        Metric(name="aprilsched_request_retries_total", kind="counter",
               help="Attempts sent again after one that failed."),
        Metric(name="aprilsched_tokens_generated_total", kind="counter",
               help="Tokens that arrived from engines."),
        Metric(name="aprilsched_tokens_delivered_total", kind="counter",
               help="Sampled tokens of delivered rollouts."),
        Metric(name="aprilsched_tokens_discarded_total", kind="counter",
               help="Sampled tokens of dropped rollouts."),
        Metric(name="aprilsched_tokens_re_prefilled_total", kind="counter",
               help="Context tokens computed again after an interruption."),
        Metric(name="aprilsched_tokens_masked_total", kind="counter",
               help="Tokens delivered with loss mask 0, because they passed the staleness bound."),
        # --- batches ---------------------------------------------------------------------------
        Metric(name="aprilsched_batches_delivered_total", kind="counter",
               help="Batches handed to the trainer."),
        Metric(name="aprilsched_batch_duration_seconds", kind="histogram", unit="seconds",
               buckets=_LONG_SECONDS,
               help="From one delivery to the next, without the time that the engines stood still "
                    "for the trainer."),
        Metric(name="aprilsched_batch_wait_seconds", kind="histogram", unit="seconds",
               buckets=_LONG_SECONDS,
               help="The trainer's wait for its batch, from the call to the delivery."),
        Metric(name="aprilsched_batch_efficiency_ratio", kind="gauge", unit="ratio",
               help="T_bound of the last batch over its duration; absent without a step-time "
                    "model."),
        Metric(name="aprilsched_batch_forecast_seconds", kind="gauge", unit="seconds",
               help="What automatic scheduling expected of the last batch's duration; absent "
                    "without a forecast, like the other ones."),
        Metric(name="aprilsched_batch_forecast_efficiency_ratio", kind="gauge", unit="ratio",
               help="What it expected of T_bound over that duration."),
        Metric(name="aprilsched_batch_efficiency_beside_forecast_ratio", kind="gauge",
               unit="ratio",
               help="T_bound of the last batch over its duration, by the step times of the "
                    "forecast."),
        Metric(name="aprilsched_batch_forecast_off_policy_tokens_ratio", kind="gauge",
               unit="ratio",
               help="What it expected of the share of tokens that an older version sampled."),
        Metric(name="aprilsched_batch_off_policy_tokens_ratio", kind="gauge", unit="ratio",
               help="Share of the last batch's tokens that an older version sampled."),
        Metric(name="aprilsched_batch_length_distance_ratio", kind="gauge", unit="ratio",
               help="Kolmogorov's distance of the last batch's response lengths from the law that "
                    "all lengths are drawn from."),
        Metric(name="aprilsched_batch_iid_length_distance_ratio", kind="gauge", unit="ratio",
               help="That distance as expected of as many groups drawn at random."),
        Metric(name="aprilsched_response_length_tokens", kind="histogram", unit="tokens",
               buckets=_LENGTHS,
               help="Lengths of the responses delivered in batches."),
        Metric(name="aprilsched_rollout_staleness_versions", kind="histogram", unit="versions",
               buckets=_VERSIONS,
               help="Of each rollout delivered in a batch: the consuming version minus that of its "
                    "oldest token."),
        # --- updates ---------------------------------------------------------------------------
        Metric(name="aprilsched_policy_version", kind="gauge",
               help="The policy version of the fleet."),
        Metric(name="aprilsched_updates_total", kind="counter", labels=("outcome",),
               help="Updates of the weights that ended; failed ones reached no engine."),
        Metric(name="aprilsched_update_duration_seconds", kind="histogram", unit="seconds",
               buckets=_SHORT_SECONDS,
               help="From the call for a new version to its end."),
        Metric(name="aprilsched_pause_duration_seconds", kind="histogram", unit="seconds",
               buckets=_SHORT_SECONDS,
               help="An engine's pause, from the call to the answer of the continue call."),
        Metric(name="aprilsched_refit_duration_seconds", kind="histogram", unit="seconds",
               buckets=_SHORT_SECONDS,
               help="An engine's refit: new weights come in."),
        # --- engines ---------------------------------------------------------------------------
        Metric(name="aprilsched_engine_up", kind="gauge", labels=("engine",),
               help="1 while the engine is in use, 0 while it is lost or on standby."),
        Metric(name="aprilsched_engine_state", kind="gauge", labels=("engine", "state"),
               help="1 for the state that the engine is in, 0 for the others."),
        Metric(name="aprilsched_engine_version", kind="gauge", labels=("engine",),
               help="The policy version of the engine; absent while its weights are inconsistent."),
        Metric(name="aprilsched_engine_losses_total", kind="counter", labels=("engine",),
               help="How often the engine was taken out of use."),
        Metric(name="aprilsched_engine_tokens_generated_total", kind="counter",
               labels=("engine",),
               help="Tokens that arrived from the engine."),
        Metric(name="aprilsched_requests_in_flight", kind="gauge", labels=("engine",),
               help="Requests that are with the engine."),
        Metric(name="aprilsched_engine_peak_requests", kind="gauge", labels=("engine",),
               help="Requests that the engine had at once at most: the slots that its seconds are "
                    "divided by."),
        Metric(name="aprilsched_engine_seconds_total", kind="counter", unit="seconds",
               labels=("engine", "part"),
               help="The engine's wall time by part: busy, or idle for a cause."),
    )
}
# fmt: on
"""The metrics by name, in the order in which they are exposed."""
