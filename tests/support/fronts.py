"""Every front of a scheduler, with the methods of the blocking one, so that one set of promises in
tests/unit/test_fronts.py holds all of them.

What a front has in another process is made by functions of :mod:`tests.support.in_a_process`.
"""

# pyright: basic
# Ray has no complete types.
from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aprilsched import Batch
from aprilsched.errors import PromptsExhausted
from aprilsched.fronts import blocking, process
from aprilsched.fronts.loop_thread import LoopThread
from tests.support import in_a_process
from tests.support.interrupting import raise_interrupt

__all__ = ["ACTOR", "FRONTS", "OWN", "Front", "OnLoop", "in_a_fork", "opened", "start_actor"]

Parts = Callable[..., dict[str, Any]]


class OnLoop:
    """An asyncio scheduler, each call of which is a task on the loop of a thread.

    What a trainer with asyncio has for Ctrl-C is that its task is cancelled: :meth:`interrupt`
    does so, and the call raises KeyboardInterrupt.
    """

    def __init__(self, rollouts: Any) -> None:
        self._rollouts: Any = rollouts
        self._thread: LoopThread | None = None
        self._task: asyncio.Task[Any] | None = None
        self._interrupted = False
        self._pid = os.getpid()

    def __enter__(self) -> OnLoop:
        self._thread = LoopThread("aprilsched-loop")
        try:
            self._wait(self._rollouts.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            self._stop()

    def _stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._thread is None or self._pid != os.getpid():
            return asyncio.run(work)

        async def run() -> Any:
            self._task = asyncio.current_task()
            return await work

        try:
            return asyncio.run_coroutine_threadsafe(run(), self._thread.loop).result()
        except concurrent.futures.CancelledError:
            if not self._interrupted:
                raise
            raise KeyboardInterrupt from None

    def interrupt(self) -> None:
        self._interrupted = True
        if self._thread is not None and self._task is not None:
            self._thread.loop.call_soon_threadsafe(self._task.cancel)

    @property
    def version(self) -> int:
        return self._rollouts.version

    def next_batch(self, *, timeout: float | None = None) -> Batch:
        return self._wait(_within(timeout, self._rollouts.next_batch()))

    def __iter__(self) -> Iterator[Batch]:
        while True:
            try:
                yield self.next_batch()
            except PromptsExhausted:
                return

    def stream(self, *, timeout: float | None = None) -> Iterator[Batch]:
        stream = self._rollouts.stream()
        try:
            while (part := self._wait(_within(timeout, _part(stream)))) is not None:
                yield part
        finally:
            self._wait(stream.aclose())

    def close(self) -> None:
        self._wait(self._rollouts.close())

    def restore(self, path: Any) -> None:
        self._rollouts.restore(path)

    def paused_for_weights(self, **named: Any) -> Any:
        return self._block(self._rollouts.paused_for_weights(**named))

    def asleep(self, **named: Any) -> Any:
        return self._block(self._rollouts.asleep(**named))

    @contextmanager
    def _block(self, block: AbstractAsyncContextManager[Any]) -> Iterator[Any]:
        entered = self._wait(block.__aenter__())
        try:
            yield entered
        except BaseException as error:
            self._wait(_left(block, error))
            raise
        self._wait(_left(block, None))

    def __getattr__(self, name: str) -> Any:
        """Every other method: evaluate, report_logprobs, update_weights, checkpoint."""
        return lambda *arguments, **named: self._wait(
            getattr(self._rollouts, name)(*arguments, **named)
        )


async def _within(seconds: float | None, work: Any) -> Any:
    async with asyncio.timeout(seconds):
        return await work


async def _part(stream: AsyncIterator[Batch]) -> Batch | None:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return None


async def _left(block: AbstractAsyncContextManager[Any], error: BaseException | None) -> None:
    await block.__aexit__(None if error is None else type(error), error, None)


# --- the fronts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Front:
    """A front, and how it is made."""

    name: str
    make: Callable[..., Any]
    """Makes one that is not opened yet, of the function that gives a scheduler's parts and of its
    arguments."""
    in_actor: bool = False
    """Whether it needs Ray."""

    def interrupt(self, rollouts: Any) -> Callable[[], None]:
        """What Ctrl-C is for a trainer with this front."""
        return rollouts.interrupt if isinstance(rollouts, OnLoop) else raise_interrupt


def _blocking(parts: Parts, *arguments: Any, **named: Any) -> Any:
    made = parts(*arguments, **named)
    return blocking.RolloutScheduler(made.pop("fleet"), made.pop("prompts"), **made)


def _asyncio(parts: Parts, *arguments: Any, **named: Any) -> OnLoop:
    return OnLoop(in_a_process.made(parts, *arguments, **named))


ACTOR, OWN = "shared", "own"
"""The actor to which the front `actor` attaches in most tests, and that of one test."""


def start_actor(
    name: str, parts: Parts, *arguments: Any, restore: Path | None = None, **named: Any
) -> None:
    """Start an actor to which the front `actor` attaches."""
    from aprilsched.fronts.ray import start_scheduler

    make = partial(in_a_process.made, parts, *arguments, **named)
    start_scheduler(name, make, restore=restore, num_cpus=0)


def _actor(*arguments: Any, name: str = ACTOR, **named: Any) -> OnLoop:
    from aprilsched.fronts.ray import ActorScheduler

    return OnLoop(ActorScheduler(name))


FRONTS = (
    Front("asyncio", _asyncio),
    Front("blocking", _blocking),
    Front("process", partial(process.RolloutScheduler, in_a_process.made)),
    Front("actor", _actor, in_actor=True),
)


@contextmanager
def opened(
    front: Front, parts: Parts, *arguments: Any, restore: Path | None = None, **named: Any
) -> Iterator[Any]:
    """A scheduler for one test; the actor of one ends with the block."""
    if not front.in_actor:
        made = front.make(parts, *arguments, **named)
        if restore is not None:
            made.restore(restore)
        with made as rollouts:
            yield rollouts
        return
    from aprilsched.fronts.ray import stop_scheduler

    start_actor(OWN, parts, *arguments, restore=restore, **named)
    try:
        with front.make(name=OWN) as rollouts:
            yield rollouts
    finally:
        stop_scheduler(OWN)


# --- forks ---------------------------------------------------------------------------------------


def in_a_fork(work: Callable[[], Any]) -> str:
    """The result of `work` in a forked child, which then ends as a program does."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = repr(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text
