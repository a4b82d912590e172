"""RolloutScheduler for trainers that are not asyncio code: the same names, without await.

A thread owns the event loop and with it the whole scheduler; every method here waits for its
coroutine there. Coroutines that the caller gives (reward, accept, episode) run on that loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import (
    AsyncIterable,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from aprilsched.config import SchedulerConfig
from aprilsched.coordinator import Accept, BiasNow, Episode, GroupReward, RefitReport, Reward
from aprilsched.coordinator import RolloutScheduler as AsyncRolloutScheduler
from aprilsched.core.state import SchedulerState
from aprilsched.engines.base import Fleet
from aprilsched.errors import PromptsExhausted, SchedulerClosed
from aprilsched.planning import Planner
from aprilsched.store import Store
from aprilsched.telemetry.base import Listener
from aprilsched.types import Batch, Prompt
from aprilsched.weights.base import WeightPublisher

__all__ = ["RolloutScheduler"]

T = TypeVar("T")


class RolloutScheduler:
    """The blocking twin of :class:`aprilsched.RolloutScheduler`; see there for the arguments.

    Use it as ``with RolloutScheduler(...) as rollouts``, and ``for batch in rollouts``.
    """

    def __init__(
        self,
        fleet: Fleet,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        *,
        reward: Reward | GroupReward | None = None,
        reward_scope: Literal["rollout", "group"] = "rollout",
        accept: Accept | None = None,
        episode: Episode | None = None,
        config: SchedulerConfig | None = None,
        planner: Planner | None = None,
        listeners: Sequence[Listener] = (),
        run_id: str | None = None,
        store: Store | None = None,
    ) -> None:
        self._rollouts = AsyncRolloutScheduler(
            fleet,
            prompts,
            reward=reward,
            reward_scope=reward_scope,
            accept=accept,
            episode=episode,
            config=config,
            planner=planner,
            listeners=listeners,
            run_id=run_id,
            store=store,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=_own_a_loop, args=(started,), name="aprilsched-loop", daemon=True
        )
        self._thread.start()
        self._loop = started.result()
        try:
            self._wait(self._rollouts.__aenter__())
        except BaseException:
            self._stop_loop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop from any state; see :meth:`aprilsched.RolloutScheduler.close`."""
        if self._loop is not None:
            try:
                self._wait(self._rollouts.close())
            finally:
                self._stop_loop()

    @property
    def version(self) -> int:
        """The trainer's policy version, which every engine in use has."""
        return self._rollouts.version

    @property
    def state(self) -> SchedulerState:
        """What the scheduler knows, to look at while no call is open."""
        return self._rollouts.state

    def bias(self) -> BiasNow:
        """How far what was delivered so far is from what is drawn."""
        return self._wait(_called(self._rollouts.bias))

    def __iter__(self) -> Iterator[Batch]:
        while True:
            try:
                yield self.next_batch()
            except PromptsExhausted:
                return

    def next_batch(self) -> Batch:
        """Wait for the next batch; raises PromptsExhausted after the last."""
        return self._wait(self._rollouts.next_batch())

    def evaluate(self, prompts: Iterable[Prompt], *, group_size: int = 1) -> Batch:
        """Run `prompts` to their end, neither over-provisioned nor carried."""
        return self._wait(self._rollouts.evaluate(prompts, group_size=group_size))

    def update_weights(
        self, publisher: WeightPublisher, *, version: int | None = None
    ) -> RefitReport:
        """Bring new weights into every engine: pause, refit, verify, continue."""
        return self._wait(self._rollouts.update_weights(publisher, version=version))

    def checkpoint(self, path: Path | str, *, acknowledge: bool = True) -> None:
        """Write the scheduler as it is now, for the trainer's own checkpoint."""
        self._wait(self._rollouts.checkpoint(path, acknowledge=acknowledge))

    def restore(self, path: Path | str) -> None:
        """Begin where :meth:`checkpoint` was called; before the ``with`` block."""
        self._rollouts.restore(path)

    @contextmanager
    def asleep(self, *, tags: Sequence[str] = ("kv_cache", "weights")) -> Generator[None]:
        """Lend the engines' memory; see :meth:`aprilsched.RolloutScheduler.asleep`."""
        sleep = self._rollouts.asleep(tags=tags)
        self._wait(_coroutine(sleep.__aenter__()))
        try:
            yield
        except BaseException as error:
            self._wait(_coroutine(sleep.__aexit__(type(error), error, error.__traceback__)))
            raise
        else:
            self._wait(_coroutine(sleep.__aexit__(None, None, None)))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise SchedulerClosed("use the scheduler inside its `with` block.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C in the trainer's thread: withdraw the call, so that nothing waits for it.
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()


async def _called(function: Callable[[], T]) -> T:
    """On the loop's thread, where nothing changes meanwhile."""
    return function()


async def _coroutine(work: Awaitable[T]) -> T:
    return await work


def _own_a_loop(started: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        started.set_result(loop)
        loop.run_forever()
