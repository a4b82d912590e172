"""The trainer's side of a torch.distributed group that engines join: rank 0, which broadcasts.

- The group is not registered with torch.distributed, so the trainer's default group is neither
  needed nor touched. (torch's own helper would split an NCCL group off the default one, in which
  all of its ranks would have to take part.)
- The blocking calls (:meth:`TrainerGroup.join`, :meth:`TrainerGroup.broadcast`) are bounded by
  the group's timeout and need a thread of their own; :meth:`TrainerGroup.close` never blocks and
  may be called meanwhile.
- Closing an idle group closes its connections: whatever an engine waits for in this group fails
  there at once, with "Connection closed by peer" (measured, gloo).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Generator, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from aprilsched.errors import AprilschedError, ConfigError
from aprilsched.kernel.engines.refit import RefitGroup

if TYPE_CHECKING:
    from torch import Tensor


DEVICES = {"gloo": "cpu", "nccl": "cuda"}
"""The backends, and the device name that torch uses for each one's keys in the rendezvous."""
_BACKLOG = 1024
_MESSAGE_LIMIT = 300
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CLEAN_UP_ONLY = "2"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOK_SECONDS = 0.0001
"""Interval at which the trainer's side looks whether a broadcast has ended on the GPU."""
_building = threading.Lock()


class GroupBroken(AprilschedError):
    """The group could not be made or a broadcast failed; the group is no longer usable."""


class TrainerGroup:
    """Rank 0 of one group. It listens from the start, so its address may be sent to engines at
    once.

    Args:
        name: name of the group; a name is never used twice.
        address: address of this machine, as the engines reach it; no other address listens.
        port: port to listen on; 0 for any free one.
        timeout_s: seconds for joining, and for each broadcast.

    Raises:
        ConfigError: if this machine cannot listen at the address.
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
        """The description of the group for the engines."""
        self._closed = False
        self._members: Any = None
        # It does not wait for the workers, because they hear of this group only afterwards.
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
        """Wait for all members. This blocks.

        Raises:
            GroupBroken: if a member is missing after the timeout, or the group was closed.
        """
        failure = ""
        try:
            self._members = self._rendezvous()
        except Exception as error:
            failure = _reason(error)
        if self._closed:  # close() ran in between and could not drop the members.
            self._members = None
            failure = failure or "the group was closed"
        if failure:
            raise GroupBroken(failure)

    def broadcast(self, flat: Tensor) -> None:
        """Send a row of bytes to all members. This blocks until it is sent.

        Raises:
            GroupBroken: if it could not be sent in time.
        """
        options = _distributed().distributed_c10d.BroadcastOptions()
        options.rootRank = 0
        members = self._members
        failure = "the group was closed"
        try:
            if members is not None:
                # gloo bounds its wait by its own timeout. A shorter one here would drop members
                # while an operation is pending, which blocks the whole process (measured).
                work = members.broadcast([flat], options)
                if flat.is_cuda:
                    _wait_for_gpu(work, flat, self._timeout)
                else:
                    work.wait()
                failure = ""
        except Exception as error:
            failure = _reason(error)
        finally:
            # An error's traceback keeps this frame alive, and with it the connections.
            work = members = None
        if failure:
            raise GroupBroken(failure)

    def close(self) -> None:
        """Close at once; from any thread, at any time.

        A pending :meth:`join` fails now. A gloo broadcast cannot be stopped (abort and shutdown
        have no effect; measured): its thread keeps the connections until it has failed or timed
        out, and drops them then.
        """
        self._closed = True
        # join() waits on its own client of the store, whose connection ends with the store.
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
        # SGLang's init_custom_process_group and torch look for each other under these keys.
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
        """Options that make gloo listen at the address that the engines reach, and only there.

        By default gloo listens at the address for which the machine's name stands.
        """
        gloo = _distributed().distributed_c10d.ProcessGroupGloo
        names = os.environ.get(_GLOO_INTERFACE, "")
        options = gloo._Options()
        options._timeout = self._timeout
        options._devices = [
            gloo.create_device(interface=name)
            for name in filter(None, (part.strip() for part in names.split(",")))
        ] or [gloo.create_device(hostname=self.refit.address)]
        return options


def _distributed() -> Any:
    """The torch module; untyped, because torch does not export the types of stores and groups."""
    import torch.distributed

    return torch.distributed


def _wait_for_gpu(work: Any, flat: Tensor, timeout: timedelta) -> None:
    import torch

    # torch's own wait looks once in a millisecond, which is as long as a bucket takes over NVLink.
    until = time.monotonic() + timeout.total_seconds()
    while not work.is_completed() and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    work.wait(timeout)  # It raises what went wrong. With a timeout it blocks more than the stream.
    torch.cuda.current_stream(flat.device).synchronize()


@contextlib.contextmanager
def _no_tear_down() -> Generator[None, None, None]:
    """Keep NCCL's watchdog from ending the trainer's process when a peer dies."""
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
    """The first line of torch's message, without the C++ stack after it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:_MESSAGE_LIMIT]


LOOPBACK = "127.0.0.1"
_ANY_PORT = 9


def address_towards(engines: Iterable[str]) -> str:
    """The address of this machine's interface towards the engines of these names (host:port).

    It is loopback if all engines are on loopback or have names of another form. Nothing is sent:
    the operating system is asked for its route to the first engine that is elsewhere.
    """
    for name in engines:
        host, separator, port = name.split("/")[0].rpartition(":")
        host = host.strip("[]")
        if not (separator and port.isdigit()) or _is_loopback(host):
            continue
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(
                host, _ANY_PORT, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
        except OSError:
            continue  # The call to the engine will give a better error.
    return LOOPBACK


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
