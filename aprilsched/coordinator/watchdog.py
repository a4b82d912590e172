"""Says which engine and which call stall, again and again for as long as they do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["watched"]

log = logging.getLogger("aprilsched")

SLOW_CALL_S = 10.0


@contextmanager
def watched(who: str, what: str) -> Generator[None]:
    """Log a line for every :data:`SLOW_CALL_S` seconds that the block takes."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    def bark() -> None:
        nonlocal timer
        log.warning("%s has not answered %s for %.0f s", who, what, loop.time() - began)
        timer = loop.call_later(SLOW_CALL_S, bark)

    timer = loop.call_later(SLOW_CALL_S, bark)
    try:
        yield
    finally:
        timer.cancel()
