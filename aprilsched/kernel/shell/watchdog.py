"""Logs calls to engines that take long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager

log = logging.getLogger("aprilsched")

SLOW_CALL_S = 10.0
"""Interval in seconds at which a call without an answer is logged."""


@contextmanager
def watched(who: str, what: str, *, every_s: float = SLOW_CALL_S) -> Generator[None]:
    """Log a warning every `every_s` seconds while the block runs."""
    loop = asyncio.get_running_loop()
    started_at = loop.time()

    def warn() -> None:
        nonlocal timer
        log.warning("%s has not answered %s for %.0f s", who, what, loop.time() - started_at)
        timer = loop.call_later(every_s, warn)

    timer = loop.call_later(every_s, warn)
    try:
        yield
    finally:
        timer.cancel()
