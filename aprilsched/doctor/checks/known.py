"""Hazards that are not tried, because trying them kills, aborts or takes too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aprilsched.doctor.findings import Check, Notes, Verdict, passed, warned

__all__ = ["CHECKS"]


def flush_in_update(notes: Notes) -> Verdict:
    """From the version; never tried."""
    if notes.simulated:
        return passed("not tried: the simulated server refuses it")
    return warned(f"not tried: {notes.facts.capabilities.server} asserts that it is idle")


def pause_default(notes: Notes) -> Verdict:
    """From the server's own schema."""
    return _default(notes, "PauseGenerationReqInput", "mode", "abort")


def label_default(notes: Notes) -> Verdict:
    """From the server's own schema."""
    return _default(notes, "UpdateWeightVersionReqInput", "abort_all_requests", True)


def _default(notes: Notes, body: str, name: str, dangerous: object) -> Verdict:
    field: dict[str, Any] = notes.schemas.get(body, {}).get(name, {})
    if "default" not in field:
        return passed(f"its schema does not tell the default of {name}")
    found = field["default"]
    danger = " (every request ends)" if found == dangerous else ""
    return passed(f"the default of {name} is {found!r}{danger}")


def brackets(notes: Notes) -> Verdict:
    """From the server's own schema."""
    if "/begin_weight_update" in notes.paths:
        return passed("it has begin_weight_update and end_weight_update")
    return passed("it has no begin_weight_update")


def not_tried(notes: Notes) -> Verdict:
    """Known of all versions that were read."""
    return passed("not tried: known of every release up to 0.5.23")


CHECKS: Sequence[Check] = (
    Check(
        name="abort after retract (hazard 1)",
        judge=not_tried,
        meaning="A whole answer keeps only multiples of 50 tokens then.",
        action="streams, and so holds every token but those of one interval",
    ),
    Check(
        name="flush within an update (hazard 3)",
        judge=flush_in_update,
        meaning="An update with flush_cache=true, its default, can kill a busy scheduler.",
        action="flushes while paused, then updates with flush_cache=false; do so by hand too",
    ),
    Check(
        name="abort under in_place (hazard 5)",
        judge=not_tried,
        meaning="It takes effect only after continue, with one token of the new version.",
        action="attributes that token by the server's spans",
    ),
    Check(
        name="default of a pause",
        judge=pause_default,
        meaning="A bare pause_generation can end every request.",
        action="always sends the mode",
    ),
    Check(
        name="default of a new label",
        judge=label_default,
        meaning="A bare update_weight_version can end every request.",
        action="gives the label with the update and never calls it",
    ),
    Check(
        name="brackets of an update",
        judge=brackets,
        meaning="Tensor and distributed updates must be put between these two where they exist.",
        action="updates from disk, which needs neither",
    ),
    Check(
        name="update outside of a pause (hazard 8)",
        judge=not_tried,
        meaning="It waits for every running request.",
        action="pauses first",
    ),
    Check(
        name="time limits of clients (hazard 13)",
        judge=not_tried,
        meaning="A total time limit, or 100 connections, cuts the long tail off.",
        action="sets neither; control calls alone have a limit",
    ),
    Check(
        name="retries (hazard 14)",
        judge=not_tried,
        meaning="A repeated generation decodes beside the first one.",
        action="repeats one only if nothing was sent, or after an abort",
    ),
    Check(
        name="trickling requests (hazard 15)",
        judge=not_tried,
        meaning="Each arrival costs every running request a prefill pass.",
        action="sends refills together",
    ),
)
