"""Tests what VLLMPublisher asks of engines and of vLLM's trainer end, and what a failure leaves.

tests/vllm/test_transfer.py runs it with vLLM's own ends; here a stand-in waits as NCCL does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from aprilsched.errors import ConfigError, EngineRejected
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.values.capabilities import Capabilities
from aprilsched.kernel.weights import vllm_transfer
from aprilsched.kernel.weights.vllm_transfer import VLLMPublisher


@dataclass
class TransferEngine:
    """An engine that notes what it is asked for, and refuses one call."""

    name: str
    ranks: int = 1
    refuses: str = ""
    group: int | None = None
    calls: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(version_spans=True, flush_while_paused=True, ranks=self.ranks)

    def _note(self, call: str, what: Any = None) -> None:
        self.calls.append((call, what))
        if call == self.refuses:
            raise EngineRejected(self.name, "no", status=500)

    async def join_transfer(self, group: int, info: Any) -> None:
        self._note("join", info)
        self.group = group

    def in_transfer(self, group: int) -> bool:
        return self.group == group

    async def begin_update(self) -> None:
        self._note("begin")

    async def receive_transfer(self, info: Any) -> None:
        self._note("receive", info)

    async def end_update(self, version: int) -> None:
        self._note("end", version)


class TrainerEnd:
    """Has vLLM's steps: the broadcast runs during the announcement, and waits for its peers."""

    made: list[TrainerEnd]
    stuck: threading.Event | None = None

    def __init__(self, info: Any, client: Any, source: Any) -> None:
        self.info, self.client, self.source = info, client, source
        self.ended, self.left = threading.Event(), threading.Event()
        self.sent: list[str] = []
        self.made.append(self)

    @classmethod
    def trainer_init(cls, info: Any, *, client: Any, source: Any) -> TrainerEnd:
        client.init_weight_transfer_engine({"rank_offset": 1, "world_size": info.world_size})
        return cls(info, client, source)

    def send_weights(self) -> None:
        try:
            self._send()
        finally:
            self.left.set()

    def _send(self) -> None:
        self.client.start_weight_update()
        try:
            self.client.update_weights({"names": [meta.name for meta in self.source.metadata()]})
        except EngineRejected:
            self.ended.wait()  # NCCL waits for the peer that does not come.
            return
        if self.stuck:
            self.stuck.wait(30)
        self.sent = [name for name, _ in self.source]
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.ended.set()


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> list[TrainerEnd]:
    """vLLM's modules; returns the trainer ends that were made."""
    modules = {
        "base": SimpleNamespace(
            WeightSource=object,
            ParamMeta=lambda name, dtype, shape: SimpleNamespace(  # type: ignore[misc]
                name=name, dtype=dtype, shape=shape
            ),
        ),
        "factory": SimpleNamespace(WeightTransferTrainerFactory=TrainerEnd),
        "nccl_engine": SimpleNamespace(NCCLTrainerInitInfo=SimpleNamespace),
    }
    monkeypatch.setattr(vllm_transfer, "_vllm", modules.__getitem__)
    monkeypatch.setattr(vllm_transfer, "_GRACE_SECONDS", 0.01)
    TrainerEnd.made = []
    return TrainerEnd.made


def weights() -> Iterator[tuple[str, Tensor]]:
    for name in "abc":
        yield name, torch.zeros(4)


def engines(*given: object) -> list[Engine]:
    return cast("list[Engine]", list(given))


async def test_every_engine_has_ranks_of_its_own_and_the_group_lasts(
    vllm: list[TrainerEnd],
) -> None:
    one, two, other = TransferEngine("one", 2), TransferEngine("two"), SimpleNamespace(name="other")
    publisher = VLLMPublisher(weights, bucket_bytes=4, address="127.0.0.1")
    for version in (1, 2):
        outcomes = await publisher.publish(version, engines(one, other, two))
        assert isinstance(outcomes["other"], ConfigError)
        assert outcomes == {"one": None, "two": None, "other": outcomes["other"]}
    (end,) = vllm
    assert (end.info.world_size, end.info.rank) == (4, 0)
    assert end.info.packed_buffer_size_bytes == 16, "the largest tensor does not fit"
    assert end.sent == ["a", "b", "c"]
    assert [one.calls[0][1]["rank_offset"], two.calls[0][1]["rank_offset"]] == [1, 3]
    names = ["join", "begin", "receive", "end", "begin", "receive", "end"]
    for engine in (one, two):
        assert [call for call, _ in engine.calls] == names
        assert [what for call, what in engine.calls if call == "end"] == [1, 2]


@pytest.mark.parametrize("refuses", ["join", "begin", "receive", "end"])
async def test_an_engine_that_fails_breaks_the_transfer_off_for_all(
    vllm: list[TrainerEnd], refuses: str
) -> None:
    good, bad = TransferEngine("good"), TransferEngine("bad", refuses=refuses)
    publisher = VLLMPublisher(weights)
    outcomes = await publisher.publish(1, engines(good, bad))
    assert isinstance(outcomes["bad"], EngineRejected)
    assert outcomes["good"] is None if refuses == "end" else "broke off" in str(outcomes["good"])
    assert await publisher.publish(2, engines(good)) == {"good": None}
    assert len(vllm) == 2 - (refuses == "join")
    assert good.calls[-1] == ("end", 2)
    for end in vllm[:-1]:
        assert end.ended.wait(30), "the old group was left open"


async def test_a_server_that_was_restarted_joins_a_new_group(vllm: list[TrainerEnd]) -> None:
    engine = TransferEngine("one")
    publisher = VLLMPublisher(weights)
    await publisher.publish(1, engines(engine))
    engine.group = None
    assert await publisher.publish(2, engines(engine)) == {"one": None}
    assert len(vllm) == 2


async def test_a_transfer_that_does_not_end_is_given_up(vllm: list[TrainerEnd]) -> None:
    engine = TransferEngine("one")
    publisher = VLLMPublisher(weights, timeout_s=0.05)
    await publisher.publish(1, engines(engine))
    vllm[0].stuck = threading.Event()
    vllm[0].left.clear()
    outcomes = await publisher.publish(2, engines(engine))
    assert "did not end in time" in str(outcomes["one"])
    assert await publisher.publish(3, engines(engine)) == {"one": None}
    vllm[0].stuck.set()
    assert await asyncio.to_thread(vllm[0].left.wait, 30)
    assert engine.calls[-1] == ("end", 3), "the transfer that was given up labelled the engine"


def test_a_thread_that_outlives_its_loop_ends(vllm: list[TrainerEnd]) -> None:
    async def give_up() -> None:
        publisher, engine = VLLMPublisher(weights, timeout_s=0.05), TransferEngine("one")
        await publisher.publish(1, engines(engine))
        vllm[0].stuck = threading.Event()
        vllm[0].left.clear()
        await publisher.publish(2, engines(engine))

    asyncio.run(give_up())
    assert vllm[0].stuck is not None
    vllm[0].stuck.set()
    # What it leaves behind unawaited fails the test by the rules of pytest.
    assert vllm[0].left.wait(30)


async def test_no_weights_are_the_callers_mistake() -> None:
    with pytest.raises(ConfigError, match="gave no tensors"):
        await VLLMPublisher(lambda: []).publish(1, engines(TransferEngine("one")))
