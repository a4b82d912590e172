"""Lets vLLM's transfer of weights by NCCL run on a CPU: gloo broadcasts in the place of NCCL's.

Everything else is vLLM's own: both ends, the announcements, the buckets and the loading.
"""

# pyright: basic, reportMissingImports=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

_TIMEOUT = timedelta(seconds=120)


class _Gloo:
    """The part of vLLM's ``PyNcclCommunicator`` that a transfer uses."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, device: object) -> None:
        import torch.distributed

        self.device = torch.device("cpu")
        distributed: Any = torch.distributed
        store = distributed.TCPStore(host, port, world_size, rank == 0, _TIMEOUT)
        self._options = distributed.distributed_c10d.BroadcastOptions
        self._group: Any = distributed.ProcessGroupGloo(store, rank, world_size, _TIMEOUT)

    def broadcast(self, tensor: Any, src: int, stream: object = None) -> None:
        options = self._options()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        self._group = None


class _Stream:
    """A stream without pending work."""

    def synchronize(self) -> None:
        pass


def install() -> None:
    """Replace NCCL by gloo, and streams by a stub."""
    import torch
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    nccl_common.stateless_init_process_group = _Gloo
    packed_tensor._get_streams = lambda device, buffers: (_Stream(),) * buffers
    torch.cuda.stream = contextlib.nullcontext
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.synchronize = lambda *device: None
    torch.accelerator.device_index = contextlib.nullcontext
    torch.cuda.current_stream = lambda device=None: _Stream()


def keep_linear_weights() -> None:
    """Let linear layers use their weights. On a CPU they keep a packed copy alone, which takes no
    patch; on a GPU they use their weights."""
    import vllm._custom_ops as custom_ops

    custom_ops._supports_onednn = False
