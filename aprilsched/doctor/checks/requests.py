"""Checks of requests that end early, and of hazards of requests that are not tried.

Hazards are not tried where a trial takes too long or ends requests. Such a line passes if the
scheduler's own behaviour avoids the hazard on every server; it warns if the result depends on the
server, because that was not examined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aprilsched.doctor.findings import (
    NEWER,
    Check,
    Notes,
    Verdict,
    failed,
    left_out,
    never_met,
    not_tried,
    passed,
    warned,
)

__all__ = ["CHECKS", "NOT_TRIED"]


def abort(notes: Notes) -> Verdict:
    """Whether an abort ends a running request."""
    if notes.abort_seconds is None or not notes.aborted:
        return left_out(notes, "aborts")
    reason: dict[str, Any] = notes.aborted[-1]["meta_info"]["finish_reason"] or {}
    kind = reason.get("type")
    seen = f"ended after {notes.abort_seconds * 1e3:.0f} ms with {kind!r}"
    if kind == "length":
        return warned(f"{seen}: it was over before the abort")
    return passed(seen) if kind == "abort" else failed(seen, NEWER)


def counts(notes: Notes) -> Verdict:
    """Whether an aborted stream has as many ids as logprobs."""
    if not notes.aborted:
        return left_out(notes, "aborts")
    last = notes.aborted[-1]
    ids = len(last.get("output_ids", []))
    known = len(last["meta_info"].get("output_token_logprobs") or [])
    seen = f"the last event has {ids} ids and {known} logprobs"
    return passed(seen) if ids == known else warned(seen)


def unknown(notes: Notes) -> Verdict:
    """Whether the abort of an unknown rid is harmless."""
    if notes.unknown_abort_status is None:
        return left_out(notes, "aborts")
    seen = f"aborting an unknown rid answers {notes.unknown_abort_status}"
    return passed(seen) if notes.unknown_abort_status == 200 else failed(seen, NEWER)


def duplicate(notes: Notes) -> Verdict:
    """Whether a rid in use is refused."""
    if notes.duplicate_status is None:
        return left_out(notes, "aborts")
    seen = f"a second request of a running rid answers {notes.duplicate_status}"
    if notes.duplicate_status == 400:
        return passed(seen)
    return warned(seen)


def hanging_up(notes: Notes) -> Verdict:
    """Whether the request of a disconnected client ends."""
    if notes.others != 0:
        return left_out(
            notes, "hanging_up", "others' requests are on it, or it does not report its load"
        )
    if notes.left_seconds is None:
        if notes.paused_before or "hanging_up" in notes.trouble:
            return left_out(notes, "hanging_up")
        return warned("its request did not leave the server within 3 s")
    return passed(f"its request was gone after {notes.left_seconds * 1e3:.0f} ms")


CHECKS: Sequence[Check] = (
    Check(
        name="abort",
        judge=abort,
        meaning="An abort without a pause gives all tokens at once; it is how rollouts move.",
        action="repeats the abort until the stream has ended",
    ),
    Check(
        name="ids at an abort (hazard 2)",
        judge=counts,
        meaning="A stream can give one id more than logprobs when it is aborted.",
        action="takes ids from the logprobs, never by position",
    ),
    Check(
        name="abort of nobody (hazard 11)",
        judge=unknown,
        meaning="Aborts may come late, and must be harmless then.",
        action="repeats aborts without asking first",
    ),
    Check(
        name="duplicate rid (hazard 11)",
        judge=duplicate,
        meaning="A rid in use is refused; refused in a stream, it ends the first one after 2 s.",
        action="gives every attempt a new rid of one fixed length, since aborts match by prefix",
    ),
    Check(
        name="hanging up (hazard 9)",
        judge=hanging_up,
        meaning="A request whose client has disconnected may decode to its end.",
        action="aborts every stream that it leaves before its end",
    ),
)

NOT_TRIED: Sequence[Check] = (
    Check(
        # It passes: the scheduler always streams.
        name="abort after retract (hazard 1)",
        judge=never_met,
        meaning="A response that is not streamed keeps only a multiple of 50 tokens.",
        action="always streams, so at most the tokens of one interval are sampled again",
    ),
    Check(
        # It passes: the limits are those of the scheduler's own connections.
        name="time limits of clients (hazard 13)",
        judge=never_met,
        meaning="A total time limit, or a limit of 100 connections, cuts off stragglers.",
        action="sets neither; only control calls have a time limit",
    ),
    Check(
        # It passes: repeating is up to the scheduler.
        name="retries (hazard 14)",
        judge=never_met,
        meaning="A repeated generation decodes at the same time as the first one.",
        action="repeats a generation only if nothing was sent, or after an abort",
    ),
    Check(
        # It warns: the cost of a prefill pass is the server's, and not all requests are refills.
        name="trickling requests (hazard 15)",
        judge=not_tried,
        meaning="Each arrival costs every running request a prefill pass.",
        action="starts many groups together; a retry or a next turn still arrives alone",
    ),
)
