"""Calls of the scheduler's API: each must return in time and raise only what is documented."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from aprilsched.errors import AprilschedError, InvariantViolation

if TYPE_CHECKING:
    from tests.campaign.life import Life

PATIENCE_S = 2 * 3600.0
"""In virtual time; a longer call hangs. Everything in a mix ends within 20 minutes."""


class Hang(BaseException):
    """A call does not return, which ends the seed."""


class Calls:
    """Makes the calls of one life; its trainer gets the result of a cancelled call."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._note = life.note
        self._complain = life.complain

    async def call(
        self, name: str, work: Coroutine[Any, Any, Any], *, cancel_after: float | None = None
    ) -> Any:
        """Return the result of a call.

        Raises:
            asyncio.CancelledError: if the call was cancelled here.
            Hang: if it does not return.
            Exception: what the call raises.
        """
        task = asyncio.create_task(work, name=name)
        self._note(f"{name}()" + ("" if cancel_after is None else f" for {cancel_after:.3f} s"))
        try:
            done, _ = await asyncio.wait([task], timeout=cancel_after or PATIENCE_S)
            cancelled = not done and cancel_after is not None
            if cancelled:
                task.cancel()
                done, _ = await asyncio.wait([task], timeout=PATIENCE_S)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task], timeout=PATIENCE_S)
            if not task.done():
                raise Hang(f"{name}() ignores its cancellation") from None
            if not task.cancelled() and task.exception() is None:
                self._life.trainer.returned_late(name, task.result())
            raise
        if not done:
            raise Hang(f"{name}() has not returned for {PATIENCE_S:g} s")
        if task.cancelled():
            if not cancelled:
                self._complain(f"{name}() was cancelled by itself")
            raise asyncio.CancelledError
        if (error := task.exception()) is None:
            return task.result()
        self._note(f"{name}() raised {error!r}")
        if not self._is_documented(error):
            text = "".join(traceback.format_exception(error)[-6:])
            self._complain(f"{name}() raised {error!r}\n{text}")
        if isinstance(error, (Exception, Hang)):
            raise error
        raise RuntimeError(f"{name}() raised {error!r}") from error

    def _is_documented(self, error: BaseException) -> bool:
        if isinstance(error, AprilschedError):
            return not isinstance(error, InvariantViolation)
        return self.comes_from_caller(error) or isinstance(error, (TimeoutError, Hang))

    def comes_from_caller(self, error: BaseException) -> bool:
        """Return whether the caller's code raised `error` or its cause."""
        raised, cause = self._life.trial.callers.raised, error.__cause__
        return id(error) in raised or (cause is not None and id(cause) in raised)

    async def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task of the campaign, and wait for its end.

        Raises:
            Hang: if it does not end, or ended with one.
        """
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=PATIENCE_S)
        if not done:
            raise Hang(f"{task} ignores its cancellation")
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, Hang):
                raise error
            if not isinstance(error, (AprilschedError, asyncio.CancelledError)):
                self._complain(f"{task.get_name()} ended with {error!r}")
