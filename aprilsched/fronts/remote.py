"""The protocol between a trainer and a scheduler in another process.

The trainer's side is a :class:`RemoteScheduler`, which sends each :class:`Request` over a
:class:`Transport` and waits for its :class:`Reply`. The scheduler's side is :class:`Served`, which
carries requests out by the tables :data:`CALLS` and :data:`NOTICES`.
:mod:`aprilsched.fronts.process` has a pipe as its transport, and :mod:`aprilsched.fronts.ray` a
handle of an actor.

Invariants:

- A cancelled call is withdrawn on the other side. While that side answers, the caller waits for the
  call to end there.
- A batch counts as delivered only when the trainer's call returns it. Until the notice "take"
  arrives, the batch is in transit. A batch that does not arrive is offered again.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle  # noqa: TID251 (between own processes)
import traceback
from abc import abstractmethod
from collections.abc import (
    AsyncGenerator,
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
from typing import Any, Protocol, TypeVar, cast

from aprilsched.errors import (
    AprilschedError,
    ConfigError,
    EngineError,
    InvariantViolation,
    RefitError,
    SchedulerClosed,
)
from aprilsched.fronts.blocking import BlockingScheduler
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.shell import RefitReport
from aprilsched.kernel.shell import RolloutScheduler as AsyncRolloutScheduler
from aprilsched.kernel.shell.prompt_queue import PromptQueue
from aprilsched.kernel.shell.protocol import AsyncScheduler
from aprilsched.kernel.weights.external import Handshake
from aprilsched.kernel.weights.from_trainer import FromTrainer
from aprilsched.kernel.weights.publisher import ConcludingPublisher, WeightPublisher
from aprilsched.observe.figures.run_figures import AlignmentFigures
from aprilsched.types import Batch, Prompt, Receipt

T = TypeVar("T")

SILENCE_S = 5.0
"""Seconds without a reply to a ping after which the other side counts as blocked or stopped."""
WITHDRAWAL_S = 0.2
"""Seconds until a call is withdrawn again. Ray does not keep the order of requests, so a withdrawal
may come before its call."""
PING = -1
"""A reserved number of a request; withdrawing it is a no-op that serves as a ping."""
MAX_CAUSES = 8
"""Number of causes that are sent with an exception: some chains have no end."""


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


class Transport(Protocol):
    """Connects a trainer's side with one :class:`Served`.

    Notices arrive in order, and before every later call.
    """

    def send(self, request: Request) -> asyncio.Future[Reply]:
        """Send a request, and return the future of its reply.

        Raises:
            ConfigError: if pickle refuses the request; the future may raise it instead.
            SchedulerClosed: if the other side has ended; the future may raise it instead.
        """
        ...


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
        self._on_its_way: Batch | None = None
        """The batch, or the part of one, that was sent and not yet taken."""
        self._blocks: list[AbstractAsyncContextManager[Any]] = []
        self._update: tuple[Handshake, asyncio.Task[RefitReport]] | None = None
        """The update whose weights the trainer's side is loading."""

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
        others = [task for task in self._calls.values() if task is not asyncio.current_task()]
        if self.scheduler is None and others:
            for task in others:
                task.cancel()
            await asyncio.wait(others)
        if self.scheduler is not None:
            await self.scheduler.close()

    async def offer(self, within: float | None, *, streamed: bool) -> Batch:
        """Wait for a batch or a part, which is on its way from then on."""
        batch = await self.opened.offered(within, streamed=streamed)
        self._on_its_way = batch
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

    async def leave(self, raised: Raised | None) -> None:
        """Leave the block that was entered last."""
        if not self._blocks:
            raise RefitError(
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

    async def start_update(self, version: int, acknowledge: bool) -> tuple[str, ...] | RefitReport:
        """Pause the engines for a publisher of the trainer's side; returns their names."""
        handshake = Handshake()
        update = asyncio.create_task(
            self.opened.update_weights(handshake, version=version, acknowledge=acknowledge)
        )
        try:
            names = await handshake.paused()
        except asyncio.CancelledError:
            update.cancel()
            await asyncio.wait([update])
            raise
        except RefitError:
            # The update has ended by itself, and raises the cause.
            return await update
        self._update = (handshake, update)
        return names

    async def finish_update(self, raised: Raised | None) -> RefitReport:
        """End an update, whether or not its weights were loaded.

        Returns once the engines have reported their versions.
        """
        if self._update is None:
            raise UpdateLost("the scheduler died while the trainer was loading weights.")
        (handshake, update), self._update = self._update, None
        with suppress(RefitError):  # The update has taken too long, which it reports itself.
            if raised is None:
                handshake.done()
            else:
                handshake.fail(raised.error())
        return await update

    def withdraw(self, number: int) -> None:
        """Cancel a call that has not ended."""
        if number in self._calls:
            self._calls[number].cancel()

    def take(self, index: int) -> None:
        """Record that a batch has arrived; do nothing if its outcome is known already."""
        if self._on_its_way is not None and index == self._on_its_way.index:
            self._on_its_way = None
            self.opened.take()

    def hand_back(self) -> None:
        """Record that the batch in transit has not arrived."""
        self._on_its_way = None
        self.opened.hand_back()

    def acknowledge(self, index: int) -> None:
        """Acknowledge a batch."""
        self.opened.acknowledge(index)

    def push(self, number: int, prompts: Sequence[Prompt]) -> None:
        """Add prompts to a queue."""
        self._queues[number].put(*prompts)

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
    "start_update": Served.start_update,
    "finish_update": Served.finish_update,
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
    them. A subclass opens the transport."""

    def __init__(self) -> None:
        self._version = 0
        self._numbers = itertools.count()
        self._offered: Batch | None = None
        """The batch, or the part of one, that was offered last."""
        self._offering = False
        """Whether a call waits for a batch."""
        self._publishers: dict[int, FromTrainer] = {}
        """Publishers with engines to close, by identity."""
        self._updates: set[asyncio.Task[RefitReport]] = set()

    @property
    def version(self) -> int:
        """The trainer's policy version in the last reply."""
        return self._version

    async def call(self, name: str, *arguments: object, **named: object) -> Any:
        """Make a call of :data:`CALLS`.

        If the wait is cancelled, the call is withdrawn, and its end is waited for, because it may
        still take effect.
        """
        request = Request(next(self._numbers), name, arguments, named)
        future = self._connection().send(request)
        try:
            reply = await asyncio.shield(future)
        except asyncio.CancelledError:
            await self._wait_ended(future, number=request.number)
            future.add_done_callback(ignore_error)
            raise
        self._version = reply.version
        return reply.get()

    @abstractmethod
    def _connection(self) -> Transport:
        """Return the transport.

        Raises:
            SchedulerClosed: outside of the ``with`` block.
        """

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
            future = self._connection().send(Request(next(self._numbers), name, arguments))
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
            # The other side would offer a batch that is on its way to the first call again.
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
        number = self.version + 1 if version is None else version
        if not isinstance(publisher, FromTrainer):
            call = partial(
                self.call, "update_weights", publisher, version=version, acknowledge=acknowledge
            )
            return await self._carried_out(publisher, call)
        self._publishers[id(publisher)] = publisher
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

    async def _carried_out(
        self, publisher: WeightPublisher, update: Callable[[], Awaitable[RefitReport]]
    ) -> RefitReport:
        """Carry out an update; a subclass may repeat it."""
        return await update()

    async def _publish(
        self, here: FromTrainer, version: int, acknowledge: bool, loading: asyncio.Event
    ) -> RefitReport:
        async def update() -> RefitReport:
            paused = await self.call("start_update", version, acknowledge)
            if isinstance(paused, RefitReport):
                return paused
            loading.set()
            try:
                await here.send(version, paused)
            except BaseException as error:
                # The update fails with the publisher's error, unless an engine has the version.
                await self.call("finish_update", Raised.of(error))
                raise
            return await self.call("finish_update", None)

        try:
            await here.prepare(version)
            await here.open(version)
            return await self._carried_out(here, update)
        finally:
            if isinstance(here.publisher, ConcludingPublisher):
                await here.publisher.conclude()

    def paused_for_weights(
        self, *, version: int | None = None, label: bool = False
    ) -> AbstractAsyncContextManager[tuple[str, ...]]:
        """Pause the engines while the trainer loads new weights by calls of its own."""
        return self._block("paused_for_weights", version=version, label=label)

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
                await self._left(Raised.of(error))
            raise
        await self._left(None)

    async def _left(self, raised: Raised | None) -> None:
        """Leave a block."""
        await self.call("leave", raised)


class BlockingRemote(BlockingScheduler):
    """The blocking scheduler over a remote one."""

    def __init__(self, remote: RemoteScheduler) -> None:
        super().__init__(remote)
        self._remote = remote

    @property
    def state(self) -> SchedulerState:
        """A copy of the scheduler's state."""
        return self._wait(self._remote.state)


def absolute(path: Path | str) -> Path:
    """Return a path from the root, because the other process may be in another folder."""
    return Path(path).absolute()


def _as_array(logprobs: object) -> object:
    """Return a tensor as a numpy array, so that the scheduler's process needs no torch."""
    detach = getattr(logprobs, "detach", None)
    return logprobs if detach is None else detach().float().cpu().numpy()
