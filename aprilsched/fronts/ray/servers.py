"""SGLang servers as Ray actors, each on GPUs of its own.

::

    arguments = ["--model-path", path, "--tp-size", "8"]
    with SGLangServers(4, arguments, gpus=8, logs="/shared/logs", name="engine") as servers:
        fleet = RayFleet(servers.names)

An actor ends with its server's process, and Ray starts it again.

Invariants:

- No process of a server outlives its actor, however that ends.
- An actor takes calls only once its server has answered.
"""

from __future__ import annotations

import itertools
import logging
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
from types import TracebackType
from typing import Any, Self
from urllib.request import ProxyHandler, build_opener

from aprilsched.errors import AprilschedError, ConfigError, EngineUnreachable
from aprilsched.fronts.ray import launcher
from aprilsched.fronts.ray.library import exceptions, last_line, ray

log = logging.getLogger("aprilsched")

LOOPBACK = "127.0.0.1"
COMMAND = (sys.executable, "-m", "sglang.launch_server")
KEY_FLAGS = ("--api-key", "--admin-api-key")
"""Flags whose values no error shows."""
PORTS = range(20_000, 32_000)
"""Below the ephemeral range: a port of that range may become the local end of another connection
before the server binds it, half a minute later."""
POLL_S = 0.25
RESTART_PAUSE_S = 5.0
"""Seconds before a server that did not come up again is started once more."""
TAIL_LINES = 12
TAIL_BYTES = 1 << 14


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
            file of its own there, such as "sglang-0-TIME.log".
        name: prefix of the actors' names: "sglang-0", "sglang-1" and so on.
        namespace: Ray namespace of the names; None for that of this process.
        gpus: GPUs of each server.
        cpus: CPUs of each server.
        command: starts a server; the default is ``python -m sglang.launch_server`` with the Python
            of this program, which each node must have at the same path.
        host: address on which each server listens. None is loopback, which only this machine
            reaches, and is refused if the cluster has several nodes. "node" is the address that its
            node has in the cluster; everybody who reaches it can use the server, unless it has
            keys.
        environment: variables for the servers, in addition to those of their actors.
        place_s: seconds within which the cluster must have room for all servers.
        ready_s: seconds within which a server must answer.

    Raises:
        ConfigError: if an argument cannot be used, if a name is taken, or if the cluster has no
            room for the servers within `place_s`.
        EngineUnreachable: if a server ends before it has answered, or does not answer within
            `ready_s`; the message has the last lines of its output.
    """

    def __init__(
        self,
        count: int,
        arguments: Sequence[str] = (),
        *,
        logs: Path | str,
        name: str = "sglang",
        namespace: str | None = None,
        gpus: int = 1,
        cpus: float = 1.0,
        command: Sequence[str] = COMMAND,
        host: str | None = None,
        environment: Mapping[str, str] | None = None,
        place_s: float = 300.0,
        ready_s: float = 1800.0,
    ) -> None:
        if isinstance(arguments, str) or isinstance(command, str):
            raise ConfigError("arguments and command must be lists of strings, got a string.")
        if count < 1:
            raise ConfigError(f"count must be 1 or more, got {count}.")
        self.names = tuple(f"{name}-{number}" for number in range(count))
        """Names of the actors, one for each server."""
        self._namespace = namespace
        self._bundle = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
        self._host = host or LOOPBACK
        self._place_s = place_s
        self._settings = {
            "command": [*command, *arguments],
            "host": self._host,
            "environment": dict(environment or {}),
            "logs": Path(logs).absolute(),
            "ready_s": ready_s,
        }
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
            self._place()
            for name, group in zip(self.names, self._groups, strict=True):
                self._actors.append(self._start(name, group))
            for name, actor in zip(self.names, self._actors, strict=True):
                self._wait_ready(name, actor)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the servers and their actors."""
        for actor in self._actors:
            ray.kill(actor)
        for group in self._groups:
            ray.util.remove_placement_group(group)
        self._actors, self._groups = [], []

    def _place(self) -> None:
        self._groups = [ray.util.placement_group([self._bundle]) for _ in self.names]
        until = time.monotonic() + self._place_s
        for name, group in zip(self.names, self._groups, strict=True):
            if not group.wait(max(0.1, until - time.monotonic())):
                free = ray.available_resources()
                what = " and ".join(f"{amount:g} {kind}" for kind, amount in self._bundle.items())
                has = ", ".join(f"{free.get(kind, 0):g} {kind}" for kind in self._bundle)
                raise ConfigError(
                    f"the Ray cluster had no room for {name} within {self._place_s:g} s, which "
                    f"needs {what} on one node, and {has} are free in the whole cluster; start "
                    "fewer servers, or more nodes."
                )

    def _start(self, name: str, group: Any) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = {
            "name": name,
            "namespace": self._namespace,
            "max_restarts": -1,
            "num_cpus": self._bundle["CPU"],
            "num_gpus": self._bundle.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(placement_group=group),
        }
        try:
            return ray.remote(ServerActor).options(**options).remote(name, **self._settings)
        except ValueError as error:
            raise ConfigError(
                f"there is an actor {name!r} already ({error}); end it, or choose another name for "
                "the servers."
            ) from error

    def _wait_ready(self, name: str, actor: Any) -> None:
        try:
            ray.get(actor.get_url.remote())
        except exceptions.RayActorError as error:
            cause = last_line(error).removeprefix("aprilsched.errors.AprilschedError: ")
            raise EngineUnreachable(name, cause) from error


class ServerActor:
    """The actor of one server, whose process is its child."""

    def __init__(
        self,
        name: str,
        *,
        command: Sequence[str],
        host: str,
        environment: Mapping[str, str],
        logs: Path,
        ready_s: float,
    ) -> None:
        host = ray.util.get_node_ip_address() if host == "node" else host
        port = _free_port(host)
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._command = [*command, "--host", host, "--port", str(port)]
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / f"{name}-{time.time_ns()}.log"
        # Only the user may read it, because SGLang writes its keys there.
        with open(os.open(self._log, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as output:
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, launcher.__file__, *self._command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        failure = self._wait_up(ready_s)
        if failure is not None:
            self._kill()
            if not ray.get_runtime_context().was_current_actor_reconstructed:
                raise AprilschedError(failure)
            # Ray gives up on an actor whose constructor raises, but restarts one that dies.
            time.sleep(RESTART_PAUSE_S)
            self._die(failure)
        threading.Thread(target=self._die_with_process, daemon=True).start()

    def get_url(self) -> str:
        """Return where the server listens."""
        return self._url

    def _wait_up(self, ready_s: float) -> str | None:
        """Wait until the server answers; returns why it does not, or None."""
        opener = build_opener(ProxyHandler({}))
        until = time.monotonic() + ready_s
        while time.monotonic() < until:
            with suppress(subprocess.TimeoutExpired):
                return self._describe_end(self._process.wait(POLL_S))
            with suppress(OSError):
                opener.open(f"{self._url}/health", timeout=30.0).close()
                return None
        return f"did not answer within {ready_s:g} s; {self._last_words()}"

    def _die_with_process(self) -> None:
        code = self._process.wait()
        self._kill()
        self._die(self._describe_end(code))

    def _die(self, cause: str) -> None:
        log.error("server at %s is started again: it %s", self._url, cause)
        os._exit(1)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _describe_end(self, code: int) -> str:
        return f"has ended with exit code {code}; {self._last_words()}"

    def _last_words(self) -> str:
        """Return the last lines of the output, without keys, and where the rest is."""
        with self._log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        text = " | ".join(line.strip() for line in lines if line.strip())
        for flag, value in itertools.pairwise((*self._command, "")):
            name, _, joined = flag.partition("=")
            if name in KEY_FLAGS:
                text = text.replace(joined or value, "***")
        return f"its output is in {self._log} and ends with: {text or 'nothing'}"


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket(family) as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise AprilschedError(f"there is no free port from {PORTS.start} to {PORTS.stop}")
