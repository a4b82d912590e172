"""Hazards around requests that are not tried, because trying them takes too long or ends requests.

Two kinds, and the status tells them apart. Where the scheduler's own behaviour keeps the hazard
away from a run on every server, whatever the server does, the line passes. Where what happens
depends on the server, the line warns: nobody has looked.
"""

from __future__ import annotations

from collections.abc import Sequence

from aprilsched.doctor.findings import Check, never_met, not_tried

__all__ = ["CHECKS"]

CHECKS: Sequence[Check] = (
    Check(
        # Passes: the scheduler asks for no whole answers.
        name="abort after retract (hazard 1)",
        judge=never_met,
        meaning="A whole answer keeps only multiples of 50 tokens then.",
        action="always streams, and so samples at most the tokens of one interval again",
    ),
    Check(
        # Passes: the limits are those of the scheduler's own connections.
        name="time limits of clients (hazard 13)",
        judge=never_met,
        meaning="A total time limit, or 100 connections, cuts the long tail off.",
        action="sets neither; control calls alone have a limit",
    ),
    Check(
        # Passes: it is the scheduler who repeats.
        name="retries (hazard 14)",
        judge=never_met,
        meaning="A repeated generation decodes beside the first one.",
        action="repeats one only if nothing was sent, or after an abort",
    ),
    Check(
        # Warns: what a prefill pass costs is the server's, and refills are not all that arrives.
        name="trickling requests (hazard 15)",
        judge=not_tried,
        meaning="Each arrival costs every running request a prefill pass.",
        action="starts groups many together; a retry or a next turn still comes alone",
    ),
)
