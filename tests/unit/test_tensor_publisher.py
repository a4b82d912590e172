"""Tests what TensorPublisher sends to which engine, and when it frees the memory."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from aprilsched.errors import ConfigError, EngineRejected
from aprilsched.kernel.weights import tensor as module
from aprilsched.kernel.weights.tensor import TensorPublisher
from tests.unit.weights_engines import SocketEngine, TensorEngine, as_engines

SHARED: list[weakref.ref[Any]] = []


class Joined:
    """Has the methods of SGLang's FlattenedTensorBucket."""

    def __init__(self, named_tensors: list[tuple[str, Tensor]]) -> None:
        self._names = [name for name, _ in named_tensors]
        self._flat = torch.cat([t.flatten().view(torch.uint8) for _, t in named_tensors])
        SHARED.append(weakref.ref(self._flat))

    def get_flattened_tensor(self) -> Tensor:
        return self._flat

    def get_metadata(self) -> list[str]:
        return self._names


class Serializer:
    """Has the method of SGLang's MultiprocessingSerializer."""

    count = 0

    @classmethod
    def serialize(cls, payload: Any, output_str: bool = False) -> str:
        assert output_str
        cls.count += 1
        flattened = "metadata" in payload
        pairs: list[tuple[str, Any]] = [] if flattened else payload
        names: list[str] = payload["metadata"] if flattened else [name for name, _ in pairs]
        return f"{'+'.join(names)}#{cls.count}"


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's three modules, on CPU tensors."""
    modules: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.weight_sync": {},
        "sglang.srt.weight_sync.tensor_bucket": {"FlattenedTensorBucket": Joined},
        "sglang.srt.utils": {},
        "sglang.srt.utils.patch_torch": {"monkey_patch_torch_reductions": lambda: None},
        "sglang.srt.utils.common": {"MultiprocessingSerializer": Serializer},
    }
    for name, contents in modules.items():
        stand_in = ModuleType(name)
        stand_in.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, stand_in)

    def anything(bucket: object) -> None:
        """Accept CPU tensors in the place of a GPU's."""

    monkeypatch.setattr(module, "require_cuda", anything)
    SHARED.clear()


def weights() -> Iterator[tuple[str, Tensor]]:
    for name in "abc":
        yield name, torch.zeros(4, requires_grad=True)


def publisher(**settings: Any) -> TensorPublisher:
    return TensorPublisher(weights, **dict[str, Any](bucket_bytes=32) | settings)


async def test_buckets_go_in_order_between_begin_and_end_with_a_handle_for_each_rank() -> None:
    one, two = TensorEngine("one"), TensorEngine("two", ranks=2)
    assert await publisher().publish(7, as_engines(one, two)) == {"one": None, "two": None}
    for engine, ranks in ((one, 1), (two, 2)):
        assert [call[0] for call in engine.calls] == ["begin", "tensors", "tensors", "end"]
        assert engine.calls[-1] == ("end", 7)
        for call, names in zip(engine.calls[1:3], ("a+b", "c"), strict=True):
            assert [handle.split("#")[0] for handle in call[1]] == [names] * ranks
            assert call[2] == "flattened_bucket"
    handles = [handle for engine in (one, two) for call in engine.calls[1:3] for handle in call[1]]
    assert len(set(handles)) == len(handles), "a handle that is opened twice is freed too early"


async def test_an_engine_that_fails_gets_no_more_and_no_version() -> None:
    bad, good = TensorEngine("bad", fails_at=1), TensorEngine("good")
    outcomes = await publisher().publish(7, as_engines(bad, good))
    assert isinstance(outcomes["bad"], EngineRejected)
    assert outcomes["good"] is None
    assert [call[0] for call in bad.calls] == ["begin", "tensors"]
    assert good.calls[-1] == ("end", 7)


async def test_other_engines_are_refused_and_delay_no_engine() -> None:
    good = TensorEngine("good")
    outcomes = await publisher().publish(7, as_engines(SocketEngine("other"), good))
    assert isinstance(outcomes["other"], ConfigError)
    assert outcomes["good"] is None


async def test_the_memory_lives_until_the_engine_answered_even_when_cancelled() -> None:
    engine = TensorEngine("slow")
    engine.may_answer.clear()
    task = asyncio.create_task(publisher().publish(7, as_engines(engine)))
    await engine.loading.wait()
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done(), "the engine still reads"
    assert SHARED[0]() is not None
    engine.may_answer.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [call[0] for call in engine.calls] == ["begin", "tensors"]
    gc.collect()  # the error's traceback keeps frames
    assert SHARED[0]() is None


async def test_one_bucket_is_held_at_a_time() -> None:
    held: list[int] = []

    class Counting(TensorEngine):
        async def _load(self) -> None:
            held.append(sum(ref() is not None for ref in SHARED))

    await publisher(bucket_bytes=1).publish(7, as_engines(Counting("one")))
    assert held == [1, 1, 1]


async def test_other_load_formats_send_the_tensors_one_by_one() -> None:
    engine = TensorEngine("one")
    await publisher(load_format="direct").publish(7, as_engines(engine))
    assert engine.calls[1][2] == "direct"
    assert not SHARED


async def test_mistakes_are_named_before_an_engine_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = TensorEngine("one")
    with pytest.raises(ConfigError, match="gave no tensors"):
        await TensorPublisher(lambda: iter(())).publish(7, as_engines(engine))
    with pytest.raises(ConfigError, match="bucket_bytes is 0"):
        publisher(bucket_bytes=0)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="needs SGLang in the trainer's environment"):
        await publisher().prepare(7)
    with pytest.raises(ConfigError, match="a is on cpu"):
        module.require_cuda([("a", torch.zeros(1))])
    assert not engine.calls


async def test_weights_that_every_rank_gathers_are_read_to_the_end_whatever_happens() -> None:
    started: list[str] = []
    ended: list[str] = []

    def gathered() -> Iterator[tuple[str, Tensor]]:
        started.append("")
        yield from weights()
        ended.append("")

    made = TensorPublisher(gathered, bucket_bytes=16, once=True)
    bad = TensorEngine("bad", fails_at=1)
    outcomes = await made.publish(7, as_engines(bad))
    await made.conclude()
    assert isinstance(outcomes["bad"], EngineRejected)
    assert (len(started), len(ended)) == (1, 1)
    await made.conclude()  # an update in which nothing was published
    assert (len(started), len(ended)) == (2, 2)
    await TensorPublisher(gathered).conclude()
    assert len(started) == 2
    with pytest.raises(ConfigError, match="weights is a generator; give a function"):
        TensorPublisher(weights())  # type: ignore[arg-type]
