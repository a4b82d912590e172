"""The table of checks in the order of the report; each theme has its own file."""

from __future__ import annotations

from collections.abc import Sequence

from aprilsched.doctor.checks import pausing, requests, server, tokens, weights
from aprilsched.doctor.findings import Check

__all__ = ["CHECKS"]

CHECKS: Sequence[Check] = (
    *server.CHECKS,
    *tokens.CHECKS,
    *requests.CHECKS,
    *pausing.CHECKS,
    *weights.CHECKS,
    *requests.NOT_TRIED,
    *server.LAST,
)
