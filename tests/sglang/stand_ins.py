"""Replaces what SGLang needs of a GPU on a machine without one: two modules, and pinned memory.

Call :func:`install` before sglang or transformers' models are imported, :func:`fork` and
:func:`doze` before a server boots, :func:`unpin` before one with LoRA does, that and
:func:`unregister` before one that returns routed experts does, all of these and
:func:`copy_kv` before one with a hierarchical cache does, and :func:`unpin` and :func:`join_ranks`
before one with data-parallel attention does.
"""

# pyright: basic, reportMissingImports=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

_PAUSED_MILLISECONDS = 20
_VLLM_OPERATORS = ("rms_norm", "fused_add_rms_norm", "rotary_embedding", "awq_dequantize")


def install() -> None:
    """Put the stand-ins into ``sys.modules``."""
    # torchvision's CUDA build cannot register its operators against a torch without CUDA.
    sys.modules["torchvision._meta_registrations"] = types.ModuleType("_meta_registrations")
    # Imported on processors without AMX and never called: the layers run native PyTorch code.
    operators = types.ModuleType("vllm._custom_ops")
    for name in _VLLM_OPERATORS:
        setattr(operators, name, None)
    package = types.ModuleType("vllm")
    package.__dict__.update(__path__=[], _custom_ops=operators)
    sys.modules["vllm"] = package
    sys.modules["vllm._custom_ops"] = operators


def unpin() -> None:
    """Let torch make plain tensors where pinned tensors are requested.

    SGLang's native LoRA backend keeps small index tensors in pinned memory without asking whether
    there is a device to copy them to, and torch refuses that on a CPU alone.
    """
    import torch

    def plain(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*args: Any, pin_memory: bool = False, **more: Any) -> Any:
            return make(*args, **more)

        return made

    def unpinned(self: Any, device: Any = None) -> Any:
        return self

    for name in ("tensor", "empty", "zeros", "ones"):
        setattr(torch, name, plain(getattr(torch, name)))
    torch.Tensor.pin_memory = unpinned


def unregister() -> None:
    """Let SGLang keep its host memory as it is, where it would register it with CUDA."""
    from sglang.srt.mem_cache.pool_host import common

    common._cuda_host_register = lambda *_, **__: None


def join_ranks() -> None:
    """Let data-parallel ranks exchange their batches by gloo; SGLang registers GPUs alone.

    They use its own copy for processors, and a length of padding sequences that its torch
    attention lacks.
    """
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention import torch_native_backend

    GroupCoordinator.all_gather_into_tensor = GroupCoordinator._all_gather_into_tensor
    GroupCoordinator.reduce_scatter_tensor = GroupCoordinator._reduce_scatter_tensor
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    torch_native_backend.TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda _: 1


def copy_kv() -> None:
    """Let SGLang copy KV between its pools by torch, in the place of a kernel for GPUs."""
    from sglang.srt.mem_cache.pool_host import base, mha

    def copy(
        *,
        src_layers: Sequence[Any],
        dst_layers: Sequence[Any],
        src_indices: Any,
        dst_indices: Any,
        page_size: int,
    ) -> None:
        for source, target in zip(src_layers, dst_layers, strict=True):
            target[dst_indices] = source[src_indices]

    mha.transfer_kv_direct = copy
    # Otherwise a host with less than 10 GB to spare has no room for a tier of any size.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def fork() -> None:
    """Let SGLang fork its processes instead of starting new interpreters that import it again.

    The imports are two thirds of the time of a boot. SGLang starts new interpreters because CUDA
    needs this; without a GPU a forked process works.
    """
    import multiprocessing

    def keep(method: str | None, force: bool = False) -> None:
        """Ignore SGLang's own choice, which comes later."""

    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = keep


def doze() -> None:
    """Let a paused server wait for its next message, as an idle one does with ``--sleep-on-idle``.

    SGLang's loop asks for messages without a rest while it is paused, with a whole core that the
    other servers and the tests need. The wait is short, because the loop also ends requests whose
    time is over. A server without that flag is unchanged.
    """
    from sglang.srt.managers.scheduler import Scheduler

    record = Scheduler._record_scheduler_state_for_paused_engine

    def record_and_wait(self: Any) -> None:
        record(self)
        if self.idle_sleeper is not None:
            self.idle_sleeper.poller.poll(_PAUSED_MILLISECONDS)

    Scheduler._record_scheduler_state_for_paused_engine = record_and_wait
