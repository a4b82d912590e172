"""How often a request is tried: bounded, in one layer, with the cause kept.

An attempt that failed without a token may be the request's own fault, so few of these in a row
are enough. One that broke off after new tokens, never reached its engine, or went down with it, is
hardly: such *breaks* have a wider bound of their own, which is there for the request that ends
every engine it meets.
"""

from __future__ import annotations

from aprilsched.core.config import SchedulerConfig
from aprilsched.core.messages.events import Failed
from aprilsched.core.state.records import RequestRecord

__all__ = ["count_failure", "count_interruption"]


def count_failure(request: RequestRecord, config: SchedulerConfig, event: Failed) -> str:
    """An attempt failed. Why it was the last, with the cause; empty if it was not."""
    if event.final:
        return f"refused at attempt {request.attempt}: {event.cause}"
    if request.gained or event.unsent:
        return count_interruption(request, config, event.cause)
    request.failures += 1
    if request.failures < config.max_attempts:
        return ""
    count = f"{request.failures} attempts in a row failed without a new token"
    return f"{count}, the last: {event.cause}"


def count_interruption(request: RequestRecord, config: SchedulerConfig, cause: str) -> str:
    """An attempt broke off. Why it was the last, with the cause; empty if it was not."""
    if request.gained:
        request.failures = 0
    request.interruptions += 1
    if request.interruptions < config.max_breaks:
        return ""
    return f"{request.interruptions} attempts broke off, the last: {cause}"
