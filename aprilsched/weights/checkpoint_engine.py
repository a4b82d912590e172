"""Publishes weights through the package checkpoint-engine, for engines on the same GPUs.

Transport: checkpoint-engine's ``ParameterServer``, one process for each GPU of the engines, holds
the weights in pinned host memory, copies them to its GPU in buckets, broadcasts them among its
ranks by NCCL and lets the engine on that GPU read them by CUDA IPC. SGLang is told only where to
connect.

Requirements: the weights fit once in pinned host memory, and each GPU has free memory for three
buckets (``PS_MAX_BUCKET_SIZE_GB`` each, 8 unless set). The engines' environment needs
checkpoint-engine as well. ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set
as torchrun sets them.

The scheduler runs in rank 0. At each version every other rank registers its share, then calls
``gather_metas(checkpoint)`` and ``update(checkpoint, lambda sockets: None)`` on its own server;
these calls match those made here.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from aprilsched.engines.base import Engine, RefitFromSockets
from aprilsched.errors import ConfigError, RefitError
from aprilsched.weights.publisher import Takers, check_weights, in_daemon, in_thread, to_the_end

if TYPE_CHECKING:
    from torch import Tensor

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SocketPaths = list[tuple[str, str]]
"""For each rank of the parameter server its GPU's UUID and its ZeroMQ socket."""


class ParameterServer(Protocol):
    """The methods of ``checkpoint_engine.ps.ParameterServer`` that are used here."""

    def register_checkpoint(
        self,
        checkpoint_name: str,
        *,
        named_tensors: dict[str, Tensor] | None = None,
        use_shared_memory_pool: bool = False,
    ) -> None: ...

    def unregister_checkpoint(self, checkpoint_name: str) -> None: ...

    def gather_metas(self, checkpoint_name: str) -> None: ...

    def update(
        self,
        checkpoint_name: str,
        req_func: Callable[[SocketPaths], None],
        *,
        timeout: timedelta = ...,
    ) -> None: ...


class CheckpointEnginePublisher:
    """Publishes the weights that a ParameterServer holds.

    An update cannot be stopped once the engines read: a cancelled :meth:`publish` returns when
    the update has ended. A parameter server whose engine failed half-way may wait for it for
    ever. The publisher gives it up after `patience` and then refuses to use it again.

    Args:
        weights: returns this rank's tensors by their Hugging Face names, as a mapping or as an
            iterator over (name, tensor), which is read once; called again for each version. They
            are copied to host memory in :meth:`prepare`, while the engines generate.
            None if the trainer itself registers the checkpoint before each version.
        server: the trainer's parameter server; None to make one. One that is made here leaves
            the process group alone if torch.distributed is already initialized; otherwise it
            makes a group for each update and destroys it afterwards.
        checkpoint: the name under which the weights are registered.
        timeout: seconds for the ranks of the parameter server to meet.
        patience: seconds for the parameter server to end after every engine has answered.

    Raises:
        ConfigError: if `timeout` or `patience` is not above 0, or `weights` is no function.
    """

    def __init__(
        self,
        weights: Callable[[], Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]] | None = None,
        *,
        server: ParameterServer | None = None,
        checkpoint: str = "aprilsched",
        timeout: float = 600.0,
        patience: float = 30.0,
    ) -> None:
        for name, seconds in (("timeout", timeout), ("patience", patience)):
            if not seconds > 0:
                raise ConfigError(f"{name} is {seconds}; give a number above 0.")
        if weights is not None:
            check_weights(weights)
        self._weights = weights
        self._server = server
        self._checkpoint = checkpoint
        self._timeout = timeout
        self._patience = patience
        self._registered = False
        self._stuck = False

    async def prepare(self, version: int) -> None:
        """Copy the weights to host memory and exchange metadata, while the engines generate.

        Raises:
            ConfigError: if checkpoint-engine is not installed or its environment is not set.
        """
        await in_thread(self._prepare)

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Let every engine read the weights from the parameter server on its GPUs.

        Raises:
            ConfigError: if nothing was prepared, or an engine cannot read from it.
            RefitError: if the parameter server failed or hangs, and no engine says why.
        """
        if self._server is None:
            raise ConfigError(f"version {version} is not prepared; await prepare() before.")
        self._refuse_stuck()
        readers: Takers[_Reader] = Takers(
            engines,
            RefitFromSockets,
            "read from a checkpoint-engine, which would wait for it for ever",
        )
        for error in readers.outcomes.values():
            if error is not None:
                raise error
        update = _Update(version, readers)
        try:
            await to_the_end(self._run(self._server, update))
        except _ServerFailed as failed:
            if not any(readers.outcomes.values()):
                raise RefitError(
                    f"The parameter server did not bring version {version} in ({failed.cause})."
                ) from failed.cause
        return readers.outcomes

    def _prepare(self) -> None:
        self._refuse_stuck()
        if self._server is None:
            self._server = _make_server()
        if self._weights is not None:
            tensors = dict(self._weights())
            if self._registered:
                self._server.unregister_checkpoint(self._checkpoint)
            self._registered = False
            # The pool keeps its memory for all versions, because pinning is slower than copying.
            self._server.register_checkpoint(
                self._checkpoint, named_tensors=tensors, use_shared_memory_pool=True
            )
            self._registered = True
        self._server.gather_metas(self._checkpoint)

    def _refuse_stuck(self) -> None:
        if self._stuck:
            raise RefitError(
                "The parameter server still waits for an engine that failed in an earlier "
                "update; restart the trainer's process, and publish by another way until then."
            )

    async def _run(self, server: ParameterServer, update: _Update) -> None:
        loop = asyncio.get_running_loop()

        def call_engines(paths: SocketPaths) -> None:  # It runs in a thread of the server's own.
            asyncio.run_coroutine_threadsafe(update.call(paths), loop).result()

        def work() -> None:
            server.update(self._checkpoint, call_engines, timeout=timedelta(seconds=self._timeout))

        ended = asyncio.ensure_future(in_daemon(work, name="parameter-server"))
        answered = asyncio.ensure_future(update.answered.wait())
        try:
            # The server bounds its own start, and the engines' adapters bound their answers.
            await asyncio.wait([ended, answered], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([ended], timeout=self._patience)
        finally:
            answered.cancel()
        if not ended.done():
            self._stuck = True
            # Its later result is marked as seen, because nobody asks for it any more.
            ended.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise _ServerFailed(TimeoutError("it still waits for an engine"))
        if (error := ended.exception()) is not None:
            raise _ServerFailed(error)


class _Reader(Engine, RefitFromSockets, Protocol):
    """An engine to which this publisher can publish."""


class _ServerFailed(Exception):
    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Update:
    """The update to one version: the engines to call, and whether all have answered."""

    def __init__(self, version: int, readers: Takers[_Reader]) -> None:
        self._version = version
        self._readers = readers
        self.answered = asyncio.Event()

    async def call(self, paths: SocketPaths) -> None:
        """Send each engine the sockets of all GPUs; each of its ranks picks its own."""
        handles = dict(paths)
        await self._readers.each(lambda engine: engine.update_from_sockets(handles, self._version))
        self.answered.set()


def _make_server() -> ParameterServer:
    try:
        package = importlib.import_module("checkpoint_engine.ps")
    except ImportError as error:
        raise ConfigError(
            f"CheckpointEnginePublisher needs checkpoint-engine ({error}); install it here and "
            "in the engines' environment."
        ) from error
    missing = [name for name in _ENVIRONMENT if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} is not set; start the trainer with torchrun, or give `server`."
        )
    from torch import distributed

    # With auto_pg the server destroys a process group that it finds.
    return package.ParameterServer(auto_pg=not distributed.is_initialized())
