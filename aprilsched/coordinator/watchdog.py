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
def watched(who: str, what: str, *, every_s: float = SLOW_CALL_S) -> Generator[None]:
    """Log a line for every `every_s` seconds that the block takes."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    def bark() -> None:
        nonlocal timer
        log.warning("%s has not answered %s for %.0f s", who, what, loop.time() - began)
        timer = loop.call_later(every_s, bark)

    timer = loop.call_later(every_s, bark)
    try:
        yield
    finally:
        timer.cancel()
