"""Handles what comes back for a request: tokens, its end, its interruption, its failure.

An attempt that was closed before, because its engine was lost, may still send something. Such late
answers are ignored, so that no token is counted twice.
"""

from __future__ import annotations

from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.admission import Admission
from aprilsched.kernel.core.state.ledger import BUSY, Reason
from aprilsched.kernel.core.state.records import Refusal, RequestRecord, State
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.core.steps.drop import count_failure, drop
from aprilsched.kernel.core.steps.engines import lose
from aprilsched.kernel.core.steps.follow import follow
from aprilsched.kernel.core.steps.members import lose_member
from aprilsched.kernel.core.steps.migration import note_crowding
from aprilsched.kernel.core.steps.turns import end_turn, refuse_turn, take_back
from aprilsched.kernel.core.steps.wrong_versions import disown, foreign_version

_MOST_FAILURES = 3
"""Failed attempts in a row, without one that went well, after which an engine is lost."""


def on_progress(state: SchedulerState, request: RequestRecord, event: ev.Progress) -> None:
    if event.prompt_tokens is not None:
        arrived = request.rollout.log.size - request.attempt_start
        sent = request.rollout.context_tokens - arrived
        state.in_flight.expand(request, max(0, event.prompt_tokens - sent))
    counters = state.in_flight.counters
    tokens = len(event.token_ids)
    state.fleet.health.tokens_arrived(request.engine, tokens)
    counters.tokens_generated += tokens
    counters.tokens_reprefilled += request.pending_prefill
    dropped = request.rollout.group.dropped
    # Appended without a call, because it is the most frequent of all facts.
    state.facts.append(
        facts.TokensReceived(
            request_id=event.request_id,
            tokens=tokens,
            recomputed=request.pending_prefill,
            dropped=dropped,
            token_ids=event.token_ids.tolist() if state.tells_tokens else None,
            logprobs=event.logprobs.tolist() if state.tells_tokens else None,
        )
    )
    if request.pending_prefill:
        request.pending_prefill = 0
        _note_success(state, request)
    if state.fleet.admissions and not request.gained:
        admission = state.fleet.admissions.get(request.engine)
        if admission is not None:
            admission.answer(
                state.in_flight.open[request.engine],
                sent=request.sent,
                attempts_sent=state.fleet.attempts_sent,
            )
    if dropped is not None:
        counters.tokens_discarded += tokens
        state.in_flight.ledger.late_tokens(dropped, tokens)
        return
    # Nearly every chunk has the expected label, so the comparison is made here first.
    label, foreign = event.label, None
    same = label is None or label == request.version
    if label is not None and not same:
        foreign = foreign_version(state, request, (label,))
    if foreign is not None and follow(state, request.engine, foreign):
        foreign = None
    if foreign is not None:
        _note_reported_version(state, request, foreign)
    elif not same:
        _note_newer_version(state, request)
    if not same or request.version != request.sent_version:
        _note_mixed_keys(state, request)
    state.in_flight.arrive(request, event.token_ids, event.logprobs, event.rows)
    if state.config.dispatch.migrate:
        note_crowding(state, request.engine)
    if state.staleness.finishes:
        state.delivery.must_deliver.note(request.rollout.group, state.weights.versions.trainer)
    if request.refusal is not None:
        refusal, request.refusal = request.refusal, None
        why = f"it refused what {request.engine} takes: {refusal.cause}"
        _count_engine_failure(state, refusal.engine, why, sent=refusal.sent)
    if foreign is not None:
        disown(state, request, foreign)


def _note_mixed_keys(state: SchedulerState, request: RequestRecord) -> None:
    """Note that the engine sampled under another version than the one that the cache key of the
    attempt names. A tier that survives flushes may have given it keys of both."""
    log, control = request.rollout.log, state.fleet.control.engines[request.engine]
    if control.stores_kv and request.adapter is None and not log.stale_keys:
        log.stale_keys = True
        state.in_flight.journal.change(request.rollout)


def _note_reported_version(state: SchedulerState, request: RequestRecord, label: int) -> None:
    """Note the tokens of the attempt under the version that the engine reports.

    If that version is older than the one that the attempt was sent under, the process was
    restarted before it took the attempt, so all tokens of the attempt have that version. A newer
    version was loaded while the attempt ran, so the chunk may have tokens from before.
    """
    if request.adapter is not None or label > request.sent_version:
        request.rollout.log.exact = False
        state.in_flight.journal.change(request.rollout)
    if request.adapter is None:
        request.version = label


def _note_newer_version(state: SchedulerState, request: RequestRecord) -> None:
    """Note that an update under way has met the attempt, which the label on its tokens shows.

    It may have been sent after the update began, and the engine may say afterwards that it has the
    old version, because somebody took the weights back. Only the spans can tell the versions of
    its tokens then; if the engine is lost, nobody can.
    """
    if request.adapter is None:
        request.crossed = True
        if state.weights.update is not None:
            state.weights.update.met.discard(request.request_id)


def on_finished(state: SchedulerState, request: RequestRecord, event: ev.Finished) -> None:
    control = state.fleet.control.engines[request.engine]
    control.consecutive_failures, control.version_seen_at = 0, state.now
    state.fleet.health.tokens_arrived(request.engine, 0)
    foreign = _close(state, request, "finished", event)
    if foreign is not None:
        disown(state, request, foreign)
    if request.rollout.group.dropped is not None:
        state.in_flight.forget(request)
        return
    request.rollout.finish_reason = event.reason
    if state.rolling and request.rollout.log.mixed and request.rollout.state is not State.RETURNING:
        # The engine had another version than it should have, and no rollout may have two.
        state.in_flight.requeue(request)
        return
    end_turn(state, request)


def on_interrupted(state: SchedulerState, request: RequestRecord, event: ev.Interrupted) -> None:
    if event.busy and _note_busy(state, request, event):
        failed = ev.Failed(
            request_id=event.request_id,
            attempt=event.attempt,
            cause=f"{BUSY}: {event.busy}",
            answered=True,
        )
        on_failed(state, request, failed)
        return
    if request.gained:
        request.failures, request.avoid = 0, frozenset()
    foreign = _close(state, request, "busy" if event.busy else "interrupted", event, event.busy)
    take_back(state, request)
    if foreign is not None:
        disown(state, request, foreign)


def _note_busy(state: SchedulerState, request: RequestRecord, event: ev.Interrupted) -> bool:
    """Note that an engine has no room for a request now. Returns whether it has been so for too
    long, and is taken for one that fails."""
    engine, fleet = request.engine, state.fleet
    in_flight = state.in_flight.open[engine]
    if engine not in fleet.admissions:
        fleet.admissions[engine] = Admission()
        state.announce(facts.EngineBusy(engine=engine, in_flight=in_flight, cause=event.busy))
    admission = fleet.admissions[engine]
    admission.refuse(
        state.now,
        sent=request.sent,
        attempts_sent=fleet.attempts_sent,
        others=in_flight - 1,
        partial=request.gained,
        wait_s=event.retry_after_s,
    )
    return state.now - admission.since >= state.config.health.fleet_wait_s


def _close(
    state: SchedulerState,
    request: RequestRecord,
    outcome: facts.Outcome,
    event: ev.Finished | ev.Interrupted,
    cause: str = "",
) -> int | None:
    """Close an attempt that came back. Returns the first version in its spans that it cannot have
    been sampled under; None if there is none."""
    spans = event.spans
    if any(span.version != request.sent_version for span in spans or ()):
        _note_mixed_keys(state, request)
    state.note_work(request.engine)
    state.in_flight.close_attempt(request, spans, event.rows, event.answer)
    told = None if spans is None else tuple([(s.version, s.start, s.end) for s in spans])
    answers = None if event.answer is None else dict(event.answer.sizes)
    state.tell(
        facts.AttemptEnded(
            request_id=request.request_id,
            outcome=outcome,
            cause=cause,
            spans=told,
            answers=answers,
        )
    )
    state.delivery.must_deliver.note(request.rollout.group, state.weights.versions.trainer)
    return foreign_version(state, request, [span.version for span in spans or ()])


def on_failed(state: SchedulerState, request: RequestRecord, event: ev.Failed) -> None:
    engine, rollout = request.engine, request.rollout
    state.note_work(engine)
    state.in_flight.close_attempt(request, None)
    request.shun(engine)
    if event.final and _another_may_take_it(state, request):
        request.refusal = Refusal(engine=engine, sent=request.sent, cause=event.cause)
        exhausted = ""
    elif rollout.state is State.RETURNING:
        exhausted = ""  # a withdrawn request is not sent again, so its attempts are not counted
    else:
        exhausted = count_failure(request, state.config, event)
        if event.answered and request.refusal is None:
            request.refusal = Refusal(engine=engine, sent=request.sent, cause=event.cause)
    retried = rollout.group.dropped is None and not exhausted
    state.tell(
        facts.AttemptEnded(
            request_id=request.request_id, outcome="failed", cause=event.cause, retried=retried
        )
    )
    if rollout.group.dropped is None and exhausted:
        if event.final and state.caller.episodes:
            refuse_turn(state, request, event.cause.removeprefix(f"{engine}: "))
        elif event.final:
            drop(state, rollout.group, Reason.FAILED, exhausted, culprit=rollout.rollout_id)
        else:
            lose_member(state, rollout, Reason.FAILED, exhausted)
    else:
        state.in_flight.counters.retries += rollout.group.dropped is None
        take_back(state, request)
    if not event.final:
        _note_broken_connection(state, engine, event.cause)
        if not (event.answered and _serves_others(state, engine)):
            _count_engine_failure(
                state, engine, event.cause, sent=request.sent, proven=not event.answered
            )


def _note_broken_connection(state: SchedulerState, engine: str, cause: str) -> None:
    """Let the engine be asked for its version before it gets another request: a server that died
    and was restarted at once answers with the weights that it was first started with."""
    control = state.fleet.control.engines.get(engine)
    if control is not None:
        state.fleet.control.note_broken_connection(control, cause)


def _another_may_take_it(state: SchedulerState, request: RequestRecord) -> bool:
    """Whether another engine should try a refused request.

    An engine that lost its key or its adapters, or whose proxy is broken, refuses every request,
    and faster than the others answer. It alone would end the run.
    """
    return request.refusal is None and bool(state.fleet.control.engines.keys() - request.avoid)


def _serves_others(state: SchedulerState, engine: str) -> bool:
    """Whether the engine generates for other requests now.

    What fails then is the request's fault, unless another engine takes it: one client whose request
    fails everywhere would otherwise put every engine out of use, with all requests in them. Streams
    that stand still have a timeout of their own.
    """
    return any(request.gained for request in state.in_flight.open_requests(engine))


def _note_success(state: SchedulerState, request: RequestRecord) -> None:
    """Begin a new row of failures: the engine has begun to answer a request that was sent after the
    last one."""
    control = state.fleet.control.engines.get(request.engine)
    if control is not None and request.sent > control.last_failure:
        control.consecutive_failures, control.suspect = 0, False


def _count_engine_failure(
    state: SchedulerState, engine: str, cause: str, *, sent: int, proven: bool = True
) -> None:
    """Count a failure of an engine, and lose the engine after too many in a row.

    A dead engine answers fastest and has the least load, so it would get every request. Failures of
    attempts that were open at the same time count once: a moment without network, or a trainer that
    blocks the event loop until every connection has timed out, must not cost the whole fleet.

    Without `proven` the requests may be at fault, so the engine is not lost yet: it has to generate
    something of the scheduler's own before it gets another request.
    """
    control = state.fleet.control.engines.get(engine)
    if control is None or sent <= control.last_failure:
        return
    control.last_failure = state.fleet.attempts_sent
    control.consecutive_failures += 1
    if control.consecutive_failures < _MOST_FAILURES:
        return
    if proven:
        lose(state, engine, f"it failed {control.consecutive_failures} times in a row: {cause}")
    else:
        control.suspect = True
