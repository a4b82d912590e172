"""Tests the calls of CheckpointEnginePublisher, and that it survives a server that hangs."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from aprilsched.errors import ConfigError, EngineRejected, RefitError
from aprilsched.weights.checkpoint_engine import CheckpointEnginePublisher, ParameterServer
from tests.unit.weights_engines import SocketEngine, TensorEngine, as_engines

PATHS = [("GPU-a", "ipc://@a.sock"), ("GPU-b", "ipc://@b.sock")]


class Server:
    """Behaves as checkpoint_engine.ps.ParameterServer does, without a GPU."""

    def __init__(self, *, fails: bool = False, waits: threading.Event | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._fails = fails
        self._waits = waits

    def register_checkpoint(
        self,
        checkpoint_name: str,
        *,
        named_tensors: dict[str, Tensor] | None = None,
        use_shared_memory_pool: bool = False,
    ) -> None:
        self.calls.append(("register", checkpoint_name, sorted(named_tensors or {})))

    def unregister_checkpoint(self, checkpoint_name: str) -> None:
        self.calls.append(("unregister", checkpoint_name))

    def gather_metas(self, checkpoint_name: str) -> None:
        self.calls.append(("gather", checkpoint_name))

    def update(
        self,
        checkpoint_name: str,
        req_func: Callable[[list[tuple[str, str]]], None],
        *,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self.calls.append(("update", checkpoint_name))
        if self._fails:
            raise RuntimeError("no peer came")
        thread = threading.Thread(target=req_func, args=(PATHS,))
        thread.start()
        if self._waits is not None:
            self._waits.wait()
        thread.join()


def weights() -> dict[str, Tensor]:
    return {"b": torch.zeros(1), "a": torch.zeros(1)}


async def prepared(server: ParameterServer, **settings: Any) -> CheckpointEnginePublisher:
    publisher = CheckpointEnginePublisher(weights, server=server, checkpoint="p", **settings)
    await publisher.prepare(3)
    return publisher


async def test_the_calls_come_in_the_order_that_the_server_wants() -> None:
    server = Server()
    publisher = await prepared(server)
    engines = [SocketEngine("one"), SocketEngine("two")]
    assert await publisher.publish(3, as_engines(*engines)) == {"one": None, "two": None}
    await publisher.prepare(4)
    assert [call[0] for call in server.calls] == [
        "register", "gather", "update", "unregister", "register", "gather",
    ]  # fmt: skip
    for engine in engines:
        assert engine.calls == [("sockets", dict(PATHS), 3)]


async def test_a_checkpoint_that_the_trainer_registers_is_only_gathered() -> None:
    server = Server()
    publisher = CheckpointEnginePublisher(server=server, checkpoint="mine")
    await publisher.prepare(3)
    assert server.calls == [("gather", "mine")]


async def test_each_engine_has_its_own_outcome() -> None:
    publisher = await prepared(Server())
    bad, good = SocketEngine("bad", fails_at=1), SocketEngine("good")
    outcomes = await publisher.publish(3, as_engines(bad, good))
    assert isinstance(outcomes["bad"], EngineRejected)
    assert outcomes["good"] is None


async def test_a_server_that_waits_for_a_failed_engine_is_given_up() -> None:
    """checkpoint-engine waits on its socket without a timeout, but the run must not."""
    release = threading.Event()
    publisher = await prepared(Server(waits=release), patience=0.05)
    outcomes = await publisher.publish(3, as_engines(SocketEngine("bad", fails_at=1)))
    assert isinstance(outcomes["bad"], EngineRejected)
    with pytest.raises(RefitError, match="still waits for an engine"):
        await publisher.prepare(4)
    with pytest.raises(RefitError, match="still waits for an engine"):
        await publisher.publish(4, as_engines(SocketEngine("good")))
    release.set()


async def test_a_server_that_fails_says_why() -> None:
    publisher = await prepared(Server(fails=True))
    with pytest.raises(RefitError, match="no peer came"):
        await publisher.publish(3, as_engines(SocketEngine("one")))


async def test_a_cancelled_publish_ends_with_the_update() -> None:
    publisher = await prepared(Server())
    engine = SocketEngine("slow")
    engine.may_answer.clear()
    task = asyncio.create_task(publisher.publish(3, as_engines(engine)))
    await engine.loading.wait()
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    engine.may_answer.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_mistakes_are_named_before_an_engine_is_touched() -> None:
    publisher = await prepared(Server())
    engine = SocketEngine("one")
    with pytest.raises(ConfigError, match="does not read from a checkpoint-engine"):
        await publisher.publish(3, as_engines(engine, TensorEngine("other")))
    with pytest.raises(ConfigError, match="is not prepared"):
        await CheckpointEnginePublisher(weights).publish(3, as_engines(engine))
    with pytest.raises(ConfigError, match="patience is 0"):
        CheckpointEnginePublisher(weights, patience=0)
    assert not engine.calls


async def test_without_the_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("checkpoint_engine", "checkpoint_engine.ps"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match="install it here"):
        await CheckpointEnginePublisher(weights).prepare(3)


@pytest.mark.parametrize(
    "name", ["register_checkpoint", "unregister_checkpoint", "gather_metas", "update"]
)
def test_the_stand_in_has_the_real_signature(name: str) -> None:
    real: Any = importlib.import_module("checkpoint_engine.ps").ParameterServer
    theirs = inspect.signature(getattr(real, name)).parameters
    for parameter in inspect.signature(getattr(Server, name)).parameters.values():
        assert theirs[parameter.name].kind is parameter.kind
