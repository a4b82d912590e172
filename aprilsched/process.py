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
  SchedulerClosed, and a scheduler whose trainer has ended closes itself. A process that was forked
  from one of them keeps its end of the pipe open, so each watches the other process itself.
- No event loop waits for the pipe, so timeouts, Ctrl-C and close() work while the other process
  stands still.
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
import socket
import struct
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

from aprilsched.coordinator import RolloutScheduler as AsyncRolloutScheduler
from aprilsched.coordinator.prompts import PromptQueue
from aprilsched.errors import ConfigError, SchedulerClosed, closed_meanwhile
from aprilsched.remote import (
    SILENT_S,
    Answer,
    BlockingRemote,
    FromTrainer,
    Raised,
    RemoteScheduler,
    Served,
    absolute,
    checked_scheduler,
    retrieved,
    said,
    unsendable,
)
from aprilsched.types import Prompt

__all__ = ["FromTrainer", "RolloutScheduler"]

log = logging.getLogger("aprilsched")

_HEADER = struct.Struct("<Iq?")
"""What a message begins with: the length of its content, the number of its call, and whether the
content is the path of a file that has it."""
_NO_ANSWER = -1
"""The number of calls without an answer."""
_INLINE_BYTES = 1 << 14
"""Larger messages go through a file. A pipe takes about 200 KB at a time, and the trainer's process
would have to get Python's lock again for each part."""
_CLOSE_S = 300.0
"""Seconds that a scheduler has to close: its engines have `timeouts.control_s` for each call."""
_END_S = 10.0
"""Seconds that a process has to end once its scheduler is closed, or once it is terminated."""
_LOOK_S = 1.0
"""Seconds until the trainer's process is looked for again, where there is no pidfd."""


class RolloutScheduler(BlockingRemote):
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
        self._numbers = itertools.count()
        self._unanswered: dict[int, asyncio.Future[Any]] = {}
        self._forwarding: list[asyncio.Task[None]] = []
        self._reading: asyncio.Task[None] | None = None

    def _replaced(self, argument: object) -> object:
        if isinstance(argument, PromptQueue):
            self._queues.append(argument)
            return _QueueOf(len(self._queues) - 1)
        return argument

    # --- life ----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._process is not None:
            raise SchedulerClosed("a RolloutScheduler is opened once; make a new one.")
        self._process = process = _Process()
        loop = asyncio.get_running_loop()
        self._reading = loop.create_task(self._read(process))
        try:
            await self.call("open", self._order)
        except BaseException:
            await self._close(process)
            raise
        self._forwarding = [
            loop.create_task(self._forward(number, queue))
            for number, queue in enumerate(self._queues)
        ]
        return self

    async def close(self) -> None:
        if self._process is None:
            return
        for task in self._forwarding:
            task.cancel()
        await self._end_updates()
        await self._close(self._process)

    async def _close(self, process: _Process) -> None:
        """Close the scheduler, if its process answers, and wait until that has ended."""
        if self._failure is None:
            closed = self._begin("close")[1]
            await self._ended(closed, within=_CLOSE_S)
            if not closed.done():
                log.error("the scheduler's process does not close, and is ended")
                process.terminate()
        self._fail(closed_meanwhile())
        process.link.hang_up()
        if self._reading is not None:
            await asyncio.shield(self._reading)

    def end(self) -> None:
        """Leave nothing behind. The process is still there only if nobody waited for its end."""
        if self._process is not None:
            self._process.end()

    def _fail(self, failure: BaseException) -> None:
        """Answer every call with `failure`, now and later. Only the first failure counts."""
        self._failure = self._failure or failure
        for future in self._unanswered.values():
            if not future.done():
                future.set_exception(self._failure)
                retrieved(future)
        self._unanswered.clear()

    # --- calls ---------------------------------------------------------------------------------

    async def call(self, name: str, *arguments: object, **named: object) -> Any:
        if self._process is None:
            raise SchedulerClosed("use the scheduler inside its `with` block.")
        return await self._answer(*self._begin(name, *arguments, **named))

    def tell(self, name: str, *arguments: object) -> None:
        if self._process is not None:
            self._send(_NO_ANSWER, name, *arguments)

    async def _withdraw(self, number: Hashable) -> None:
        with suppress(SchedulerClosed):
            await self._begin("withdraw", number)[1]

    def _begin(
        self, name: str, *arguments: object, **named: object
    ) -> tuple[int, asyncio.Future[Any]]:
        """Make a call; returns its number and the future of its answer."""
        if self._failure is not None:
            raise self._failure
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._send(number, name, *arguments, **named)
        self._unanswered[number] = future
        return number, future

    def _send(self, number: int, name: str, *arguments: object, **named: object) -> None:
        try:
            content = pickle.dumps((name, arguments, named))
        except Exception as error:
            raise unsendable(f"an argument of {name}()", error) from error
        if self._process is not None:
            self._process.link.send(number, content)

    async def _read(self, process: _Process) -> None:
        """Receive what the process says, until it has ended."""
        async for message in process.link.received():
            self._receive(message)
        code = await process.exit_code()
        hint = ", which its output explains" if code > 0 else ""
        self._fail(
            SchedulerClosed(
                f"the scheduler's process has ended with exit code {code}{hint}; open a new "
                "scheduler."
            )
        )

    def _receive(self, message: _Message) -> None:
        future = self._unanswered.pop(message.number, None)
        if future is None or future.done():
            return
        try:
            answer: Answer = message.read()
        except Exception as trouble:
            future.set_exception(unsendable("the scheduler's answer", trouble))
        else:
            self._version = answer.version
            if answer.raised is None:
                future.set_result(answer.result)
            else:
                future.set_exception(answer.raised.again())
        retrieved(future)

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
    """The scheduler's process as the trainer's has it, and the link to it."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = loop.create_future()
        context = multiprocessing.get_context("spawn")
        ours, theirs = socket.socketpair()
        self.link = _Link(ours, Path(tempfile.mkdtemp(prefix="aprilsched-")))
        self._process = context.Process(
            target=_main,
            args=(theirs, str(self.link.folder), os.getpid()),
            name="aprilsched",
        )
        try:
            with theirs:
                self._process.start()
        except BaseException:
            self.link.close()
            raise
        # Python's own one is held open by what the process forks.
        self._pidfd = _pidfd(self._process.pid or 0)
        self._sentinel = self._process.sentinel if self._pidfd is None else self._pidfd
        loop.add_reader(self._sentinel, self._has_ended, loop)
        # At its end, Python waits for the process, which waits for this.
        atexit.register(self.end, _CLOSE_S)

    def _has_ended(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._sentinel)
        # What it said before its end is still received.
        self.link.hang_up()
        self._ended.set_result(None)

    def terminate(self) -> None:
        """Ask the process to end."""
        self._process.terminate()

    async def exit_code(self) -> int:
        """Wait until the process has ended, and kill it if it stays. Returns its exit code; minus
        the signal that killed it."""
        await asyncio.wait([self._ended], timeout=_END_S)
        self._process.kill()
        await self._ended
        self._process.join()
        return self._process.exitcode or 0

    def end(self, within: float = 0) -> None:
        """Kill the process if it is still there after so many seconds, and remove what the link has
        left. A forked process, which has a copy, leaves everything alone."""
        if not self.link.ours:
            return
        self.link.hang_up()
        if self._process.is_alive():
            wait([self._sentinel], within)
            self._process.kill()
            self._process.join()
        self.link.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        atexit.unregister(self.end)


def _pidfd(pid: int) -> int | None:
    """A file descriptor that is readable once a process has ended; None if there are none here."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


@dataclass(frozen=True)
class _Message:
    number: int
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

    def __init__(self, end: socket.socket, folder: Path) -> None:
        self.folder = folder
        self._end = end
        self._pid = os.getpid()
        self._files = itertools.count()
        self._transport: asyncio.Transport | None = None
        self._unsent = bytearray()
        """What was to be sent before the end was received from."""

    @property
    def ours(self) -> bool:
        """Whether this process made the link, and was not forked from the one that did."""
        return os.getpid() == self._pid

    def send(self, number: int, content: bytes) -> None:
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
        message = _HEADER.pack(len(content), number, in_file) + content
        if self._transport is None:
            self._unsent += message
        elif not self._transport.is_closing():
            self._transport.write(message)

    async def received(self) -> AsyncIterator[_Message]:
        """Every message, until one of both sides hangs up."""
        reader = asyncio.StreamReader()
        # A StreamWriter that a forked process drops takes this process's socket from its epoll.
        self._transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: asyncio.StreamReaderProtocol(reader), sock=self._end
        )
        self._transport.write(self._unsent)
        try:
            with suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    header = await reader.readexactly(_HEADER.size)
                    length, number, in_file = _HEADER.unpack(header)
                    yield _Message(number, await reader.readexactly(length), in_file)
        finally:
            # What could not be sent by now is wanted by nobody.
            self._transport.abort()

    def hang_up(self) -> None:
        """Let both sides receive what was sent, and no more. To close the end would say nothing
        while a forked process has a copy of it."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and remove the folder; a forked process, which has a copy, leaves it alone."""
        if self.ours:
            self.hang_up()
            self._end.close()
            shutil.rmtree(self.folder, ignore_errors=True)


# --- the scheduler's process ---------------------------------------------------------------------


def _main(end: socket.socket, folder: str, trainer: int) -> None:
    """What the scheduler's process runs, until the trainer's process hangs up or has ended."""
    # Ctrl-C reaches both processes. The trainer's decides what becomes of its call.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_Served(_Link(end, Path(folder))).run(trainer))


def _end_with(trainer: int, loop: asyncio.AbstractEventLoop, link: _Link) -> None:
    """Hang up when the trainer's process has ended, and end this one if that does not do it: user
    code may block its loop, and it would keep the store and the engines.

    This is a thread of its own. A death signal would come when the trainer's thread ends that began
    this process.
    """
    pidfd = _pidfd(trainer)
    # Another process may have its number by now. Nobody else can be this one's parent by it.
    if pidfd is not None and os.getppid() == trainer:
        wait([pidfd])
    while os.getppid() == trainer:
        time.sleep(_LOOK_S)
    noticed = threading.Event()
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(noticed.set)
    link.hang_up()
    if noticed.wait(SILENT_S):
        time.sleep(_CLOSE_S)
    link.close()
    os._exit(1)


class _Served(Served):
    """Answers the calls of the trainer's process."""

    def __init__(self, link: _Link) -> None:
        super().__init__()
        self._link = link
        self._queues: dict[int, PromptQueue] = {}

    async def run(self, trainer: int) -> None:
        loop = asyncio.get_running_loop()
        watch = (trainer, loop, self._link)
        threading.Thread(target=_end_with, args=watch, name="aprilsched-end", daemon=True).start()
        async for message in self._link.received():
            self._handle(message.number, message)
        await self.close()
        # A trainer that was killed has left the folder.
        self._link.close()

    async def open(self, order: _Order) -> None:
        made = checked_scheduler(
            order.make(
                *(self._replaced(each) for each in order.arguments),
                **{name: self._replaced(each) for name, each in order.named.items()},
            )
        )
        if order.restored is not None:
            made.restore(order.restored)
        await made.__aenter__()
        self.scheduler = made

    def _replaced(self, argument: object) -> object:
        if isinstance(argument, _QueueOf):
            return self._queues.setdefault(argument.number, PromptQueue())
        return argument

    def _handle(self, number: int, message: _Message) -> None:
        try:
            name, arguments, named = message.read()
        except Exception as error:
            refused = unsendable("an argument", error)
            self._reply(number, Answer(version=self.version, raised=Raised.of(refused)))
            return
        if number == _NO_ANSWER:
            getattr(self, name)(*arguments)
            return
        if name == "withdraw":
            # At once: what is told next, that a batch has not arrived, is said of this call.
            self.cancel(*arguments)
            self._reply(number, Answer(version=self.version))
            return
        call = self.begin(number, name, arguments, named)
        call.add_done_callback(lambda _: self._reply(number, self.outcome(call)))

    def _reply(self, number: int, answer: Answer) -> None:
        try:
            try:
                content = pickle.dumps(answer)
            except BaseException as trouble:
                raise ConfigError(
                    f"what the scheduler returned cannot be sent to the trainer's process "
                    f"({said(trouble)}); give prompts only metadata that pickle can take."
                ) from trouble
            self._link.send(number, content)
        except ConfigError as refused:
            raised = Raised.of(refused)
            self._link.send(number, pickle.dumps(replace(answer, result=None, raised=raised)))

    # --- what it is told, without an answer ----------------------------------------------------

    def push(self, number: int, prompts: Sequence[Prompt]) -> None:
        self._queues[number].put(*prompts)

    def end_queue(self, number: int) -> None:
        self._queues[number].close()
