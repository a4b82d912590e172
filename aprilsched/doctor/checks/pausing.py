"""Checks of what a pause stops, keeps and holds back."""

from __future__ import annotations

from collections.abc import Sequence

from aprilsched.doctor.findings import (
    NEWER,
    NO_STRAGGLERS,
    Check,
    Notes,
    PauseNotes,
    Verdict,
    failed,
    left_out,
    passed,
    warned,
)

__all__ = ["CHECKS"]

_NOT_IN_PLACE = 'do not use straggler="in_place"'


def retract(notes: Notes) -> Verdict:
    """Whether pause(retract) stops a stream and keeps it open."""
    return _stops(notes, notes.retract, "retract", NO_STRAGGLERS)


def in_place(notes: Notes) -> Verdict:
    """Whether pause(in_place) stops a stream and keeps it open."""
    return _stops(notes, notes.in_place, "in_place", _NOT_IN_PLACE)


def _stops(notes: Notes, noted: PauseNotes, scenario: str, to_do: str) -> Verdict:
    if noted.tokens_during is None or noted.pause_seconds is None:
        return left_out(notes, scenario, noted.why_not or "")
    if noted.tokens_during:
        return failed(f"{noted.tokens_during} tokens arrived while it was paused", to_do)
    if noted.held_silent is False:
        return failed("a request sent while it was paused was generated", to_do)
    if noted.ended_during:
        seen = "a response of ours was over when the pause took effect"
        return warned(seen) if noted.ready_status == 503 else failed(seen, to_do)
    return passed(f"paused in {noted.pause_seconds * 1e3:.0f} ms, no token arrived meanwhile")


def goes_on(notes: Notes) -> Verdict:
    """Whether a stream continues after retract, flush and continue."""
    return _goes_on(notes, notes.retract, "retract", NO_STRAGGLERS)


def goes_on_in_place(notes: Notes) -> Verdict:
    """Whether a stream continues after in_place and continue."""
    return _goes_on(notes, notes.in_place, "in_place", _NOT_IN_PLACE)


def _goes_on(notes: Notes, noted: PauseNotes, scenario: str, to_do: str) -> Verdict:
    if noted.tokens_during is None or noted.same_tokens is None:
        return left_out(notes, scenario, noted.why_not or "")
    if noted.finish != "length":
        return failed(f"the stream ended with {noted.finish!r} after continue", to_do)
    if not noted.same_tokens:
        return warned("the stream continued with other tokens than without a pause")
    return passed("the stream continued with the same tokens as without a pause")


def flush(notes: Notes) -> Verdict:
    """Whether the cache can be flushed between retract and continue."""
    noted = notes.retract
    if noted.flush_status is None:
        return left_out(notes, "retract", noted.why_not or "")
    seen = f"flush_cache answers {noted.flush_status} after a retract"
    if noted.flush_status == 200:
        return passed(seen)
    return failed(seen, f'{NO_STRAGGLERS} with kv_after_refit="apart"')


def held(notes: Notes) -> Verdict:
    """Whether a request that is sent during a pause waits and is answered later."""
    noted = notes.retract
    if noted.held_completed is None:
        return left_out(notes, "retract", noted.why_not or "")
    if noted.held_silent and noted.held_completed:
        return passed("held silently, and answered after continue")
    return failed(
        "answered while paused" if not noted.held_silent else "lost after continue", NEWER
    )


def ready(notes: Notes) -> Verdict:
    """Whether /ready shows a pause."""
    noted = notes.retract
    if noted.ready_status is None:
        return left_out(notes, "retract", noted.why_not or "")
    seen = f"/ready answers {noted.ready_status} while paused"
    return passed(seen) if noted.ready_status == 503 else warned(seen)


def loads(notes: Notes) -> Verdict:
    """What the loads report during a pause."""
    noted = notes.retract
    if noted.tokens_during is None:
        return left_out(notes, "retract", noted.why_not or "")
    return passed(f"/v1/loads reports {noted.running_told} requests while paused")


def abort_in_place(notes: Notes) -> Verdict:
    """What happens to a stream that is aborted between pause(in_place) and continue."""
    noted = notes.in_place
    if noted.abort_finish is None:
        return left_out(notes, "in_place", noted.why_not or "")
    when = "before" if noted.abort_ended_during else "after"
    more = f"{noted.abort_tokens} more tokens arrived"
    seen = f"ended {when} continue with {noted.abort_finish!r}, {more}"
    return passed(seen) if noted.abort_finish == "abort" else warned(seen)


CHECKS: Sequence[Check] = (
    Check(
        name="pause retract",
        judge=retract,
        meaning="Stragglers wait inside the engine while new weights come in.",
        action='uses this pause for straggler="retract"',
    ),
    Check(
        name="continue after retract",
        judge=goes_on,
        meaning="A straggler's KV is recomputed and nothing of it is lost.",
        action="delivers the straggler in a later batch",
    ),
    Check(
        name="flush after retract (hazard 3)",
        judge=flush,
        meaning="Without a flush, tokens attend to keys of older weights.",
        action="flushes between pause and update",
    ),
    Check(
        name="held requests (hazard 4)",
        judge=held,
        meaning="A request sent during a pause is silent, and an abort of it is lost.",
        action="sends none while paused, and closes the connection of one without a token",
    ),
    Check(
        name="ready while paused (hazard 6)",
        judge=ready,
        meaning="/ready shows to other programs that a server is paused.",
        action="asks it before it probes with a request; routers and watchdogs should ask it too",
    ),
    Check(
        name="loads while paused (hazard 7)",
        judge=loads,
        meaning="The loads are those from before the pause.",
        action="counts its own requests instead",
    ),
    Check(
        name="pause in_place",
        judge=in_place,
        meaning="The KV stays, so tokens after an update attend to keys of older weights.",
        action='uses this pause only for straggler="in_place"',
    ),
    Check(
        name="continue after in_place",
        judge=goes_on_in_place,
        meaning="Nothing is recomputed.",
        action="delivers the straggler in a later batch",
    ),
    Check(
        name="abort under in_place (hazard 5)",
        judge=abort_in_place,
        meaning="Such an abort acts only after continue, with one token of the new version.",
        action="repeats the abort until the stream ends, and trusts the spans for that token",
    ),
)
