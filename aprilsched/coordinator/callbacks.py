"""The caller's functions: reward, accept, episode; and how plain ones are kept off the loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from aprilsched.coordinator.episodes import Turn
from aprilsched.types import Group, Prompt, Rollout

__all__ = ["Accept", "CallbackRunner", "Episode", "GroupReward", "Reward"]

T = TypeVar("T")

Reward: TypeAlias = Callable[[Rollout, Prompt], float | Awaitable[float]]
"""Scores one rollout. A plain function runs in a thread, so it may be slow."""
GroupReward: TypeAlias = Callable[[Group], Sequence[float] | Awaitable[Sequence[float]]]
"""Scores a whole group, in the order of its rollouts (``reward_scope="group"``)."""
Accept: TypeAlias = Callable[[Group], bool | Awaitable[bool]]
"""Keeps or rejects a scored group (dynamic sampling)."""

_THREADS = 16


class Episode(Protocol):
    """Drives one rollout of several turns; may return the rollout's reward."""

    def __call__(self, turn: Turn, prompt: Prompt, /) -> Awaitable[float | None]: ...


class CallbackRunner:
    """Calls the caller's functions: coroutines on the loop, plain functions in threads.

    A cancelled coroutine is cancelled; of a plain function only the result is thrown away,
    because a thread cannot be stopped.
    """

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    async def call(self, function: Callable[..., T | Awaitable[T]], *args: Any) -> T:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 (an object with async __call__)
        ):
            result = function(*args)
        else:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="aprilsched")
            result = await asyncio.get_running_loop().run_in_executor(
                self._threads, function, *args
            )
        return cast("T", await result if inspect.isawaitable(result) else result)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
