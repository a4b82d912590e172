"""RolloutScheduler for trainers that are not asyncio code: the same methods, without await.

A thread owns the event loop and the whole scheduler. Every method here runs its coroutine on that
loop and waits for it. Coroutines of the caller (reward, accept, episode) run on that loop too.

Invariant: an exception in the trainer's thread while it waits (for example Ctrl-C) loses no batch.
A batch counts as delivered only when the call that returns it can no longer raise. Until then it is
offered, and the next call returns it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import (
    AsyncIterable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

from aprilsched.errors import ConfigError, PromptsExhausted, SchedulerClosed, closed_meanwhile
from aprilsched.fronts.loop_thread import LoopThread
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.engines.base import Fleet
from aprilsched.kernel.shell import RefitReport
from aprilsched.kernel.shell import RolloutScheduler as AsyncRolloutScheduler
from aprilsched.kernel.shell.protocol import AsyncScheduler
from aprilsched.kernel.shell.rollouts import SchedulerOptions
from aprilsched.kernel.shell.session import forked
from aprilsched.kernel.weights.publisher import WeightPublisher
from aprilsched.observe.figures.run_figures import AlignmentFigures
from aprilsched.types import Batch, Prompt, Receipt

__all__ = ["RolloutScheduler"]

T = TypeVar("T")

_LOOK_SECONDS = 0.001
"""Interval at which the loop checks whether the trainer's thread has taken a batch. The thread
usually needs some microseconds."""


class BlockingScheduler:
    """Blocking versions of an asyncio scheduler's calls.

    They run on the event loop of a thread that starts with the ``with`` block.
    """

    def __init__(self, rollouts: AsyncScheduler) -> None:
        self._rollouts = rollouts
        self._thread: LoopThread | None = None
        self._calls: set[_Call[Any]] = set()
        """The calls that some thread waits for."""
        self._pid = 0
        """Id of the process that has the thread."""
        self._handing: _Handing | None = None

    def __enter__(self) -> Self:
        self._thread = LoopThread("aprilsched-loop")
        self._pid = os.getpid()
        try:
            self._wait(self._rollouts.__aenter__)
        except BaseException:
            self._stop_thread()
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
        """Stop from any state; see :meth:`aprilsched.RolloutScheduler.close`.

        It does nothing in a process that was forked from the scheduler's.
        """
        if self._thread is not None and self._pid == os.getpid():
            try:
                self._wait(self._rollouts.close)
            finally:
                self._stop_thread()

    @property
    def version(self) -> int:
        """The trainer's policy version, which every engine in use has."""
        return self._rollouts.version

    def __iter__(self) -> Iterator[Batch]:
        while True:
            try:
                yield self.next_batch()
            except PromptsExhausted:
                return

    def next_batch(self, *, timeout: float | None = None) -> Batch:
        """Wait for the next batch.

        A wait that ends with a timeout or is interrupted (KeyboardInterrupt) loses nothing. It has
        not ended the batch in work: the engines generate for it as before, and the next call goes
        on with it, so a trainer may poll as often as it likes.

        Args:
            timeout: longest wait, in seconds; 0 takes only a batch that is complete already, and
                None waits without a limit.

        Raises:
            TimeoutError: if no batch was complete within `timeout`.
            PromptsExhausted: after the last batch.
            ConfigError: if `timeout` is negative.
            SchedulerClosed: outside of the ``with`` block.
        """
        _check_timeout(timeout)
        handing = _Handing()
        try:
            batch = self._wait(lambda: self._hand_over(handing, timeout, streamed=False))
            # From here to the return nothing can raise, because Python handles a signal only at a
            # call.
            handing.done = True
            return batch
        except BaseException:
            handing.void = True
            raise

    def stream(self, *, timeout: float | None = None) -> Iterator[Batch]:
        """Yield the groups of the next batch, each as soon as it is scored and accepted.

        See :meth:`aprilsched.RolloutScheduler.stream`.

        The engines keep generating while the trainer works on a group.

        Args:
            timeout: longest wait for each group, in seconds. A longer wait ends the loop, but not
                the batch: the engines keep generating for it, and another call continues with its
                remaining groups.

        Raises:
            TimeoutError: if no group was there within `timeout`.
            PromptsExhausted: after the last batch.
            ConfigError: if `timeout` is negative.
        """
        _check_timeout(timeout)
        complete = False
        while not complete:
            handing = _Handing()
            try:
                part = self._wait(partial(self._hand_over, handing, timeout, streamed=True))
                complete = part.complete
                if part.units:
                    # As in next_batch(), nothing can raise between these two lines.
                    handing.done = True
                    yield part
            except BaseException:
                handing.void = True
                raise

    def report_logprobs(self, batch: Batch, logprobs: object) -> AlignmentFigures:
        """Compare the trainer's log-probabilities of a batch with the engines'.

        See :meth:`aprilsched.RolloutScheduler.report_logprobs`.
        """
        return self._wait(lambda: self._rollouts.report_logprobs(batch, logprobs))

    def evaluate(self, prompts: Iterable[Prompt], *, group_size: int = 1) -> Batch:
        """Generate all responses to `prompts`, without over-provisioning and carry.

        When the wait is interrupted (KeyboardInterrupt), the result is lost; call it again.
        """
        return self._wait(lambda: self._rollouts.evaluate(prompts, group_size=group_size))

    def update_weights(
        self,
        publisher: WeightPublisher,
        *,
        version: int | None = None,
        acknowledge: bool = True,
    ) -> RefitReport:
        """Bring new weights into every engine: pause, refit, verify, continue.

        If the wait is interrupted (KeyboardInterrupt) before any weights are loaded, nothing
        changes. After that, the update still completes. :attr:`version` shows which case applies.
        """
        return self._wait(
            lambda: self._rollouts.update_weights(
                publisher, version=version, acknowledge=acknowledge
            )
        )

    def checkpoint(self, path: Path | str, *, acknowledge: bool = True) -> None:
        """Write the scheduler's state to a file, for the trainer's own checkpoint.

        When the wait is interrupted (KeyboardInterrupt), nothing is acknowledged. The file is then
        either the complete old one or the complete new one.
        """
        self._wait(lambda: self._rollouts.checkpoint(path, acknowledge=acknowledge))

    def restore(self, path: Path | str) -> None:
        """Start from the state of a checkpoint. Call it before the ``with`` block."""
        self._rollouts.restore(path)

    @contextmanager
    def paused_for_weights(
        self, *, version: int | None = None, label: bool = False, acknowledge: bool = True
    ) -> Generator[tuple[str, ...]]:
        """Pause the engines while the trainer loads new weights with its own calls.

        See :meth:`aprilsched.RolloutScheduler.paused_for_weights`.
        """
        paused = self._rollouts.paused_for_weights(
            version=version, label=label, acknowledge=acknowledge
        )
        with self._entered(paused) as engines:
            yield engines

    @contextmanager
    def asleep(self, *, tags: Sequence[str] = ("kv_cache", "weights")) -> Generator[None]:
        """Release the engines' memory; see :meth:`aprilsched.RolloutScheduler.asleep`."""
        with self._entered(self._rollouts.asleep(tags=tags)):
            yield

    @contextmanager
    def _entered(self, block: AbstractAsyncContextManager[T]) -> Generator[T]:
        """Enter and leave `block` on the loop, for a block of the trainer's thread."""
        entered: list[T] = []

        async def enter() -> None:
            entered.append(await block.__aenter__())

        async def leave(error: BaseException | None) -> None:
            trace = None if error is None else error.__traceback__
            await block.__aexit__(None if error is None else type(error), error, trace)

        try:
            self._wait(enter)
            yield entered[0]
        except BaseException as error:
            # Ctrl-C may also come after `enter` and before the trainer's own block starts.
            if entered:
                self._wait(partial(leave, error))
            raise
        else:
            self._wait(partial(leave, None))

    def on_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Call an asynchronous function on the scheduler's event loop, and wait for its result.

        Engines and fleets belong to that loop, so ``rollouts.on_loop(lambda: fleet.add(url))`` adds
        a server. It must not be called from a function that runs on the loop itself.

        Raises:
            SchedulerClosed: outside of the ``with`` block.
        """
        return self._wait(work)

    def _wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that `work` makes on the loop, and wait for its end."""
        if self._thread is None:
            raise SchedulerClosed("use the scheduler inside its `with` block.")
        if self._pid != os.getpid():
            # The thread is not in this process, so nothing would answer.
            raise forked()
        call = _Call(work, self._thread.loop, self._hand_over_resolved)
        self._calls.add(call)
        try:
            call.start()
            call.wait()
            return call.outcome.result()
        except BaseException:
            if not call.ended:
                # Ctrl-C in the trainer's thread. Withdraw the call and wait until it ends.
                # Otherwise it could still be open at the next call. A second Ctrl-C ends the wait.
                call.withdraw()
                call.wait()
            raise
        finally:
            self._calls.discard(call)

    async def _hand_over(self, handing: _Handing, within: float | None, *, streamed: bool) -> Batch:
        """Wait at most `within` seconds for a batch or its next part, and hand it over.

        The trainer's thread takes it.
        """
        while not self._hand_over_resolved():  # noqa: ASYNC110
            # Another thread's call received a batch after this call started, and would share it.
            await asyncio.sleep(_LOOK_SECONDS)
        # The batch counts as taken when _hand_over_resolved() finds that the call has returned.
        batch = await self._rollouts.offered(within, streamed=streamed)
        if not batch.units:
            # A streamed batch ends without a further group. There is nothing that could be lost.
            self._rollouts.take()
            return batch
        self._handing = handing
        asyncio.get_running_loop().call_soon(self._take_in_time)
        if batch.receipt is None:
            return batch
        receipt = batch.receipt
        return replace(batch, receipt=Receipt(lambda: self._acknowledge(receipt)))

    def _acknowledge(self, receipt: Receipt) -> None:
        """Acknowledge from any thread.

        The caller has the batch, so the trainer has taken it, even if the loop has not noticed yet.
        """
        if self._pid != os.getpid():
            raise receipt.elsewhere()
        thread = self._thread
        if thread is not None:
            thread.loop.call_soon_threadsafe(
                lambda: self._hand_over_resolved() and receipt.acknowledge()
            )

    def _hand_over_resolved(self) -> bool:
        """Whether it is known if the trainer took the last batch. Call it on the loop's thread."""
        handing = self._handing
        if handing is None:
            return True
        if not handing.done and not handing.void:
            return False
        self._handing = None
        if handing.done:
            self._rollouts.take()
        else:
            self._rollouts.hand_back()
        return True

    def _take_in_time(self) -> None:
        if self._thread is not None and not self._hand_over_resolved():
            self._thread.loop.call_later(_LOOK_SECONDS, self._take_in_time)

    def _stop_thread(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()
            # A call that another thread starts while the loop stops never runs. Without close(),
            # that thread would wait for it forever.
            for call in tuple(self._calls):
                call.close()


class RolloutScheduler(BlockingScheduler):
    """The blocking form of :class:`aprilsched.RolloutScheduler`, which describes the arguments.

    Use it as ``with RolloutScheduler(...) as rollouts``, and ``for batch in rollouts``.
    """

    def __init__(
        self,
        fleet: Fleet,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        **options: Unpack[SchedulerOptions],
    ) -> None:
        self._here = AsyncRolloutScheduler(fleet, prompts, **options)
        super().__init__(self._here)

    @property
    def state(self) -> SchedulerState:
        """The scheduler's state, to be read only, while no call is open."""
        if self._thread is not None and not self._thread.current:
            return self._wait(lambda: _called(lambda: self._here.state))
        return self._here.state


@dataclass(slots=True, eq=False)
class _Handing:
    """One batch on its way from the loop's thread to the trainer's thread."""

    done: bool = False
    """The trainer has the batch."""
    void: bool = False
    """The trainer does not have the batch, because its call raised."""


class _Call(Generic[T]):
    """Runs a coroutine on the loop for another thread.

    The coroutine starts when `ready` returns True. `outcome` is done when the coroutine has ended
    or was withdrawn. `work` makes the coroutine and is called on the loop. If the other thread made
    it, Ctrl-C right afterwards would leave a coroutine that is never awaited.
    """

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        loop: asyncio.AbstractEventLoop,
        ready: Callable[[], bool],
    ) -> None:
        self.outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._work = work
        self._loop = loop
        self._ready = ready
        self._task: asyncio.Task[T] | None = None
        self._withdrawn = False
        self.ended = False
        """Whether `outcome` is done."""
        # Ctrl-C inside the future's own wait can raise "cannot release un-acquired lock", or leave
        # a lock acquired that the loop's thread needs. A plain lock has no such race.
        self._running = threading.Lock()
        self._running.acquire()
        self.outcome.add_done_callback(self._note_end)

    def wait(self) -> None:
        """Wait until `outcome` is done."""
        while not self.ended:
            self._running.acquire()

    def _note_end(self, _: concurrent.futures.Future[T]) -> None:
        self.ended = True
        self._running.release()

    def start(self) -> None:
        self._on_loop(self._begin)

    def withdraw(self) -> None:
        self._withdrawn = True
        self._on_loop(self._cancel)

    def close(self) -> None:
        """End the call because its loop has ended."""
        with suppress(concurrent.futures.InvalidStateError):
            self.outcome.set_exception(closed_meanwhile())

    def _on_loop(self, step: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(step)
        except RuntimeError:
            # Another thread has closed the scheduler, and the loop with it.
            self.close()

    def _begin(self) -> None:
        if self.outcome.done():
            return
        if self._ready():
            self._task = self._loop.create_task(self._work())
            self._task.add_done_callback(self._end)
        else:
            # Another thread is about to return with a batch, or to raise.
            self._loop.call_later(_LOOK_SECONDS, self._begin)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.outcome.done():
            self.outcome.set_exception(concurrent.futures.CancelledError())

    def _end(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            # When the loop ends, it cancels its running tasks. From a CancelledError the trainer
            # could not know that the scheduler was closed.
            closed = task.cancelling() > 0 and not self._withdrawn
            error = closed_meanwhile() if closed else concurrent.futures.CancelledError()
            self.outcome.set_exception(error)
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None and not timeout >= 0:
        raise ConfigError(f"timeout is {timeout}; give seconds, 0 or more, or None.")


async def _called(function: Callable[[], T]) -> T:
    """Call `function` on the loop's thread, so that nothing changes during the call."""
    return function()
