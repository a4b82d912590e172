"""A listener that knows the value of every metric of the table, at any moment.

Invariants: progress costs it nothing, since what can be had from :class:`LiveFigures` is read when
somebody asks; a counter never goes down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import Event
from aprilsched.core.state.ledger import Reason
from aprilsched.telemetry.live_figures import FiguresListener, LiveFigures
from aprilsched.telemetry.metrics.histogram import Buckets, Histogram
from aprilsched.telemetry.metrics.table import METRICS
from aprilsched.telemetry.usage.parts import EngineState
from aprilsched.telemetry.usage.usage import EngineUsage

__all__ = ["Metrics", "Sample", "Scrape"]

_STATES: tuple[EngineState, ...] = get_args(EngineState)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A value of the metric `name`; `labels` are in the table's order."""

    name: str
    labels: tuple[str, ...] = ()
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scrape:
    """Everything at one moment; `histograms` by name."""

    samples: tuple[Sample, ...]
    histograms: Mapping[str, Buckets]


class Metrics(FiguresListener):
    """Keeps the metrics of a run.

    Args:
        figures: an account that is a listener of its own and stands before this one; None keeps
            one inside.
    """

    def __init__(self, figures: LiveFigures | None = None) -> None:
        super().__init__(figures)
        self._version = 0
        self._updates: Counter[str] = Counter(succeeded=0, failed=0)
        self._losses: Counter[str] = Counter()
        self._asked_at: float | None = None
        self._update_at: float | None = None
        self._paused_at: dict[str, float] = {}
        self._refit_at: dict[str, float] = {}
        self._exposed: dict[tuple[str, str], float] = {}
        """The seconds of an engine's part that were exposed last."""
        self._histograms = {
            name: Histogram(metric.buckets)
            for name, metric in METRICS.items()
            if metric.kind == "histogram"
        }
        self._handlers = {
            ev.Opened: self._opened,
            ev.BatchRequested: self._requested,
            ev.BatchWithdrawn: self._withdrawn,
            ev.UpdateRequested: self._update_requested,
            ev.UpdateWithdrawn: self._update_withdrawn,
            ev.Refitted: self._refitted,
            ev.Continued: self._continued,
            do.EndOfPrompts: self._withdrawn,
            do.Pause: self._pause,
            do.Refit: self._refit,
            do.LoseEngine: self._lose_engine,
            do.FinishUpdate: self._finish_update,
            do.Deliver: self._deliver,
            do.Redeliver: self._redeliver,
        }

    def hear(self, what: Event | Command, now: float) -> None:
        if type(what) in self._handlers:
            with self._figures.lock:
                super().hear(what, now)

    def scrape(self) -> Scrape:
        """The values now; from any thread."""
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
            ("groups_ready", self._figures.usage.groups_ready),
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
        if batch.figures.efficiency is not None:
            yield _sample("batch_efficiency_ratio", batch.figures.efficiency)

    def _of_updates(self) -> Iterator[Sample]:
        yield _sample("policy_version", self._version)
        for outcome, updates in self._updates.items():
            yield _sample("updates_total", updates, outcome)

    def _of_engines(self) -> Iterator[Sample]:
        for name, engine in self._figures.usage.engines.items():
            yield _sample("engine_up", engine.state != "lost", name)
            for state in _STATES:
                yield _sample("engine_state", state == engine.state, name, state)
            if engine.version is not None:
                yield _sample("engine_version", engine.version, name)
            yield _sample("engine_losses_total", self._losses[name], name)
            yield _sample("engine_tokens_generated_total", engine.tokens, name)
            yield _sample("requests_in_flight", engine.in_flight, name)
            yield _sample("engine_peak_requests", engine.capacity, name)
            yield from self._seconds_of(engine)

    def _seconds_of(self, engine: EngineUsage) -> Iterator[Sample]:
        """What was read as re-prefill may turn out to have been decoding, and a counter that goes
        down would be read as one that began anew: such a part stands until it has caught up."""
        for part, seconds in engine.seconds.items():
            key = (engine.name, part)
            exposed = self._exposed[key] = max(seconds, self._exposed.get(key, 0.0))
            yield _sample("engine_seconds_total", exposed, *key)

    # --- batches -------------------------------------------------------------------------------

    def _opened(self, event: ev.Opened) -> None:
        self._version = max((engine.version or 0 for engine in event.engines), default=0)

    def _requested(self, _: ev.BatchRequested) -> None:
        if self._asked_at is None:
            self._asked_at = self._now

    def _withdrawn(self, _: ev.BatchWithdrawn | do.EndOfPrompts) -> None:
        self._asked_at = None

    def _deliver(self, _: do.Deliver) -> None:
        self._handed_over()
        batch = self._figures.batch
        if batch is None:
            return
        self._observe("batch_duration_seconds", batch.figures.seconds)
        self._histograms["aprilsched_response_length_tokens"].observe(batch.lengths)
        self._histograms["aprilsched_rollout_staleness_versions"].observe(batch.oldest_by_rollout)

    def _redeliver(self, _: do.Redeliver) -> None:
        self._handed_over()

    def _handed_over(self) -> None:
        self._observe_since("batch_wait_seconds", self._asked_at)
        self._asked_at = None

    # --- updates and engines -------------------------------------------------------------------

    def _update_requested(self, _: ev.UpdateRequested) -> None:
        self._update_at = self._now

    def _update_withdrawn(self, _: ev.UpdateWithdrawn) -> None:
        self._update_at = None

    def _finish_update(self, command: do.FinishUpdate) -> None:
        self._updates["failed" if command.cause else "succeeded"] += 1
        if not command.cause:
            self._version = command.version
        self._observe_since("update_duration_seconds", self._update_at)
        self._update_at = None

    def _pause(self, command: do.Pause) -> None:
        self._paused_at.setdefault(command.engine, self._now)

    def _continued(self, event: ev.Continued) -> None:
        self._observe_since("pause_duration_seconds", self._paused_at.pop(event.engine, None))

    def _refit(self, command: do.Refit) -> None:
        self._refit_at.update(dict.fromkeys(command.engines, self._now))

    def _refitted(self, event: ev.Refitted) -> None:
        self._observe_since("refit_duration_seconds", self._refit_at.pop(event.engine, None))

    def _lose_engine(self, command: do.LoseEngine) -> None:
        self._losses[command.engine] += 1
        self._paused_at.pop(command.engine, None)
        self._refit_at.pop(command.engine, None)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[f"aprilsched_{name}"].observe(value)

    def _observe_since(self, name: str, began: float | None) -> None:
        if began is not None:
            self._observe(name, self._now - began)


def _sample(name: str, value: float, *labels: str) -> Sample:
    return Sample(name=f"aprilsched_{name}", labels=labels, value=float(value))
