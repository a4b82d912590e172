"""A listener that has the value of every metric of the table at any moment.

Invariants: a chunk of tokens costs nothing here, because the figures in :class:`LiveFigures` are
read at a scrape. A counter never goes down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from aprilsched.core.messages import facts as of
from aprilsched.core.messages.facts import Fact
from aprilsched.core.state.ledger import Reason
from aprilsched.telemetry.live_figures import FiguresListener, LiveFigures
from aprilsched.telemetry.metrics.histogram import Buckets, Histogram
from aprilsched.telemetry.metrics.table import METRICS
from aprilsched.telemetry.usage.engine_usage import EngineUsage
from aprilsched.telemetry.usage.parts import EngineState

__all__ = ["Metrics", "Sample", "Scrape"]

_STATES: tuple[EngineState, ...] = get_args(EngineState)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One value of the metric `name`; `labels` are in the order of the table."""

    name: str
    labels: tuple[str, ...] = ()
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scrape:
    """All metrics at one moment; `histograms` are by name."""

    samples: tuple[Sample, ...]
    histograms: Mapping[str, Buckets]


class Metrics(FiguresListener):
    """Keeps the metrics of a run.

    Args:
        figures: LiveFigures that are a listener before this one. If it is None, the metrics keep
            figures of their own.
    """

    def __init__(self, figures: LiveFigures | None = None) -> None:
        super().__init__(figures)
        self._updates: Counter[str] = Counter(succeeded=0, failed=0)
        self._asked_at: float | None = None
        self._update_at: float | None = None
        self._paused_at: dict[str, float] = {}
        self._refit_at: dict[str, float] = {}
        self._exposed: dict[tuple[str, str], float] = {}
        """Seconds of each engine's parts that were exposed last."""
        self._histograms = {
            name: Histogram(metric.buckets)
            for name, metric in METRICS.items()
            if metric.kind == "histogram"
        }
        self._handlers = {
            of.BatchRequested: self._requested,
            of.BatchRequestWithdrawn: self._withdrawn,
            of.PromptsEnded: self._withdrawn,
            of.BatchDelivered: self._delivered,
            of.UpdateBegun: self._update_begun,
            of.UpdateWithdrawn: self._update_withdrawn,
            of.UpdateFinished: self._update_finished,
            of.RefitBegun: self._refit_begun,
            of.EngineRefitted: self._refitted,
            of.EngineModeChanged: self._mode_changed,
            of.EngineLost: self._engine_lost,
        }

    def react(self, facts: Sequence[Fact], now: float) -> None:
        with self._figures.lock:
            super().react(facts, now)

    def scrape(self) -> Scrape:
        """The present values. Any thread may call this."""
        with self._figures.lock:
            self._figures.advance()
            return Scrape(
                samples=(
                    *self._of_rollouts(),
                    *self._of_batches(),
                    *self._of_updates(),
                    *self._of_engines(),
                ),
                histograms={name: each.buckets() for name, each in self._histograms.items()},
            )

    # --- the values ----------------------------------------------------------------------------

    def _of_rollouts(self) -> Iterator[Sample]:
        counters, dropped = self._figures.counters, self._figures.ledger.rollouts
        in_flight = counters.launched - counters.delivered - dropped.total()
        for name, value in (
            ("rollouts_launched_total", counters.launched),
            ("rollouts_delivered_total", counters.delivered),
            ("rollouts_in_flight", in_flight),
            ("groups_ready", self._figures.state.groups_ready),
            ("request_retries_total", counters.retries),
            ("tokens_generated_total", counters.tokens_generated),
            ("tokens_delivered_total", counters.tokens_delivered),
            ("tokens_discarded_total", counters.tokens_discarded),
            ("tokens_re_prefilled_total", counters.tokens_reprefilled),
            ("tokens_masked_total", counters.tokens_masked),
        ):
            yield _sample(name, value)
        for reason in Reason:
            yield _sample("rollouts_dropped_total", dropped[reason], reason.value)

    def _of_batches(self) -> Iterator[Sample]:
        yield _sample("batches_delivered_total", self._figures.counters.batches)
        batch = self._figures.batch
        if batch is None:
            return
        yield _sample("batch_off_policy_tokens_ratio", batch.figures.off_policy_token_share)
        for name, value in (
            ("batch_efficiency_ratio", batch.figures.efficiency),
            ("batch_length_distance_ratio", batch.figures.length_distance),
            ("batch_iid_length_distance_ratio", batch.figures.iid_length_distance),
        ):
            if value is not None:
                yield _sample(name, value)
        forecast = batch.figures.forecast
        if forecast is not None:
            yield _sample("batch_forecast_seconds", forecast.seconds_forecast)
            yield _sample("batch_forecast_efficiency_ratio", forecast.efficiency_forecast)
            if forecast.efficiency is not None:
                yield _sample("batch_efficiency_beside_forecast_ratio", forecast.efficiency)
            share = forecast.off_policy_token_share_forecast
            yield _sample("batch_forecast_off_policy_tokens_ratio", share)

    def _of_updates(self) -> Iterator[Sample]:
        yield _sample("policy_version", self._figures.state.version)
        for outcome, updates in self._updates.items():
            yield _sample("updates_total", updates, outcome)

    def _of_engines(self) -> Iterator[Sample]:
        for name, engine in self._figures.state.engine_usage.items():
            yield _sample("engine_up", engine.state != "lost", name)
            for state in _STATES:
                yield _sample("engine_state", state == engine.state, name, state)
            if engine.version is not None:
                yield _sample("engine_version", engine.version, name)
            yield _sample("engine_losses_total", engine.losses, name)
            yield _sample("engine_tokens_generated_total", engine.tokens, name)
            yield _sample("requests_in_flight", engine.in_flight, name)
            yield _sample("engine_peak_requests", engine.capacity, name)
            yield from self._seconds_of(engine)

    def _seconds_of(self, engine: EngineUsage) -> Iterator[Sample]:
        """The seconds to expose for a part. Time that was counted as re-prefill may later be moved
        to decoding, and a counter that goes down would look like one that was restarted. So such a
        part keeps its exposed value until the true value has caught up."""
        for part, seconds in engine.seconds.items():
            key = (engine.name, part)
            exposed = self._exposed[key] = max(seconds, self._exposed.get(key, 0.0))
            yield _sample("engine_seconds_total", exposed, *key)

    # --- batches -------------------------------------------------------------------------------

    def _requested(self, _: of.BatchRequested) -> None:
        if self._asked_at is None:
            self._asked_at = self._now

    def _withdrawn(self, _: of.BatchRequestWithdrawn | of.PromptsEnded) -> None:
        self._asked_at = None

    def _delivered(self, fact: of.BatchDelivered) -> None:
        self._observe_since("batch_wait_seconds", self._asked_at)
        self._asked_at = None
        batch = self._figures.batch
        if fact.again or batch is None:
            return
        self._observe("batch_duration_seconds", batch.figures.seconds)
        self._histograms["aprilsched_response_length_tokens"].observe(batch.lengths)
        self._histograms["aprilsched_rollout_staleness_versions"].observe(batch.oldest_by_rollout)

    # --- updates and engines -------------------------------------------------------------------

    def _update_begun(self, _: of.UpdateBegun) -> None:
        self._update_at = self._now

    def _update_withdrawn(self, _: of.UpdateWithdrawn) -> None:
        self._update_at = None

    def _update_finished(self, fact: of.UpdateFinished) -> None:
        self._updates["failed" if fact.cause else "succeeded"] += 1
        self._observe_since("update_duration_seconds", self._update_at)
        self._update_at = None

    def _mode_changed(self, fact: of.EngineModeChanged) -> None:
        if fact.finish == "pausing":
            self._paused_at.setdefault(fact.engine, self._now)
        elif fact.start == "continuing":
            since = self._paused_at.pop(fact.engine, None)
            self._observe_since("pause_duration_seconds", since)

    def _refit_begun(self, fact: of.RefitBegun) -> None:
        self._refit_at.update(dict.fromkeys(fact.engines, self._now))

    def _refitted(self, fact: of.EngineRefitted) -> None:
        self._observe_since("refit_duration_seconds", self._refit_at.pop(fact.engine, None))

    def _engine_lost(self, fact: of.EngineLost) -> None:
        self._paused_at.pop(fact.engine, None)
        self._refit_at.pop(fact.engine, None)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[f"aprilsched_{name}"].observe(value)

    def _observe_since(self, name: str, began: float | None) -> None:
        if began is not None:
            self._observe(name, self._now - began)


def _sample(name: str, value: float, *labels: str) -> Sample:
    return Sample(name=f"aprilsched_{name}", labels=labels, value=float(value))
