"""Handles the results of a request: tokens, its end, its interruption, its failure.

An attempt that was closed earlier, because its engine was lost, may still send tokens. Such late
answers are ignored, so that no token is counted twice.
"""

from __future__ import annotations

from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.admission import Admission
from aprilsched.kernel.core.state.in_flight import InFlight
from aprilsched.kernel.core.state.ledger import BUSY, Reason
from aprilsched.kernel.core.state.records import Refusal, RequestRecord, State
from aprilsched.kernel.core.state.state import Fleet, SchedulerState
from aprilsched.kernel.core.steps.drop import count_failure, drop
from aprilsched.kernel.core.steps.engines import lose
from aprilsched.kernel.core.steps.follow import follow
from aprilsched.kernel.core.steps.members import lose_member
from aprilsched.kernel.core.steps.migration import note_crowding
from aprilsched.kernel.core.steps.turns import end_turn, refuse_turn, take_back
from aprilsched.kernel.core.steps.wrong_versions import disown, foreign_version

_MOST_FAILURES = 3
"""Failed attempts in a row, without a successful one, after which an engine is lost."""


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
    state.out.facts.append(
        facts.TokensReceived(
            request_id=event.request_id,
            tokens=tokens,
            recomputed=request.pending_prefill,
            dropped=dropped,
            token_ids=event.token_ids.tolist() if state.tells_tokens else None,
            logprobs=event.logprobs.tolist() if state.tells_tokens else None,
            decode_seconds=event.decode_seconds,
        )
    )
    if request.pending_prefill:
        request.pending_prefill = 0
        _note_success(state.fleet, request)
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
    # Nearly every chunk has the expected label, so this comparison comes first.
    label, foreign = event.label, None
    same = label is None or label == request.version
    if label is not None and not same:
        foreign = foreign_version(state.weights, state.rolling, request, (label,))
    if foreign is not None and follow(state, request.engine, foreign):
        foreign = None
    if foreign is not None:
        _note_reported_version(state.in_flight, request, foreign)
    elif not same:
        _note_newer_version(state, request)
    if not same or request.version != request.sent_version:
        _note_mixed_keys(state.in_flight, state.fleet, request)
    state.in_flight.arrive(request, event.token_ids, event.logprobs, event.rows)
    if state.config.dispatch.migrate:
        note_crowding(state.in_flight, state.fleet, state.now, request.engine)
    if state.staleness.finishes:
        state.delivery.must_deliver.note(request.rollout.group, state.weights.versions.trainer)
    if request.refusal is not None:
        refusal, request.refusal = request.refusal, None
        why = f"it refused what {request.engine} takes: {refusal.cause}"
        _count_engine_failure(state, refusal.engine, why, sent=refusal.sent)
    if foreign is not None:
        disown(state, request, foreign)


def _note_mixed_keys(in_flight: InFlight, fleet: Fleet, request: RequestRecord) -> None:
    """Note that the engine sampled under another version than the attempt's cache key names.

    A tier that survives flushes may have received KV of both versions under this key.
    """
    log, control = request.rollout.log, fleet.control.engines[request.engine]
    if control.able.stores_kv and request.adapter is None and not log.stale_keys:
        log.stale_keys = True
        in_flight.journal.change(request.rollout)


def _note_reported_version(in_flight: InFlight, request: RequestRecord, label: int) -> None:
    """Record the tokens of the attempt under the version that the engine reports.

    If that version is older than the one at dispatch, the process was restarted before it took the
    attempt, so all tokens of the attempt have that version. A newer version was loaded during the
    attempt, so the chunk may contain older tokens.
    """
    if request.adapter is not None or label > request.sent_version:
        request.rollout.log.exact = False
        in_flight.journal.change(request.rollout)
    if request.adapter is None:
        request.version = label


def _note_newer_version(state: SchedulerState, request: RequestRecord) -> None:
    """Note that an update under way reached the attempt, as the label on its tokens shows.

    The attempt may have been sent after the update started, and the engine may report the old
    version afterwards, because another client restored the old weights. Then only the spans show
    the versions of its tokens; if the engine is lost, they stay unknown.
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
        # The engine had another version than it should, and no rollout may mix two.
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
    """Note that an engine has no room for a request; return whether it counts as failing.

    An engine counts as failing if it has had no room for too long.
    """
    engine, fleet = request.engine, state.fleet
    in_flight = state.in_flight.open[engine]
    if engine not in fleet.admissions:
        fleet.admissions[engine] = Admission()
        state.out.announce(facts.EngineBusy(engine=engine, in_flight=in_flight, cause=event.busy))
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
    """Close an attempt that has returned, and return the first impossible version in its spans.

    A version is impossible if the attempt cannot have been sampled under it. None if there is none.
    """
    spans = event.spans
    versions = [] if spans is None else [span.version for span in spans]
    if versions.count(request.sent_version) < len(versions):
        _note_mixed_keys(state.in_flight, state.fleet, request)
    state.note_work(request.engine)
    state.in_flight.close_attempt(request, spans, event.rows, event.answer)
    ranges = None if spans is None else tuple([(s.version, s.start, s.end) for s in spans])
    answers = None if event.answer is None else dict(event.answer.sizes)
    state.out.tell(
        facts.AttemptEnded(
            request_id=request.request_id,
            outcome=outcome,
            cause=cause,
            spans=ranges,
            answers=answers,
        )
    )
    state.delivery.must_deliver.note(request.rollout.group, state.weights.versions.trainer)
    return foreign_version(state.weights, state.rolling, request, versions)


def on_failed(state: SchedulerState, request: RequestRecord, event: ev.Failed) -> None:
    engine, rollout = request.engine, request.rollout
    state.note_work(engine)
    state.in_flight.close_attempt(request, None)
    request.shun(engine)
    if event.final and _another_may_take_it(state.fleet, request):
        request.refusal = Refusal(engine=engine, sent=request.sent, cause=event.cause)
        exhausted = ""
    elif rollout.state is State.RETURNING:
        exhausted = ""  # a withdrawn request is not sent again, so its attempts are not counted
    else:
        exhausted = count_failure(request, state.config, event)
        if event.answered and request.refusal is None:
            request.refusal = Refusal(engine=engine, sent=request.sent, cause=event.cause)
    retried = rollout.group.dropped is None and not exhausted
    state.out.tell(
        facts.AttemptEnded(
            request_id=request.request_id, outcome="failed", cause=event.cause, retried=retried
        )
    )
    if rollout.group.dropped is None and exhausted:
        if event.final and state.caller.episodes:
            refuse_turn(
                state.in_flight, state.out, request, event.cause.removeprefix(f"{engine}: ")
            )
        elif event.final:
            drop(state, rollout.group, Reason.FAILED, exhausted, culprit=rollout.rollout_id)
        else:
            lose_member(state, rollout, Reason.FAILED, exhausted)
    else:
        state.in_flight.counters.retries += rollout.group.dropped is None
        take_back(state, request)
    if not event.final:
        _note_broken_connection(state.fleet, engine, event.cause)
        if not (event.answered and _serves_others(state.in_flight, engine)):
            _count_engine_failure(
                state, engine, event.cause, sent=request.sent, proven=not event.answered
            )


def _note_broken_connection(fleet: Fleet, engine: str, cause: str) -> None:
    """Let the engine be queried for its version before it gets another request.

    A server that died and was restarted at once serves the weights that it was first started with.
    """
    control = fleet.control.engines.get(engine)
    if control is not None:
        fleet.control.note_broken_connection(control, cause)


def _another_may_take_it(fleet: Fleet, request: RequestRecord) -> bool:
    """Return whether another engine should try a refused request.

    An engine that lost its key or its adapters, or whose proxy is broken, refuses every request,
    and does so faster than the others answer. It alone would end the run.
    """
    return request.refusal is None and bool(fleet.control.engines.keys() - request.avoid)


def _serves_others(in_flight: InFlight, engine: str) -> bool:
    """Return whether the engine generates for other requests now.

    If so, a failure is the request's fault, unless another engine takes the request. Otherwise one
    client whose request fails everywhere would put every engine out of use, with all requests in
    them. Stalled streams have a separate timeout.
    """
    return any(request.gained for request in in_flight.open_requests(engine))


def _note_success(fleet: Fleet, request: RequestRecord) -> None:
    """Reset the failure count once the engine answers a request sent after the last failure."""
    control = fleet.control.engines.get(request.engine)
    if control is not None and request.sent > control.last_failure:
        control.consecutive_failures, control.suspect = 0, False


def _count_engine_failure(
    state: SchedulerState, engine: str, cause: str, *, sent: int, proven: bool = True
) -> None:
    """Count a failure of an engine, and lose the engine after too many in a row.

    A dead engine answers fastest and has the least load, so it would get every request. Failures of
    attempts that were open at the same time count once: a moment without network, or a trainer that
    blocks the event loop until every connection has timed out, must not cost the whole fleet.

    Without `proven` the requests may be at fault, so the engine is not lost yet: it must first
    generate tokens for a probe of the scheduler before it gets another request.
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
