"""An engine whose weights are a dictionary, and which really joins the trainer's group (gloo).

Tests use it for failures that a server does not produce on demand. Its ranks are group members in
the trainer's process. The behaviour of a server in such a group is tested on servers.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from aprilsched.errors import EngineError, EngineRejected
from aprilsched.kernel.engines.refit import RefitGroup, TensorMeta
from aprilsched.kernel.values.capabilities import Capabilities

T = TypeVar("T")

TIMEOUT = timedelta(seconds=30)
_THREADS = ThreadPoolExecutor(64)


class GroupMember:
    """One engine of `ranks` ranks.

    Attributes:
        fail_at: the call ("begin", "receive 2", "end", "join") that fails.
        dies: whether it then drops its connections without an answer, instead of refusing the call.
    """

    def __init__(
        self,
        name: str,
        *,
        ranks: int = 1,
        fail_at: str = "",
        dies: bool = False,
        always: bool = True,
    ) -> None:
        self.name = name
        self.capabilities = Capabilities(
            version_spans=True, flush_while_paused=True, ranks=ranks, server="a stand-in"
        )
        self.fail_at = fail_at
        self.dies = dies
        self.weights: dict[str, Tensor] = {}
        self.version_now = 0
        self.calls: list[str] = []
        self.joined: list[tuple[RefitGroup, int]] = []
        self.received = 0
        self._groups: dict[str, list[Any]] = {}

    async def begin_update(self) -> None:
        self._called("begin")
        self.received = 0

    async def end_update(self, version: int) -> None:
        self._called("end")
        self.version_now = version

    async def join_group(self, group: RefitGroup, *, rank_offset: int) -> None:
        self._called("join")
        self.joined.append((group, rank_offset))
        ranks = range(rank_offset, rank_offset + self.capabilities.ranks)
        try:
            self._groups[group.name] = await asyncio.gather(
                *(_in_thread(_member, group, rank) for rank in ranks)
            )
        except RuntimeError as error:
            raise EngineRejected(self.name, str(error).splitlines()[0], status=400) from None

    def in_group(self, name: str) -> bool:
        return name in self._groups

    async def leave_group(self, name: str) -> None:
        self.calls.append("leave")
        self._groups.pop(name, None)

    async def receive(self, tensors: Sequence[TensorMeta], *, group: str) -> None:
        self.received += 1
        self._called(f"receive {self.received}")
        if group not in self._groups:
            raise EngineRejected(self.name, f"is not in {group}", status=400)
        rows = await asyncio.gather(
            *(_in_thread(_receive, members, tensors) for members in self._groups[group])
        )
        failure = next((row for row in rows if isinstance(row, str)), None)
        if failure is not None:
            raise EngineRejected(self.name, failure, status=400)
        assert isinstance(rows[0], Tensor)
        start = 0
        for meta in tensors:
            dtype = getattr(torch, meta.dtype)
            size = torch.empty(meta.shape, dtype=dtype).nbytes
            part = rows[0][start : start + size]
            self.weights[meta.name] = part.view(dtype).reshape(meta.shape)
            start += size

    def _called(self, what: str) -> None:
        self.calls.append(what)
        if what != self.fail_at:
            return
        if self.dies:
            self._groups.clear()
            raise EngineError(self.name, "the connection broke.")
        raise EngineRejected(self.name, f"refused {what}", status=400)


def _in_thread(work: Callable[..., T], *args: object) -> asyncio.Future[T]:
    """Run `work` in a thread of this module's pool, because all ranks wait for each other and the
    loop's own pool has few threads."""
    return asyncio.get_running_loop().run_in_executor(_THREADS, work, *args)


def _member(group: RefitGroup, rank: int) -> Any:
    """Join the group as SGLang's init_custom_process_group does, but without torch's registry,
    which allows only one member in a process."""
    distributed: Any = importlib.import_module("torch.distributed")
    store = distributed.TCPStore(group.address, group.port, None, False, TIMEOUT)
    for prefix in (group.name, f"{group.name}/", "cpu/"):
        store = distributed.PrefixStore(prefix, store)
    return distributed.distributed_c10d.ProcessGroupGloo(store, rank, group.world_size, TIMEOUT)


def _receive(members: Any, tensors: Sequence[TensorMeta]) -> Tensor | str:
    distributed: Any = importlib.import_module("torch.distributed")
    options = distributed.distributed_c10d.BroadcastOptions()
    options.rootRank = 0
    size = sum(torch.empty(m.shape, dtype=getattr(torch, m.dtype)).nbytes for m in tensors)
    row = torch.empty(size, dtype=torch.uint8)
    try:
        members.broadcast([row], options).wait()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return row
