"""The command line; each command has a module. All serving commands end on the same signals."""

from __future__ import annotations

import asyncio
import signal

_INTERRUPTED = 130


def told_to_end() -> asyncio.Future[int]:
    """Return a future of the exit code on a signal: 0 for SIGTERM, 130 for Ctrl-C."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    for number, code in ((signal.SIGTERM, 0), (signal.SIGINT, _INTERRUPTED)):
        loop.add_signal_handler(number, end, code)
    return ended
