"""A scheduler in another process: what both sides have, whatever connects them.

A :class:`Caller` waits for the answers of an :class:`Answering` side. :class:`RemoteScheduler` is
the trainer's side of a scheduler. It has the methods of the asyncio scheduler, and makes a call or
tells something without an answer. :class:`Served` is the scheduler's side. They are connected by a
pipe in :mod:`aprilsched.process`, and by an actor in :mod:`aprilsched.ray`.

Invariants:

- A call that is cancelled is withdrawn on the other side, and its end is waited for, as long as
  that side answers at all.
- A batch counts as delivered only when the trainer's call returns it. Until the trainer's side says
  that it was taken, it is on its way, and is offered again if it does not arrive.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import traceback
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from aprilsched import blocking
from aprilsched.coordinator import BiasNow, RefitReport
from aprilsched.coordinator import RolloutScheduler as AsyncRolloutScheduler
from aprilsched.coordinator.protocol import FleetScheduler
from aprilsched.core.state.state import SchedulerState
from aprilsched.engines.base import Engine, Fleet
from aprilsched.errors import (
    AprilschedError,
    ConfigError,
    EngineError,
    InvariantViolation,
    RefitError,
)
from aprilsched.telemetry.figures import AlignmentFigures
from aprilsched.types import Batch, Prompt, Receipt
from aprilsched.weights.external import ExternalWeights, Handshake
from aprilsched.weights.publisher import AdapterPublisher, ConcludingPublisher, WeightPublisher

log = logging.getLogger("aprilsched")

T = TypeVar("T")

SILENT_S = 5.0
"""Seconds after which a side that has not answered an empty call counts as standing still."""
_LOOK_S = 0.2
"""Seconds until a call that was withdrawn is withdrawn again. Ray does not keep the order of calls,
so a withdrawal may come before its call."""
_NO_CALL = -1
"""The number of no call, which is withdrawn only to see whether the other side answers."""
_CAUSES = 8
"""Number of causes that an exception takes along: those of some exceptions have no end."""


class FromTrainer:
    """Runs a publisher in the trainer's process, where the tensors are.

    ``rollouts.update_weights(FromTrainer(DistributedPublisher(weights), SGLangFleet(urls)))``
    pauses the engines and asks each for its version afterwards, as every update does. In between,
    the publisher moves the weights from the trainer's process to the engines of `fleet`. Make one
    object for all updates of a scheduler, so that connections and groups last from one to the next.

    Args:
        publisher: any publisher of full weights.
        fleet: the engines of the scheduler once more, under the same names. Only its list of
            engines is used; each is opened here before the first update. A fleet that asks
            somebody for its servers (``SGLangListedFleet``, ``RayFleet``) asks again before each
            update.

    Raises:
        ConfigError: if `publisher` publishes adapters, or nothing itself.
    """

    def __init__(self, publisher: WeightPublisher, fleet: Fleet) -> None:
        if isinstance(publisher, AdapterPublisher | ExternalWeights | Handshake):
            raise ConfigError(
                f"a {type(publisher).__name__} moves no tensors of the trainer; give it to "
                "update_weights() itself, or use paused_for_weights()."
            )
        self.publisher = publisher
        self._fleet = fleet
        self._opened: dict[str, Engine] = {}
        self._opening = asyncio.Lock()

    async def prepare(self, version: int) -> None:
        """Prepare the publisher."""
        await self.publisher.prepare(version)

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """What the publisher does, for a scheduler of the same process."""
        return await self.publisher.publish(version, engines)

    async def open(self, version: int) -> None:
        """Open the engines here, while they generate.

        An engine that cannot be opened does not take the version. It is tried again at the next.
        """
        async with self._opening:
            if isinstance(self._fleet, ListedFleet):
                engines = await self._fleet.listed()
                names = {engine.name for engine in engines}
                await self._close([name for name in self._opened if name not in names])
            else:
                engines = self._fleet.engines
            closed = [each for each in engines if each.name not in self._opened]
            failures = await asyncio.gather(
                *(engine.open() for engine in closed), return_exceptions=True
            )
            for engine, failure in zip(closed, failures, strict=True):
                if failure is None:
                    self._opened[engine.name] = engine
                else:
                    log.error("%s does not take version %d: %r", engine.name, version, failure)

    def opened(self, names: Sequence[str]) -> Sequence[Engine]:
        """The engines of these names that are open here.

        Raises:
            ConfigError: if none of them is.
        """
        engines = [self._opened[name] for name in names if name in self._opened]
        if not engines:
            raise ConfigError(
                f"FromTrainer has opened {', '.join(self._opened) or 'no engine'}, and the "
                f"scheduler has paused {', '.join(names)}; give it a fleet of the same servers."
            )
        return engines

    async def send(self, version: int, names: Sequence[str]) -> None:
        """Bring `version` to the engines of these names, which the scheduler has paused.

        Raises:
            ConfigError: if none of them is open here.
            Exception: what the publisher raises, or the first error if no engine took the weights.
        """
        engines = self.opened(names)
        try:
            outcomes = await self.publisher.publish(version, engines)
        except BaseException:
            await self._close(list(self._opened))
            raise
        failed = {name: error for name, error in outcomes.items() if error is not None}
        # What went wrong there may be a restart, of which an engine that is opened again knows.
        await self._close(failed)
        if len(failed) == len(engines):
            raise next(iter(failed.values()))

    async def close(self) -> None:
        """Leave the engines' groups, and close the engines."""
        if isinstance(self.publisher, LastingPublisher):
            await self.publisher.aclose()
        await self._close(list(self._opened))

    async def _close(self, names: Iterable[str]) -> None:
        for name in names:
            await self._opened.pop(name).close()


@runtime_checkable
class ListedFleet(Protocol):
    """A fleet that asks somebody which servers there are."""

    async def listed(self) -> Sequence[Engine]: ...


@runtime_checkable
class LastingPublisher(Protocol):
    """A publisher that keeps something from one update to the next."""

    async def aclose(self) -> None: ...


# --- the side that calls -------------------------------------------------------------------------


class Caller(ABC):
    """Waits for the answers of another process; a subclass says what connects the two."""

    @abstractmethod
    async def _withdraw(self, number: Hashable) -> None:
        """Cancel a call over there, if it has not ended; returns when that has arrived."""

    async def _answer(self, number: Hashable, future: asyncio.Future[T]) -> T:
        """The answer of a call. If the wait for it is cancelled, the call is withdrawn, and its end
        is waited for, because it may still take effect."""
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await self._ended(future, withdrawing=number)
            future.add_done_callback(retrieved)
            raise

    async def _ended(
        self,
        future: asyncio.Future[Any],
        *,
        withdrawing: Hashable = _NO_CALL,
        within: float | None = None,
    ) -> None:
        """Wait until a call has ended, for at most `within` seconds, or until the other side has
        not answered for :data:`SILENT_S`: user code blocks its loop, or the process was stopped."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while not future.done():
                    async with asyncio.timeout(SILENT_S):
                        await self._withdraw(withdrawing)
                    await asyncio.wait([future], timeout=_LOOK_S)


class RemoteScheduler(Caller, FleetScheduler):
    """The scheduler as the trainer's side has it; its methods are those of
    :class:`aprilsched.RolloutScheduler`, which describes them."""

    def __init__(self) -> None:
        self._version = 0
        self._offer: int | None = None
        """Number of the batch that was offered last."""
        self._offering = False
        """Whether a call waits for a batch."""
        self._publishers: dict[int, FromTrainer] = {}
        """By identity: those that have engines to close."""
        self._updates: set[asyncio.Task[RefitReport]] = set()

    @property
    def version(self) -> int:
        """The trainer's policy version, as of the last answer of the scheduler."""
        return self._version

    # --- what connects the two sides -------------------------------------------------------------

    @abstractmethod
    async def call(self, name: str, *arguments: object, **named: object) -> Any:
        """Call a method of :class:`Served` with this name, or else of the scheduler."""

    @abstractmethod
    def tell(self, name: str, *arguments: object) -> None:
        """Call a method of :class:`Served` that has no answer."""

    async def _end_updates(self) -> None:
        """End the updates of this side, and close the engines of its publishers."""
        for task in self._updates:
            task.cancel()
        for publisher in self._publishers.values():
            with suppress(EngineError):
                await publisher.close()

    # --- batches ---------------------------------------------------------------------------------

    async def offered(self, within: float | None = None, *, streamed: bool = False) -> Batch:
        if self._offering:
            # Over there, an offer that is on its way to the other call would be offered again.
            raise ConfigError(
                "another next_batch() call is waiting already; await it before the next call."
            )
        self._offering = True
        limit = asyncio.timeout(None if within is None else within + SILENT_S)
        try:
            async with limit:
                batch: Batch = await self.call("offered", within, streamed=streamed)
        except BaseException as error:
            # It may have been on its way.
            self.hand_back()
            if not limit.expired() or not isinstance(error, TimeoutError):
                raise
            raise TimeoutError(
                f"no batch was complete within {within} s, and the scheduler's process does not "
                "answer; the next call continues the wait."
            ) from None
        finally:
            self._offering = False
        self._offer = batch.index
        if batch.receipt is None:
            return batch
        return replace(batch, receipt=Receipt(partial(self._acknowledge, batch.index)))

    def take(self) -> None:
        self.tell("take", self._offer)

    def hand_back(self) -> None:
        self.tell("hand_back")

    def _acknowledge(self, index: int) -> None:
        self.tell("acknowledge", index)

    async def evaluate(self, prompts: Iterable[Prompt], *, group_size: int = 1) -> Batch:
        """Generate all responses to `prompts`, without over-provisioning and carry."""
        return await self.call("evaluate", tuple(prompts), group_size=group_size)

    async def report_logprobs(self, batch: Batch, logprobs: object) -> AlignmentFigures:
        """Compare the trainer's log-probabilities of a batch with those of the engines."""
        if isinstance(logprobs, list | tuple):
            rows = [_plain(row) for row in cast("Sequence[object]", logprobs)]
            return await self.call("report_logprobs", batch, rows)
        return await self.call("report_logprobs", batch, _plain(logprobs))

    # --- weights ---------------------------------------------------------------------------------

    async def update_weights(
        self,
        publisher: WeightPublisher,
        *,
        version: int | None = None,
        acknowledge: bool = True,
    ) -> RefitReport:
        """Bring new weights into every engine. The publisher is sent to the scheduler and runs
        there, or here if it is a :class:`~aprilsched.process.FromTrainer`."""
        named = {"version": version, "acknowledge": acknowledge}
        if not isinstance(publisher, FromTrainer):
            return await self.call("update_weights", publisher, **named)
        self._publishers[id(publisher)] = publisher
        number = self.version + 1 if version is None else version
        begun = asyncio.Event()
        update = asyncio.create_task(self._publish(publisher, number, acknowledge, begun))
        self._updates.add(update)
        update.add_done_callback(self._updates.discard)
        try:
            return await asyncio.shield(update)
        except asyncio.CancelledError:
            # Weights that are being loaded are loaded to their end, as in every update.
            if not begun.is_set():
                update.cancel()
                await asyncio.wait([update])
            raise

    async def _publish(
        self, here: FromTrainer, version: int, acknowledge: bool, begun: asyncio.Event
    ) -> RefitReport:
        try:
            await here.prepare(version)
            await here.open(version)
            return await self._publish_prepared(here, version, acknowledge, begun)
        finally:
            if isinstance(here.publisher, ConcludingPublisher):
                await here.publisher.conclude()

    async def _publish_prepared(
        self, here: FromTrainer, version: int, acknowledge: bool, begun: asyncio.Event
    ) -> RefitReport:
        paused = await self.call("begin_update", version, acknowledge)
        if isinstance(paused, RefitReport):
            return paused
        begun.set()
        try:
            await here.send(version, paused)
        except BaseException as error:
            # The update fails with the publisher's error, unless an engine has the version.
            await self.call("end_update", Raised.of(error))
            raise
        return await self.call("end_update", None)

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
        """A block of the scheduler around one of the trainer."""
        entered = await self.call("enter", name, **named)
        try:
            yield entered
        except BaseException as error:
            await self.call("leave", Raised.of(error))
            raise
        else:
            await self.call("leave", None)

    # --- durability ------------------------------------------------------------------------------

    async def checkpoint(self, path: Path | str, *, acknowledge: bool = True) -> None:
        """Write the scheduler's state to a file, which the scheduler's process writes."""
        await self.call("checkpoint", absolute(path), acknowledge=acknowledge)


class BlockingRemote(blocking.RolloutScheduler):
    """The blocking scheduler over a remote one; a subclass says what connects it."""

    def _use_remote(self, remote: RemoteScheduler) -> None:
        self._remote = remote
        self._use_fleet(remote)

    @property
    def state(self) -> SchedulerState:
        """A copy of the scheduler's state."""
        return self._wait(lambda: self._remote.call("state"))

    def bias(self) -> BiasNow:
        """How the delivered lengths differ so far from the law that lengths are drawn from."""
        return self._wait(lambda: self._remote.call("bias"))


def unsendable(what: str, error: Exception) -> ConfigError:
    """The error for something that pickle cannot take."""
    return ConfigError(
        f"{what} cannot be sent to the scheduler's process ({said(error)}); give functions and "
        "classes of a module, and a publisher that needs the trainer's memory as "
        "FromTrainer(publisher, fleet)."
    )


def checked_scheduler(made: object) -> AsyncRolloutScheduler:
    """What the user's function has made.

    Raises:
        ConfigError: if that is no scheduler.
    """
    if not isinstance(made, AsyncRolloutScheduler):
        raise ConfigError(
            f"the scheduler's function returned a {type(made).__name__}; return an "
            "aprilsched.RolloutScheduler."
        )
    return made


def absolute(path: Path | str) -> Path:
    """The path from the root, because the other process may be in another folder."""
    return Path(path).absolute()


def _plain(logprobs: object) -> object:
    """A tensor as a numpy array, so that the scheduler's process needs no torch."""
    detach = getattr(logprobs, "detach", None)
    return logprobs if detach is None else detach().float().cpu().numpy()


# --- between the two -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Raised:
    """An exception on its way to the other process.

    Pickle calls the constructor of an exception with its message, which many of them refuse. The
    parts are sent instead, and a summary for those that the other process cannot have. Nothing that
    the exception's own code raises keeps it from arriving, because a call would wait for ever.
    """

    summary: str
    parts: bytes | None
    cause: Raised | None

    @classmethod
    def of(cls, error: BaseException, *, tell_where: bool = False) -> Raised:
        if tell_where and not isinstance(
            error, AprilschedError | TimeoutError | asyncio.CancelledError
        ):
            with suppress(BaseException):
                trace = "".join(traceback.format_exception(error))
                error.add_note(f"In the scheduler's process:\n{trace}")
        causes = [error]
        with suppress(BaseException):
            while (cause := causes[-1].__cause__) is not None and len(causes) <= _CAUSES:
                causes.append(cause)
        raised = None
        for each in reversed(causes[1:]):
            raised = cls(summary=said(each), parts=_parts(each), cause=raised)
        return cls(summary=said(error), parts=_parts(error), cause=raised)

    def again(self) -> BaseException:
        error: object = None
        with suppress(BaseException):
            kind, arguments, fields = pickle.loads(self.parts or b"")  # noqa: S301
            made = kind.__new__(kind, *arguments)
            made.__dict__.update(fields)
            # Whoever gets it puts it into other errors and logs.
            error = made if f"{made}{made!r}" else None
        if not isinstance(error, BaseException):
            error = AprilschedError(f"the scheduler's process raised {self.summary}")
        if self.cause is not None:
            error.__cause__ = self.cause.again()
        return error


def _parts(error: BaseException) -> bytes | None:
    try:
        return pickle.dumps((type(error), error.args, error.__dict__))
    except BaseException:
        return None


def said(error: BaseException) -> str:
    """Type and text of an exception, whose code for that may raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return f"{type(error).__name__}, which has no text"


def retrieved(future: asyncio.Future[Any]) -> None:
    """Look at the error of a call for which nobody waits, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a call returned or raised, and the version of the scheduler then."""

    version: int = 0
    result: Any = None
    raised: Raised | None = None

    def get(self) -> Any:
        """The result.

        Raises:
            BaseException: what the call raised.
        """
        if self.raised is not None:
            raise self.raised.again()
        return self.result


# --- the side that answers -----------------------------------------------------------------------


class Answering:
    """Answers the calls of another process, on the event loop of what is called."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, asyncio.Task[Any]] = {}

    @property
    def version(self) -> int:
        """The trainer's policy version; 0 for what has none."""
        return 0

    def _method(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """What is called by this name."""
        return getattr(self, name)

    def begin(
        self, number: Hashable, name: str, arguments: Sequence[object], named: Mapping[str, object]
    ) -> asyncio.Task[Any]:
        """Begin a call."""
        call = self._call(name, arguments, named)
        task = self._calls[number] = asyncio.get_running_loop().create_task(call)
        # A task that is cancelled before it begins runs nothing of its coroutine.
        task.add_done_callback(lambda _: self._calls.pop(number, None))
        return task

    async def _call(
        self, name: str, arguments: Sequence[object], named: Mapping[str, object]
    ) -> Any:
        return await self._method(name)(*arguments, **named)

    async def answer(
        self, number: Any, name: str, arguments: Sequence[object], named: Mapping[str, object]
    ) -> Answer:
        """Make a call, and say how it has ended."""
        call = self.begin(number, name, arguments, named)
        await asyncio.wait([call])
        return self.outcome(call)

    def outcome(self, call: asyncio.Task[Any]) -> Answer:
        """How a call has ended."""
        error = asyncio.CancelledError() if call.cancelled() else call.exception()
        if error is None:
            return Answer(version=self.version, result=call.result())
        return Answer(version=self.version, raised=Raised.of(error, tell_where=True))

    def cancel(self, number: Hashable) -> None:
        """Cancel a call, if it has not ended."""
        if number in self._calls:
            self._calls[number].cancel()

    async def withdraw(self, number: Hashable) -> None:
        """What the side that calls asks for: see :meth:`cancel`."""
        self.cancel(number)


class Served(Answering):
    """Answers the calls of the trainer's side of a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: AsyncRolloutScheduler | None = None
        """The scheduler whose calls these are; None before it is open."""
        self._on_its_way: Batch | None = None
        """The batch, or the part of one, that the trainer's side was sent and has not taken."""
        self._blocks: list[AbstractAsyncContextManager[Any]] = []
        self._update: tuple[Handshake, asyncio.Task[RefitReport]] | None = None
        """The update whose weights the trainer's side is loading."""

    @property
    def version(self) -> int:
        return 0 if self.scheduler is None else self.scheduler.version

    def _method(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        return getattr(self, name, None) or getattr(self._opened, name)

    async def close(self) -> None:
        """Close the scheduler, which ends every call, or stop opening it."""
        others = [task for task in self._calls.values() if task is not asyncio.current_task()]
        if self.scheduler is None and others:
            for task in others:
                task.cancel()
            await asyncio.wait(others)
        if self.scheduler is not None:
            await self.scheduler.close()

    # --- calls -----------------------------------------------------------------------------------

    @property
    def _opened(self) -> AsyncRolloutScheduler:
        if self.scheduler is None:
            raise InvariantViolation("the scheduler's process was called before it was open")
        return self.scheduler

    async def offered(self, within: float | None, *, streamed: bool = False) -> Batch:
        batch = await self._opened.offered(within, streamed=streamed)
        self._on_its_way = batch
        return batch

    async def state(self) -> SchedulerState:
        return self._opened.state

    async def bias(self) -> BiasNow:
        return self._opened.bias()

    async def enter(self, name: str, **named: object) -> object:
        block = getattr(self._opened, name)(**named)
        entered = await block.__aenter__()
        self._blocks.append(block)
        return entered

    async def leave(self, raised: Raised | None) -> None:
        block = self._blocks.pop()
        if raised is None:
            await block.__aexit__(None, None, None)
            return
        error = raised.again()
        try:
            await block.__aexit__(type(error), error, None)
        except BaseException as other:
            # The trainer's side raises its own error itself.
            if other is not error:
                raise

    async def begin_update(self, version: int, acknowledge: bool) -> tuple[str, ...] | RefitReport:
        """Pause the engines for a publisher of the trainer's side; returns their names."""
        handshake = Handshake()
        update = asyncio.create_task(
            self._opened.update_weights(handshake, version=version, acknowledge=acknowledge)
        )
        try:
            names = await handshake.paused()
        except asyncio.CancelledError:
            update.cancel()
            await asyncio.wait([update])
            raise
        except RefitError:
            # The update has ended by itself, and knows why.
            return await update
        self._update = (handshake, update)
        return names

    async def end_update(self, raised: Raised | None) -> RefitReport:
        """Say that the weights are loaded, or why not; returns when the engines were asked."""
        if self._update is None:
            raise InvariantViolation("an update was ended that had not begun")
        (handshake, update), self._update = self._update, None
        with suppress(RefitError):  # The update has taken too long, which it says itself.
            if raised is None:
                handshake.done()
            else:
                handshake.fail(raised.again())
        return await update

    # --- what it is told, without an answer ------------------------------------------------------

    def take(self, index: int) -> None:
        # What became of a batch may be known already when this arrives.
        if self._on_its_way is not None and index == self._on_its_way.index:
            self._on_its_way = None
            self._opened.take()

    def hand_back(self) -> None:
        self._on_its_way = None
        self._opened.hand_back()

    def acknowledge(self, index: int) -> None:
        self._opened.acknowledge(index)
