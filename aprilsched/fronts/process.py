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

The transport of :mod:`aprilsched.fronts.remote` is a pipe here; larger messages are files in a
temporary folder that only this user can read.

Invariants:

- Each process notices the end of the other. A call to a process that has ended raises
  SchedulerClosed, and a scheduler whose trainer has ended closes itself. A process that was forked
  from one of them keeps its end of the pipe open, so each watches the other process itself.
- No event loop waits for the pipe, so timeouts, Ctrl-C and close() work while the other process is
  stopped.
"""

from __future__ import annotations

import asyncio
import atexit
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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Self

from aprilsched.errors import ConfigError, SchedulerClosed, closed_meanwhile
from aprilsched.fronts.remote import (
    SILENCE_S,
    BlockingRemote,
    Order,
    QueueOf,
    Raised,
    RemoteScheduler,
    Reply,
    Request,
    Served,
    absolute,
    ignore_error,
    summary_of,
    unsendable,
)
from aprilsched.kernel.shell import RolloutScheduler as AsyncRolloutScheduler
from aprilsched.kernel.shell.prompt_queue import PromptQueue
from aprilsched.kernel.weights.from_trainer import FromTrainer

__all__ = ["FromTrainer", "RolloutScheduler"]

log = logging.getLogger("aprilsched")

HEADER = struct.Struct("<Iq?")
"""The start of a message: the length of its content, the number of its request, and whether the
content is the path of a file."""
INLINE_BYTES = 1 << 14
"""Larger messages go through a file. A pipe takes about 200 KB at a time, and the trainer's process
would have to get Python's lock again for each part."""
CLOSE_S = 300.0
"""Seconds that a scheduler has to close: its engines have `timeouts.control_s` for each call."""
END_S = 10.0
"""Seconds that a process has to end once its scheduler is closed, or once it is terminated."""
PARENT_POLL_S = 1.0
"""Seconds between two looks for the trainer's process, on a system without pidfd."""


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
    """The scheduler's side in the trainer's process, on the blocking scheduler's loop."""

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
        self._child: _Child | None = None
        self._forwarding: list[asyncio.Task[None]] = []

    def _replaced(self, argument: object) -> object:
        if isinstance(argument, PromptQueue):
            self._queues.append(argument)
            return QueueOf(len(self._queues) - 1)
        return argument

    def restore(self, path: Path | str) -> None:
        if self._child is not None:
            raise SchedulerClosed("restore() comes before the `with` block.")
        self._order = replace(self._order, checkpoint=absolute(path))

    async def __aenter__(self) -> Self:
        if self._child is not None:
            raise SchedulerClosed("a RolloutScheduler is opened once; make a new one.")
        self._child = child = _Child()
        try:
            await self.call("open", self._order)
        except BaseException:
            await self._close(child)
            raise
        self._forwarding = [
            asyncio.create_task(self._forward(child, number, queue))
            for number, queue in enumerate(self._queues)
        ]
        return self

    def _connection(self) -> _Child:
        if self._child is None:
            raise SchedulerClosed("use the scheduler inside its `with` block.")
        return self._child

    async def close(self) -> None:
        if self._child is not None:
            for task in self._forwarding:
                task.cancel()
            await self._end_updates()
            await self._close(self._child)

    async def _close(self, child: _Child) -> None:
        """Close the scheduler, if its process answers, and wait until that has ended."""
        with suppress(SchedulerClosed):
            closed = child.send(Request(next(self._numbers), "close"))
            await self._wait_ended(closed, within=CLOSE_S)
            if not closed.done():
                log.error("the scheduler's process does not close, and is terminated")
                child.terminate()
        await child.close()

    def end(self) -> None:
        """Leave nothing behind. The process still runs only if no call has waited for its end."""
        if self._child is not None:
            self._child.end()

    async def _forward(self, child: _Child, number: int, queue: PromptQueue) -> None:
        """Send on the prompts that the trainer pushes into a queue."""
        try:
            async for prompt in queue:
                self.notify(
                    "push", number, [prompt, *[await anext(queue) for _ in range(len(queue))]]
                )
            self.notify("end_queue", number)
        except ConfigError as error:
            child.fail(error)


class _Child:
    """The scheduler's process as the trainer's process has it: the transport to it, and its end."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._failure: BaseException | None = None
        """The error because of which requests can no longer be answered; None while they can."""
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        context = multiprocessing.get_context("spawn")
        ours, theirs = socket.socketpair()
        self._link = _Link(ours, Path(tempfile.mkdtemp(prefix="aprilsched-")))
        self._process = context.Process(
            target=_main,
            args=(theirs, str(self._link.folder), os.getpid()),
            name="aprilsched",
        )
        try:
            with theirs:
                self._process.start()
        except BaseException:
            self._link.close()
            raise
        # The sentinel of multiprocessing stays open while a process that this one forks runs.
        self._pidfd = _pidfd(self._process.pid or 0)
        self._sentinel = self._process.sentinel if self._pidfd is None else self._pidfd
        loop.add_reader(self._sentinel, self._has_ended, loop)
        # At its exit, Python waits for the process, which waits for the pipe to close.
        atexit.register(self.end, CLOSE_S)
        self._reading = loop.create_task(self._read())

    def send(self, request: Request) -> asyncio.Future[Reply]:
        """Send a request; see :class:`~aprilsched.fronts.remote.Transport`."""
        if self._failure is not None:
            raise self._failure
        try:
            content = pickle.dumps(request)
        except Exception as error:
            raise unsendable(f"an argument of {request.name}()", error) from error
        self._link.send(request.number, content)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[request.number] = future
        return future

    async def _read(self) -> None:
        """Receive replies until the process has ended."""
        async for number, content in self._link.received():
            future = self._waiting.pop(number, None)
            if future is not None and not future.done():
                try:
                    future.set_result(pickle.loads(content))  # noqa: S301
                except Exception as error:
                    future.set_exception(unsendable("the scheduler's answer", error))
                    ignore_error(future)
        await asyncio.wait([self._ended], timeout=END_S)
        self._process.kill()
        await self._ended
        self._process.join()
        code = self._process.exitcode or 0
        hint = ", which its output explains" if code > 0 else ""
        self.fail(
            SchedulerClosed(
                f"the scheduler's process has ended with exit code {code}{hint}; open a new "
                "scheduler."
            )
        )

    def fail(self, failure: BaseException) -> None:
        """Answer every request with `failure` from now on. Only the first failure counts."""
        self._failure = self._failure or failure
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._failure)
                ignore_error(future)
        self._waiting.clear()

    def _has_ended(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._sentinel)
        # Its last replies are still received.
        self._link.hang_up()
        self._ended.set_result(None)

    def terminate(self) -> None:
        """Ask the process to end."""
        self._process.terminate()

    async def close(self) -> None:
        """Hang up and wait until the process has ended; it is killed if it stays."""
        self.fail(closed_meanwhile())
        self._link.hang_up()
        await asyncio.shield(self._reading)

    def end(self, within: float = 0) -> None:
        """Kill the process if it still runs after `within` seconds, and remove the folder.

        In a forked process, which has a copy of this object, do nothing.
        """
        if not self._link.ours:
            return
        self._link.hang_up()
        if self._process.is_alive():
            wait([self._sentinel], within)
            self._process.kill()
            self._process.join()
        self._link.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        atexit.unregister(self.end)


def _pidfd(pid: int) -> int | None:
    """Return a file descriptor that is readable once a process has ended; None on other systems."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


class _Link:
    """One end of the pipe between the two processes, and the folder for large messages."""

    def __init__(self, end: socket.socket, folder: Path) -> None:
        self.folder = folder
        self._end = end
        self._pid = os.getpid()
        self._files = itertools.count()
        self._transport: asyncio.Transport | None = None
        self._unsent = bytearray()
        """Messages that were sent before the loop of :meth:`received` started."""

    @property
    def ours(self) -> bool:
        """Whether this process made the link, and was not forked from the one that did."""
        return os.getpid() == self._pid

    def send(self, number: int, content: bytes) -> None:
        """Send a message, unless the other side has hung up, which :meth:`received` notices.

        Raises:
            ConfigError: if the message needs a file, and that cannot be written.
        """
        in_file = len(content) > INLINE_BYTES
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
        message = HEADER.pack(len(content), number, in_file) + content
        if self._transport is None:
            self._unsent += message
        elif not self._transport.is_closing():
            self._transport.write(message)

    async def received(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the number and the content of each message, until one of both sides hangs up."""
        reader = asyncio.StreamReader()
        # A StreamWriter that a forked process drops takes this process's socket from its epoll.
        self._transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: asyncio.StreamReaderProtocol(reader), sock=self._end
        )
        self._transport.write(self._unsent)
        try:
            with suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    header = await reader.readexactly(HEADER.size)
                    length, number, in_file = HEADER.unpack(header)
                    content = await reader.readexactly(length)
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
        """Hang up and remove the folder; a forked process, which has a copy, leaves it alone."""
        if self.ours:
            self.hang_up()
            self._end.close()
            shutil.rmtree(self.folder, ignore_errors=True)


def _read_and_remove(path: Path) -> bytes:
    content = path.read_bytes()
    path.unlink()
    return content


def _main(end: socket.socket, folder: str, trainer: int) -> None:
    """Run the scheduler's process, until the trainer's process hangs up or has ended."""
    # Ctrl-C reaches both processes. The trainer's decides about its call.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_serve(_Link(end, Path(folder)), trainer))


async def _serve(link: _Link, trainer: int) -> None:
    served, replies = Served(), set[asyncio.Task[None]]()
    watch = (trainer, asyncio.get_running_loop(), link)
    threading.Thread(target=_end_with, args=watch, name="aprilsched-end", daemon=True).start()
    async for number, content in link.received():
        try:
            request: Request = pickle.loads(content)  # noqa: S301
        except Exception as error:
            _send_reply(link, number, served.refusal(unsendable("an argument", error)))
            continue
        task = asyncio.create_task(_answer(served, link, request))
        replies.add(task)
        task.add_done_callback(replies.discard)
    await served.close()
    # A trainer that was killed has left the folder.
    link.close()


async def _answer(served: Served, link: _Link, request: Request) -> None:
    _send_reply(link, request.number, await served.answer(request))


def _send_reply(link: _Link, number: int, reply: Reply) -> None:
    try:
        try:
            content = pickle.dumps(reply)
        except BaseException as trouble:
            raise ConfigError(
                f"what the scheduler returned cannot be sent to the trainer's process "
                f"({summary_of(trouble)}); give prompts only metadata that pickle can take."
            ) from trouble
        link.send(number, content)
    except ConfigError as refused:
        raised = Raised.of(refused)
        link.send(number, pickle.dumps(replace(reply, result=None, raised=raised)))


def _end_with(trainer: int, loop: asyncio.AbstractEventLoop, link: _Link) -> None:
    """Hang up when the trainer's process has ended, and end this process if that has no effect:
    user code may block its loop, and it would keep the store and the engines.

    This is a thread of its own. A death signal would come at the end of the trainer's thread that
    started this process.
    """
    pidfd = _pidfd(trainer)
    # The id may belong to another process by now, which is not the parent of this one.
    if pidfd is not None and os.getppid() == trainer:
        wait([pidfd])
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
