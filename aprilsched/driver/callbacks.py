"""Calls the caller's functions, so that whatever they raise becomes an ordinary exception.

A CancelledError, StopIteration or SystemExit from the caller's code would end the scheduler's own
tasks without any message. So these become a CallbackError here.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar, cast

from aprilsched.errors import CallbackError
from aprilsched.types import Group, Prompt, Rollout, Score

__all__ = [
    "Accept",
    "CallbackRunner",
    "GroupReward",
    "Overdue",
    "Reward",
    "called",
    "called_now",
    "raised",
]

log = logging.getLogger("aprilsched")

T = TypeVar("T")

Reward: TypeAlias = Callable[[Rollout, Prompt], float | Score | Awaitable[float | Score]]
"""Function that scores one rollout. A plain function runs in a thread, so it may be slow."""
GroupReward: TypeAlias = Callable[
    [Group], Sequence[float | Score] | Awaitable[Sequence[float | Score]]
]
"""Function that scores a whole group, in the order of its rollouts (``reward_scope="group"``)."""
Accept: TypeAlias = Callable[[Group], bool | Awaitable[bool]]
"""Function that keeps or rejects a scored group (dynamic sampling)."""

_THREADS = 16
_GRACE_S = 10.0
"""Seconds that cancelled code of the caller has to clean up, for example to leave a process
group."""
_LEFT_BEHIND: set[asyncio.Task[Any]] = set()
"""Tasks of cancelled code that may still run. asyncio may drop a task that nothing refers to."""


class CallbackRunner:
    """Calls the caller's functions: coroutines on the loop, plain functions in threads.

    Cancelling a call cancels a coroutine. A plain function runs to its end and its result is
    dropped, because a thread cannot be stopped.
    """

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    async def call(self, what: str, function: Callable[..., T | Awaitable[T]], *args: Any) -> T:
        """The result of ``function(*args)``; `what` names the function in errors.

        Raises:
            CallbackError: if it raises an exception that asyncio reserves.
            Exception: any other exception that it raises.
        """
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 (an object with async __call__)
        ):
            return await called(what, cast("Callable[..., Awaitable[T]]", function), *args)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="aprilsched")
        return await called(what, self._in_thread, what, self._threads, function, args)

    @staticmethod
    async def _in_thread(
        what: str, threads: ThreadPoolExecutor, function: Callable[..., Any], args: Sequence[Any]
    ) -> Any:
        loop = asyncio.get_running_loop()
        result, error = await loop.run_in_executor(threads, _outcome_in_thread, function, args)
        if error is not None:
            raise ordinary(what, error)
        return await result if inspect.isawaitable(result) else result

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


async def called(
    what: str,
    function: Callable[..., Awaitable[T]],
    *args: Any,
    within: float | None = None,
) -> T:
    """Await ``function(*args)``, which is the caller's code, in a task of its own.

    The separate task distinguishes a CancelledError that the caller's code raises by itself from a
    cancellation of the task that waits here. When the waiting task is cancelled, the caller's code
    is cancelled too. If it does not end within :data:`_GRACE_S`, it is left behind, and an error is
    logged.

    Raises:
        CallbackError: if it raises an exception that asyncio reserves; `what` names the function.
        Overdue: if it has not ended after `within` seconds.
        Exception: any other exception that it raises.
    """
    task = asyncio.create_task(_outcome(function, args), name=what)
    try:
        done, _ = await asyncio.wait([task], timeout=within)
    except asyncio.CancelledError:
        await _leave(task, what)
        raise
    if not done:
        await _leave(task, what)
        raise Overdue
    # The task may be cancelled before it begins, by code that cancels every task it finds.
    result, error = (None, asyncio.CancelledError()) if task.cancelled() else task.result()
    if error is not None:
        raise ordinary(what, error)
    return cast("T", result)


def called_now(what: str, function: Callable[..., T], *args: Any) -> T:
    """Call a plain function of the caller on the loop's thread, where it must not take long.

    Raises:
        CallbackError: if it raises an exception that asyncio reserves; `what` names the function.
        Exception: any other exception that it raises.
    """
    try:
        return function(*args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ordinary(what, error) from error


def raised(what: str, error: Exception) -> str:
    """The cause for the ledger: the name of the called function, and what it raised."""
    return f"{what} raised {(error.__cause__ if isinstance(error, CallbackError) else error)!r}"


class Overdue(Exception):
    """The caller's code did not end in time."""


async def _outcome(
    function: Callable[..., Awaitable[Any]], args: Sequence[Any]
) -> tuple[Any, BaseException | None]:
    """The result or the exception, as a pair. A task that raises CancelledError or SystemExit has
    another meaning for asyncio, so exceptions are values here. Only Ctrl-C is raised."""
    try:
        return await function(*args), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, error


def _outcome_in_thread(
    function: Callable[..., Any], args: Sequence[Any]
) -> tuple[Any, BaseException | None]:
    # A future refuses a StopIteration, so its waiter would wait forever.
    try:
        return function(*args), None
    except BaseException as error:
        return None, error


def ordinary(what: str, error: BaseException) -> Exception:
    """The error itself, or a CallbackError that names the caller's code where asyncio reserves the
    exception for itself."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = CallbackError(what, error)
    wrapped.__cause__ = error
    return wrapped


async def _leave(task: asyncio.Task[Any], what: str) -> None:
    """Cancel the caller's code, and wait until it ends, at most :data:`_GRACE_S`."""
    task.cancel()
    _LEFT_BEHIND.add(task)
    task.add_done_callback(_LEFT_BEHIND.discard)
    _, hanging = await asyncio.wait([task], timeout=_GRACE_S)
    if hanging:
        log.error("%s ignores that it was cancelled and is left behind", what)
