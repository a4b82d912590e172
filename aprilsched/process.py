"""RolloutScheduler in a process of its own, for trainers whose Python code keeps their own busy.

The blocking scheduler runs on a thread of the trainer's process. Python runs one thread of a
process at a time, so the scheduler reads no token, refills no engine and ends no pause while the
trainer's code holds Python's lock. Here the scheduler has an interpreter of its own, and the
trainer's process only passes calls and batches on::

    def make(urls, path):                        # at the top of a module
        prompts = read_prompts(path)
        return aprilsched.RolloutScheduler(SGLangFleet(urls), prompts, reward=score, config=config)

    if __name__ == "__main__":
        with process.RolloutScheduler(make, urls, "prompts.jsonl") as rollouts:
            for batch in rollouts:
                trainer.step(batch.to_torch())
                trainer.save_pretrained(folder)
                rollouts.update_weights(DiskPublisher(folder))

Both processes belong together: a pipe connects them, and larger messages are files in a temporary
folder that only this user can read.

Invariants:

- Whoever ends first, the other one notices. A call to a process that has ended raises
  SchedulerClosed, and a scheduler whose trainer has ended closes itself.
- A batch counts as delivered only when the trainer's call returns it, as in
  :mod:`aprilsched.blocking`, whose code makes the calls here too.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import struct
import tempfile
import traceback
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from aprilsched import blocking
from aprilsched.coordinator import BiasNow, RefitReport
from aprilsched.coordinator import RolloutScheduler as AsyncRolloutScheduler
from aprilsched.coordinator.prompt_queue import PromptQueue
from aprilsched.core.state.state import SchedulerState
from aprilsched.engines.base import Engine, Fleet
from aprilsched.errors import (
    AprilschedError,
    ConfigError,
    EngineError,
    InvariantViolation,
    RefitError,
    SchedulerClosed,
)
from aprilsched.telemetry.figures import AlignmentFigures
from aprilsched.types import Batch, Prompt, Receipt
from aprilsched.weights.base import AdapterPublisher, ConcludingPublisher, WeightPublisher
from aprilsched.weights.external import ExternalWeights, Handshake

__all__ = ["FromTrainer", "RolloutScheduler"]

log = logging.getLogger("aprilsched")

_HEADER = struct.Struct("<qq?")
"""What a message begins with: the number of its call, the fleet's version, and whether the rest is
the path of a file that has the content."""
_OPENING = 0
"""The number of the call that opens the scheduler."""
_NO_ANSWER = -1
"""The number of calls without an answer."""
_INLINE_BYTES = 1 << 14
"""Larger messages go through a file. A pipe takes about 200 KB at a time, and the trainer's process
would have to get Python's lock again for each part."""


class RolloutScheduler(blocking.RolloutScheduler):
    """The blocking scheduler with an interpreter of its own.

    Everything that `make` makes is in the scheduler's process: the fleet, the prompts, the reward
    and filter functions, episodes, listeners, the store. It is called there with the arguments
    given here, which pickle must be able to take, and so must `make`, so it is a function of a
    module. What the trainer gives to a method is sent there, too:

    - A publisher must not need the trainer's memory. ``DiskPublisher(folder)`` without `save`
      works once the trainer has written the folder, and so do ``LoraPublisher(folder)`` and
      ``ExternalWeights()``. A :class:`FromTrainer` runs any other one in the trainer's process, and
      the block of ``paused_for_weights()`` is there too.
    - A :class:`~aprilsched.PromptQueue` among the arguments of `make` stays usable: what the
      trainer pushes into it is sent on.

    A new interpreter begins with the trainer's main module, as always in multiprocessing, so a
    script needs ``if __name__ == "__main__":``.

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
        self._remote = _Remote(make, arguments, named)
        self._use(cast("AsyncRolloutScheduler", self._remote))

    @property
    def version(self) -> int:
        """The trainer's policy version, as of the last answer of the scheduler."""
        return self._remote.version

    @property
    def state(self) -> SchedulerState:
        """A copy of the scheduler's state."""
        return self._wait(lambda: self._remote.call("state"))

    def bias(self) -> BiasNow:
        """How the delivered lengths differ so far from the law that lengths are drawn from."""
        return self._wait(lambda: self._remote.call("bias"))

    async def _offered(self, within: float | None) -> Batch:
        return await self._remote.offered(within)

    def _stop_thread(self) -> None:
        try:
            super()._stop_thread()
        finally:
            self._remote.end()


class FromTrainer:
    """Runs a publisher in the trainer's process, where the tensors are.

    ``rollouts.update_weights(FromTrainer(DistributedPublisher(weights), SGLangFleet(urls)))``
    pauses the engines and asks each for its version afterwards, as every update does. In between,
    the publisher moves the weights from the trainer's process to the engines of `fleet`. Make one
    object for all updates of a scheduler, so that connections and groups last from one to the next.

    Args:
        publisher: any publisher of full weights.
        fleet: the engines of the scheduler once more, under the same names. Only its list of
            engines is used; each is opened here before the first update.

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
        closed = [each for each in self._fleet.engines if each.name not in self._opened]
        failures = await asyncio.gather(
            *(engine.open() for engine in closed), return_exceptions=True
        )
        for engine, failure in zip(closed, failures, strict=True):
            if failure is None:
                self._opened[engine.name] = engine
            else:
                log.error("%s does not take version %d: %r", engine.name, version, failure)

    async def send(self, version: int, names: Sequence[str]) -> None:
        """Bring `version` to the engines of these names, which the scheduler has paused.

        Raises:
            ConfigError: if none of them is open here.
            Exception: what the publisher raises, or the first error if no engine took the weights.
        """
        engines = [self._opened[name] for name in names if name in self._opened]
        if not engines:
            raise ConfigError(
                f"FromTrainer has opened {', '.join(self._opened) or 'no engine'}, and the "
                f"scheduler has paused {', '.join(names)}; give it a fleet of the same servers."
            )
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
class LastingPublisher(Protocol):
    """A publisher that keeps something from one update to the next."""

    async def aclose(self) -> None: ...


# --- the trainer's process -----------------------------------------------------------------------


class _Remote:
    """The scheduler as the trainer's process sees it: the asyncio scheduler's methods, which are
    called on the loop of the blocking scheduler's thread."""

    def __init__(
        self,
        make: Callable[..., AsyncRolloutScheduler],
        arguments: Sequence[object],
        named: Mapping[str, object],
    ) -> None:
        self.version = 0
        self._queues: list[PromptQueue] = []
        self._order = _Order(
            make=make,
            arguments=tuple(self._replaced(each) for each in arguments),
            named={name: self._replaced(each) for name, each in named.items()},
        )
        self._process: _Process | None = None
        self._failure: BaseException | None = None
        """Why no call can be answered any more."""
        self._numbers = itertools.count(_OPENING)
        self._unanswered: dict[int, asyncio.Future[Any]] = {}
        self._forwarding: list[asyncio.Task[None]] = []
        self._publishers: dict[int, FromTrainer] = {}
        """By identity: those that have engines to close."""
        self._updates: set[asyncio.Task[RefitReport]] = set()

    def _replaced(self, argument: object) -> object:
        if isinstance(argument, PromptQueue):
            self._queues.append(argument)
            return _QueueOf(len(self._queues) - 1)
        return argument

    # --- life ----------------------------------------------------------------------------------

    async def __aenter__(self) -> None:
        if self._process is not None:
            raise SchedulerClosed("a RolloutScheduler is opened once; make a new one.")
        self._process = process = _Process(self._order)
        loop = asyncio.get_running_loop()
        loop.add_reader(process.link.connection.fileno(), self._read, process)
        loop.add_reader(process.sentinel, self._has_ended, process)
        try:
            await self._answer(process, next(self._numbers))
        except BaseException:
            await self._hang_up(process)
            raise
        self._forwarding = [
            loop.create_task(self._forward(number, queue))
            for number, queue in enumerate(self._queues)
        ]

    async def close(self) -> None:
        if self._process is None:
            return
        for task in (*self._forwarding, *self._updates):
            task.cancel()
        for publisher in self._publishers.values():
            with suppress(EngineError):
                await publisher.close()
        if self._failure is None:
            with suppress(SchedulerClosed):
                await self.call("close")
        await self._hang_up(self._process)

    async def _hang_up(self, process: _Process) -> None:
        """Close the pipe, by which the scheduler's process is told to end, and wait for that."""
        if not process.link.connection.closed:
            asyncio.get_running_loop().remove_reader(process.link.connection.fileno())
            process.link.connection.close()
            self._fail(SchedulerClosed("the scheduler was closed while it was waited for."))
        await asyncio.shield(process.ended)

    def end(self) -> None:
        """Leave nothing behind. The process is still there only if nobody waited for its end."""
        if self._process is not None:
            self._process.end()

    def _has_ended(self, process: _Process) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        # What it said before its end is still in the pipe.
        self._read(process)
        code = process.exit_code()
        hint = ", which its output explains" if code > 0 else ""
        self._fail(
            SchedulerClosed(
                f"the scheduler's process has ended with exit code {code}{hint}; open a new "
                "scheduler."
            )
        )
        process.ended.set_result(None)

    def _fail(self, failure: BaseException) -> None:
        """Answer every call with `failure`, now and later. Only the first failure counts."""
        self._failure = self._failure or failure
        for future in self._unanswered.values():
            if not future.done():
                future.set_exception(self._failure)
        self._unanswered.clear()

    # --- calls ---------------------------------------------------------------------------------

    async def call(self, name: str, *arguments: object, **named: object) -> Any:
        """Call a method of :class:`_Served` with this name, or else of the scheduler."""
        if self._process is None:
            raise SchedulerClosed("use the scheduler inside its `with` block.")
        number = next(self._numbers)
        self._send(self._process, number, name, *arguments, **named)
        return await self._answer(self._process, number)

    def tell(self, name: str, *arguments: object) -> None:
        """Make a call without an answer."""
        if self._process is not None:
            self._send(self._process, _NO_ANSWER, name, *arguments)

    async def _answer(self, process: _Process, number: int) -> Any:
        if self._failure is not None:
            raise self._failure
        future = self._unanswered[number] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not future.done():
                # The call is withdrawn. Its end is waited for, because it may still take effect.
                self._send(process, number, "withdraw")
                await asyncio.wait([future])
            future.exception()
            raise

    def _send(
        self, process: _Process, number: int, name: str, *arguments: object, **named: object
    ) -> None:
        try:
            content = pickle.dumps((name, arguments, named))
        except Exception as error:
            raise _unsendable(f"an argument of {name}()", error) from error
        process.link.send(number, self.version, content)

    def _read(self, process: _Process) -> None:
        connection = process.link.connection
        try:
            for message in process.link.received():
                self.version = message.version
                self._receive(message)
        except (EOFError, OSError):
            # The process has ended. Its sentinel says so too, and how.
            asyncio.get_running_loop().remove_reader(connection.fileno())

    def _receive(self, message: _Message) -> None:
        future = self._unanswered.pop(message.number, None)
        if future is None or future.done():
            return
        try:
            result, error = message.read()
        except Exception as trouble:
            future.set_exception(_unsendable("the scheduler's answer", trouble))
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error.again())

    async def _forward(self, number: int, queue: PromptQueue) -> None:
        """Send on what the trainer pushes into a queue of prompts."""
        try:
            async for prompt in queue:
                self.tell(
                    "push", number, [prompt, *[await anext(queue) for _ in range(len(queue))]]
                )
            self.tell("end_queue", number)
        except ConfigError as error:
            self._fail(error)

    # --- the scheduler's methods ---------------------------------------------------------------

    async def offered(self, within: float | None) -> Batch:
        try:
            batch: Batch = await self.call("offered", within)
        except BaseException:
            # It may have been on its way.
            self._hand_back()
            raise
        if batch.receipt is None:
            return batch
        return replace(batch, receipt=Receipt(partial(self.tell, "acknowledge", batch.index)))

    def _take(self) -> None:
        self.tell("take")

    def _hand_back(self) -> None:
        self.tell("hand_back")

    async def evaluate(self, prompts: Iterable[Prompt], *, group_size: int) -> Batch:
        return await self.call("evaluate", tuple(prompts), group_size=group_size)

    async def report_logprobs(self, batch: Batch, logprobs: object) -> AlignmentFigures:
        if isinstance(logprobs, list | tuple):
            rows = [_plain(row) for row in cast("Sequence[object]", logprobs)]
            return await self.call("report_logprobs", batch, rows)
        return await self.call("report_logprobs", batch, _plain(logprobs))

    async def update_weights(
        self, publisher: WeightPublisher, *, version: int | None, acknowledge: bool
    ) -> RefitReport:
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
            paused = await self.call("begin_update", version, acknowledge)
            if isinstance(paused, RefitReport):
                return paused
            begun.set()
            try:
                await here.send(version, paused)
            except BaseException as error:
                # The update fails with the publisher's error, unless an engine has the version.
                await self.call("end_update", _Raised.of(error))
                raise
            return await self.call("end_update", None)
        finally:
            if isinstance(here.publisher, ConcludingPublisher):
                await here.publisher.conclude()

    async def checkpoint(self, path: Path | str, *, acknowledge: bool) -> None:
        await self.call("checkpoint", _absolute(path), acknowledge=acknowledge)

    def restore(self, path: Path | str) -> None:
        if self._process is not None:
            raise SchedulerClosed("restore() comes before the `with` block.")
        self._order = replace(self._order, restored=_absolute(path))

    def paused_for_weights(
        self, *, version: int | None, label: bool
    ) -> AbstractAsyncContextManager[tuple[str, ...]]:
        return self._block("paused_for_weights", version=version, label=label)

    def asleep(self, *, tags: Sequence[str]) -> AbstractAsyncContextManager[None]:
        return self._block("asleep", tags=tuple(tags))

    @asynccontextmanager
    async def _block(self, name: str, **named: object) -> AsyncGenerator[Any]:
        """A block of the scheduler around one of the trainer."""
        entered = await self.call("enter", name, **named)
        try:
            yield entered
        except BaseException as error:
            await self.call("leave", _Raised.of(error))
            raise
        else:
            await self.call("leave", None)


def _unsendable(what: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{what} cannot be sent to the scheduler's process ({error}); give functions and classes "
        "of a module, and a publisher that needs the trainer's memory as FromTrainer(publisher, "
        "fleet)."
    )


def _absolute(path: Path | str) -> Path:
    return Path(path).absolute()


def _plain(logprobs: object) -> object:
    """A tensor as a numpy array, so that the scheduler's process needs no torch."""
    detach = getattr(logprobs, "detach", None)
    return logprobs if detach is None else detach().float().cpu().numpy()


# --- between the two -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What the scheduler's process begins with."""

    make: Callable[..., AsyncRolloutScheduler]
    arguments: tuple[object, ...]
    named: Mapping[str, object]
    restored: Path | None = None


@dataclass(frozen=True)
class _QueueOf:
    """Stands for a queue of prompts of the trainer's process."""

    number: int


@dataclass(frozen=True, kw_only=True)
class _Raised:
    """An exception on its way to the other process.

    Pickle calls the constructor of an exception with its message, which many of them refuse. The
    parts are sent instead, and a summary for those that the other process cannot have.
    """

    summary: str
    parts: bytes | None
    cause: _Raised | None

    @classmethod
    def of(cls, error: BaseException, *, tell_where: bool = False) -> _Raised:
        if tell_where and not isinstance(
            error, AprilschedError | TimeoutError | asyncio.CancelledError
        ):
            trace = "".join(traceback.format_exception(error))
            error.add_note(f"In the scheduler's process:\n{trace}")
        try:
            parts = pickle.dumps((type(error), error.args, error.__dict__))
        except Exception:
            parts = None
        cause = error.__cause__
        return cls(
            summary=f"{type(error).__name__}: {error}",
            parts=parts,
            cause=None if cause is None else cls.of(cause),
        )

    def again(self) -> BaseException:
        error: BaseException
        try:
            kind, arguments, fields = pickle.loads(self.parts or b"")  # noqa: S301
            error = kind.__new__(kind, *arguments)
            error.__dict__.update(fields)
        except Exception:
            error = AprilschedError(f"the scheduler's process raised {self.summary}")
        if self.cause is not None:
            error.__cause__ = self.cause.again()
        return error


class _Process:
    """The scheduler's process as the trainer's has it, and the link to it.

    Raises:
        ConfigError: if what it begins with cannot be sent.
    """

    def __init__(self, order: _Order) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the process has ended and everything that it said was read."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.link = _Link(ours, Path(tempfile.mkdtemp(prefix="aprilsched-")))
        self._process = context.Process(
            target=_main,
            args=(theirs, str(self.link.folder)),
            kwargs={"order": order},
            name="aprilsched",
        )
        try:
            with theirs:
                self._process.start()
        except Exception as error:
            self.link.close()
            raise _unsendable("the function or an argument of it", error) from error
        # At its end, Python waits for the process, which waits for this.
        atexit.register(self.link.close)

    @property
    def sentinel(self) -> int:
        """A file descriptor that is readable once the process has ended."""
        return self._process.sentinel

    def exit_code(self) -> int:
        """The exit code of the process, which has ended; minus the signal that killed it."""
        self._process.join()
        return self._process.exitcode or 0

    def end(self) -> None:
        """Kill the process if it is still there, and remove what the link has left."""
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.link.close()
        atexit.unregister(self.link.close)


@dataclass(frozen=True)
class _Message:
    number: int
    version: int
    content: bytes
    in_file: bool

    def read(self) -> Any:
        """What was sent; a file is removed.

        Raises:
            Exception: if this process cannot read it.
        """
        if not self.in_file:
            return pickle.loads(self.content)  # noqa: S301
        path = Path(os.fsdecode(self.content))
        content = path.read_bytes()
        path.unlink()
        return pickle.loads(content)  # noqa: S301


class _Link:
    """One end of the pipe between the two processes, and the folder for large messages."""

    def __init__(self, connection: Connection, folder: Path) -> None:
        self.connection = connection
        self.folder = folder
        self._pid = os.getpid()
        self._files = itertools.count()

    def send(self, number: int, version: int, content: bytes) -> None:
        """Send a message. If nobody reads any more, nothing is sent: whoever reads notices that.

        Raises:
            ConfigError: if the message needs a file, and that cannot be written.
        """
        in_file = len(content) > _INLINE_BYTES
        if in_file:
            path = self.folder / f"{self._pid}-{next(self._files)}"
            try:
                path.write_bytes(content)
            except OSError as error:
                path.unlink(missing_ok=True)
                raise ConfigError(
                    f"{self.folder} cannot be written ({error.strerror}); free space there, or set "
                    "TMPDIR to another disk."
                ) from error
            content = os.fsencode(path)
        with suppress(OSError):
            self.connection.send_bytes(_HEADER.pack(number, version, in_file) + content)

    def received(self) -> Iterator[_Message]:
        """Every message that has arrived.

        Raises:
            OSError, EOFError: if the other end is closed.
        """
        while not self.connection.closed and self.connection.poll():
            message = self.connection.recv_bytes()
            number, version, in_file = _HEADER.unpack_from(message)
            yield _Message(number, version, message[_HEADER.size :], in_file)

    def close(self) -> None:
        """Hang up and remove the folder; a forked process, which has a copy, leaves it alone."""
        if os.getpid() == self._pid:
            self.connection.close()
            shutil.rmtree(self.folder, ignore_errors=True)


# --- the scheduler's process ---------------------------------------------------------------------


def _main(connection: Connection, folder: str, *, order: _Order) -> None:
    """What the scheduler's process runs, until the trainer's process hangs up or has ended."""
    # Ctrl-C reaches both processes. The trainer's decides what becomes of its call.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_Served(_Link(connection, Path(folder)), order).run())


class _Served:
    """Answers the calls of the trainer's process."""

    def __init__(self, link: _Link, order: _Order) -> None:
        self._link = link
        self._order = order
        self._scheduler: AsyncRolloutScheduler | None = None
        self._queues: dict[int, PromptQueue] = {}
        self._calls: dict[int, asyncio.Task[Any]] = {}
        self._blocks: list[AbstractAsyncContextManager[Any]] = []
        self._update: tuple[Handshake, asyncio.Task[RefitReport]] | None = None
        """The update whose weights the trainer's process is loading."""
        self._hung_up = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._begin(_OPENING, self._open())
        loop.add_reader(self._link.connection.fileno(), self._read)
        await self._hung_up.wait()
        for task in list(self._calls.values()):
            task.cancel()
        if self._scheduler is not None:
            await self._scheduler.close()
        # A trainer that was killed has left the folder.
        self._link.close()

    async def _open(self) -> None:
        order = self._order
        made: Any = order.make(
            *(self._replaced(each) for each in order.arguments),
            **{name: self._replaced(each) for name, each in order.named.items()},
        )
        if not isinstance(made, AsyncRolloutScheduler):
            raise ConfigError(
                f"the scheduler's function returned a {type(made).__name__}; return an "
                "aprilsched.RolloutScheduler."
            )
        if order.restored is not None:
            made.restore(order.restored)
        await made.__aenter__()
        self._scheduler = made

    def _replaced(self, argument: object) -> object:
        if isinstance(argument, _QueueOf):
            return self._queues.setdefault(argument.number, PromptQueue())
        return argument

    def _read(self) -> None:
        try:
            for message in self._link.received():
                self._handle(message.number, message)
        except (EOFError, OSError):
            # The trainer's process has hung up or ended.
            asyncio.get_running_loop().remove_reader(self._link.connection.fileno())
            self._hung_up.set()

    def _handle(self, number: int, message: _Message) -> None:
        try:
            name, arguments, named = message.read()
        except Exception as error:
            self._reply(number, None, _unsendable("an argument", error))
            return
        if name == "withdraw":
            if number in self._calls:
                self._calls[number].cancel()
        elif number == _NO_ANSWER:
            getattr(self, name)(*arguments)
        else:
            method = getattr(self, name, None) or getattr(self._scheduler, name)
            self._begin(number, method(*arguments, **named))

    def _begin(self, number: int, call: Coroutine[Any, Any, Any]) -> None:
        task = self._calls[number] = asyncio.get_running_loop().create_task(call)
        # A task that is cancelled before it begins runs nothing of its coroutine.
        task.add_done_callback(partial(self._end, number))

    def _end(self, number: int, task: asyncio.Task[Any]) -> None:
        del self._calls[number]
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._reply(number, None if error else task.result(), error)

    def _reply(self, number: int, result: object, error: BaseException | None) -> None:
        version = 0 if self._scheduler is None else self._scheduler.version
        raised = None if error is None else _Raised.of(error, tell_where=True)
        try:
            try:
                content = pickle.dumps((result, raised))
            except Exception as trouble:
                raise ConfigError(
                    f"what the scheduler returned cannot be sent to the trainer's process "
                    f"({trouble}); give prompts only metadata that pickle can take."
                ) from trouble
            self._link.send(number, version, content)
        except ConfigError as refused:
            self._link.send(number, version, pickle.dumps((None, _Raised.of(refused))))

    # --- what the trainer's process calls ------------------------------------------------------

    @property
    def _opened(self) -> AsyncRolloutScheduler:
        if self._scheduler is None:
            raise InvariantViolation("the scheduler's process was called before it was open")
        return self._scheduler

    async def offered(self, within: float | None) -> Batch:
        return await blocking.offered(self._opened, within)

    async def state(self) -> SchedulerState:
        return self._opened.state

    async def bias(self) -> BiasNow:
        return self._opened.bias()

    async def enter(self, name: str, **named: object) -> object:
        block = getattr(self._opened, name)(**named)
        entered = await block.__aenter__()
        self._blocks.append(block)
        return entered

    async def leave(self, raised: _Raised | None) -> None:
        block = self._blocks.pop()
        if raised is None:
            await block.__aexit__(None, None, None)
            return
        error = raised.again()
        try:
            await block.__aexit__(type(error), error, None)
        except BaseException as other:
            # The trainer's process raises its own error itself.
            if other is not error:
                raise

    async def begin_update(self, version: int, acknowledge: bool) -> tuple[str, ...] | RefitReport:
        """Pause the engines for a publisher of the trainer's process; returns their names."""
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

    async def end_update(self, raised: _Raised | None) -> RefitReport:
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

    # --- what it is told, without an answer ----------------------------------------------------

    def take(self) -> None:
        self._opened._take()  # pyright: ignore[reportPrivateUsage]

    def hand_back(self) -> None:
        self._opened._hand_back()  # pyright: ignore[reportPrivateUsage]

    def acknowledge(self, index: int) -> None:
        session = self._opened._session  # pyright: ignore[reportPrivateUsage]
        session.durability.acknowledge((index,))

    def push(self, number: int, prompts: Sequence[Prompt]) -> None:
        self._queues[number].put(*prompts)

    def end_queue(self, number: int) -> None:
        self._queues[number].close()
