"""Publishes weights by the trainer ends that vLLM itself has, over NCCL or CUDA IPC.

vLLM cuts the weights into buckets, announces and sends them (``WeightTransferTrainerFactory`` in
``vllm/distributed/weight_transfer/factory.py``, 0.32). It asks for a client of its servers' control
calls, and this publisher's client gives each call to all engines at once.

Requirements: the trainer has a GPU and vLLM, in the servers' version; the servers are started with
``--weight-transfer-config '{"backend": "nccl"}'``, or "ipc" and
``VLLM_ALLOW_INSECURE_SERIALIZATION=1``, because vLLM sends the handles of CUDA IPC as a pickle.

- An engine that fails breaks the transfer off for all engines of the call, since the others wait
  inside NCCL for what never comes: only those that had ended the update have the
  version. The next call makes a new group of the engines that are there then.
- Every wait is bounded. A transfer that broke off may continue inside NCCL: vLLM's own thread is
  left behind, and its communicator is aborted.
- Changed elements alone ("sparse_nccl") are sent only to the group that took the previous version
  from this publisher, while each of its engines still reports that version. Every other update
  sends all elements, so a missed version never stays.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import pickle  # noqa: TID251 (only dumps, for vLLM)
import socket
from base64 import b64encode
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol

from aprilsched.errors import ConfigError, ControlTimeout
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.engines.refit import RefitByTransfer
from aprilsched.kernel.values.bounds import AT_LEAST_1, check_range
from aprilsched.kernel.weights.delta import changed_elements
from aprilsched.kernel.weights.process_group import address_towards
from aprilsched.kernel.weights.tensor_buckets import check_weights
from aprilsched.kernel.weights.threads import Takers, call_each, in_daemon, in_thread

if TYPE_CHECKING:
    from torch import Tensor, device

log = logging.getLogger("aprilsched")

_PACKAGE = "vllm.distributed.weight_transfer"
_GRACE_SECONDS = 5.0
"""Time in which vLLM's end may notice that an engine has refused."""


class _Target(Engine, RefitByTransfer, Protocol):
    """An engine to which this publisher can publish."""


class VLLMPublisher:
    """Publishes CUDA tensors to vLLM servers, by vLLM's own transfer.

    Args:
        weights: returns an iterator over (name, CUDA tensor) of all weights, under their Hugging
            Face names, as whole (gathered) tensors. It is called for each version and runs in a
            thread. Before the first version it is called once more, for names, types and shapes,
            and with "sparse_nccl" once more for each version, to find what changed.
        backend: "nccl" to servers on any GPUs, "ipc" to servers on the trainer's own GPU, or
            "sparse_nccl" to send only what changed, which needs a copy of the weights in host
            memory and three times the bytes for an update that sends everything (an index of 4
            bytes for each element). The servers must be started with the same backend.
        address: address of this machine, as the engines reach it. None takes the address of the
            interface towards them, or loopback if they are on this machine.
        port: port at which the members of the NCCL group meet; 0 for any free one.
        bucket_bytes: bytes of tensors that are sent at a time; at least those of the largest one.
        timeout_s: seconds for a whole transfer.

    Raises:
        ConfigError: if `backend` or `bucket_bytes` is out of its range, or `weights` is no
            function.
    """

    def __init__(
        self,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        backend: Literal["nccl", "ipc", "sparse_nccl"] = "nccl",
        address: str | None = None,
        port: int = 0,
        bucket_bytes: int = 2**30,
        timeout_s: float = 300.0,
    ) -> None:
        check_weights(weights)
        if backend not in ("nccl", "ipc", "sparse_nccl"):
            raise ConfigError(f'`backend` must be "nccl", "ipc" or "sparse_nccl", got {backend!r}.')
        check_range(AT_LEAST_1, bucket_bytes=bucket_bytes)
        self._weights = weights
        self._backend = backend
        self._address = address
        self._port = port
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._client: _Client | None = None
        self._end: Any = None
        """vLLM's trainer end, which has a group with the engines of `_client`."""
        self._device: device | None = None
        """The device of the weights."""
        self._patches: list[Any] | None = None
        """What changed since the version that the engines of `_client` have; None: everything."""
        self.sent_bytes = 0
        """Bytes of values and indices in the last update; counted with "sparse_nccl"."""

    async def prepare(self, version: int) -> None:
        """Import vLLM, which takes seconds, and find what changed, while the engines generate.

        Raises:
            ConfigError: if vLLM is not installed.
        """
        await in_thread(_vllm, "base")
        if self._backend == "sparse_nccl":
            self._patches = await in_thread(self._find_patches)

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Send the weights to every engine, and label them `version`.

        Raises:
            ConfigError: if vLLM is not installed, or `weights` gives nothing.
        """
        takers: Takers[_Target] = Takers(
            engines, RefitByTransfer, "take weights by vLLM's transfer"
        )
        if takers.left:
            client = self._client_of(takers.left, version)
            if self._backend == "sparse_nccl" and not await client.has_last():
                self._patches = None
            outcomes = await self._send(client)
            client.last_version = None if any(outcomes.values()) else version
            takers.outcomes |= outcomes
        return takers.outcomes

    def _client_of(self, engines: Sequence[_Target], version: int) -> _Client:
        """The client of the group of these engines, which is made again where it is another one."""
        client = self._client
        if client is None or client.engines != engines or not client.joined():
            self._drop()
            client = self._client = _Client(engines)
        client.start(version)
        return client

    async def _send(self, client: _Client) -> Mapping[str, Exception | None]:
        work = asyncio.ensure_future(in_daemon(lambda: self._transfer(client), name="vllm-weights"))
        failed = asyncio.ensure_future(client.failed.wait())
        try:
            await asyncio.wait(
                [work, failed], timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not work.done():
                await asyncio.wait([work], timeout=_GRACE_SECONDS)
            error = work.exception() if work.done() else None
            if work.done() and error is None:
                return client.outcomes
        except BaseException:
            self._drop()
            raise
        finally:
            failed.cancel()
            work.cancel()
        self._drop()
        if isinstance(error, ConfigError) and not any(client.outcomes.values()):
            raise error
        why = f"the transfer broke off: {error or 'it did not end in time'}"
        return {
            name: failure or (None if name in client.took else ControlTimeout(name, f"{why}."))
            for name, failure in client.outcomes.items()
        }

    def _drop(self) -> None:
        """Leave the group behind; ending it may block."""
        if self._client is not None:
            self._client.given_up = True
        end, self._end, self._client = self._end, None, None
        if end is not None:
            ending = asyncio.ensure_future(in_daemon(end.shutdown, name="vllm-weights-end"))
            # Its error is marked as seen, because no caller asks for it.
            ending.add_done_callback(lambda task: task.cancelled() or task.exception())

    # --- in a thread ---------------------------------------------------------------------------

    def _transfer(self, client: _Client) -> None:
        """Send the weights once; the first time the engines join a group."""
        source = _source(self._weights) if self._end is None else None
        if source is not None:
            source.metadata()
            self._device = source.device
        with _settled(self._device):
            if source is not None:
                end = _vllm("factory").WeightTransferTrainerFactory.trainer_init(
                    self._init_info(client, source.metadata()),
                    client=client,
                    source=None if self._backend == "sparse_nccl" else source,
                )
                if self._client is not client:  # The call was given up in between.
                    return end.shutdown()
                self._end = end
            end: Any = self._end
            if self._backend == "sparse_nccl":
                self._send_patches(client, end)
            else:
                end.send_weights()

    def _find_patches(self) -> list[Any] | None:
        """The changes since the engines' version; None if one of them cannot be a patch."""
        last = self._client.last if self._client is not None else {}
        patches: list[Any] = []
        names: set[str] = set()
        whole = True
        for name, tensor in self._weights():  # To its end: other ranks may take part.
            indices = changed_elements(last.get(name), tensor)
            names.add(name)
            if indices is None:
                whole = False
            elif whole and len(indices):
                patches.append(_patch(name, tensor, indices))
        return patches if whole and names == last.keys() else None

    def _send_patches(self, client: _Client, end: Any) -> None:
        """Send what changed, or all elements if the engines may lack the previous version."""
        patches, self._patches = self._patches, None
        last = client.last
        client.start_weight_update()
        if patches is None:
            import torch

            self.sent_bytes = 0
            last.clear()
            for name, tensor in self._weights():  # One at a time: an index has 4 bytes.
                last[name] = tensor.detach().to("cpu", copy=True).contiguous()
                every = torch.arange(tensor.numel(), device=tensor.device)
                end.send_weight_chunk([_patch(name, tensor, every)])
                self.sent_bytes += tensor.nbytes + 4 * tensor.numel()
        else:
            end.send_weight_chunk(patches)
            self.sent_bytes = sum(each.values.nbytes + each.indices.nbytes for each in patches)
            for patch in patches:
                last[patch.name].flatten()[patch.indices.long().cpu()] = patch.values.cpu()
        client.finish_weight_update()
        log.info("sent all=%s bytes=%d to vLLM", patches is None, self.sent_bytes)

    def _init_info(self, client: _Client, metadata: Sequence[Any]) -> Any:
        sizes = [meta.dtype.itemsize * math.prod(meta.shape) for meta in metadata]
        if not sizes:
            raise ConfigError("weights() gave no tensors; it has to give all of them each time.")
        bucket = max(self._bucket_bytes, *sizes)
        if self._backend == "ipc":
            return _vllm("ipc_engine").IPCTrainerInitInfo(
                rank=0, packed=True, packed_buffer_size_bytes=bucket
            )
        address = self._address or address_towards(engine.name for engine in client.engines)
        group = {
            "rank": 0,
            "master_address": address,
            "master_port": self._port or _free_port(address),
            "world_size": 1 + sum(engine.capabilities.ranks for engine in client.engines),
        }
        if self._backend == "sparse_nccl":
            return _vllm("sparse_nccl_engine").SparseNCCLTrainerInitInfo(**group)
        return _vllm("nccl_engine").NCCLTrainerInitInfo(**group, packed_buffer_size_bytes=bucket)


class _Client:
    """vLLM's client of the control calls (``VLLMWeightSyncClient``), for several engines.

    vLLM calls it from a thread; the engines are called on the loop that made it.
    """

    def __init__(self, engines: Sequence[_Target]) -> None:
        self.engines = list(engines)
        self.outcomes: dict[str, Exception | None] = {}
        """The error of each engine in the transfer under way."""
        self.took: set[str] = set()
        """The engines that have ended the update with its version."""
        self.failed = asyncio.Event()
        self.given_up = False
        self.last: dict[str, Tensor] = {}
        """A copy of the weights that the engines took last, in host memory, by name."""
        self.last_version: int | None = None
        """The version that all of `engines` took last; None before the first one."""
        self._loop = asyncio.get_running_loop()
        self._version = 0

    def start(self, version: int) -> None:
        """Expect a transfer of `version`."""
        self._version, self.failed = version, asyncio.Event()
        self.took = set()
        self.outcomes = {engine.name: None for engine in self.engines}

    def joined(self) -> bool:
        """Whether every engine is in the group still: a server that was restarted is not."""
        return all(engine.in_transfer(id(self)) for engine in self.engines)

    async def has_last(self) -> bool:
        """Whether every engine has `last_version` still, so that changes to it suffice."""
        if self.last_version is None:
            return False
        versions = await asyncio.gather(
            *(engine.version() for engine in self.engines), return_exceptions=True
        )
        return set(versions) == {self.last_version}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let every engine join; vLLM gives the rank of the first one."""
        infos: dict[str, dict[str, Any]] = {}
        offset = init_info.get("rank_offset")
        for engine in self.engines:
            infos[engine.name] = {**init_info}
            if offset is not None:
                infos[engine.name]["rank_offset"] = offset
                offset += engine.capabilities.ranks
        self._each(lambda engine: engine.join_transfer(id(self), infos[engine.name]))

    def start_weight_update(self) -> None:
        """Start an update on every engine."""
        self._each(lambda engine: engine.begin_update())

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Let every engine receive what is announced."""
        info = update_info
        if isinstance(info, dict) and (handles := info.get("ipc_handles")) is not None:
            pickled = b64encode(pickle.dumps(handles)).decode()
            info = {k: v for k, v in info.items() if k != "ipc_handles"}
            info["ipc_handles_pickled"] = pickled
        self._each(lambda engine: engine.receive_transfer(info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update on every engine, with the version."""
        self._each(self._end)

    async def _end(self, engine: _Target) -> None:
        await engine.end_update(self._version)
        self.took.add(engine.name)

    def _each(self, call: Callable[[_Target], Awaitable[object]]) -> None:
        work = self._call(call)
        try:
            running = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # A thread that was given up may last longer than the loop.
            work.close()
            raise
        outcomes = running.result()
        failures = {name: error for name, error in outcomes.items() if error is not None}
        if failures:
            self.outcomes |= failures
            self._loop.call_soon_threadsafe(self.failed.set)
            raise next(iter(failures.values()))

    async def _call(self, call: Callable[[_Target], Awaitable[object]]) -> Mapping[str, Any]:
        if self.given_up:  # It would label weights that came later with its own version.
            raise RuntimeError("The transfer was given up.")
        return await call_each(self.engines, call)


def _source(weights: Callable[[], Iterable[tuple[str, Tensor]]]) -> Any:
    """vLLM's ``WeightSource`` of the weights that a function gives."""
    base = _vllm("base")

    class Source(base.WeightSource):
        def __init__(self) -> None:
            self._metadata: list[Any] | None = None
            self.device: device | None = None

        def metadata(self) -> list[Any]:
            if self._metadata is None:
                self._metadata = []
                for name, tensor in weights():
                    self.device = self.device or tensor.device
                    meta = base.ParamMeta(name, tensor.dtype, tuple(tensor.shape))
                    self._metadata.append(meta)
            return self._metadata

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights():
                yield name, tensor.detach()

    return Source()


@contextmanager
def _settled(device: device | None) -> Generator[None]:
    """Use the trainer's GPU in this thread, after what the trainer has queued on it.

    A new thread uses the first GPU, and vLLM packs the tensors on streams that wait for no other.
    """
    if device is None or device.type != "cuda":
        yield
        return
    import torch

    with torch.cuda.device(device):
        torch.cuda.synchronize()
        yield


def _patch(name: str, tensor: Tensor, indices: Tensor) -> Any:
    """vLLM's patch of the elements at flat `indices`."""
    import torch

    flat = tensor.detach().contiguous().flatten()
    return _vllm("sparse_nccl_engine").SparseWeightPatch(
        name, indices.to(torch.int32), flat[indices], tuple(tensor.shape)
    )


def _vllm(module: str) -> Any:
    try:
        return importlib.import_module(f"{_PACKAGE}.{module}")  # noqa: TID251 (a module of vLLM)
    except (ImportError, RuntimeError, OSError) as error:  # It is missing or for another torch.
        raise ConfigError(
            f"VLLMPublisher needs vLLM in the trainer's environment ({error}); install the version "
            "that the servers run."
        ) from error


def _free_port(address: str) -> int:
    """A port that is free now: vLLM requires one."""
    with socket.create_server((address, 0)) as listening:
        return int(listening.getsockname()[1])
