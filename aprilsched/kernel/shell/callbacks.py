"""Calls the caller's functions, turns anything they raise into an ordinary exception, and reports
their failures.

A CancelledError, StopIteration or SystemExit from the caller's code would end the scheduler's own
tasks without any message. So these become a CallbackError here.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any, TypeAlias, TypeVar, cast

from aprilsched.errors import CallbackError, ConfigError
from aprilsched.types import Group, Prompt, Rollout, Sample, Score

log = logging.getLogger("aprilsched")

T = TypeVar("T")

Reward: TypeAlias = Callable[[Rollout, Prompt], float | Score | Awaitable[float | Score]]
"""Function that scores one rollout. A plain function runs in a thread, so it may be slow."""
GroupReward: TypeAlias = Callable[
    [Group], Sequence[float | Score] | Awaitable[Sequence[float | Score]]
]
"""Function that scores a whole group, in the order of its rollouts (``reward_scope="group"``)."""
_Verdict: TypeAlias = bool | Awaitable[bool]
Accept: TypeAlias = Callable[[Group], _Verdict] | Callable[[Sample], _Verdict]
"""Function that keeps or rejects a scored group, or with ``delivery="samples"`` one sample with the
rewards of its siblings (dynamic sampling).

Dropping samples whose advantage is zero is harmless: their term of the gradient is zero, and they
stay among the siblings of others. Any other rule, such as one on the length or the reward alone,
changes which responses are trained on, and so biases the gradient.
"""

_PACKAGE = f"{Path(__file__).parents[1].as_posix()}/"
_KINDS = 32
"""Largest number of kinds of failures of which the first one is logged."""
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
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, _outcome_in_thread, function, args)
        result, error = await work
        if error is not None:
            raise ordinary(what, error)
        return await called(what, lambda: result) if inspect.isawaitable(result) else result

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


async def called(
    what: str,
    function: Callable[..., Awaitable[T]],
    *args: Any,
    within: float | None = None,
) -> T:
    """Await ``function(*args)``, which is the caller's code, in a separate task.

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
    # The task may be cancelled before it starts, by code that cancels every task it finds.
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
    """Return the cause for the ledger: the function's name, and its exception or result."""
    if isinstance(error, WrongResult):
        return f"{what} returned {error}"
    own = _own(error)
    try:
        return f"{what} raised {own!r}"
    except Exception:
        return f"{what} raised {type(own).__name__}, which cannot be printed"


def check_callable(what: str, function: object, *parameters: str) -> None:
    """Check that a function of the caller can be called with these parameters, where that is known
    before it is called.

    Raises:
        ConfigError: if it cannot be; `what` names the function.
    """
    wanted = f"give a function that is called with ({', '.join(parameters)})."
    if not callable(function):
        raise ConfigError(f"{what} is a {type(function).__name__}; {wanted}")
    try:
        # A decorator may give its function other arguments than it gets itself.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return  # Python does not know the signatures of some functions that are written in C.
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise ConfigError(f"{what} takes {signature} ({error}); {wanted}") from None


class WrongResult(Exception):
    """The caller's function returned a wrong result; the text describes it."""


class Failures:
    """Logs the first failure of each kind with the traceback of the caller's code. Later ones are
    counted in the ledger only, because a reward function may fail a million times.

    Attributes:
        errors: the errors that were logged, by their causes.
    """

    def __init__(self) -> None:
        self.errors: dict[str, BaseException] = {}
        self._kinds: set[Hashable] = set()

    def first(self, *kind: Hashable) -> bool:
        """Whether a failure of this kind has not been there before, and is to be logged."""
        new = kind not in self._kinds and len(self._kinds) < _KINDS
        if new:
            self._kinds.add(kind)
        return new

    def note(self, what: str, function: object, error: Exception) -> str:
        """Note that a function of the caller failed; returns the cause for the ledger."""
        cause, own = raised(what, error), _own(error)
        trace = _trace_of_caller(own)
        line = None if trace is None else [(f.f_code.co_filename, n) for f, n in walk_tb(trace)][-1]
        if self.first(what, type(own), line or cause):
            self.errors[cause] = own
            log.error(
                "%s; the function is %s, and later failures of this kind are only counted",
                cause,
                place_of(function),
                exc_info=None if trace is None else (type(own), own, trace),
            )
        return cause


def _own(error: BaseException) -> BaseException:
    """Return the exception that the caller's code itself raised."""
    return (error.__cause__ or error) if isinstance(error, CallbackError) else error


def _trace_of_caller(error: BaseException) -> TracebackType | None:
    """The traceback from the first line of the caller's code; None if none of it is in it."""
    trace = error.__traceback__
    while trace and Path(trace.tb_frame.f_code.co_filename).as_posix().startswith(_PACKAGE):
        trace = trace.tb_next
    return trace


def place_of(function: Any) -> str:
    """Name, file and line of a function of the caller."""
    for each in (function, getattr(function, "func", None), type(function).__call__):
        code = getattr(each, "__code__", None)
        if code is not None:
            return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
    return f"a {type(function).__name__}"


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
