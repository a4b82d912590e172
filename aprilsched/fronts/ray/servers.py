"""SGLang servers as Ray actors, each on GPUs of its own.

::

    arguments = ["--model-path", path, "--tp-size", "8"]
    with SGLangServers(4, arguments, gpus=8, logs="/shared/logs", name="engine") as servers:
        fleet = RayFleet(servers.names)

An actor ends with its server's process, and Ray starts it again.

Invariant: no process of a server outlives its actor, however that ends.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess  # noqa: TID251 (a command of the user's program)
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.request import ProxyHandler, build_opener

from aprilsched.errors import ConfigError, EngineUnreachable
from aprilsched.fronts.ray import launcher
from aprilsched.fronts.ray.library import exceptions, ray

LOOPBACK = "127.0.0.1"
COMMAND = (sys.executable, "-m", "sglang.launch_server")
PORTS = range(20_000, 32_000)
"""Below the ephemeral range: a port of that range may become the local end of another connection
before the server binds it, half a minute later."""
POLL_S = 0.25
PLACE_S = 300.0
"""Seconds within which the cluster must have room for all servers."""


class SGLangServers:
    """A number of SGLang servers of one kind, each in a Ray actor with a placement group.

    ``names`` has the names of the actors that :class:`~aprilsched.fronts.ray.RayFleet` asks for
    their servers. The servers start when the ``with`` block is entered, which waits until all of
    them have answered, and are killed at its end, or with this program.

    An actor whose server ends dies with it, and Ray starts a dead actor again on any node that has
    room for it. The server has another address then, and the fleet follows it. A server that spans
    several nodes needs actors of your own, which :class:`~aprilsched.fronts.ray.RayFleet` takes
    too.

    Args:
        count: number of servers.
        arguments: arguments of each server, such as ``["--model-path", path]``, without its host
            and its port.
        logs: folder for the output of the servers, on their nodes. Each start of a server has a
            file of its own there, such as "sglang-0-TIME.log", which only you can read.
        name: prefix of the actors' names: "sglang-0", "sglang-1" and so on.
        gpus: GPUs of each server.
        cpus: CPUs of each server.
        command: starts a server; the default is ``python -m sglang.launch_server`` with the Python
            of this program, which each node must have at the same path.
        host: address on which each server listens. None is loopback, which only this machine
            reaches, and is refused if the cluster has several nodes. "node" is the address that its
            node has in the cluster; every client that reaches it can use the server, unless it has
            keys.
        environment: variables for the servers, in addition to those of their actors.
        ready_s: seconds within which all servers must have answered.

    Raises:
        ConfigError: if the cluster has several nodes and the servers are on loopback, or if it has
            no room for the servers.
        EngineUnreachable: if a server ends before it has answered, or does not answer within
            `ready_s`; `logs` has its output.
        ValueError: from Ray, if there is an actor of one of the names.
    """

    def __init__(
        self,
        count: int,
        arguments: Sequence[str] = (),
        *,
        logs: Path | str,
        name: str = "sglang",
        gpus: int = 1,
        cpus: float = 1.0,
        command: Sequence[str] = COMMAND,
        host: str | None = None,
        environment: Mapping[str, str] | None = None,
        ready_s: float = 1800.0,
    ) -> None:
        self.names = tuple(f"{name}-{number}" for number in range(count))
        """Names of the actors, one for each server."""
        self._resources = {"num_cpus": cpus, "num_gpus": gpus}
        self._bundle = {"CPU": cpus, "GPU": gpus}
        self._host = host or LOOPBACK
        self._logs = Path(logs).absolute()
        self._ready_s = ready_s
        self._settings = ([*command, *arguments], self._host, environment or {}, self._logs)
        self._groups: list[Any] = []
        self._actors: list[Any] = []

    def __enter__(self) -> Self:
        nodes = sum(node["Alive"] for node in ray.nodes())
        if self._host == LOOPBACK and nodes > 1:
            raise ConfigError(
                f"the cluster has {nodes} nodes, and servers on loopback are reached from their "
                'own node only; give host="node", and keys if others reach these addresses too.'
            )
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the servers and their actors."""
        for actor in self._actors:
            ray.kill(actor)
        for group in self._groups:
            ray.util.remove_placement_group(group)
        self._actors, self._groups = [], []

    def _start(self) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._groups = [ray.util.placement_group([self._bundle]) for _ in self.names]
        until = time.monotonic() + PLACE_S
        for name, group in zip(self.names, self._groups, strict=True):
            if not group.wait(max(0.1, until - time.monotonic())):
                raise ConfigError(
                    f"the Ray cluster has no node with room for {name}, which needs {self._bundle} "
                    f"(free in the whole cluster: {ray.available_resources()}); start fewer "
                    "servers, or more nodes."
                )
            placed = PlacementGroupSchedulingStrategy(placement_group=group)
            actor = ray.remote(ServerActor).options(
                name=name, max_restarts=-1, scheduling_strategy=placed, **self._resources
            )
            self._actors.append(actor.remote(name, *self._settings))
        try:
            ray.get([actor.get_url.remote() for actor in self._actors], timeout=self._ready_s)
        except (exceptions.RayError, TimeoutError) as error:
            cause = f"of the servers, one has ended, or did not answer within {self._ready_s:g} s"
            raise EngineUnreachable(
                ", ".join(self.names), f"{cause}; their output is in {self._logs}"
            ) from error


class ServerActor:
    """The actor of one server, whose process is its child."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        host: str,
        environment: Mapping[str, str],
        logs: Path,
    ) -> None:
        host = ray.util.get_node_ip_address() if host == "node" else host
        port = _free_port(host)
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._is_up = False
        logs.mkdir(parents=True, exist_ok=True)
        path = logs / f"{name}-{time.time_ns()}.log"
        # Only the user may read it, because SGLang writes its keys there.
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as output:
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, launcher.__file__, *command, "--host", host, "--port", str(port)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        threading.Thread(target=self._die_with_process, daemon=True).start()

    def get_url(self) -> str:
        """Return where the server listens, once it has answered."""
        opener = build_opener(ProxyHandler({}))
        while not self._is_up:
            time.sleep(POLL_S)
            with suppress(OSError):
                opener.open(f"{self._url}/health", timeout=30.0).close()
                self._is_up = True
        return self._url

    def _die_with_process(self) -> None:
        self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        os._exit(1)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        with socket.socket(family) as probe, suppress(OSError):
            port = random.choice(PORTS)  # noqa: S311
            probe.bind((host, port))
            return port
