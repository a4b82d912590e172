"""SGLang servers as Ray actors, each on GPUs of its own placement group.

::

    with SGLangServers(
        4, ["--model-path", path], tensor_parallel=8, logs="/shared/logs", name="engine"
    ) as servers:
        fleet = RayFleet(servers.names)

A server is one process on each of its nodes, and each process is the child of an actor. The first
node's actor, the *head*, tells the others when to start, and starts all of them again when one of
them has ended, whatever ended: the process, its actor, or the node. The ranks of a server find each
other only at their start, so none of them can be started alone.

Invariants:

- No process of a server outlives its actor, however that ends: a guard in the server's process
  group holds a pipe of the actor, and kills the group when the pipe closes.
- A server is told to others only while its processes run and after it has answered.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from aprilsched.engines.http import HttpLimits
from aprilsched.engines.sglang.http_engine import SGLangListedFleet
from aprilsched.errors import AprilschedError, ConfigError, EngineUnreachable
from aprilsched.ray.library import LoopActor, exceptions, named, ray

log = logging.getLogger("aprilsched")

_LOOPBACK = "127.0.0.1"
_LAUNCH = (sys.executable, "-m", "sglang.launch_server")
_CHOSEN = (
    "--host", "--port", "--nnodes", "--node-rank", "--dist-init-addr", "--tp", "--tp-size",
    "--tensor-parallel-size",
)  # fmt: skip
"""Flags that the actors give by themselves."""
_KEYS = ("--api-key", "--admin-api-key")
"""Flags whose values are shown nowhere."""
_PORTS = range(20_000, 32_000)
"""Below the ephemeral range: a port of that range may become the local end of another connection
before the server binds it, half a minute later."""
_BINDS = 5
"""Number of ports that are tried."""
_POLL_S = 0.25
_PAUSES_S = (1.0, 60.0)
"""Shortest and longest pause before a server that has ended is started again."""
_TERM_S = 20.0
"""Seconds that a server has to end after SIGTERM."""
_TAIL_LINES = 12
_TAIL_BYTES = 1 << 14
_GUARD = """
exec 3<&0 </dev/null
trap : TERM
"$@" 3<&- &
server=$!
(read -r _ <&3; kill -9 0) &
while :; do
  wait "$server"
  code=$?
  kill -0 "$server" 2>/dev/null || exit "$code"
done
"""
"""Runs a server as long as the pipe at its standard input is open. A signal that ends the server
is trapped, so that its exit code is the guard's. Whoever waits for the guard kills what is left of
the process group."""


class SGLangServers:
    """A number of SGLang servers of one kind, each in Ray actors of its own.

    ``names`` has the names of the actors that :class:`~aprilsched.ray.RayFleet` asks for their
    servers. The servers start when the ``with`` block is entered, which waits until all of them
    have answered, and end with it.

    A server process that ends is started again by its actor, after 1, 2, 4 … 60 seconds, and an
    actor that dies is started again by Ray, on any node that has room for it. In both cases the
    server has another address, and the fleet follows it.

    Args:
        count: number of servers.
        arguments: arguments of each server, such as ``["--model-path", path]``. Its host, its port,
            its ranks and its nodes are chosen here.
        logs: folder for the output of the servers, on each of their nodes. Each start of a process
            has a file of its own there.
        name: prefix of the actors' names: "sglang-0", "sglang-1" and so on.
        namespace: Ray namespace of the names; None for that of this process.
        tensor_parallel: number of tensor-parallel ranks of a server.
        nodes: number of nodes of a server.
        gpus: GPUs of a server, on all of its nodes together; None for one for each rank.
        cpus: CPUs for each actor.
        command: what starts a server; None for ``python -m sglang.launch_server`` of the Python
            that runs the actor.
        host: address on which each server listens. None is loopback, which only this machine
            reaches, and is refused if the cluster has several nodes. "node" is the address that its
            node has in the cluster; everybody who reaches it can use the server, unless it has
            keys.
        environment: variables for the servers, in addition to those of their actors.
        lifetime: "detached" lets the servers outlive this program; :meth:`close` ends them.
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
        tensor_parallel: int = 1,
        nodes: int = 1,
        gpus: int | None = None,
        cpus: float = 1.0,
        command: Sequence[str] | None = None,
        host: str | None = None,
        environment: Mapping[str, str] | None = None,
        lifetime: str | None = None,
        place_s: float = 300.0,
        ready_s: float = 1800.0,
    ) -> None:
        if isinstance(arguments, str) or isinstance(command, str):
            raise ConfigError("arguments and command are lists of strings; split them.")
        if count < 1 or nodes < 1 or tensor_parallel < 1:
            raise ConfigError(
                f"count is {count}, nodes {nodes} and tensor_parallel {tensor_parallel}; give 1 or "
                "more."
            )
        self._gpus = tensor_parallel if gpus is None else gpus
        if self._gpus % nodes:
            raise ConfigError(
                f"{self._gpus} GPUs cannot be divided among {nodes} nodes; give a multiple."
            )
        given = [each.partition("=")[0] for each in arguments]
        own = next((flag for flag in _CHOSEN if flag in given), None)
        if own is not None:
            raise ConfigError(
                f"arguments have {own}, which the actors choose; use tensor_parallel=, nodes= and "
                "host=."
            )
        self.names = tuple(f"{name}-{number}" for number in range(count))
        """Names of the actors to ask for the servers, one for each server."""
        self._namespace = namespace
        self._nodes = nodes
        self._cpus = cpus
        self._lifetime = lifetime
        self._place_s = place_s
        self._host = host
        parallel = ["--tp-size", str(tensor_parallel)] if tensor_parallel > 1 else []
        self._plan = _Plan(
            command=tuple(command or ()),
            arguments=(*arguments, *parallel),
            environment=dict(environment or {}),
            host=host or _LOOPBACK,
            nodes=nodes,
            logs=Path(logs).absolute(),
            ready_s=ready_s,
        )
        self._groups: list[Any] = []
        self._actors: list[list[Any]] = []
        """The actors of each server, its head first."""

    # --- life ----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
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

    def start(self) -> None:
        """Place the servers and start them; :meth:`wait_ready` waits until they answer."""
        if self._actors:
            raise ConfigError("the servers are started already; make other ones.")
        self._check_host()
        for name in self.names:
            self._check_name(name)
        try:
            self._place()
            for name, group in zip(self.names, self._groups, strict=True):
                self._actors.append(self._start(name, group))
        except BaseException:
            self.close()
            raise

    def wait_ready(self) -> None:
        """Wait until every server has answered."""
        waiting = {actors[0].do.remote("ready"): name for actors, name in self._named_actors()}
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            name = waiting.pop(done)
            error = ray.get(done)
            if error is not None:
                raise EngineUnreachable(name, error)

    def urls(self) -> dict[str, str | None]:
        """The URL of each server by the name of its actor; None if it does not run now."""
        return {name: ray.get(actors[0].get_url.remote()) for actors, name in self._named_actors()}

    def logs(self) -> dict[str, tuple[str, ...]]:
        """Where the present output of each server is, as "node:path" for each of its nodes."""
        return {
            name: tuple(ray.get([actor.do.remote("where") for actor in actors]))
            for actors, name in self._named_actors()
        }

    def close(self) -> None:
        """End the servers and their actors."""
        heads = [actors[0].do.remote("end") for actors in self._actors]
        if heads:
            # An actor that is just being restarted has no process.
            ray.wait(heads, num_returns=len(heads), timeout=2 * _TERM_S)
        for actor in itertools.chain(*self._actors):
            ray.kill(actor)
        for group in self._groups:
            _groups().remove_placement_group(group)
        self._actors, self._groups = [], []

    # --- placing -------------------------------------------------------------------------------

    def _check_host(self) -> None:
        if self._host is not None:
            return
        nodes = sum(node["Alive"] for node in ray.nodes())
        if nodes > 1 or self._nodes > 1:
            raise ConfigError(
                f"the cluster has {nodes} nodes, and servers on loopback are reached from their "
                'own node only; give host="node", and keys if others reach these addresses too.'
            )

    def _check_name(self, name: str) -> None:
        if named(name, self._namespace) is not None:
            raise ConfigError(
                f"there is an actor {name!r} already; end it, or choose another name for the "
                "servers."
            )

    def _place(self) -> None:
        bundle = {"CPU": self._cpus, "GPU": self._gpus / self._nodes}
        bundle = {kind: amount for kind, amount in bundle.items() if amount}
        for _ in self.names:
            self._groups.append(
                _groups().placement_group(
                    [bundle] * self._nodes,
                    strategy="PACK" if self._nodes == 1 else "STRICT_SPREAD",
                    lifetime=self._lifetime,
                )
            )
        until = time.monotonic() + self._place_s
        for name, group in zip(self.names, self._groups, strict=True):
            if not group.wait(max(0.1, until - time.monotonic())):
                what = " and ".join(f"{amount:g} {kind}" for kind, amount in bundle.items())
                free = ray.available_resources()
                has = ", ".join(f"{free.get(kind, 0):g} {kind}" for kind in bundle)
                raise ConfigError(
                    f"the Ray cluster had no room for {name} within {self._place_s:g} s, which "
                    f"needs {what} on each of {self._nodes} nodes, and {has} are free in the whole "
                    "cluster; start fewer servers, or more nodes."
                )

    def _start(self, name: str, group: Any) -> list[Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        def start(rank: int, followers: Sequence[Any]) -> Any:
            options = {
                "name": name if rank == 0 else f"{name}-node-{rank}",
                "namespace": self._namespace,
                "lifetime": self._lifetime,
                "max_restarts": -1,
                "num_cpus": self._cpus,
                "num_gpus": self._gpus / self._nodes,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=rank
                ),
            }
            try:
                if rank == 0:
                    head = ray.remote(_HeadActor).options(**options)
                    return head.remote(self._plan, name, followers)
                return (
                    ray.remote(LoopActor).options(**options).remote(_Node, self._plan, name, rank)
                )
            except ValueError as error:
                raise ConfigError(
                    f"the actor {options['name']!r} cannot be started ({error})"
                ) from error

        followers = [start(rank, ()) for rank in range(1, self._nodes)]
        return [start(0, followers), *followers]

    def _named_actors(self) -> list[tuple[list[Any], str]]:
        if not self._actors:
            raise ConfigError("the servers are not started; use them inside their `with` block.")
        return list(zip(self._actors, self.names, strict=True))


def _groups() -> Any:
    from ray.util import placement_group

    return sys.modules[placement_group.__module__]


# --- the actor -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What the actors of a server know of it. Arguments and variables may contain keys."""

    command: tuple[str, ...]
    arguments: tuple[str, ...] = field(repr=False)
    environment: Mapping[str, str] = field(repr=False)
    host: str
    nodes: int
    logs: Path
    ready_s: float


class _Ended(Exception):
    """A server has ended, or does not come up; the message says why."""


class _Node:
    """The process of a server on one node."""

    def __init__(self, plan: _Plan, name: str, rank: int) -> None:
        self.plan = plan
        self.name = name
        self._rank = rank
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""
        self._meet = ""
        self._log: Path | None = None

    def _meeting(self) -> str:
        """An address of this node at which the ranks of the server can find each other."""
        address = ray.util.get_node_ip_address()
        return f"{address}:{_free_port(address)}"

    async def start(self, meet: str) -> None:
        """Start the process, for a server whose ranks find each other at `meet`."""
        await self.stop()
        plan = self.plan
        host = ray.util.get_node_ip_address() if plan.host == "node" else plan.host
        port = _free_port(host)
        several = ["--nnodes", str(plan.nodes), "--node-rank", str(self._rank)]
        several += ["--dist-init-addr", meet]
        arguments = [
            *(plan.command or _LAUNCH),
            *plan.arguments,
            *("--host", host, "--port", str(port)),
            *(several if plan.nodes > 1 else ()),
        ]
        plan.logs.mkdir(parents=True, exist_ok=True)
        # Others may not read it, because SGLang writes its keys there.
        self._log = plan.logs / f"{self.name}-node-{self._rank}-{time.time_ns()}.log"
        self._process = self._spawn(arguments, self._log)
        self._meet = meet
        self._address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _spawn(self, arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        with open(os.open(log, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as output:
            return subprocess.Popen(  # noqa: S603
                ["/bin/sh", "-c", _GUARD, "sh", *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.plan.environment},
                start_new_session=True,
            )

    async def ended(self, meet: str) -> str | None:
        if self._process is None or self._meet != meet:
            return "was stopped"
        code = self._process.poll()
        return None if code is None else f"has ended with exit code {code}; {self._last_words()}"

    async def stop(self) -> None:
        """End the process and its children, gently first."""
        process, self._process = self._process, None
        if process is None:
            return
        for kind in (signal.SIGTERM, signal.SIGKILL):  # the group may outlive its leader
            with suppress(ProcessLookupError):
                os.killpg(process.pid, kind)
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, _TERM_S)
        if process.stdin is not None:
            process.stdin.close()

    async def where(self) -> str:
        return f"{ray.util.get_node_ip_address()}:{self._log}"

    def _cannot_bind(self) -> bool:
        return b"address already in use" in self._tail()

    def _last_words(self) -> str:
        """The last lines of the output, without keys, and where the rest is."""
        lines = self._tail().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        text = " | ".join(line.strip() for line in lines if line.strip())
        for key in _secrets(self.plan):
            text = text.replace(key, "***")
        return f"its output is in {self._log} and ends with: {text or 'nothing'}"

    def _tail(self) -> bytes:
        if self._log is None:
            return b""
        with self._log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read()


class _Head(_Node):
    """The first node of a server, which starts the processes of all nodes, again when one of them
    has ended."""

    def __init__(self, plan: _Plan, name: str, followers: Sequence[Any]) -> None:
        super().__init__(plan, name, 0)
        self._url: str | None = None
        """Where the server listens; None while it does not."""
        self._followers = followers
        self._known = asyncio.Event()
        """Whether it is known what became of the first start."""
        if ray.get_runtime_context().was_current_actor_reconstructed:
            # Whoever asks then uses the other servers meanwhile.
            self._known.set()
        self._error: str | None = None
        self._task: asyncio.Task[None] | None = None

    async def get_url(self) -> str | None:
        """Where the server listens; None if it does not run now. It waits for the first start."""
        error = await self.ready()
        if error is not None:
            raise AprilschedError(error)
        return self._url

    async def ready(self) -> str | None:
        """Wait for the first start; returns why it failed, or None."""
        await self._known.wait()
        return self._error

    async def run(self) -> None:
        self._task = asyncio.current_task()
        shortest, longest = _PAUSES_S
        pause = shortest
        for starts in itertools.count():
            up = time.monotonic()
            try:
                cause = await self._serve()
            except _Ended as error:
                cause = str(error)
            except OSError as error:
                cause = f"cannot be started ({error}); look at its command and at logs="
            finally:
                self._url = None
                await self._stop_all()
            if not self._known.is_set():
                self._error = cause
                self._known.set()
                return
            pause = shortest if time.monotonic() - up > longest else min(2 * pause, longest)
            log.warning(
                "server %s is started again in %g s (start %d): %s",
                self.name, pause, starts + 2, cause,
            )  # fmt: skip
            await asyncio.sleep(pause)

    async def end(self) -> None:
        """Stop the server for good."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _serve(self) -> str:
        """Start the server, and return when it has ended, with the cause.

        Raises:
            _Ended: if it does not come up.
        """
        meet = await self._start_all()
        for _ in range(_BINDS):
            if await self._comes_up(meet):
                break
            await self._stop_all()
            meet = await self._start_all()
        self._url = self._address
        self._known.set()
        log.info("server %s listens at %s", self.name, self._url)
        while True:
            cause = await self._any_ended(meet)
            if cause is not None:
                return cause
            await asyncio.sleep(4 * _POLL_S)

    async def _start_all(self) -> str:
        """Start the process of every node; returns where the ranks meet."""
        meet = self._meeting()
        try:
            await asyncio.gather(*(each.do.remote("start", meet) for each in self._followers))
        except exceptions.RayError as error:
            raise _Ended(f"an actor of another node is away ({_first(error)})") from None
        await self.start(meet)
        return meet

    async def _comes_up(self, meet: str) -> bool:
        """Wait until the server answers; returns False if its port was taken meanwhile."""
        until = time.monotonic() + self.plan.ready_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30.0)) as session:
            while time.monotonic() < until:
                if self._cannot_bind():
                    return False
                cause = await self._any_ended(meet)
                if cause is not None:
                    raise _Ended(cause)
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"{self._address}/health") as answer:
                        if answer.status == 200:
                            return True
                await asyncio.sleep(_POLL_S)
        raise _Ended(f"did not answer within {self.plan.ready_s:g} s; {self._last_words()}")

    async def _any_ended(self, meet: str) -> str | None:
        """Why a process of the server has ended; None if all of them run."""
        cause = await self.ended(meet)
        for follower in self._followers:
            if cause is None:
                try:
                    cause = await follower.do.remote("ended", meet)
                except exceptions.RayError as error:
                    cause = f"an actor of another node has died ({_first(error)})"
        return cause

    async def _stop_all(self) -> None:
        await self.stop()
        with suppress(exceptions.RayError):
            await asyncio.gather(*(each.do.remote("stop") for each in self._followers))


class _HeadActor(LoopActor):
    """The actor of the first node, which a fleet asks for the server."""

    def __init__(self, plan: _Plan, name: str, followers: Sequence[Any]) -> None:
        super().__init__(_Head, plan, name, followers)
        self._running = asyncio.run_coroutine_threadsafe(self.do("run"), self._thread.loop)

    async def get_url(self) -> str | None:
        return await self.do("get_url")


def _secrets(plan: _Plan) -> list[str]:
    """The keys among the arguments."""
    found: list[str] = []
    for flag, value in itertools.pairwise((*plan.arguments, "")):
        name, _, joined = flag.partition("=")
        if name in _KEYS:
            found.append(joined or value)
    return sorted(filter(None, found), key=len, reverse=True)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket(family) as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise _Ended(f"there is no free port from {_PORTS.start} to {_PORTS.stop}")


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


# --- fleet ---------------------------------------------------------------------------------------

# A fleet of SGLang servers that Ray actors own.
#
# Trainers on Ray start each server inside an actor, and know the actors and not their addresses.
# An actor that dies is restarted by Ray, often with a server at another address. :class:`RayFleet`
# asks the actors for the addresses of their servers, and follows them.

_METHODS = ("get_url", "get_server_address")
"""How actors are asked for their address: those of slime, and those of verl."""
_FIRST_ANSWER_S = 600.0
"""Seconds that actors have for their answers when the fleet is opened: they may just be starting
their servers."""
_ANSWER_S = 5.0
"""Seconds that an actor has for its answer later. One that does something else for longer, such as
loading weights, keeps the address that it had."""


class RayFleet(SGLangListedFleet):
    """The SGLang servers of Ray actors, as the actors die and are restarted.

    .. code-block:: python

        servers = [Server.options(max_restarts=-1).remote() for _ in range(4)]
        async with RolloutScheduler(RayFleet(servers), prompts) as rollouts: ...

    Every `poll_s` seconds each actor is asked for the address of its server. When an actor has
    died, its server leaves the fleet, unless it is the last one, and its rollouts continue on the
    others. When Ray has restarted the actor, its server joins again, at whatever address it has
    then. An actor that is busy keeps its address.

    Ray must be connected (``ray.init()``) before the fleet is opened.

    Args:
        actors: handles of actors, or names of named actors. A name is looked up every time, so
            that another actor may take the place of one that died.
        address: asks an actor for its address, ``lambda actor: actor.where.remote()``. By default
            the method ``get_url`` or ``get_server_address`` of the actor is called. The answer is
            a URL, ``"host:port"``, or a pair of host and port; None if the actor has no server,
            as on the further nodes of a server that spans several. If an actor raises instead,
            :meth:`open` raises that, and later the fleet asks again.
        namespace: Ray namespace of the names; None for that of this process.
        admin_key: the servers' ``--admin-api-key``, where they have one.
        api_key: the servers' ``--api-key``, where they have one.
        model_path: refuse servers that serve another model; None accepts any one model.
        stream_interval: tokens between two events of a stream.
        limits: timeouts and sizes, for each server.
        poll_s: seconds between two questions for the addresses.

    Raises:
        ConfigError: if there is no actor, or if `poll_s` is not above 0.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        address: Callable[[Any], Any] | None = None,
        namespace: str | None = None,
        admin_key: str | None = None,
        api_key: str | None = None,
        model_path: str | None = None,
        stream_interval: int = 64,
        limits: HttpLimits | None = None,
        poll_s: float = 5.0,
    ) -> None:
        if isinstance(actors, str):
            raise ConfigError(f"actors is the string {actors!r}; give a list of names or handles.")
        if not actors:
            raise ConfigError("The list of actors is empty; give at least one.")
        self._actors = tuple(actors)
        self._address = address or _address
        self._namespace = namespace
        self._known: dict[int, str | None] = {}
        """Address that each actor gave last, by its position; None if it has no server."""
        self._opening = False
        super().__init__(
            self._urls,
            admin_key=admin_key,
            api_key=api_key,
            model_path=model_path,
            stream_interval=stream_interval,
            limits=limits,
            poll_s=poll_s,
        )

    async def open(self) -> None:
        """Ask the actors, which may take minutes while they start their servers, and open each
        server; see :meth:`aprilsched.SGLangListedFleet.open`."""
        self._known.clear()
        self._opening = True
        try:
            await super().open()
        finally:
            self._opening = False

    async def _urls(self) -> Sequence[str]:
        """The URLs of the servers whose actors live."""
        await asyncio.gather(*(self._ask(number) for number in range(len(self._actors))))
        return [url for _, url in sorted(self._known.items()) if url is not None]

    async def _ask(self, number: int) -> None:
        actor = self._actors[number]
        try:
            async with asyncio.timeout(_FIRST_ANSWER_S if self._opening else _ANSWER_S):
                handle = await asyncio.to_thread(self._named, actor)
                if handle is None:
                    self._known.pop(number, None)
                else:
                    self._known[number] = _url(await self._address(handle))
        except exceptions.RayActorError:  # It has died, or is just being restarted.
            self._known.pop(number, None)
        except (exceptions.RayTaskError, TimeoutError):
            # An actor that was restarted may have no server yet, and raise.
            if self._opening:
                raise

    def _named(self, actor: Any) -> Any:
        """The actor of that name; None if there is none now."""
        return named(actor, self._namespace) if isinstance(actor, str) else actor


def _address(actor: Any) -> Any:
    """Ask the actor by the method that it has."""
    for name in _METHODS:
        method = getattr(actor, name, None)
        if method is not None:
            return method.remote()
    raise ConfigError(
        f"{actor} has neither {' nor '.join(_METHODS)}; say by address= how to ask it for the "
        "address of its server."
    )


def _url(answer: Any) -> str | None:
    """The URL in the answer of an actor."""
    if answer is None:
        return None
    if not isinstance(answer, str):
        try:
            host, port = answer
        except (TypeError, ValueError):
            raise ConfigError(
                f"an actor gave {answer!r} as the address of its server; let address= ask for a "
                "URL, or for host and port."
            ) from None
        answer = f"[{host}]:{port}" if ":" in host and "[" not in host else f"{host}:{port}"
    return answer if "://" in answer else f"http://{answer}"
