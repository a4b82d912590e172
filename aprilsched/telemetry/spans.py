"""A run as OpenTelemetry spans. Needs the extra ``otel``; of it, :class:`Spans` uses the API only.

::

    aprilsched.run
    ├── aprilsched.batch            from the delivery before (or the opening) to its own
    │   ├── aprilsched.rollout      from its launch to the end of its response
    │   └── aprilsched.update       from the call for a new version to its end
    │       └── aprilsched.pause, .refit, .continue     one of each for an engine; those outside
    │                               of an update (synchronous pace) are below the batch
    └── aprilsched.evaluation       its rollouts are below it

Invariants: a rollout's span is below the batch that delivers it, so one that was carried over began
before its parent did; every span that was begun is ended by :meth:`Spans.close` at the latest, at
the time of the last thing that happened.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

from opentelemetry.trace import (
    Span,
    Status,
    StatusCode,
    Tracer,
    get_tracer,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue

from aprilsched.core.messages import facts as of
from aprilsched.core.messages.facts import DeliveredRollout, Fact
from aprilsched.extras import extra
from aprilsched.telemetry.base import DispatchingListener

_Attributes = Mapping[str, AttributeValue]
_Call = Literal["pause", "refit", "continue"]
_NANOSECONDS = 1e9


def epoch_of_monotonic() -> int:
    """The wall-clock time at which :func:`time.monotonic` was 0, in ns since 1970."""
    return time.time_ns() - time.monotonic_ns()


class Spans(DispatchingListener):
    """A listener that writes spans of a run. Use it as ``with Spans() as spans:`` around the
    scheduler.

    In a :class:`~aprilsched.telemetry.worker.QueuedListener`, pass `kinds` to it.

    Args:
        tracer: the tracer; None takes that of the process's own provider.
        epoch_ns: the wall-clock time of the events' time 0, in ns since 1970. With None the first
            event happens now, and later times count from there; this is for a clock that is not the
            machine's (a virtual clock, or that of a log).
        attributes: attributes of the run's span.
    """

    def __init__(
        self,
        tracer: Tracer | None = None,
        *,
        epoch_ns: int | None = None,
        attributes: _Attributes | None = None,
    ) -> None:
        super().__init__()
        self._tracer = tracer or get_tracer("aprilsched")
        self._epoch_ns = epoch_ns
        self._attributes = attributes or {}
        self._run: Span | None = None
        self._batch: Span | None = None
        self._update: Span | None = None
        self._updated: tuple[Span, float] | None = None
        """The span of the last update, and the time of its end."""
        self._calls: dict[tuple[str, _Call], Span] = {}
        """Spans of the open calls, by engine."""
        self._evaluations: dict[int, Span] = {}
        self._launched: dict[int, float] = {}
        """Launch time of each rollout in flight."""
        self._ended: dict[int, float] = {}
        """Time of the end of the response, of each rollout in flight whose response has ended."""
        self._handlers = {
            of.RunOpened: self._opened,
            of.BatchDelivered: self._batch_delivered,
            of.EvaluationRequested: self._evaluation_requested,
            of.EvaluationDelivered: self._evaluation_delivered,
            of.GroupLaunched: self._launched_group,
            of.MemberLaunched: self._launched_member,
            of.RolloutFinished: self._finished,
            of.GroupDropped: self._group_dropped,
            of.UpdateBegun: self._update_begun,
            of.UpdateWithdrawn: self._update_withdrawn,
            of.UpdateFinished: self._update_finished,
            of.RefitBegun: self._refit_begun,
            of.EngineRefitted: self._refitted,
            of.EngineModeChanged: self._mode_changed,
            of.ControlCallFailed: self._control_failed,
            of.EngineLost: self._engine_lost,
        }

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        if self._epoch_ns is None:
            self._epoch_ns = time.time_ns() - round(now * _NANOSECONDS)
        super().on_facts(facts, now)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all open spans."""
        if self._run is None:
            return
        for span in (*self._calls.values(), self._update, *self._evaluations.values()):
            self._end(span, {"aprilsched.unfinished": True})
        for rollout_id, at in self._launched.items():
            self._end(
                self._rollout_span(rollout_id, at, self._run, {"aprilsched.unfinished": True})
            )
        self._end(self._batch, {"aprilsched.unfinished": True})
        self._end(self._run)
        self._run = None

    # --- spans ---------------------------------------------------------------------------------

    def _ns(self, at: float) -> int:
        return (self._epoch_ns or 0) + round(at * _NANOSECONDS)

    def _begin(
        self,
        name: str,
        parent: Span | None,
        attributes: _Attributes | None = None,
        *,
        at: float | None = None,
    ) -> Span:
        return self._tracer.start_span(
            f"aprilsched.{name}",
            context=None if parent is None else set_span_in_context(parent),
            attributes=attributes,
            start_time=self._ns(self._now if at is None else at),
        )

    def _end(
        self,
        span: Span | None,
        attributes: _Attributes | None = None,
        *,
        at: float | None = None,
        error: str = "",
    ) -> None:
        if span is None:
            return
        if attributes:
            span.set_attributes(attributes)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(self._ns(self._now if at is None else at))

    # --- the run and its batches ---------------------------------------------------------------

    def _opened(self, fact: of.RunOpened) -> None:
        if self._run is not None:
            return
        names = tuple(engine.name for engine in fact.engines)
        self._run = self._begin("run", None, {**self._attributes, "aprilsched.run.engines": names})
        self._batch = self._begin("batch", self._run)

    def _batch_delivered(self, fact: of.BatchDelivered) -> None:
        if fact.again:
            return
        self._rollouts(fact.rollouts, self._batch)
        self._end(
            self._batch,
            {
                "aprilsched.batch.index": fact.batch,
                "aprilsched.batch.groups": len(of.group_ids(fact.rollouts)),
                "aprilsched.policy.version": fact.version,
                "gen_ai.usage.output_tokens": sum(rollout.tokens for rollout in fact.rollouts),
            },
        )
        self._batch = self._begin("batch", self._run)

    def _evaluation_requested(self, fact: of.EvaluationRequested) -> None:
        self._evaluations[fact.evaluation_id] = self._begin("evaluation", self._run)

    def _evaluation_delivered(self, fact: of.EvaluationDelivered) -> None:
        span = self._evaluations.pop(fact.evaluation_id, None)
        self._rollouts(fact.rollouts, span)
        self._end(span, {"aprilsched.policy.version": fact.version})

    # --- rollouts ------------------------------------------------------------------------------

    def _launched_group(self, fact: of.GroupLaunched) -> None:
        self._launched.update(dict.fromkeys(fact.rollout_ids, self._now))

    def _launched_member(self, fact: of.MemberLaunched) -> None:
        self._launched[fact.rollout_id] = self._now

    def _finished(self, fact: of.RolloutFinished) -> None:
        if fact.rollout_id in self._launched:
            self._ended[fact.rollout_id] = self._now

    def _rollouts(self, rollouts: Sequence[DeliveredRollout], parent: Span | None) -> None:
        for rollout in rollouts:
            at = self._launched.pop(rollout.rollout_id, self._now)
            ended = self._ended.pop(rollout.rollout_id, self._now)
            span = self._rollout_span(rollout.rollout_id, at, parent, _attributes(rollout))
            self._end(span, at=ended)

    def _group_dropped(self, fact: of.GroupDropped) -> None:
        for rollout_id in fact.rollout_ids:
            at = self._launched.pop(rollout_id, None)
            ended = self._ended.pop(rollout_id, self._now)
            if at is None:
                continue
            attributes = {"aprilsched.drop.reason": fact.reason}
            span = self._rollout_span(rollout_id, at, self._batch, attributes)
            self._end(span, at=ended, error=fact.cause or fact.reason)

    def _rollout_span(
        self, rollout_id: int, at: float, parent: Span | None, attributes: _Attributes
    ) -> Span:
        named = {"aprilsched.rollout.id": rollout_id, **attributes}
        return self._begin("rollout", parent, named, at=at)

    # --- updates -------------------------------------------------------------------------------

    def _update_begun(self, fact: of.UpdateBegun) -> None:
        attributes = {"aprilsched.policy.version": fact.version}
        self._update = self._begin("update", self._batch, attributes)

    def _update_withdrawn(self, _: of.UpdateWithdrawn) -> None:
        if self._update is not None:
            self._update.set_attribute("aprilsched.update.withdrawn", True)

    def _update_finished(self, fact: of.UpdateFinished) -> None:
        lost = tuple(name for name, _ in fact.failed)
        if self._update is not None:
            self._end(self._update, {"aprilsched.update.failed_engines": lost}, error=fact.cause)
            self._updated = (self._update, self._now)
        self._update = None

    def _refit_begun(self, fact: of.RefitBegun) -> None:
        for engine in fact.engines:
            self._call(engine, "refit", {"aprilsched.policy.version": fact.version})

    def _refitted(self, fact: of.EngineRefitted) -> None:
        self._answer(fact.engine, "refit", fact.cause)

    def _mode_changed(self, fact: of.EngineModeChanged) -> None:
        if fact.start in ("pausing", "continuing"):
            self._answer(fact.engine, "pause" if fact.start == "pausing" else "continue")
        if fact.finish == "pausing":
            self._call(fact.engine, "pause", {"aprilsched.pause.mode": fact.pause})
        elif fact.finish == "continuing":
            self._call(fact.engine, "continue", {})

    def _call(self, engine: str, call: _Call, attributes: _Attributes) -> None:
        parent = self._update or self._batch
        if self._updated is not None and self._updated[1] == self._now:
            parent = self._updated[0]  # engines continue in the moment in which the update ends
        self._answer(engine, call)
        self._calls[engine, call] = self._begin(
            call, parent, {"aprilsched.engine.name": engine, **attributes}
        )

    def _answer(self, engine: str, call: _Call, error: str = "") -> None:
        self._end(self._calls.pop((engine, call), None), error=error)

    def _control_failed(self, fact: of.ControlCallFailed) -> None:
        if fact.call == "pause" or fact.call == "refit" or fact.call == "continue":
            self._answer(fact.engine, fact.call, fact.cause)

    def _engine_lost(self, fact: of.EngineLost) -> None:
        for engine, call in list(self._calls):
            if engine == fact.engine:
                self._answer(engine, call, fact.cause)
        if self._run is not None:
            attributes = {"aprilsched.engine.name": fact.engine, "error.message": fact.cause}
            self._run.add_event("aprilsched.engine.lost", attributes, self._ns(self._now))


def _attributes(rollout: DeliveredRollout) -> dict[str, Any]:
    sampled = [(version, engine) for _, _, version, engine in rollout.segments if engine]
    return {
        "aprilsched.group.id": rollout.group_id,
        "aprilsched.rollout.engines": tuple(dict.fromkeys(engine for _, engine in sampled)),
        "aprilsched.rollout.versions": tuple(dict.fromkeys(version for version, _ in sampled)),
        "aprilsched.rollout.turns": rollout.turns,
        "gen_ai.response.finish_reasons": (rollout.finish_reason,),
        "gen_ai.usage.input_tokens": rollout.prompt_tokens,
        "gen_ai.usage.output_tokens": rollout.tokens,
    }


_MAX_PENDING_SPANS = 1 << 16
"""Number of spans that may wait. All spans of a batch come at once, and the SDK's own 2048 would
drop most of a large batch."""


@contextmanager
def otlp_tracer() -> Generator[Tracer]:
    """A tracer whose spans go to OTEL_EXPORTER_OTLP_ENDPOINT by OTLP over HTTP (by default port
    4318 of this machine).

    At the end of the block the remaining spans are sent. The provider of the process is not
    changed.

    Raises:
        MissingExtra: if OpenTelemetry's SDK or its exporter is not installed.
    """
    # Spans of a tracer of the user's own need the API only.
    with extra("otel"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    name = os.environ.get("OTEL_SERVICE_NAME", "aprilsched")
    provider = TracerProvider(
        resource=Resource.create({"service.name": name}), shutdown_on_exit=False
    )
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(), max_queue_size=_MAX_PENDING_SPANS)
    )
    try:
        yield provider.get_tracer("aprilsched")
    finally:
        provider.shutdown()
