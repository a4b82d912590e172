"""A Ray cluster of this machine for tests, without a network."""

# pyright: basic
# Ray has no complete types.
from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

__all__ = [
    "listening_process",
    "local_cluster",
    "patiently",
    "pid_of",
    "runs",
    "two_nodes",
    "url_of",
]

T = TypeVar("T")


def patiently(start: Callable[[], T]) -> T:
    """Start a node of Ray, again if Ray gives it up: it waits for 30 s, which a busy machine may
    exceed."""
    while True:
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            # Otherwise their processes would run on, and fail the test that collects the garbage.
            node = inspect.trace()[-1].frame.f_locals["self"]
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


@contextmanager
def _offline() -> Generator[Any]:
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        # Ray would write a token into the home folder.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        # With Ray's 15 an actor takes up to 90 s to start on a machine that other tests fill.
        patch.setenv("RAY_worker_niceness", "0")
        try:
            yield ray
        finally:
            ray.shutdown()


@contextmanager
def local_cluster(num_cpus: int = 2) -> Generator[None]:
    """Ray, with a cluster that ends with the block."""
    with _offline() as ray:
        # Without "local" it connects to the cluster that another test has on this machine.
        options = {"num_cpus": num_cpus, "include_dashboard": False, "log_to_driver": False}
        patiently(partial(ray.init, "local", **options))
        yield


@contextmanager
def two_nodes() -> Generator[None]:
    """Ray, with a cluster of two nodes on this machine."""
    with _offline() as ray:
        from ray.cluster_utils import Cluster

        options = {"num_cpus": 1, "include_dashboard": False}
        cluster = patiently(partial(Cluster, initialize_head=True, head_node_args=options))
        try:
            patiently(partial(cluster.add_node, num_cpus=1))
            ray.init(address=cluster.address, log_to_driver=False)
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()


def pid_of(actor: Any) -> int:
    """The process of an actor."""
    from ray._private.state import actors

    known: Any = actors(actor_id=actor._actor_id.hex())
    return known["Pid"]


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def url_of(name: str) -> str | None:
    """The URL of a server by the name of its actor; None while Ray restarts that."""
    ray: Any = pytest.importorskip("ray")
    try:
        return ray.get(ray.get_actor(name).get_url.remote())
    except ray.exceptions.RayActorError:
        return None


def listening_process(url: str | None) -> int:
    """The process that listens at `url`; not the launcher, which has it in its arguments too."""
    assert url is not None, "the server does not run"
    port = url.rpartition(":")[2].encode()
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except (NotADirectoryError, FileNotFoundError, ProcessLookupError):
            continue
        if port in command and not command[1].endswith(b"launcher.py"):
            return int(entry.name)
    raise AssertionError(f"nothing listens at {url}")
