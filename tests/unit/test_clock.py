"""Tests the virtual clock, and what it cannot measure."""

from __future__ import annotations

import asyncio
import threading
import warnings

from aprilsched.simulation.engine import run_virtual


def test_threads_are_waited_for_at_the_end_however_long_they_take():
    """From Python 3.12 on, a Runner waits five minutes for them; a virtual clock skips these."""
    ending = threading.Event()
    ended: list[bool] = []

    def work() -> None:
        ended.append(ending.wait(timeout=60))

    async def main() -> None:
        asyncio.get_running_loop().run_in_executor(None, work)
        threading.Timer(0.5, ending.set).start()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_virtual(main())
    assert ended == [True]
