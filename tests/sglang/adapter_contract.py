"""Checks of everything that publishing LoRA adapters relies on, for every engine that serves
adapters."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from aprilsched.errors import ConfigError, EngineRejected
from aprilsched.kernel.engines.base import Engine, GenerationRequest
from aprilsched.kernel.engines.refit import TakesAdapters
from aprilsched.kernel.weights.lora import LoraPublisher
from aprilsched.testing.contract import ENDLESS, WAIT_SECONDS, Stream, greedy, whole
from aprilsched.types import VersionSpan


@dataclass(frozen=True, kw_only=True)
class Adapting:
    """An open engine, two adapters in the PEFT layout, and an empty folder."""

    engine: Engine
    adapters: tuple[Path, Path]
    folder: Path

    @property
    def loads(self) -> TakesAdapters:
        assert isinstance(self.engine, TakesAdapters)
        return self.engine

    async def load(self, which: int) -> str:
        """Load an adapter under a name that no other check has used."""
        name = f"adapter-{uuid.uuid4().hex}"
        await self.loads.load_adapter(name, self.adapters[which])
        return name


AdapterCheck = Callable[[Adapting], Awaitable[None]]


def adapted(adapter: str | None, tokens: int = 64) -> GenerationRequest:
    """A greedy request with `adapter`."""
    return msgspec.structs.replace(greedy(tokens), adapter=adapter)


async def every_adapter_samples_by_itself(subject: Adapting) -> None:
    """In one batch, two adapters and the base model sample as they do alone; no KV is shared."""
    engine = subject.engine
    version = await engine.version()
    names = None, await subject.load(0), await subject.load(1)
    alone = [await whole(engine, adapted(name)) for name in names]
    assert not any(stream.last.cached_tokens for stream in alone[1:])
    together = [Stream(engine, adapted(name)).start() for name in names]
    for stream, reference in zip(together, alone, strict=True):
        await stream.end()
        assert stream.ids == reference.ids
        np.testing.assert_allclose(stream.logprobs, reference.logprobs, atol=1e-3)
        assert stream.last.spans == (VersionSpan(version=version, start=0, end=64),)
    assert len({tuple(stream.ids) for stream in alone}) == 3
    for name in names[1:]:
        await subject.loads.unload_adapter(str(name))


async def loading_pauses_nothing(subject: Adapting) -> None:
    """Running requests, and requests that a pause holds, continue with their own adapters."""
    engine = subject.engine
    old = await subject.load(0)
    reference = await whole(engine, adapted(old, 600))
    stream = await Stream(engine, adapted(old, ENDLESS)).start().reach(16)
    new = await subject.load(1)
    assert not stream.done
    assert (await whole(engine, adapted(new, 8))).ids != reference.ids[:8]
    await engine.pause("retract")
    await engine.flush()
    newest = await subject.load(1)
    await engine.resume()
    await stream.cut(600)
    assert stream.ids[:600] == reference.ids
    for name in (old, new, newest):
        await subject.loads.unload_adapter(name)


async def unloading_ends_no_request(subject: Adapting) -> None:
    """Unloading aborts no request of the adapter. SGLang waits for the last one, vLLM does not."""
    engine = subject.engine
    name = await subject.load(0)
    stream = await Stream(engine, adapted(name, 2000)).start().reach(16)
    unloading = asyncio.create_task(subject.loads.unload_adapter(name))
    await stream.end()
    assert stream.last.finish == "length"
    assert len(stream) == 2000
    await asyncio.wait_for(unloading, WAIT_SECONDS)


async def what_is_not_there_is_refused_or_ignored(subject: Adapting) -> None:
    """Unknown adapters, used names and wrong paths are refused. Unloading an unknown adapter has no
    effect."""
    with pytest.raises(EngineRejected):
        await whole(subject.engine, adapted(f"never-{uuid.uuid4().hex}", 4))
    with pytest.raises(EngineRejected):
        await subject.loads.load_adapter("nothing", subject.folder / "nothing")
    name = await subject.load(0)
    with pytest.raises(EngineRejected, match=r"already (been )?loaded"):
        await subject.loads.load_adapter(name, subject.adapters[1])
    for _ in range(2):
        await subject.loads.unload_adapter(name)


async def a_publisher_brings_versions_in_beside_each_other(subject: Adapting) -> None:
    """Version 2 is loaded while a response of version 1 runs; the response ends under 1."""
    engine = subject.engine
    current = 0

    def save(path: Path) -> None:
        shutil.copytree(subject.adapters[current], path, dirs_exist_ok=True)

    publisher = LoraPublisher(subject.folder, save, keep=1, name=f"policy-{uuid.uuid4().hex}")
    with pytest.raises(ConfigError, match="holds no LoRA adapter"):
        await publisher.publish(1, [engine])
    await publisher.prepare(1)
    assert await publisher.publish(1, [engine]) == {engine.name: None}
    first = publisher.adapter_name(1)
    reference = await whole(engine, adapted(first, 400))
    stream = await Stream(engine, adapted(first, ENDLESS)).start().reach(16)
    current = 1
    await publisher.prepare(2)
    assert await publisher.publish(2, [engine]) == {engine.name: None}
    assert publisher.holds(1), "its files stay while an engine has it loaded"
    other = await whole(engine, adapted(publisher.adapter_name(2), 64))
    assert other.ids != reference.ids[:64]
    await stream.cut(400)
    assert stream.ids[:400] == reference.ids
    await publisher.retire(1, engine)
    current = 0
    await publisher.prepare(2)
    assert await publisher.publish(2, [engine]) == {engine.name: None}, "the name was taken"
    assert not publisher.holds(1)
    again = await whole(engine, adapted(publisher.adapter_name(2), 64))
    assert again.ids == reference.ids[:64]
    await publisher.retire(2, engine)


ADAPTER_CHECKS: tuple[AdapterCheck, ...] = (
    every_adapter_samples_by_itself,
    loading_pauses_nothing,
    unloading_ends_no_request,
    what_is_not_there_is_refused_or_ignored,
    a_publisher_brings_versions_in_beside_each_other,
)


def fake_adapters(folder: Path) -> tuple[Path, Path]:
    """Two adapters for the toy model, which needs only different files."""
    found = folder / "adapter-0", folder / "adapter-1"
    for path in found:
        path.mkdir()
        (path / "adapter_config.json").write_text("{}")
        (path / "adapter_model.safetensors").write_text(path.name)
    return found
