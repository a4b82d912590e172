"""RolloutScheduler in a separate process, for trainers whose Python code holds the GIL.

The blocking scheduler runs on a thread of the trainer's process. Python runs one thread of a
process at a time, so the scheduler reads no token, refills no engine and ends no pause while the
trainer's code holds the GIL. Here the scheduler has its own interpreter, and the trainer's process
only forwards calls and batches::

    def make(urls, path):                        # at the top of a module
        prompts = read_prompts(path)
        return aprilsched.RolloutScheduler(SGLangFleet(urls), prompts, reward=score, config=config)

    if __name__ == "__main__":
        with process.RolloutScheduler(make, urls, "prompts.jsonl") as rollouts:
            for batch in rollouts:
                trainer.step(batch.to_torch())
                trainer.save_pretrained(folder)
                rollouts.update_weights(DiskPublisher(folder))

The trainer's side is a ``RemoteScheduler``, which sends each ``Request`` and waits for its
``Reply``. The scheduler's side is ``Served``, which carries requests out by the tables ``CALLS``
and ``NOTICES``. A pipe connects the two here, and the handle of an actor in
:mod:`aprilsched.fronts.ray`. Messages that are too large for a pipe are files in a temporary folder
that only this user can read.

Invariants:

- A cancelled call is withdrawn on the other side. While that side answers, the caller waits for the
  call to end there.
- A batch counts as delivered only when the trainer's call returns it. Until the notice "take"
  arrives, the batch is in transit. A batch that does not arrive is offered again.
- Each process notices the end of the other. A call to a process that has ended raises
  SchedulerClosed, and a scheduler whose trainer has ended closes itself. A process that was forked
  from one of them keeps its end of the pipe open, so each watches the other process itself.
- No event loop waits for the pipe, so timeouts, Ctrl-C and close() work while the other process is
  stopped.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import itertools
import logging
import multiprocessing
import os
import pickle  # noqa: TID251 (between two processes of one program)
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
import traceback
from abc import abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from aprilsched.errors import (
    AprilschedError,
    ConfigError,
    EngineError,
    InvariantViolation,
    RefitError,
    SchedulerClosed,
    closed_meanwhile,
)
from aprilsched.fronts.blocking import BlockingScheduler
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.shell import RefitReport
from aprilsched.kernel.shell import RolloutScheduler as AsyncRolloutScheduler
from aprilsched.kernel.shell.prompt_queue import PromptQueue
from aprilsched.kernel.shell.protocol import AsyncScheduler
from aprilsched.kernel.weights.from_trainer import FromTrainer
from aprilsched.kernel.weights.publisher import ConcludingPublisher, WeightPublisher
from aprilsched.observe.figures.run_figures import AlignmentFigures
from aprilsched.types import Batch, Prompt, Receipt

__all__ = ["FromTrainer", "RolloutScheduler"]

T = TypeVar("T")

log = logging.getLogger("aprilsched")

SILENCE_S = 5.0
"""Seconds without a reply to a ping after which the other side counts as blocked or stopped."""
WITHDRAWAL_S = 0.2
"""Seconds until a call is withdrawn again. Ray does not keep the order of requests, so a withdrawal
may come before its call."""
PING = -1
"""A reserved number of a request; withdrawing it is a no-op that serves as a ping."""
MAX_CAUSES = 8
"""Number of causes that are sent with an exception: some chains have no end."""
HEADER = struct.Struct("<Iq?")
"""The start of a message: the length of its content, the number of its request, and whether the
content is the path of a file."""
INLINE_BYTES = 1 << 14
"""Larger messages go through a file. A pipe takes about 200 KB at a time, and the trainer's process
would have to get Python's lock again for each part."""
CLOSE_S = 300.0
"""Seconds that a scheduler has to close: its engines have `timeouts.control_s` for each call."""
END_S = 10.0
"""Seconds that a process has to end once its scheduler is closed."""
POLL_S = 0.05
"""Seconds between two looks at whether the scheduler's process has ended."""
PARENT_POLL_S = 1.0
"""Seconds between two looks at whether the trainer's process has ended."""


@dataclass(frozen=True)
class Request:
    """A call or a notice, by its name in :data:`CALLS` or :data:`NOTICES`."""

    number: int
    name: str
    arguments: tuple[object, ...] = ()
    named: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The result or the exception of a request, and the version of the scheduler then."""

    version: int = 0
    result: Any = None
    raised: Raised | None = None

    def get(self) -> Any:
        """Return the result.

        Raises:
            BaseException: the exception of the request.
        """
        if self.raised is not None:
            raise self.raised.error()
        return self.result


@dataclass(frozen=True, kw_only=True)
class Raised:
    """An exception in a form that pickle accepts.

    Pickle calls the constructor of an exception with its message, which many of them refuse. So the
    parts are sent, and a summary for a process that cannot build the exception from them. Nothing
    that the exception's own code raises prevents the reply, because a call would wait forever.
    """

    summary: str
    parts: bytes | None
    cause: Raised | None

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Return `error` and its causes."""
        causes = [error]
        with suppress(BaseException):
            while (cause := causes[-1].__cause__) is not None and len(causes) <= MAX_CAUSES:
                causes.append(cause)
        raised = None
        for each in reversed(causes):
            parts = None
            with suppress(BaseException):
                parts = pickle.dumps((type(each), each.args, each.__dict__))
            raised = cls(summary=summary_of(each), parts=parts, cause=raised)
        return cast("Raised", raised)

    def error(self) -> BaseException:
        """Return the exception, or an AprilschedError with its summary."""
        error: object = None
        with suppress(BaseException):
            kind, arguments, fields = pickle.loads(self.parts or b"")  # noqa: S301
            made = kind.__new__(kind, *arguments)
            made.__dict__.update(fields)
            # Other errors and logs quote it.
            error = made if f"{made}{made!r}" else None
        if not isinstance(error, BaseException):
            error = AprilschedError(f"the scheduler's process raised {self.summary}")
        if self.cause is not None:
            error.__cause__ = self.cause.error()
        return error


def summary_of(error: BaseException) -> str:
    """Return the type and the text of an exception, whose own code may raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return f"{type(error).__name__}, which has no text"


def unsendable(what: str, error: Exception) -> ConfigError:
    """Return the error for an object that pickle refuses."""
    return ConfigError(
        f"{what} cannot be sent to the scheduler's process ({summary_of(error)}); give functions "
        "and classes of a module, and a publisher that needs the trainer's memory as "
        "FromTrainer(publisher, fleet)."
    )


def ignore_error(future: asyncio.Future[Any]) -> None:
    """Retrieve the error of a future that has no waiter, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()


def absolute(path: Path | str) -> Path:
    """Return a path from the root, because the other process may be in another folder."""
    return Path(path).absolute()


class UpdateLost(RefitError):
    """The scheduler was restarted in an update, which must be repeated."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a scheduler is made from in its process."""

    make: Callable[..., object]
    arguments: tuple[object, ...] = ()
    named: Mapping[str, object] = field(default_factory=dict[str, object])
    checkpoint: Path | None = None
    """Where the run starts from."""


@dataclass(frozen=True)
class QueueOf:
    """A placeholder, among the arguments of `make`, for a prompt queue in the trainer's process."""

    number: int


class Served:
    """Carries out the requests of the trainer's side, on the event loop of the scheduler."""

    def __init__(self) -> None:
        self.scheduler: AsyncRolloutScheduler | None = None
        """None before it is open."""
        self._calls: dict[int, asyncio.Task[Any]] = {}
        self._queues: dict[int, PromptQueue] = {}
        self._in_transit: Batch | None = None
        """The batch, or the part of one, that was sent and not yet taken."""
        self._blocks: list[AbstractAsyncContextManager[Any]] = []

    @property
    def opened(self) -> AsyncRolloutScheduler:
        """The scheduler, once it is open."""
        if self.scheduler is None:
            raise InvariantViolation("the scheduler's process was called before it was open")
        return self.scheduler

    async def answer(self, request: Request) -> Reply:
        """Carry out a request."""
        try:
            if request.name in NOTICES:
                NOTICES[request.name](self, *request.arguments)
                return self.reply()
            call = CALLS[request.name](self, *request.arguments, **request.named)
            task = self._calls[request.number] = asyncio.get_running_loop().create_task(call)
            await asyncio.wait([task])
            del self._calls[request.number]
            return self.reply(task.result())
        except BaseException as error:
            return self.refusal(error)

    def refusal(self, error: BaseException) -> Reply:
        """Return the reply to a request that raised `error`, with a note of where."""
        if not isinstance(error, AprilschedError | TimeoutError | asyncio.CancelledError):
            with suppress(BaseException):
                trace = "".join(traceback.format_exception(error))
                error.add_note(f"In the scheduler's process:\n{trace}")
        return replace(self.reply(), raised=Raised.of(error))

    def reply(self, result: object = None) -> Reply:
        """Return a reply with the scheduler's version."""
        return Reply(version=0 if self.scheduler is None else self.scheduler.version, result=result)

    def made(self, order: Order) -> AsyncRolloutScheduler:
        """Return the scheduler of an order, not open yet.

        Raises:
            ConfigError: if the user's function returns something else.
        """

        def replaced(argument: object) -> object:
            if isinstance(argument, QueueOf):
                return self._queues.setdefault(argument.number, PromptQueue())
            return argument

        made = order.make(
            *(replaced(each) for each in order.arguments),
            **{name: replaced(each) for name, each in order.named.items()},
        )
        if not isinstance(made, AsyncRolloutScheduler):
            raise ConfigError(
                f"the scheduler's function returned a {type(made).__name__}; return an "
                "aprilsched.RolloutScheduler."
            )
        return made

    async def open(self, order: Order) -> None:
        """Make the scheduler and open it."""
        made = self.made(order)
        if order.checkpoint is not None:
            made.restore(order.checkpoint)
        await made.__aenter__()
        self.scheduler = made

    async def close(self) -> None:
        """Close the scheduler, which ends every call, or stop opening it."""
        if self.scheduler is not None:
            await self.scheduler.close()
        else:
            await self.end_calls()

    async def end_calls(self) -> None:
        """Cancel the calls under way, and wait until they have ended."""
        calls = [each for each in self._calls.values() if each is not asyncio.current_task()]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def offer(self, within: float | None, *, streamed: bool) -> Batch:
        """Wait for a batch or a part, which is in transit from then on."""
        batch = await self.opened.offered(within, streamed=streamed)
        self._in_transit = batch
        return batch

    async def state(self) -> SchedulerState:
        """Return the scheduler's state, which the reply copies."""
        return self.opened.state

    async def enter(self, name: str, **named: object) -> object:
        """Enter a block of :data:`BLOCKS`."""
        block = BLOCKS[name](self.opened, **named)
        entered = await block.__aenter__()
        self._blocks.append(block)
        return entered

    async def leave(self, raised: Raised | None) -> RefitReport | None:
        """Leave the block that was entered last, and return the report of the last update."""
        if not self._blocks:
            raise UpdateLost(
                "the scheduler died while the trainer was loading weights; load them again in "
                "another paused_for_weights() block."
            )
        block = self._blocks.pop()
        error = None if raised is None else raised.error()
        try:
            await block.__aexit__(None if error is None else type(error), error, None)
        except BaseException as other:
            # The trainer's side raises its own error itself.
            if other is not error:
                raise
        return self.opened.last_refit

    def withdraw(self, number: int) -> None:
        """Cancel a call that has not ended."""
        if number in self._calls:
            self._calls[number].cancel()

    def take(self, index: int) -> None:
        """Record that a batch has arrived; do nothing if its outcome is known already."""
        if self._in_transit is not None and index == self._in_transit.index:
            self._in_transit = None
            self.opened.take()

    def hand_back(self) -> None:
        """Record that the batch in transit has not arrived."""
        self._in_transit = None
        self.opened.hand_back()

    def acknowledge(self, index: int) -> None:
        """Acknowledge a batch."""
        self.opened.acknowledge(index)

    def push(self, number: int, prompt: Prompt) -> None:
        """Add a prompt to a queue."""
        self._queues[number].put(prompt)

    def end_queue(self, number: int) -> None:
        """Close a queue of prompts."""
        self._queues[number].close()


def _of_scheduler(
    method: Callable[..., Coroutine[Any, Any, T]],
) -> Callable[..., Coroutine[Any, Any, T]]:
    async def call(served: Served, *arguments: object, **named: object) -> T:
        return await method(served.opened, *arguments, **named)

    return call


CALLS: Mapping[str, Callable[..., Coroutine[Any, Any, Any]]] = {
    "open": Served.open,
    "close": Served.close,
    "offer": Served.offer,
    "evaluate": _of_scheduler(AsyncRolloutScheduler.evaluate),
    "report_logprobs": _of_scheduler(AsyncRolloutScheduler.report_logprobs),
    "checkpoint": _of_scheduler(AsyncRolloutScheduler.checkpoint),
    "state": Served.state,
    "update_weights": _of_scheduler(AsyncRolloutScheduler.update_weights),
    "enter": Served.enter,
    "leave": Served.leave,
}
"""Requests that the trainer's side awaits, and that it may withdraw."""

NOTICES: Mapping[str, Callable[..., None]] = {
    "withdraw": Served.withdraw,
    "take": Served.take,
    "hand_back": Served.hand_back,
    "acknowledge": Served.acknowledge,
    "push": Served.push,
    "end_queue": Served.end_queue,
}
"""Requests that are carried out as soon as they arrive."""

BLOCKS: Mapping[str, Callable[..., AbstractAsyncContextManager[Any]]] = {
    "paused_for_weights": AsyncRolloutScheduler.paused_for_weights,
    "asleep": AsyncRolloutScheduler.asleep,
}
"""Blocks of the trainer's side, which "enter" and "leave" have on the scheduler's."""


class RemoteScheduler(AsyncScheduler):
    """The trainer's side, with the methods of :class:`aprilsched.RolloutScheduler`, which describes
    them. A subclass connects it with one :class:`Served`."""

    def __init__(self) -> None:
        self._version = 0
        self._numbers = itertools.count()
        self._failure: BaseException | None = SchedulerClosed(
            "use the scheduler inside its `with` block."
        )
        """The error because of which requests cannot be answered; None while they can."""
        self._offered: Batch | None = None
        """The batch, or the part of one, that was offered last."""
        self._offering = False
        """Whether a call waits for a batch."""
        self._publishers: dict[int, FromTrainer] = {}
        """Publishers with engines to close, by identity."""
        self._updates: set[asyncio.Task[RefitReport]] = set()
        self._last_refit: RefitReport | None = None

    @property
    def version(self) -> int:
        """The trainer's policy version in the last reply."""
        return self._version

    @abstractmethod
    def _transmit(self, request: Request) -> asyncio.Future[Reply]:
        """Send a request, and return the future of its reply.

        Notices must arrive in order, and before every later call.

        Raises:
            ConfigError: if pickle refuses the request; the future may raise it instead.
            SchedulerClosed: if the other side has ended; the future may raise it instead.
        """

    def send(self, request: Request) -> asyncio.Future[Reply]:
        """Send a request, unless it could not be answered."""
        if self._failure is not None:
            raise self._failure
        return self._transmit(request)

    async def call(self, name: str, *arguments: object, **named: object) -> Any:
        """Make a call of :data:`CALLS`.

        If the wait is cancelled, the call is withdrawn, and its end is waited for, because it may
        still take effect.
        """
        request = Request(next(self._numbers), name, arguments, named)
        future = self.send(request)
        try:
            reply = await asyncio.shield(future)
        except asyncio.CancelledError:
            await self._wait_ended(future, number=request.number)
            future.add_done_callback(ignore_error)
            raise
        self._version = reply.version
        return reply.get()

    async def _wait_ended(
        self, future: asyncio.Future[Any], *, number: int = PING, within: float | None = None
    ) -> None:
        """Withdraw a call, and wait at most `within` seconds until it has ended.

        The wait also ends if the other side is silent, because user code blocks its loop or the
        process is stopped.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while not future.done():
                    async with asyncio.timeout(SILENCE_S):
                        with suppress(Exception):
                            await self.notify("withdraw", number)
                    await asyncio.wait([future], timeout=WITHDRAWAL_S)

    def notify(self, name: str, *arguments: object) -> Awaitable[object]:
        """Send a notice of :data:`NOTICES`; the caller need not wait for its reply."""
        try:
            future = self.send(Request(next(self._numbers), name, arguments))
        except SchedulerClosed as error:
            future = asyncio.get_running_loop().create_future()
            future.set_exception(error)
        future.add_done_callback(ignore_error)
        return future

    async def _end_updates(self) -> None:
        """End the updates of this side, and close the engines of its publishers."""
        for task in self._updates:
            task.cancel()
        for publisher in self._publishers.values():
            with suppress(EngineError):
                await publisher.close()

    async def offered(self, within: float | None = None, *, streamed: bool = False) -> Batch:
        if self._offering:
            # The other side would offer a batch that is in transit to the first call again.
            raise ConfigError(
                "another next_batch() call is waiting already; await it before the next call."
            )
        self._offering = True
        limit = asyncio.timeout(None if within is None else within + SILENCE_S)
        try:
            async with limit:
                batch: Batch = await self.call("offer", within, streamed=streamed)
        except BaseException as error:
            # The batch may be in transit.
            self.hand_back()
            if not limit.expired() or not isinstance(error, TimeoutError):
                raise
            raise TimeoutError(
                f"no batch was complete within {within} s, and the scheduler's process does not "
                "answer; the next call continues the wait."
            ) from None
        finally:
            self._offering = False
        self._offered = batch
        if batch.receipt is None:
            return batch
        return replace(batch, receipt=Receipt(partial(self._acknowledge, batch.index)))

    def take(self) -> None:
        if self._offered is not None:
            self.notify("take", self._offered.index)

    def hand_back(self) -> None:
        self.notify("hand_back")

    def _acknowledge(self, index: int) -> None:
        self.notify("acknowledge", index)

    async def evaluate(self, prompts: Iterable[Prompt], *, group_size: int = 1) -> Batch:
        """Generate all responses to `prompts`, without over-provisioning and carry."""
        return await self.call("evaluate", tuple(prompts), group_size=group_size)

    async def report_logprobs(self, batch: Batch, logprobs: object) -> AlignmentFigures:
        """Compare the trainer's log-probabilities of a batch with those of the engines."""
        if isinstance(logprobs, list | tuple):
            rows = [_as_array(row) for row in cast("Sequence[object]", logprobs)]
            return await self.call("report_logprobs", batch, rows)
        return await self.call("report_logprobs", batch, _as_array(logprobs))

    async def state(self) -> SchedulerState:
        """Return a copy of the scheduler's state."""
        return await self.call("state")

    async def checkpoint(self, path: Path | str, *, acknowledge: bool = True) -> None:
        """Write the scheduler's state to a file, which the scheduler's process writes."""
        await self.call("checkpoint", absolute(path), acknowledge=acknowledge)

    async def update_weights(
        self,
        publisher: WeightPublisher,
        *,
        version: int | None = None,
        acknowledge: bool = True,
    ) -> RefitReport:
        """Bring new weights into every engine.

        The publisher is sent to the scheduler and runs there, or here if it is a
        :class:`~aprilsched.fronts.process.FromTrainer`.
        """
        if not isinstance(publisher, FromTrainer):
            return await self.call(
                "update_weights", publisher, version=version, acknowledge=acknowledge
            )
        self._publishers[id(publisher)] = publisher
        number = self.version + 1 if version is None else version
        loading = asyncio.Event()
        update = asyncio.create_task(self._publish(publisher, number, acknowledge, loading))
        self._updates.add(update)
        update.add_done_callback(self._updates.discard)
        try:
            return await asyncio.shield(update)
        except asyncio.CancelledError:
            # Weights that are being loaded are loaded to the end, as in every update.
            if not loading.is_set():
                update.cancel()
                await asyncio.wait([update])
            raise

    async def _publish(
        self, here: FromTrainer, version: int, acknowledge: bool, loading: asyncio.Event
    ) -> RefitReport:
        """Load weights from this process, in a block that pauses the engines."""
        try:
            await here.prepare(version)
            await here.open(version)
            async with self.paused_for_weights(version=version, acknowledge=acknowledge) as engines:
                loading.set()
                try:
                    await here.send(version, engines)
                except Exception as error:
                    raise RefitError(
                        f"version {version} was not loaded, so no engine is used before the next "
                        f"update: {error!r}"
                    ) from error
        finally:
            if isinstance(here.publisher, ConcludingPublisher):
                await here.publisher.conclude()
        return cast("RefitReport", self._last_refit)

    def paused_for_weights(
        self, *, version: int | None = None, label: bool = False, acknowledge: bool = True
    ) -> AbstractAsyncContextManager[tuple[str, ...]]:
        """Pause the engines while the trainer loads new weights by calls of its own."""
        return self._block(
            "paused_for_weights", version=version, label=label, acknowledge=acknowledge
        )

    def asleep(
        self, *, tags: Sequence[str] = ("kv_cache", "weights")
    ) -> AbstractAsyncContextManager[None]:
        """Release the engines' memory for a trainer on the same GPUs."""
        return self._block("asleep", tags=tuple(tags))

    @asynccontextmanager
    async def _block(self, name: str, **named: object) -> AsyncGenerator[Any]:
        """Enter a block of the scheduler around one of the trainer, whose error wins."""
        entered = await self.call("enter", name, **named)
        try:
            yield entered
        except BaseException as error:
            with suppress(RefitError, SchedulerClosed):
                await self.call("leave", Raised.of(error))
            raise
        self._last_refit = await self.call("leave", None)


class BlockingRemote(BlockingScheduler):
    """The blocking scheduler over a remote one."""

    def __init__(self, remote: RemoteScheduler) -> None:
        super().__init__(remote)
        self._remote = remote

    @property
    def state(self) -> SchedulerState:
        """A copy of the scheduler's state."""
        return self._wait(self._remote.state)


def _as_array(logprobs: object) -> object:
    """Return a tensor as a numpy array, so that the scheduler's process needs no torch."""
    detach = getattr(logprobs, "detach", None)
    return logprobs if detach is None else detach().float().cpu().numpy()


class RolloutScheduler(BlockingRemote):
    """The blocking scheduler with an interpreter of its own.

    `make` runs in the scheduler's process, and so does everything that it makes: the fleet, the
    prompts, the reward and filter functions, episodes, listeners, the store. Pickle must accept
    `make`, which is therefore a function of a module, and its arguments. Arguments of methods are
    sent there, too:

    - A publisher must not need the trainer's memory: ``DiskPublisher(folder)`` without `save`,
      ``LoraPublisher(folder)``, ``ExternalWeights()``. A :class:`FromTrainer` runs any other one in
      the trainer's process, where the block of ``paused_for_weights()`` is too.
    - A :class:`~aprilsched.PromptQueue` among the arguments of `make` stays usable: prompts that
      the trainer pushes are sent on.

    A new interpreter imports the trainer's main module, as always in multiprocessing, so a script
    needs ``if __name__ == "__main__":``.

    Args:
        make: returns the asyncio :class:`aprilsched.RolloutScheduler`, which is not opened yet.
        arguments: positional arguments of `make`.
        named: keyword arguments of `make`.

    Raises:
        ConfigError: on entering, if `make` or an argument cannot be sent, or if `make` returns
            something else.
        SchedulerClosed: by every call, if the scheduler's process ends by itself or is killed.
    """

    def __init__(
        self, make: Callable[..., AsyncRolloutScheduler], /, *arguments: object, **named: object
    ) -> None:
        self._process = _ProcessScheduler(make, arguments, named)
        super().__init__(self._process)

    def _stop_thread(self) -> None:
        try:
            super()._stop_thread()
        finally:
            self._process.end()


class _ProcessScheduler(RemoteScheduler):
    """The trainer's side of a scheduler's process, on the blocking scheduler's loop."""

    def __init__(
        self,
        make: Callable[..., AsyncRolloutScheduler],
        arguments: Sequence[object],
        named: Mapping[str, object],
    ) -> None:
        super().__init__()
        self._queues: list[PromptQueue] = []
        self._order = Order(
            make=make,
            arguments=tuple(self._replaced(each) for each in arguments),
            named={name: self._replaced(each) for name, each in named.items()},
        )
        self._link: _Link | None = None
        """None before the process is started."""
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._forwarding: list[asyncio.Task[None]] = []

    def _replaced(self, argument: object) -> object:
        if isinstance(argument, PromptQueue):
            self._queues.append(argument)
            return QueueOf(len(self._queues) - 1)
        return argument

    def restore(self, path: Path | str) -> None:
        if self._link is not None:
            raise SchedulerClosed("restore() comes before the `with` block.")
        self._order = replace(self._order, checkpoint=absolute(path))

    async def __aenter__(self) -> Self:
        if self._link is not None:
            raise SchedulerClosed("a RolloutScheduler is opened once; make a new one.")
        ours, theirs = socket.socketpair()
        link = _Link(ours, Path(tempfile.mkdtemp(prefix="aprilsched-")))
        self._process = multiprocessing.get_context("spawn").Process(
            target=_main, args=(theirs, link.folder, os.getpid()), name="aprilsched"
        )
        try:
            with theirs:
                self._process.start()
        except BaseException:
            link.close()
            raise
        self._link = link
        # At its exit, Python waits for the process, which waits for the pipe to close.
        atexit.register(self.end, CLOSE_S)
        await link.open()
        self._failure = None
        self._reading = asyncio.create_task(self._read(link))
        try:
            await self.call("open", self._order)
        except BaseException:
            await self._close(link)
            raise
        self._forwarding = [
            asyncio.create_task(self._forward(number, queue))
            for number, queue in enumerate(self._queues)
        ]
        return self

    async def close(self) -> None:
        if self._link is not None:
            for task in self._forwarding:
                task.cancel()
            await self._end_updates()
            await self._close(self._link)

    async def _close(self, link: _Link) -> None:
        """Close the scheduler, if its process answers, and wait until that has ended."""
        with suppress(SchedulerClosed):
            closed = self.send(Request(next(self._numbers), "close"))
            await self._wait_ended(closed, within=CLOSE_S)
            if not closed.done():
                log.error("the scheduler's process does not close, and is terminated")
                self._process.terminate()
        self._fail(closed_meanwhile())
        link.hang_up()
        await asyncio.shield(self._reading)

    def end(self, within: float = 0) -> None:
        """Kill the process if it still runs after `within` seconds, and remove the folder.

        In a forked process, which has a copy of this object, do nothing.
        """
        if self._link is not None and self._link.ours:
            self._link.hang_up()
            until = time.monotonic() + within
            while self._process.is_alive() and time.monotonic() < until:
                time.sleep(POLL_S)
            self._process.kill()
            self._process.join()
            self._link.close()
            atexit.unregister(self.end)

    def _transmit(self, request: Request) -> asyncio.Future[Reply]:
        try:
            content = pickle.dumps(request)
        except Exception as error:
            raise unsendable(f"an argument of {request.name}()", error) from error
        cast("_Link", self._link).send(request.number, content)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[request.number] = future
        return future

    async def _read(self, link: _Link) -> None:
        """Receive replies until the process has ended."""
        watching = asyncio.create_task(self._watch(link))
        async for number, content in link.received():
            future = self._replies.pop(number, None)
            if future is not None and not future.done():
                try:
                    future.set_result(pickle.loads(content))  # noqa: S301
                except Exception as error:
                    future.set_exception(unsendable("the scheduler's answer", error))
                    ignore_error(future)
        await asyncio.wait([watching], timeout=END_S)
        self._process.kill()
        await watching
        code = self._process.exitcode or 0
        hint = ", which its output explains" if code > 0 else ""
        self._fail(
            SchedulerClosed(
                f"the scheduler's process has ended with exit code {code}{hint}; open a new "
                "scheduler."
            )
        )

    async def _watch(self, link: _Link) -> None:
        """Wait until the process has ended; its last replies are still received then."""
        while self._process.is_alive():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        link.hang_up()

    def _fail(self, failure: BaseException) -> None:
        """Answer every request with `failure` from now on. Only the first failure counts."""
        self._failure = self._failure or failure
        for future in self._replies.values():
            if not future.done():
                future.set_exception(self._failure)
                ignore_error(future)
        self._replies.clear()

    async def _forward(self, number: int, queue: PromptQueue) -> None:
        """Send on the prompts that the trainer pushes into a queue."""
        try:
            async for prompt in queue:
                self.notify("push", number, prompt)
            self.notify("end_queue", number)
        except ConfigError as error:
            self._fail(error)


class _Link:
    """One end of the pipe between the two processes, and the folder for large messages."""

    def __init__(self, end: socket.socket, folder: Path) -> None:
        self.folder = folder
        self._end = end
        self._pid = os.getpid()
        self._files = itertools.count()

    @property
    def ours(self) -> bool:
        """Whether this process made the link, and was not forked from the one that did."""
        return os.getpid() == self._pid

    async def open(self) -> None:
        """Connect with the running event loop."""
        self._reader = asyncio.StreamReader()
        # A StreamWriter that a forked process drops takes this process's socket from its epoll.
        self._transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: asyncio.StreamReaderProtocol(self._reader), sock=self._end
        )

    def send(self, number: int, content: bytes) -> None:
        """Send a message, unless the other side has hung up, which :meth:`received` notices.

        Raises:
            OSError: if the message needs a file, and that cannot be written.
        """
        in_file = len(content) > INLINE_BYTES
        if in_file:
            path = self.folder / f"{self._pid}-{next(self._files)}"
            path.write_bytes(content)
            content = os.fsencode(path)
        if not self._transport.is_closing():
            self._transport.write(HEADER.pack(len(content), number, in_file) + content)

    async def received(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the number and the content of each message, until one of both sides hangs up."""
        try:
            with suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    header = await self._reader.readexactly(HEADER.size)
                    length, number, in_file = HEADER.unpack(header)
                    content = await self._reader.readexactly(length)
                    if in_file:
                        content = _read_and_remove(Path(os.fsdecode(content)))
                    yield number, content
        finally:
            # No process waits for a message that could not be sent by now.
            self._transport.abort()

    def hang_up(self) -> None:
        """Shut the connection down; both sides still receive the messages already sent.

        Closing the socket would have no effect while a forked process has a copy of it.
        """
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and remove the folder."""
        self.hang_up()
        self._end.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _read_and_remove(path: Path) -> bytes:
    content = path.read_bytes()
    path.unlink()
    return content


def _main(end: socket.socket, folder: Path, trainer: int) -> None:
    """Run the scheduler's process, until the trainer's process hangs up or has ended."""
    # Ctrl-C reaches both processes. The trainer's decides about its call.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Otherwise the collector would visit all imported modules again and again (docs/scale.md).
    gc.freeze()
    asyncio.run(_serve(_Link(end, folder), trainer))


async def _serve(link: _Link, trainer: int) -> None:
    served, replies = Served(), set[asyncio.Task[None]]()
    watch = (trainer, asyncio.get_running_loop(), link)
    threading.Thread(target=_end_with, args=watch, name="aprilsched-end", daemon=True).start()
    await link.open()
    async for number, content in link.received():
        task = asyncio.create_task(_answer(served, link, number, content))
        replies.add(task)
        task.add_done_callback(replies.discard)
    await served.close()
    # A trainer that was killed has left the folder.
    link.close()


async def _answer(served: Served, link: _Link, number: int, content: bytes) -> None:
    try:
        request: Request = pickle.loads(content)  # noqa: S301
    except Exception as error:
        reply = served.refusal(unsendable("an argument", error))
    else:
        reply = await served.answer(request)
    try:
        link.send(number, pickle.dumps(reply))
    except BaseException as error:
        refused = ConfigError(
            f"what the scheduler returned cannot be sent to the trainer's process "
            f"({summary_of(error)}); give prompts only metadata that pickle can take, and free "
            f"space in {link.folder.parent}."
        )
        link.send(number, pickle.dumps(replace(reply, result=None, raised=Raised.of(refused))))


def _end_with(trainer: int, loop: asyncio.AbstractEventLoop, link: _Link) -> None:
    """Hang up when the trainer's process has ended, and end this process if that has no effect:
    user code may block its loop, and it would keep the store and the engines.

    This is a thread of its own. A death signal would come at the end of the trainer's thread that
    started this process.
    """
    while os.getppid() == trainer:
        time.sleep(PARENT_POLL_S)
    noticed = threading.Event()
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(noticed.set)
    link.hang_up()
    if noticed.wait(SILENCE_S):
        time.sleep(CLOSE_S)
    link.close()
    os._exit(1)
