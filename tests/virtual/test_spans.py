"""Tests a run's spans with OpenTelemetry's SDK: they are one complete tree at the run's times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, Tracer

from aprilsched.core.messages import facts as of
from aprilsched.telemetry.spans import Spans, epoch_of_monotonic
from aprilsched.telemetry.worker import QueuedListener
from aprilsched.types import Batch
from tests.support.facts import changed, lost, opened, refitted
from tests.virtual.test_metrics import driven

NS = 1_000_000_000
OPENED = opened("a", "b")


class Kept:
    """Finished spans, and a tracer that adds to them."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer: Tracer = provider.get_tracer("test")

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == f"aprilsched.{name}"]


def identity(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def trace(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / NS


def about(span: ReadableSpan, name: str) -> object:
    return (span.attributes or {}).get(name)


@pytest.fixture(scope="module")
def run() -> tuple[Kept, list[Batch]]:
    kept = Kept()
    with Spans(kept.tracer, attributes={"aprilsched.clock": "virtual"}) as spans:
        batches = driven([spans], pace="asynchronous")
    return kept, batches


def test_it_is_one_tree(run: tuple[Kept, list[Batch]]):
    kept, _ = run
    names = {identity(span): span.name for span in kept.spans}
    below: dict[str, set[str]] = {}
    for span in kept.spans:
        parent = "" if span.parent is None else names[span.parent.span_id]
        below.setdefault(parent.removeprefix("aprilsched."), set()).add(
            span.name.removeprefix("aprilsched.")
        )
    assert below[""] == {"run"}
    assert below["run"] == {"batch", "rollout"}  # those in flight at the end
    assert below["batch"] >= {"rollout", "update"}
    assert below["update"] == {"pause", "refit", "continue"}
    assert len({trace(span) for span in kept.spans}) == 1


def test_every_rollout_has_a_span_below_its_batch(run: tuple[Kept, list[Batch]]):
    kept, batches = run
    by_index = {about(span, "aprilsched.batch.index"): span for span in kept.named("batch")}
    for batch in batches:
        span = by_index[batch.index]
        mine = {
            about(child, "aprilsched.rollout.id"): child
            for child in kept.named("rollout")
            if child.parent is not None and child.parent.span_id == identity(span)
        }
        for rollout in batch.rollouts:
            child = mine.pop(rollout.rollout_id)
            assert about(child, "gen_ai.usage.output_tokens") == len(rollout)
            assert about(child, "gen_ai.usage.input_tokens") == len(rollout.prompt_ids)
            assert about(child, "gen_ai.response.finish_reasons") == (rollout.finish_reason,)
            assert seconds(child) > 0
        assert all(child.status.status_code is StatusCode.ERROR for child in mine.values())
        assert {about(child, "aprilsched.drop.reason") for child in mine.values()} <= {"stale"}
    dropped = [s for s in kept.named("rollout") if about(s, "aprilsched.drop.reason")]
    assert dropped


def test_batches_follow_each_other_and_updates_take_their_time(run: tuple[Kept, list[Batch]]):
    kept, _ = run
    spans = kept.named("batch")
    for before, after in pairwise(spans):
        assert before.end_time == after.start_time
    (whole,) = kept.named("run")
    assert sum(map(seconds, spans)) == pytest.approx(seconds(whole))
    assert about(whole, "aprilsched.clock") == "virtual"
    assert about(whole, "aprilsched.run.engines") == ("sim-0", "sim-1")
    refits = kept.named("refit")
    assert len(refits) == 8
    assert all(seconds(span) == pytest.approx(0.3) for span in refits)
    assert {about(span, "aprilsched.engine.name") for span in refits} == {"sim-0", "sim-1"}
    assert [about(span, "aprilsched.policy.version") for span in kept.named("update")] == [
        1,
        2,
        3,
        4,
    ]


def test_virtual_seconds_run_on_from_the_begin():
    kept, before = Kept(), time.time_ns()
    with Spans(kept.tracer) as spans:
        spans.on_facts([OPENED], 1000.0)
        after = time.time_ns()
        spans.on_facts([of.BatchRequested()], 4600.0)
    (run,) = kept.named("run")
    assert run.start_time is not None
    assert before <= run.start_time + 1 <= after + 2
    assert seconds(run) == 3600


def test_the_machine_s_clock_is_mapped_exactly():
    kept, epoch = Kept(), epoch_of_monotonic()
    with Spans(kept.tracer, epoch_ns=epoch) as spans:
        spans.on_facts([OPENED], 5.0)
    assert kept.named("run")[0].start_time == epoch + 5 * NS


def test_what_fails_says_so():
    kept = Kept()
    with Spans(kept.tracer) as spans:
        spans.on_facts([OPENED], 0.0)
        pausing = [changed(engine, "running", "pausing", pause="retract")[0] for engine in "ab"]
        spans.on_facts([of.UpdateBegun(version=1), *pausing], 1.0)
        spans.on_facts(changed("a", "pausing", "paused"), 1.5)
        failed = of.ControlCallFailed(engine="b", call="pause", cause="no answer")
        begun = of.RefitBegun(version=1, engines=("a",))
        spans.on_facts(
            [failed, *lost("b", "no answer"), begun, *changed("a", "paused", "refitting")], 2.0
        )
        finished = of.UpdateFinished(version=1, cause="no engine took it")
        spans.on_facts([*refitted("a", None, cause="half loaded"), finished], 3.0)
    by_name = {
        (span.name.removeprefix("aprilsched."), about(span, "aprilsched.engine.name")): span
        for span in kept.spans
    }
    assert by_name["pause", "a"].status.status_code is StatusCode.UNSET
    assert by_name["pause", "b"].status.description == "no answer"
    assert by_name["refit", "a"].status.description == "half loaded"
    assert by_name["update", None].status.description == "no engine took it"
    (event,) = kept.named("run")[0].events
    assert event.name == "aprilsched.engine.lost"
    assert event.timestamp == (kept.named("run")[0].start_time or 0) + 2 * NS


def test_in_a_thread_of_its_own_it_is_told_what_it_looks_at():
    kept = Kept()
    with Spans(kept.tracer) as spans:
        with QueuedListener(spans, kinds=spans.kinds, close_seconds=60) as queued:
            batches = driven([queued])
        assert queued.error is None
        assert queued.dropped == 0
    assert len(kept.named("batch")) == len(batches) + 1
    delivered = [s for s in kept.named("rollout") if about(s, "gen_ai.usage.output_tokens")]
    assert len(delivered) == sum(1 for batch in batches for _ in batch.rollouts)
