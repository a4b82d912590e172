"""A run as OpenTelemetry spans. Needs the extra ``otel``; of it, only the API is used here.

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

import time
from collections.abc import Mapping
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

from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import Event
from aprilsched.telemetry.dispatching import DispatchingListener
from aprilsched.types import Batch, Rollout

__all__ = ["Spans", "epoch_of_monotonic"]

_Attributes = Mapping[str, AttributeValue]
_Call = Literal["pause", "refit", "continue"]
_NANOSECONDS = 1e9


def epoch_of_monotonic() -> int:
    """The wall-clock time, in ns since 1970, at which :func:`time.monotonic` was 0."""
    return time.time_ns() - time.monotonic_ns()


class Spans(DispatchingListener):
    """Writes spans of a run. Use it as ``with Spans() as spans:`` around the scheduler.

    Behind a :class:`~aprilsched.telemetry.queued.QueuedListener`, give it `kinds`.

    Args:
        tracer: None takes the one of the provider that the process has set up.
        epoch_ns: the wall-clock time, in ns since 1970, of the events' time 0. None puts the first
            event now: for a clock that is not the machine's (a virtual one, a log's), whose seconds
            then run on from there.
        attributes: of the run's span.
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
        """The update before, and when it ended."""
        self._calls: dict[tuple[str, _Call], Span] = {}
        """Under way, by engine."""
        self._evaluations: dict[int, Span] = {}
        self._launched: dict[int, float] = {}
        """When each rollout was that is in flight."""
        self._ended: dict[int, float] = {}
        """When their responses did."""
        self._requests: dict[int, int] = {}
        """The rollout of each request under way."""
        self._episodes: set[int] = set()
        self._handlers = {
            ev.Opened: self._opened,
            ev.UpdateRequested: self._update_requested,
            ev.UpdateWithdrawn: self._update_withdrawn,
            ev.EvaluationRequested: self._evaluation_requested,
            ev.Finished: self._finished,
            ev.EpisodeFinished: self._episode_finished,
            ev.Paused: self._paused,
            ev.Refitted: self._refitted,
            ev.Continued: self._continued,
            ev.ControlFailed: self._control_failed,
            do.Launch: self._launch,
            do.Send: self._send,
            do.StartEpisode: self._start_episode,
            do.CancelWork: self._cancel_work,
            do.Pause: self._pause,
            do.Refit: self._refit,
            do.Continue: self._continue,
            do.LoseEngine: self._lose_engine,
            do.FinishUpdate: self._finish_update,
            do.Deliver: self._deliver,
            do.DeliverEvaluation: self._deliver_evaluation,
        }

    @property
    def kinds(self) -> frozenset[type]:
        """The types of events and commands that it looks at."""
        return frozenset(self._handlers)

    def hear(self, what: Event | Command, now: float) -> None:
        if self._epoch_ns is None:
            self._epoch_ns = time.time_ns() - round(now * _NANOSECONDS)
        super().hear(what, now)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is under way."""
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

    def _opened(self, event: ev.Opened) -> None:
        if self._run is not None:
            return
        names = tuple(engine.name for engine in event.engines)
        self._run = self._begin("run", None, {**self._attributes, "aprilsched.run.engines": names})
        self._batch = self._begin("batch", self._run)

    def _deliver(self, command: do.Deliver) -> None:
        batch = command.batch
        self._rollouts(batch, self._batch)
        self._end(
            self._batch,
            {
                "aprilsched.batch.index": batch.index,
                "aprilsched.batch.groups": len(batch.groups),
                "aprilsched.policy.version": batch.version,
                "gen_ai.usage.output_tokens": batch.tokens,
            },
        )
        self._batch = self._begin("batch", self._run)

    def _evaluation_requested(self, event: ev.EvaluationRequested) -> None:
        self._evaluations[event.evaluation_id] = self._begin("evaluation", self._run)

    def _deliver_evaluation(self, command: do.DeliverEvaluation) -> None:
        span = self._evaluations.pop(command.evaluation_id, None)
        self._rollouts(command.batch, span)
        self._end(span, {"aprilsched.policy.version": command.batch.version})

    # --- rollouts ------------------------------------------------------------------------------

    def _launch(self, command: do.Launch) -> None:
        self._launched.update(dict.fromkeys(command.rollout_ids, self._now))

    def _send(self, command: do.Send) -> None:
        self._requests[command.request_id] = command.rollout_id

    def _start_episode(self, command: do.StartEpisode) -> None:
        self._episodes.add(command.rollout_id)

    def _finished(self, event: ev.Finished) -> None:
        rollout_id = self._requests.pop(event.request_id, None)
        if rollout_id in self._launched and rollout_id not in self._episodes:
            self._ended[rollout_id] = self._now

    def _episode_finished(self, event: ev.EpisodeFinished) -> None:
        if event.rollout_id in self._launched:
            self._ended[event.rollout_id] = self._now

    def _rollouts(self, batch: Batch, parent: Span | None) -> None:
        for rollout in batch.rollouts:
            at = self._launched.pop(rollout.rollout_id, self._now)
            ended = self._forget(rollout.rollout_id)
            span = self._rollout_span(rollout.rollout_id, at, parent, _attributes(rollout))
            self._end(span, at=ended)

    def _cancel_work(self, command: do.CancelWork) -> None:
        for rollout_id in command.rollout_ids:
            at = self._launched.pop(rollout_id, None)
            ended = self._forget(rollout_id)
            if at is None:
                continue
            attributes = {"aprilsched.drop.reason": command.reason}
            span = self._rollout_span(rollout_id, at, self._batch, attributes)
            self._end(span, at=ended, error=command.cause or command.reason)

    def _rollout_span(
        self, rollout_id: int, at: float, parent: Span | None, attributes: _Attributes
    ) -> Span:
        named = {"aprilsched.rollout.id": rollout_id, **attributes}
        return self._begin("rollout", parent, named, at=at)

    def _forget(self, rollout_id: int) -> float:
        self._episodes.discard(rollout_id)
        return self._ended.pop(rollout_id, self._now)

    # --- updates -------------------------------------------------------------------------------

    def _update_requested(self, event: ev.UpdateRequested) -> None:
        attributes = {"aprilsched.policy.version": event.version}
        self._update = self._begin("update", self._batch, attributes)

    def _update_withdrawn(self, _: ev.UpdateWithdrawn) -> None:
        if self._update is not None:
            self._update.set_attribute("aprilsched.update.withdrawn", True)

    def _finish_update(self, command: do.FinishUpdate) -> None:
        lost = tuple(name for name, _ in command.failed)
        if self._update is not None:
            self._end(self._update, {"aprilsched.update.failed_engines": lost}, error=command.cause)
            self._updated = (self._update, self._now)
        self._update = None

    def _pause(self, command: do.Pause) -> None:
        self._call(command.engine, "pause", {"aprilsched.pause.mode": command.mode})

    def _refit(self, command: do.Refit) -> None:
        for engine in command.engines:
            self._call(engine, "refit", {"aprilsched.policy.version": command.version})

    def _continue(self, command: do.Continue) -> None:
        self._call(command.engine, "continue", {})

    def _call(self, engine: str, call: _Call, attributes: _Attributes) -> None:
        parent = self._update or self._batch
        if self._updated is not None and self._updated[1] == self._now:
            parent = self._updated[0]  # engines are let go on in the moment in which it is over
        self._answer(engine, call)
        self._calls[engine, call] = self._begin(
            call, parent, {"aprilsched.engine.name": engine, **attributes}
        )

    def _answer(self, engine: str, call: _Call, error: str = "") -> None:
        self._end(self._calls.pop((engine, call), None), error=error)

    def _paused(self, event: ev.Paused) -> None:
        self._answer(event.engine, "pause")

    def _refitted(self, event: ev.Refitted) -> None:
        self._answer(event.engine, "refit", event.cause)

    def _continued(self, event: ev.Continued) -> None:
        self._answer(event.engine, "continue")

    def _control_failed(self, event: ev.ControlFailed) -> None:
        if event.call == "pause" or event.call == "refit" or event.call == "continue":
            self._answer(event.engine, event.call, event.cause)

    def _lose_engine(self, command: do.LoseEngine) -> None:
        for engine, call in list(self._calls):
            if engine == command.engine:
                self._answer(engine, call, command.cause)
        if self._run is not None:
            attributes = {"aprilsched.engine.name": command.engine, "error.message": command.cause}
            self._run.add_event("aprilsched.engine.lost", attributes, self._ns(self._now))


def _attributes(rollout: Rollout) -> dict[str, Any]:
    engines = dict.fromkeys(run.engine for run in rollout.segments if run.engine is not None)
    return {
        "aprilsched.group.id": rollout.group_id,
        "aprilsched.rollout.engines": tuple(engines),
        "aprilsched.rollout.versions": tuple(
            dict.fromkeys(run.version for run in rollout.segments if run.engine is not None)
        ),
        "aprilsched.rollout.turns": rollout.turns,
        "gen_ai.response.finish_reasons": (rollout.finish_reason,),
        "gen_ai.usage.input_tokens": len(rollout.prompt_ids),
        "gen_ai.usage.output_tokens": len(rollout),
    }
