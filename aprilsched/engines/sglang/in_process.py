"""SGLang inside of this process (``sglang.Engine``), for notebooks and trainers of one process.

The calls are those of a server without its sockets: control calls are requests to SGLang's own
HTTP application, and tokens come as the objects that it would write as JSON. So the order of
calls, the chunks and the errors are those of :class:`~aprilsched.engines.sglang.SGLangEngine`.

What SGLang does to a process, and what is done about it here (0.5.21):

- It binds itself to the event loop of its first call. It gets a thread with a loop of its own, so
  the scheduler may run on any loop, or on several in turn.
- A result that arrives for a cancelled control call ends its event loop, and it then kills the
  whole process. So a control call that nobody waits for any more still runs to its end.
- When one of its processes fails, this process gets a SIGQUIT, which ends it. The signal is taken
  here and reported as the loss of the engine.
- ``Engine.shutdown`` kills every child of this process, whosever they are. Here its own are killed.
- It replaces the handlers and the level of the root logger. They are put back.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import importlib
import logging
import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from aprilsched.engines.base import Chunk, EngineLoad, GenerationRequest
from aprilsched.engines.http import Answer, HttpLimits, quote, refusal, rejection
from aprilsched.engines.server import despite_cancellation
from aprilsched.engines.sglang.control import ServerControl
from aprilsched.engines.sglang.probe import probe
from aprilsched.engines.sglang.wire import ChunkAssembler
from aprilsched.engines.stream import empty_chunk
from aprilsched.errors import (
    ConfigError,
    ControlTimeout,
    EngineError,
    EngineUnreachable,
)
from aprilsched.extras import extra
from aprilsched.loop_thread import LoopThread

_log = logging.getLogger(__name__)

T = TypeVar("T")

_NAME = "in-process"
_LOOK_SECONDS = 0.5
"""Interval at which the processes of SGLang are looked at."""
_KILL_SECONDS = 60.0
_WARNINGS = ("Duplicate Operation ID", "ORJSONResponse is deprecated")
"""What FastAPI says to SGLang's developers at the first calls, and would say in every notebook."""
_BAD_REQUEST = 400
_FAILED = 500
_DEFAULTS: Mapping[str, Any] = {
    # The scheduler works with token ids, and needs each token once.
    "skip_tokenizer_init": True,
    "incremental_streaming_output": True,
}
"""Arguments of the server that differ from SGLang's own defaults."""


class SGLangInProcessFleet:
    """One SGLang engine inside of this process, as a fleet.

    SGLang must be installed in the same environment (extra ``sglang``). It holds its configuration
    and the label of its weights once for a process, so a process can have one such fleet open at a
    time. Make the fleet in the main thread: only there can the signal be taken that SGLang sends
    when one of its processes fails, and which would otherwise end this process.

    Args:
        engine: a ``sglang.Engine`` that has not generated yet. It stays as it is when the fleet
            is closed, and may be given to another fleet. None starts one when the fleet is opened,
            and ends it, with its processes, when the fleet is closed.
        stream_interval: tokens between two chunks of a response.
        limits: timeouts of the control calls.
        first_version: version of the weights that SGLang labels "0".
        server_args: arguments of ``sglang.Engine``, such as ``model_path``, where no `engine` is
            given.

    Raises:
        ConfigError: if both an engine and arguments are given, or neither, or the
            `stream_interval` is below 1.
    """

    def __init__(
        self,
        engine: Any = None,
        *,
        stream_interval: int = 64,
        limits: HttpLimits | None = None,
        first_version: int = 0,
        **server_args: Any,
    ) -> None:
        if (engine is None) != bool(server_args):
            raise ConfigError(
                "SGLangInProcessFleet needs a sglang.Engine or the arguments for one, such as "
                "model_path; give one of the two."
            )
        source = _Started(server_args) if engine is None else _Given(engine)
        self._engine = SGLangInProcessEngine(
            source, stream_interval=stream_interval, limits=limits, first_version=first_version
        )
        _sigquit.take()

    def __repr__(self) -> str:
        return f"SGLangInProcessFleet({self._engine!r})"

    @property
    def engines(self) -> Sequence[SGLangInProcessEngine]:
        """The one engine."""
        return (self._engine,)

    async def open(self) -> None:
        """Start SGLang, unless an engine was given, and ask what it can do.

        Raises:
            ConfigError: if SGLang is not installed or refuses its arguments, if the engine was
                used outside of a fleet, or if another fleet of this process is open.
            EngineError: if SGLang does not start.
        """
        try:
            await self._engine.open()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End SGLang and its processes, unless the engine was given."""
        await self._engine.close()


class SGLangInProcessEngine(ServerControl):
    """The engine of :class:`SGLangInProcessFleet`."""

    _holder: ClassVar[SGLangInProcessEngine | None] = None
    """The engine that is open in this process, since SGLang has one configuration for a process."""

    def __init__(
        self,
        source: _Started | _Given,
        *,
        stream_interval: int = 64,
        limits: HttpLimits | None = None,
        first_version: int = 0,
    ) -> None:
        self._source = source
        self._generations: dict[str, _Generation] = {}
        self._application = _Application()
        self._watching: asyncio.Task[None] | None = None
        super().__init__(
            _NAME,
            self._application,
            limits or HttpLimits(),
            stream_interval=stream_interval,
            first_version=first_version,
        )

    def __repr__(self) -> str:
        return f"SGLangInProcessEngine({self._source!r})"

    @classmethod
    def is_one_open(cls) -> bool:
        """Whether such an engine is open in this process."""
        return cls._holder is not None

    @property
    def address(self) -> str:
        """This process: it has one such engine, which no two schedulers can share."""
        return f"process {os.getpid()}"

    async def open(self) -> None:
        """Start SGLang, or take the engine that was given; start it again if it has ended."""
        holder = SGLangInProcessEngine._holder
        if holder is not None and holder is not self:
            raise ConfigError(
                "another SGLangInProcessFleet is open, and SGLang has one configuration for a "
                "process; close that fleet first."
            )
        SGLangInProcessEngine._holder = self
        _sigquit.take()
        await self._stop_watching()
        self._groups.clear()
        inside = await self._source.inside()
        self._application.attach(inside)
        known = inside.manager.model_config.vocab_size
        self._facts = await probe(self._questions, vocab_size=known)
        await self._forget_releases_of_prior_run()
        self._watching = asyncio.create_task(self._watch(inside), name="SGLang's processes")

    async def close(self) -> None:
        """End the streams that are open with an error, and SGLang if this object started it."""
        await self._stop_watching()
        self._lose("was closed while it generated.")
        await despite_cancellation(self._source.end())
        if SGLangInProcessEngine._holder is self:
            SGLangInProcessEngine._holder = None
            _sigquit.give_back()

    async def load(self, *, metrics: bool = False) -> EngineLoad:
        """Ask for the load. There is no page of metrics, so `metrics` adds nothing."""
        return await super().load()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Stream one response; see :meth:`aprilsched.engines.base.Engine.generate`."""
        self._check_request(request)
        generation = self._application.generate(self._body(request))
        self._generations[request.request_id] = generation
        assembler = ChunkAssembler(self.name, request, first_version=self._first_version)
        finished = False
        try:
            while not finished:
                output = await generation.next()
                if output is None:
                    yield empty_chunk(spans_known=self.capabilities.version_spans)
                    return
                chunk = assembler.convert(output)
                finished = chunk.finish is not None
                yield chunk
        finally:
            if self._generations.get(request.request_id) is generation:
                del self._generations[request.request_id]
            if not finished:
                generation.leave()

    async def abort(self, request_id: str) -> None:
        """End one request; if nothing has arrived from it, SGLang drops it at once."""
        generation = self._generations.get(request_id)
        if generation is not None and generation.silent:
            # An abort of a request that a pause holds would be lost, and so would later ones.
            generation.hang_up()
        else:
            self._application.abort(request_id)

    async def _watch(self, inside: _Inside) -> None:
        while (ended := inside.ended()) is None:  # noqa: ASYNC110 - nothing tells of an end
            await asyncio.sleep(_LOOK_SECONDS)
        self._lose(ended)

    async def _stop_watching(self) -> None:
        task, self._watching = self._watching, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def _lose(self, why: str) -> None:
        self._application.detach(why)
        for generation in self._generations.values():
            generation.break_off(EngineError(self.name, why))


# --- SGLang and its thread ---------------------------------------------------------------------


class _Inside:
    """SGLang inside of this process: its engine, and the thread of its event loop."""

    def __init__(self, engine: Any, thread: LoopThread) -> None:
        self.engine = engine
        self.thread = thread
        self.manager = engine.tokenizer_manager
        structs = importlib.import_module("sglang.srt.managers.io_struct")
        managers = importlib.import_module("sglang.srt.managers.tokenizer_manager")
        server: Any = importlib.import_module("sglang.srt.entrypoints.http_server")
        for message in _WARNINGS:
            warnings.filterwarnings("ignore", message)
        self.generate_input: Callable[..., Any] = structs.GenerateReqInput
        httpx: Any = importlib.import_module("httpx")  # SGLang has it for its own clients.
        transport = httpx.ASGITransport(app=server.app)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://sglang")
        server.set_global_state(
            server._GlobalState(
                tokenizer_manager=self.manager,
                template_manager=engine.template_manager,
                scheduler_info=engine._scheduler_init_result.scheduler_infos[0],
            )
        )
        # A server sets this after its warm-up; before it, it says that it is not ready.
        self.manager.server_status = managers.ServerStatus.Up
        self._pids = frozenset[int](engine.get_all_child_pids())
        self._children = [p for p in multiprocessing.active_children() if p.pid in self._pids]

    async def answer(self, method: str, path: str, body: bytes) -> Answer:
        """What the application answers; an exception is an answer with status 500, as over HTTP."""
        try:
            json = {"Content-Type": "application/json"}
            answer = await self._client.request(method, f"/{path}", content=body, headers=json)
        except Exception as error:
            return Answer(_FAILED, f"{type(error).__name__}: {error}".encode())
        return Answer(answer.status_code, answer.content)

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run `work` in SGLang's loop."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.thread.loop))

    def ended(self) -> str | None:
        """Say which of SGLang's processes has ended; None while all of them run."""
        for process in self._children:
            if not process.is_alive():
                return (
                    f"SGLang's process {process.pid} has ended with exit code {process.exitcode}; "
                    "its log says why."
                )
        return None

    def end(self) -> None:
        """Kill SGLang's processes, wait until they have ended, and stop its thread."""
        atexit.unregister(self.engine.shutdown)  # It would kill every child of this process.
        # It takes a process that is killed for one that has crashed.
        watchdog = getattr(self.manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()
        for pid in self._pids.difference(process.pid for process in self._children):
            with suppress(ProcessLookupError):  # A child of the data-parallel controller.
                os.kill(pid, signal.SIGKILL)
        for process in self._children:
            process.kill()
        for process in self._children:
            process.join(_KILL_SECONDS)
        self.thread.stop()
        for owner, name in (
            (self.engine, "send_to_rpc"),
            (self.manager, "send_to_scheduler"),
            (self.manager, "recv_from_detokenizer"),
        ):
            if (socket := getattr(owner, name, None)) is not None:
                socket.close(linger=0)


class _Given:
    """An engine that the user made. It keeps its thread for as long as it lives."""

    _threads: ClassVar[WeakKeyDictionary[Any, LoopThread]] = WeakKeyDictionary()

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __repr__(self) -> str:
        return repr(self._engine)

    async def inside(self) -> _Inside:
        """The engine with its thread."""
        engine = self._engine
        thread = self._threads.get(engine)
        if thread is None:
            if engine.tokenizer_manager.event_loop is not None:
                raise ConfigError(
                    "the sglang.Engine has generated already, and belongs to the event loop in "
                    "which it did; give the fleet a new one."
                )
            thread = self._threads[engine] = LoopThread("sglang")
            # Its blocking methods run its own loop, where nothing would arrive any more, and wait
            # for ever. This loop runs already, so that they raise an error.
            engine.loop = thread.loop
        inside = await asyncio.to_thread(_Inside, engine, thread)
        if (ended := inside.ended()) is not None:
            raise EngineUnreachable(_NAME, f"{ended} Make a new sglang.Engine and a new fleet.")
        return inside

    async def end(self) -> None:
        """Leave the engine as it is."""


class _Started:
    """An engine that is started when it is needed, and again if it has ended."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = {**_DEFAULTS, **arguments}
        self._thread: LoopThread | None = None
        self._start: concurrent.futures.Future[_Inside] | None = None

    def __repr__(self) -> str:
        return repr(self._arguments.get("model_path"))

    async def inside(self) -> _Inside:
        """The engine, which is started if none runs.

        A start goes on if this call is cancelled, and the next call waits for the same start.
        """
        start = self._start
        if (
            start is not None
            and start.done()
            and (start.exception() is not None or start.result().ended() is not None)
        ):
            await self.end()
            start = None
        if start is None:
            self._thread = thread = LoopThread("sglang")
            start = self._start = asyncio.run_coroutine_threadsafe(
                self._start_engine(thread), thread.loop
            )
        return await asyncio.shield(asyncio.wrap_future(start))

    async def end(self) -> None:
        """End the engine and its processes; wait for a start that is under way, and undo it."""
        start, self._start = self._start, None
        thread, self._thread = self._thread, None
        if start is None or thread is None:
            return
        try:
            inside = await asyncio.wrap_future(start)
        except (ConfigError, EngineError):
            await asyncio.to_thread(thread.stop)
        else:
            await asyncio.to_thread(inside.end)

    async def _start_engine(self, thread: LoopThread) -> _Inside:
        root = logging.getLogger()
        handlers, level = list(root.handlers), root.level
        started = False
        try:
            with extra("sglang"):
                sglang = importlib.import_module("sglang")
            inside = _Inside(sglang.Engine(**self._arguments), thread)
            started = True
            return inside
        except (ConfigError, EngineError):
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(f"SGLang refuses its arguments: {quote(str(error))}") from error
        except Exception as error:
            raise EngineError(_NAME, f"did not start ({quote(str(error))}).") from error
        finally:
            if not started:
                _kill_children_of_this_thread()
            root.handlers[:] = handlers
            root.setLevel(level)


def _kill_children_of_this_thread() -> None:
    """Kill what a start has left that failed: some of SGLang's processes may still be loading.

    They would end with this thread, but only once they have asked the kernel for it.
    """
    try:
        pids = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    except OSError:  # Not every kernel lists them.
        return
    for process in multiprocessing.active_children():
        if str(process.pid) in pids:
            process.kill()
            process.join(_KILL_SECONDS)


# --- calls and streams across the two loops ----------------------------------------------------


class _Application:
    """SGLang's HTTP application, called without a connection."""

    def __init__(self) -> None:
        self._inside: _Inside | None = None
        self._lost: asyncio.Future[str] | None = None
        """Says why, once SGLang is gone."""

    def attach(self, inside: _Inside) -> None:
        """Use this engine from now on, in the loop that runs."""
        self._inside = inside
        self._lost = asyncio.get_running_loop().create_future()

    def detach(self, why: str) -> None:
        """End all calls that wait, and refuse further ones."""
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(why)

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        timeout: float,  # noqa: ASYNC109 - as Transport.call
        accept: tuple[int, ...] = (200,),
        repeatable: bool = True,
        admin: bool = True,
        query: Mapping[str, str] | None = None,
        at_most: int | None = None,
    ) -> Answer:
        """Make one control call; see :class:`~aprilsched.engines.sglang.wire.ControlCalls`."""
        inside, lost = self._require_attached()
        data = b"" if body is None else msgspec.json.encode(body)
        work = inside.run(inside.answer(method, path, data))
        await asyncio.wait((work, lost), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if lost.done() and not work.done():
            raise EngineError(_NAME, lost.result())
        if not work.done():
            raise ControlTimeout(_NAME, f"{method} /{path} did not answer within {timeout:g} s.")
        answer = work.result()
        if answer.status not in accept:
            raise rejection(_NAME, f"{method} /{path}", answer)
        return answer

    def generate(self, body: Mapping[str, Any]) -> _Generation:
        """Begin one response."""
        return _Generation(self._require_attached()[0], body)

    def abort(self, request_id: str) -> None:
        """Tell SGLang to abort one request."""
        inside, _ = self._require_attached()
        inside.thread.loop.call_soon_threadsafe(inside.manager.abort_request, request_id)

    def _require_attached(self) -> tuple[_Inside, asyncio.Future[str]]:
        if self._inside is None or self._lost is None:
            raise EngineUnreachable(_NAME, "is not open; call open() before using it.")
        if self._lost.done():
            raise EngineUnreachable(_NAME, self._lost.result())
        return self._inside, self._lost


class _Generation:
    """One response: SGLang's loop writes it, and the loop that began it reads it."""

    def __init__(self, inside: _Inside, body: Mapping[str, Any]) -> None:
        self.silent = True
        """Whether nothing has arrived of the response."""
        self._left = False
        self._arrived: deque[Mapping[str, Any] | EngineError | None] = deque()
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._writing = asyncio.run_coroutine_threadsafe(
            self._write(inside, body), inside.thread.loop
        )

    async def next(self) -> Mapping[str, Any] | None:
        """The next output as SGLang makes it, or None after :meth:`hang_up`.

        Raises:
            EngineRejected: if SGLang refuses the request.
            EngineError: if the response breaks off.
        """
        while not self._arrived:
            self._news.clear()
            await self._news.wait()
        found = self._arrived.popleft()
        if isinstance(found, EngineError):
            raise found
        return found

    def hang_up(self) -> None:
        """End a response of which nothing has arrived; it reads as aborted."""
        self._put(None)
        self.leave()

    def break_off(self, why: EngineError) -> None:
        """End the response with an error, after what has arrived of it."""
        self._put(why)
        self.leave()

    def leave(self) -> None:
        """Let SGLang drop the request, or abort it if it is with its scheduler already."""
        self._left = True
        self._writing.cancel()

    def _put(self, item: Mapping[str, Any] | EngineError | None) -> None:
        if not self._left:
            self.silent = False
            self._arrived.append(item)
            self._news.set()

    # Everything below runs in SGLang's loop.

    async def _write(self, inside: _Inside, body: Mapping[str, Any]) -> None:
        rid = body["rid"]
        end = EngineError(_NAME, f"request {rid}: the stream ended before the response did.")
        try:
            request = inside.generate_input(**body)
            async with aclosing(inside.manager.generate_request(request, None)) as outputs:
                async for output in outputs:
                    self._give(output)
        except ValueError as error:  # Over HTTP it is a refusal with status 400.
            status = getattr(error, "status_code", _BAD_REQUEST)
            end = refusal(_NAME, quote(str(error)), status=status)
        except Exception as error:
            what = f"{type(error).__name__}: {quote(str(error))}"
            end = EngineError(_NAME, f"request {rid}: SGLang failed ({what}).")
        self._give(end)

    def _give(self, item: Mapping[str, Any] | EngineError) -> None:
        with suppress(RuntimeError):  # The reader's loop is closed.
            self._loop.call_soon_threadsafe(self._put, item)


# --- the signal of a process that fails --------------------------------------------------------


class _Sigquit:
    """Takes the SIGQUIT that SGLang's processes send to this one when they fail."""

    def __init__(self) -> None:
        self._before: Callable[[int, FrameType | None], Any] | int | None = None
        self._taken = False

    def take(self) -> None:
        """Take the signal, in the main thread; elsewhere nothing can be done."""
        if threading.current_thread() is not threading.main_thread():
            return
        found = signal.getsignal(signal.SIGQUIT)
        if found != self._heed:
            self._before, self._taken = found, True
            signal.signal(signal.SIGQUIT, self._heed)

    def give_back(self) -> None:
        """Restore the handler that was there before, in the main thread."""
        if self._taken and threading.current_thread() is threading.main_thread():
            self._taken = False
            signal.signal(signal.SIGQUIT, self._before)

    def _heed(self, number: int, frame: FrameType | None) -> None:
        if SGLangInProcessEngine.is_one_open():
            _log.error("a process of SGLang says that it has failed; its log says why")
        elif callable(self._before):
            self._before(number, frame)
        elif self._before != signal.SIG_IGN:
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGQUIT)


_sigquit = _Sigquit()
