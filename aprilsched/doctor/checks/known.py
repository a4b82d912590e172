"""Hazards of requests that are not tried, because a trial takes too long or ends requests.

A line passes if the scheduler's own behaviour avoids the hazard on every server. A line warns if
the result depends on the server, because that was not examined.
"""

from __future__ import annotations

from collections.abc import Sequence

from aprilsched.doctor.findings import Check, never_met, not_tried

__all__ = ["CHECKS"]

CHECKS: Sequence[Check] = (
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
