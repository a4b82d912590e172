"""Checks of what the server is, and whether it is left as it was found."""

from __future__ import annotations

from collections.abc import Sequence

from aprilsched.doctor.findings import (
    NEWER,
    Check,
    Notes,
    Verdict,
    failed,
    left_out,
    passed,
    warned,
)
from aprilsched.engines.sglang.probe import SPANS_SINCE

__all__ = ["CHECKS", "LAST"]

_READ_UP_TO = (0, 5, 23)
"""The newest release whose source was read for the hazards."""
_RESTART = "look at its log, and restart it"


def release(notes: Notes) -> Verdict:
    """Which release it is, and whether its hazards are known."""
    seen = f"{notes.facts.capabilities.server}, model {notes.facts.model_path}"
    if notes.simulated:
        return warned(f"{seen}, simulated: no model is behind it")
    if notes.version < SPANS_SINCE:
        return warned(seen, NEWER)
    if notes.version > _READ_UP_TO:
        return warned(seen)
    return passed(seen)


def paused_before(notes: Notes) -> Verdict:
    """Whether somebody left it paused."""
    if notes.paused_before:
        return failed(
            "/ready answers 503: it is paused",
            "let whoever paused it continue it, or send POST /continue_generation; then examine it "
            "again",
        )
    return passed("it is not paused")


def others(notes: Notes) -> Verdict:
    """Whether it was idle, so that everything could be examined."""
    if notes.others is None:
        return warned("/v1/loads does not report how many requests are on it")
    if notes.others:
        return warned(
            f"{notes.others} requests of others were on it",
            "examine it again when it is idle, so that pauses are tried",
        )
    return passed("it was idle")


def vocabulary(notes: Notes) -> Verdict:
    """Whether token ids beyond the vocabulary can be refused in time."""
    size = notes.facts.vocab_size
    if size is None:
        return warned(
            "it does not report the size of its vocabulary; ids beyond it were not tried",
            "make sure that no prompt has a token id beyond the vocabulary",
        )
    return passed(f"{size} token ids; ids beyond it were not tried")


def room(notes: Notes) -> Verdict:
    """How much fits on it."""
    found = notes.facts.capabilities
    seen = f"{found.max_running_requests} running requests, {found.kv_tokens} tokens of KV"
    whole = found.max_running_requests is not None and found.kv_tokens is not None
    return passed(seen) if whole else warned(seen)


def label(notes: Notes) -> Verdict:
    """Whether its label of the weights is a version number."""
    found = notes.facts.label
    if found == "default" or (found.isascii() and found.isdigit()):
        return passed(f"weight_version is {found!r}")
    return warned(f"weight_version is {found!r}, which is not a number")


def health(notes: Notes) -> Verdict:
    """Whether it generates at all."""
    if notes.health_status is None:
        return left_out(notes, "health")
    seen = f"/health answers {notes.health_status} while it is not paused"
    return passed(seen) if notes.health_status == 200 else failed(seen, _RESTART)


def unchanged(notes: Notes) -> Verdict:
    """Whether the doctor left it unchanged."""
    if notes.label_after is None or notes.paused_after is None:
        return failed("it did not answer after everything was taken back", _RESTART)
    wrong = [
        what
        for what, is_so in (
            (f"weight_version is {notes.label_after!r}", notes.label_after != notes.facts.label),
            ("it is paused", notes.paused_after and not notes.paused_before),
            (f"{notes.running_after} requests run", notes.others == 0 and notes.running_after),
        )
        if is_so
    ]
    if wrong:
        return failed(" and ".join(wrong), _RESTART)
    state = "still paused" if notes.paused_after else "not paused"
    idle = ", no request on it" if notes.running_after == 0 else ""
    return passed(f"weight_version {notes.label_after!r}, {state}{idle}")


CHECKS: Sequence[Check] = (
    Check(
        name="release",
        judge=release,
        meaning="The hazards were read or measured on SGLang 0.5.17 to 0.5.23.",
        action="asks each server what it can do, and does not use what it cannot",
    ),
    Check(
        name="left paused (hazard 12)",
        judge=paused_before,
        meaning="A client that stops between pause and continue leaves the server paused for ever.",
        action="follows every pause by a continue, and continues every server that it opens",
    ),
    Check(
        name="idle",
        judge=others,
        meaning="A server with others' requests is never paused or flushed by this command.",
        action="none",
    ),
    Check(
        name="vocabulary (hazard 3b)",
        judge=vocabulary,
        meaning="A token id beyond the vocabulary kills the scheduler of a real server.",
        action="refuses such a prompt before it is sent, where the size is known",
    ),
    Check(
        name="room",
        judge=room,
        meaning="A batch larger than this cannot run all at once.",
        action="leaves the rest in the server's queue; set dispatch.max_in_flight to bound it",
    ),
    Check(
        name="weight version",
        judge=label,
        meaning="Tokens are attributed to policy versions by this label.",
        action="labels each update with its number; any other label counts as version 0",
    ),
    Check(
        name="health (hazard 6)",
        judge=health,
        meaning="/health generates a token, so it hangs while paused; a router may eject it then.",
        action="never calls it, but /ready and /model_info; routers should do the same",
    ),
)
LAST: Sequence[Check] = (
    Check(
        name="left as found",
        judge=unchanged,
        meaning="This command continues what it paused and ends what it began.",
        action="none",
    ),
)
