"""Publishes weights from the trainer's GPU memory to engines on the same GPUs (CUDA IPC).

Transport: the trainer joins the tensors of a bucket into one on its GPU and sends the engine a
handle of that memory, some hundred bytes, over HTTP. The engine opens the memory and copies from
GPU to GPU. No weights pass through the host or a network.

Requirements: the trainer holds all weights under their Hugging Face names, as whole (gathered)
CUDA tensors, one bucket of them at a time, and `bucket_bytes` of additional free GPU memory. It
needs SGLang installed, in the engines' own version, because SGLang's code makes the handles.
Every engine runs on the trainer's machine and sees the trainer's GPU; torch's allocator has
``expandable_segments`` off, because older drivers cannot share such memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from aprilsched.errors import ConfigError
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.engines.refit import RefitFromTensors
from aprilsched.kernel.weights.tensor_buckets import Bucket, ReadingPublisher, Source, Weights
from aprilsched.kernel.weights.threads import Takers, in_thread, to_the_end

_FLATTENED = "flattened_bucket"


class _Target(Engine, RefitFromTensors, Protocol):
    """An engine to which this publisher can publish."""


class TensorPublisher(ReadingPublisher):
    """Publishes CUDA tensors by handle.

    An engine that fails at one bucket gets no further one: its weights are inconsistent and its
    label stays, while the other engines continue. The trainer may change its weights again as soon
    as :meth:`publish` has returned. A cancelled publish returns only when the bucket in transfer
    was answered, because the engines read the trainer's memory until then.

    Args:
        weights: returns an iterator over (name, CUDA tensor) of all weights; called again for each
            version. It runs in a thread, where it may gather shards. It is read once for each
            version, so the iterator may be a generator. It may also be a coroutine, and the
            iterator asynchronous.
        bucket_bytes: bytes of tensors that are handed over at a time; a larger tensor goes alone.
        load_format: how the engine takes a bucket. "flattened_bucket" is one handle for all its
            tensors. "direct" (with the engine's own parameter names), or the name of a loader
            with which the server was started, is one handle for each tensor.
        once: True if every rank of the trainer takes part in the iteration, as in gathering
            shards. `weights` is then called exactly once for each ``update_weights()`` call and
            read to its end, whatever becomes of the update, so that no other rank waits.

    Raises:
        ConfigError: if `bucket_bytes` is below 1, or `weights` is not a function.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        bucket_bytes: int = 512 * 2**20,
        load_format: str = _FLATTENED,
        once: bool = False,
    ) -> None:
        super().__init__(weights, bucket_bytes=bucket_bytes, once=once)
        self._load_format = load_format

    async def prepare(self, version: int) -> None:
        """Import SGLang, which takes seconds, while the engines still generate.

        Raises:
            ConfigError: if SGLang is not installed.
        """
        await in_thread(_sglang)

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Hand every bucket to every engine, in parallel, and label the weights `version`.

        Raises:
            ConfigError: if SGLang is not installed, or `weights` yields nothing or a tensor that
                is not on a GPU.
        """
        takers: Takers[_Target] = Takers(engines, RefitFromTensors, "open a trainer's memory")
        if takers.left:
            sglang = await in_thread(_sglang)
            async with self._reading() as source:
                await self._hand_over_all(version, takers, sglang, source)
        return takers.outcomes

    async def _hand_over_all(
        self, version: int, takers: Takers[_Target], sglang: _SGLang, source: Source
    ) -> None:
        # The first bucket comes before any engine starts, so that a caller's mistake harms no
        # engine.
        bucket = await _next(source)
        if bucket is None:
            raise ConfigError("weights() gave no tensors; it has to give all of them each time.")
        try:
            await to_the_end(takers.each(lambda engine: engine.begin_update()))
            while bucket is not None and takers.left:
                await self._hand_over(sglang, bucket, takers)
                bucket = None  # It is dropped first, so that only one bucket takes memory.
                bucket = await _next(source)
        finally:
            await in_thread(_collect)
        await to_the_end(takers.each(lambda engine: engine.end_update(version)))

    async def _hand_over(self, sglang: _SGLang, bucket: Bucket, takers: Takers[_Target]) -> None:
        # `shared` owns the memory that the engines read, so it lives until all have answered.
        shared, handles = await in_thread(
            sglang.share,
            bucket,
            [engine.capabilities.ranks for engine in takers.left],
            flattened=self._load_format == _FLATTENED,
        )
        try:
            of_engine = dict(zip((engine.name for engine in takers.left), handles, strict=True))
            await to_the_end(
                takers.each(
                    lambda engine: engine.update_from_tensors(
                        of_engine[engine.name], load_format=self._load_format
                    )
                )
            )
        finally:
            del shared  # An error's traceback would keep it alive.


class _SGLang:
    """The parts of SGLang that make handles for SGLang's own servers."""

    def __init__(self, bucket: Any, serializer: Any) -> None:
        self._bucket = bucket
        self._serializer = serializer

    def share(
        self, bucket: Bucket, ranks: Sequence[int], *, flattened: bool
    ) -> tuple[object, list[list[str]]]:
        """Return the shared memory, and for each engine one handle for each of its ranks.

        Each handle is made separately: torch counts the openings of each, and a handle that is
        opened twice would free the memory under the second reader.
        """
        import torch

        with torch.no_grad():
            named = [(name, tensor.detach()) for name, tensor in bucket]
            payload: Any = named
            if flattened:
                joined = self._bucket(named_tensors=named)
                payload = {
                    "flattened_tensor": joined.get_flattened_tensor(),
                    "metadata": joined.get_metadata(),
                }
        if bucket[0][1].is_cuda:
            # The engine reads on another stream, so all writes must have finished.
            torch.cuda.synchronize(bucket[0][1].device)
        return payload, [
            [self._serializer.serialize(payload, output_str=True) for _ in range(count)]
            for count in ranks
        ]


def _sglang() -> _SGLang:
    try:
        buckets = importlib.import_module("sglang.srt.weight_sync.tensor_bucket")  # noqa: TID251 (a module of SGLang)
        patches = importlib.import_module("sglang.srt.utils.patch_torch")  # noqa: TID251 (a module of SGLang)
        utils = importlib.import_module("sglang.srt.utils.common")  # noqa: TID251 (a module of SGLang)
    except (ImportError, RuntimeError, OSError) as error:  # It is missing or for another torch.
        raise ConfigError(
            f"TensorPublisher needs SGLang in the trainer's environment ({error}); install the "
            "version that the engines run."
        ) from error
    # Without the patch a handle names the GPU by its index, which differs between processes.
    patches.monkey_patch_torch_reductions()
    return _SGLang(buckets.FlattenedTensorBucket, utils.MultiprocessingSerializer)


async def _next(source: Source) -> Bucket | None:
    bucket = await source.next()
    if bucket is not None:
        require_cuda(bucket)
    return bucket


def require_cuda(bucket: Bucket) -> None:
    """Refuse tensors whose memory no other process can open."""
    for name, tensor in bucket:
        if not tensor.is_cuda:
            raise ConfigError(
                f"{name} is on {tensor.device}; TensorPublisher hands over CUDA tensors only."
            )


def _collect() -> None:
    """Free the memory of the buckets that the engines have closed by now."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()
