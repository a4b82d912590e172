"""The trainer's side of a torch.distributed group that engines join: rank 0, which broadcasts.

- The group is the trainer's own: nothing is registered with torch.distributed, so a default
  group of the trainer's is neither needed nor touched. (torch's own helper would split an NCCL
  group off the default one, which all of its ranks would have to take part in.)
- The calls that wait (:meth:`TrainerGroup.join`, :meth:`TrainerGroup.broadcast`) are bounded by
  the group's time and belong into a thread; :meth:`TrainerGroup.close` never waits and may be
  called while they do.
- An idle group that is closed closes its connections, and whatever an engine waits for in this
  group fails there at once, with "Connection closed by peer" (measured, gloo).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Generator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from aprilsched.engines.refit import RefitGroup
from aprilsched.errors import AprilschedError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DEVICES", "GroupBroken", "TrainerGroup"]

DEVICES = {"gloo": "cpu", "nccl": "cuda"}
"""Backends, and the device under which torch puts each one's keys into the rendezvous."""
_BACKLOG = 1024
_MESSAGE_LIMIT = 300
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CLEAN_UP_ONLY = "2"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_building = threading.Lock()


class GroupBroken(AprilschedError):
    """The group could not be made, or a broadcast did not go through; it is of no more use."""


class TrainerGroup:
    """Rank 0 of one group. It listens from the start, so engines may be told at once.

    Args:
        name: of the group; a name is never used twice.
        address: of this machine, as the engines reach it. Only this address listens.
        port: 0 for any that is free.
        timeout_s: for joining, and for each broadcast.

    Raises:
        ConfigError: if this machine cannot listen there.
    """

    def __init__(
        self,
        name: str,
        *,
        address: str,
        port: int,
        world_size: int,
        backend: str,
        timeout_s: float,
    ) -> None:
        distributed = _distributed()
        self._timeout = timedelta(seconds=timeout_s)
        listening = _listen(address, port)
        self.refit = RefitGroup(
            name=name,
            address=address,
            port=listening.getsockname()[1],
            world_size=world_size,
            backend=backend,
        )
        """What the engines have to know."""
        self._closed = False
        self._members: Any = None
        # Without waiting for the workers, which are told of this group only afterwards.
        self._store: Any = distributed.TCPStore(
            address,
            self.refit.port,
            None,
            True,
            self._timeout,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    def join(self) -> None:
        """Wait for all members. Blocks.

        Raises:
            GroupBroken: if one is missing after the time, or the group was closed meanwhile.
        """
        failure = ""
        try:
            self._members = self._rendezvous()
        except Exception as error:
            failure = _reason(error)
        if self._closed:  # while this thread was at it, so nobody else drops them
            self._members = None
            failure = failure or "the group was closed"
        if failure:
            raise GroupBroken(failure)

    def broadcast(self, flat: Tensor) -> None:
        """Send a row of bytes to all members. Blocks until it is sent.

        Raises:
            GroupBroken: if it could not be sent, or not in time.
        """
        options = _distributed().distributed_c10d.BroadcastOptions()
        options.rootRank = 0
        members = self._members
        failure = "the group was closed"
        try:
            if members is not None:
                # gloo's own time bounds its wait, and ours must not be shorter: members that are
                # dropped while something is pending block the whole process (measured).
                work = members.broadcast([flat], options)
                if flat.is_cuda:
                    _wait_for_gpu(work, flat, self._timeout)
                else:
                    work.wait()
                failure = ""
        except Exception as error:
            failure = _reason(error)
        finally:
            # An error's traceback keeps this frame, and with it the connections.
            work = members = None
        if failure:
            raise GroupBroken(failure)

    def close(self) -> None:
        """Drop everything, at once; from any thread, at any time.

        What this side waits for in :meth:`join` fails now. A gloo broadcast cannot be stopped
        (abort and shutdown do nothing; measured): its thread keeps the connections until it has
        failed or timed out, and drops them then.
        """
        self._closed = True
        # join() waits on a client of its own, whose connection ends with the store.
        self._store = None
        members, self._members = self._members, None
        if members is not None and self.refit.backend == "nccl":
            # An NCCL broadcast can be stopped, but stopping it may wait for the GPU.
            threading.Thread(target=members.abort, daemon=True).start()

    def _rendezvous(self) -> Any:
        distributed = _distributed()
        c10d = distributed.distributed_c10d
        group = self.refit
        store = distributed.TCPStore(group.address, group.port, None, False, self._timeout)
        # The keys under which SGLang's init_custom_process_group and torch look for each other.
        for prefix in (group.name, f"{group.name}/", f"{DEVICES[group.backend]}/"):
            store = distributed.PrefixStore(prefix, store)
        if group.backend == "gloo":
            return c10d.ProcessGroupGloo(store, 0, group.world_size, self._gloo_options())
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.global_ranks_in_group = []
        with _no_tear_down():
            return c10d.ProcessGroupNCCL(store, 0, group.world_size, options)

    def _gloo_options(self) -> Any:
        """gloo listens, too: where the engines reach this machine, and nowhere else.

        Left to itself it takes whatever address the machine's name stands for.
        """
        gloo = _distributed().distributed_c10d.ProcessGroupGloo
        told = os.environ.get(_GLOO_INTERFACE, "")
        options = gloo._Options()
        options._timeout = self._timeout
        options._devices = [
            gloo.create_device(interface=name)
            for name in filter(None, (part.strip() for part in told.split(",")))
        ] or [gloo.create_device(hostname=self.refit.address)]
        return options


def _distributed() -> Any:
    """The module; untyped, since torch does not export the types of stores and groups."""
    import torch.distributed

    return torch.distributed


def _wait_for_gpu(work: Any, flat: Tensor, timeout: timedelta) -> None:
    import torch

    work.wait(timeout)  # with a time it blocks the thread and not just the stream
    torch.cuda.current_stream(flat.device).synchronize()


@contextlib.contextmanager
def _no_tear_down() -> Generator[None, None, None]:
    """By default NCCL's watchdog ends the whole process when a peer died: the trainer."""
    with _building:
        before = os.environ.get(_ERROR_HANDLING)
        os.environ[_ERROR_HANDLING] = _CLEAN_UP_ONLY
        try:
            yield
        finally:
            if before is None:
                del os.environ[_ERROR_HANDLING]
            else:
                os.environ[_ERROR_HANDLING] = before


def _listen(address: str, port: int) -> socket.socket:
    made: socket.socket | None = None
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(place)
        made.listen(_BACKLOG)
    except OSError as error:
        if made is not None:
            made.close()
        raise ConfigError(
            f"The trainer cannot listen on {address}:{port} ({error}); give the address of this "
            "machine that the engines reach, and a free port or 0."
        ) from error
    return made


def _reason(error: Exception) -> str:
    """The first line of torch's message, which goes on with a C++ stack."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:_MESSAGE_LIMIT]
