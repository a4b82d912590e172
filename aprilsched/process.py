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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aprilsched.coordinator import RolloutScheduler as AsyncRolloutScheduler
from aprilsched.coordinator.prompt_queue import PromptQueue
from aprilsched.errors import ConfigError, SchedulerClosed, closed_meanwhile
from aprilsched.remote import (
    BlockingScheduler,
    FromTrainer,
    Raised,
    RemoteScheduler,
    Served,
    absolute,
    unsendable,
)
from aprilsched.types import Prompt

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


class RolloutScheduler(BlockingScheduler):
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
        self._process = _Remote(make, arguments, named)
        self._use_remote(self._process)

    def _stop_thread(self) -> None:
        try:
            super()._stop_thread()
        finally:
            self._process.end()


# --- the trainer's process -----------------------------------------------------------------------


class _Remote(RemoteScheduler):
    """The scheduler as the trainer's process sees it. Its methods are called on the loop of the
    blocking scheduler's thread."""

    def __init__(
        self,
        make: Callable[..., AsyncRolloutScheduler],
        arguments: Sequence[object],
        named: Mapping[str, object],
    ) -> None:
        super().__init__()
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
        for task in self._forwarding:
            task.cancel()
        await self._end_updates()
        if self._failure is None:
            with suppress(SchedulerClosed):
                await self.call("close")
        await self._hang_up(self._process)

    async def _hang_up(self, process: _Process) -> None:
        """Close the pipe, by which the scheduler's process is told to end, and wait for that."""
        if not process.link.connection.closed:
            asyncio.get_running_loop().remove_reader(process.link.connection.fileno())
            process.link.connection.close()
            self._fail(closed_meanwhile())
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
        if self._process is None:
            raise SchedulerClosed("use the scheduler inside its `with` block.")
        number = next(self._numbers)
        self._send(self._process, number, name, *arguments, **named)
        return await self._answer(self._process, number)

    def tell(self, name: str, *arguments: object) -> None:
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
            raise unsendable(f"an argument of {name}()", error) from error
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
            future.set_exception(unsendable("the scheduler's answer", trouble))
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

    def restore(self, path: Path | str) -> None:
        if self._process is not None:
            raise SchedulerClosed("restore() comes before the `with` block.")
        self._order = replace(self._order, restored=absolute(path))


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
            raise unsendable("the function or an argument of it", error) from error
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


class _Served(Served):
    """Answers the calls of the trainer's process."""

    def __init__(self, link: _Link, order: _Order) -> None:
        super().__init__()
        self._link = link
        self._order = order
        self._queues: dict[int, PromptQueue] = {}
        self._hung_up = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._answer(_OPENING, self._begin(_OPENING, self._open()))
        loop.add_reader(self._link.connection.fileno(), self._read)
        await self._hung_up.wait()
        await self._close()
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
            self._reply(number, None, unsendable("an argument", error))
            return
        if name == "withdraw":
            self.withdraw(number)
        elif number == _NO_ANSWER:
            getattr(self, name)(*arguments)
        else:
            self._answer(number, self.begin(number, name, arguments, named))

    def _answer(self, number: int, call: asyncio.Task[Any]) -> None:
        call.add_done_callback(partial(self._end, number))

    def _end(self, number: int, task: asyncio.Task[Any]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._reply(number, None if error else task.result(), error)

    def _reply(self, number: int, result: object, error: BaseException | None) -> None:
        version = self.version
        raised = None if error is None else Raised.of(error, tell_where=True)
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
            self._link.send(number, version, pickle.dumps((None, Raised.of(refused))))

    # --- what it is told, without an answer ----------------------------------------------------

    def push(self, number: int, prompts: Sequence[Prompt]) -> None:
        self._queues[number].put(*prompts)

    def end_queue(self, number: int) -> None:
        self._queues[number].close()
