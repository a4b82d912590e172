"""Tests broadcasting weights to real servers: one, two at once, and servers that fail amid it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from torch import Tensor

from aprilsched import SGLangFleet
from aprilsched.agents.gateway import Gateway, GatewaySettings
from aprilsched.errors import ControlTimeout, EngineRejected, InconsistentWeights
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.engines.refit import RefitFromGroup
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.kernel.weights.distributed import DistributedPublisher
from aprilsched.kernel.weights.process_group import TrainerGroup
from aprilsched.testing.contract import PROMPT, Stream, greedy, until, whole
from aprilsched.types import Rollout
from tests.sglang.conftest import ADMIN_KEY
from tests.sglang.recorded import scores, try_until
from tests.sglang.server import CpuServer
from tests.sglang.trained import tensors
from tests.support.group_engine import GroupMember

SMALL = 200_000
"""Size of a bucket in bytes. The tiny model has a dozen buckets, of one or several tensors."""
TOLERANCE = 1e-4


@pytest.fixture
async def engine(engine: SGLangEngine) -> SGLangEngine:
    """An open engine, paused and flushed as for a refit."""
    await engine.pause("retract")
    await engine.flush()
    return engine


@pytest.fixture
async def pair(
    engine: SGLangEngine, clean_pair: tuple[CpuServer, CpuServer]
) -> AsyncIterator[tuple[SGLangEngine, SGLangEngine]]:
    """Two such engines."""
    second = SGLangEngine(clean_pair[1].url, admin_key=ADMIN_KEY)
    await second.open()
    await second.pause("retract")
    await second.flush()
    yield engine, second
    await second.close()


def publisher(weights: Any, **settings: Any) -> DistributedPublisher:
    own: dict[str, Any] = {"backend": "gloo", "bucket_bytes": SMALL, "timeout_s": 30.0}
    return DistributedPublisher(weights, **(own | settings))


async def continued(engine: SGLangEngine, tokens: int = 40) -> Any:
    """What the engine generates after the refit."""
    await engine.resume()
    return await whole(engine, greedy(tokens))


async def assert_has(
    engine: SGLangEngine, model: Path, other: Path, version: int, folder: Path
) -> None:
    """Check that its greedy tokens have the logprobs that transformers gives with `model`."""
    stream = await continued(engine)
    assert await engine.version() == version
    found = SimpleNamespace(prompt_ids=PROMPT, token_ids=np.array(stream.ids))
    right, wrong = scores([model, other], [cast(Rollout, found)], folder)
    assert np.abs(stream.logprobs - right[0]).max() < TOLERANCE
    assert np.median(np.abs(stream.logprobs - wrong[0])) > 0.5


@pytest.mark.shows("weights by broadcast", engine="SGLang")
async def test_a_server_takes_weights_again_and_again_over_one_group(
    engine: SGLangEngine, models: tuple[Path, Path], tmp_path: Path
) -> None:
    """The second publish brings the old weights back, in one large bucket."""
    assert isinstance(engine, RefitFromGroup)
    current = [models[1]]
    made = publisher(lambda: tensors(current[0]))
    assert await made.publish(1, [engine]) == {engine.name: None}
    await assert_has(engine, models[1], models[0], 1, tmp_path)
    await engine.pause("retract")
    await engine.flush()
    current[0] = models[0]
    group = made._group
    assert await made.publish(2, [engine]) == {engine.name: None}
    assert made._group is group
    await assert_has(engine, models[0], models[1], 2, tmp_path)
    await made.aclose()


@pytest.mark.shows("weights by broadcast", engine="SGLang")
async def test_two_servers_take_weights_at_once_in_one_bucket(
    pair: tuple[SGLangEngine, SGLangEngine], models: tuple[Path, Path], tmp_path: Path
) -> None:
    made = publisher(lambda: tensors(models[1]), bucket_bytes=512 * 2**20)
    assert await made.publish(1, pair) == {engine.name: None for engine in pair}
    for engine in pair:
        await assert_has(engine, models[1], models[0], 1, tmp_path)
    await made.aclose()


@pytest.mark.shows("weights by broadcast", "gateway", engine="SGLang")
@pytest.mark.long
async def test_a_broadcast_through_a_gateway_reaches_all_servers_behind_it(
    clean_pair: tuple[CpuServer, CpuServer], models: tuple[Path, Path], tmp_path: Path
) -> None:
    """The trainer knows one address. Both servers have responses open, whose tokens are scored
    under the weights of their versions."""
    fleet = SGLangFleet([server.url for server in clean_pair], admin_key=ADMIN_KEY)
    async with Gateway(fleet, settings=GatewaySettings(port=0, drain_s=0)) as gateway:
        front = SGLangEngine(gateway.url, stream_interval=8)
        await front.open()
        assert front.capabilities.ranks == 2
        version = 0
        made = publisher(lambda: tensors(models[version % 2]))

        async def once(number: int) -> list[Stream]:
            nonlocal version
            # Read to their end, because an abort comes before the servers have sent the versions.
            streams = [Stream(front, greedy(1000)).start() for _ in range(4)]
            for stream in streams:
                await until(lambda stream=stream: len(stream) >= 8)
            await front.pause("retract")
            await front.flush()
            version = number + 1
            assert await made.publish(version, [front]) == {front.name: None}
            await front.resume()
            assert await front.version() == version
            return [await stream.end() for stream in streams]

        def crossed(streams: list[Stream]) -> bool:
            return all(len(stream.last.spans or ()) == 2 for stream in streams)

        for stream in await try_until(once, crossed, "not every response outlived the update"):
            found = SimpleNamespace(prompt_ids=PROMPT, token_ids=np.array(stream.ids))
            spans = stream.last.spans
            assert spans is not None
            assert [span.version for span in spans] == [version - 1, version]
            right = scores(list(models), [cast(Rollout, found)], tmp_path)
            for span in spans:
                of_version = slice(span.start, span.end)
                difference = np.abs(stream.logprobs - right[span.version % 2][0])[of_version]
                assert difference.max() < TOLERANCE
        await made.aclose()
        await front.close()


async def test_types_may_be_mixed_in_a_bucket(
    engine: SGLangEngine, models: tuple[Path, Path]
) -> None:
    """A trainer in bfloat16 may keep some tensors in float32."""

    def mixed() -> Iterator[tuple[str, Tensor]]:
        for index, (name, tensor) in enumerate(tensors(models[1])):
            yield name, tensor if index % 3 else tensor.bfloat16()

    made = publisher(mixed)
    assert await made.publish(1, [engine]) == {engine.name: None}
    assert len((await continued(engine)).ids) == 40
    await made.aclose()


async def test_weights_that_do_not_fit_are_refused_and_the_next_ones_taken(
    engine: SGLangEngine, models: tuple[Path, Path], tmp_path: Path
) -> None:
    """The server reports the error, counts as inconsistent, and a full refit repairs it."""

    def cut() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors(models[1]):
            yield name, tensor[:3] if "embed_tokens" in name else tensor

    given = [cut]
    made = publisher(lambda: given[0]())
    outcome = await made.publish(1, [engine])
    assert isinstance(outcome[engine.name], EngineRejected)
    assert "Failed to update parameter" in str(outcome[engine.name])
    with pytest.raises(InconsistentWeights):
        await engine.version()
    given[0] = lambda: tensors(models[1])
    assert await made.publish(2, [engine]) == {engine.name: None}
    await assert_has(engine, models[1], models[0], 2, tmp_path)
    await made.aclose()


@pytest.mark.parametrize("dies", [True, False])
async def test_a_member_that_fails_in_the_middle_tears_no_server(
    engine: SGLangEngine, models: tuple[Path, Path], tmp_path: Path, dies: bool
) -> None:
    """The server gets all weights again in a group without the failed member."""
    other = GroupMember("other", fail_at="receive 3", dies=dies)
    made = publisher(lambda: tensors(models[1]))
    outcome = await made.publish(1, [cast(Engine, other), engine])
    assert outcome[engine.name] is None
    assert outcome["other"] is not None
    await assert_has(engine, models[1], models[0], 1, tmp_path)
    await made.aclose()


async def test_a_server_that_stops_answering_is_left_behind_and_comes_back(
    pair: tuple[SGLangEngine, SGLangEngine],
    clean_pair: tuple[CpuServer, CpuServer],
    models: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    """All processes of the second server are stopped in the middle of the first broadcast."""
    process = clean_pair[1]._process
    assert process is not None
    frozen = False

    def weights() -> Iterator[tuple[str, Tensor]]:
        nonlocal frozen
        for index, pair in enumerate(tensors(models[1])):
            if index == 8 and not frozen:
                frozen = True
                os.killpg(process.pid, signal.SIGSTOP)
            yield pair

    made = publisher(weights, timeout_s=8.0)
    try:
        outcome = await made.publish(1, pair)
    finally:
        os.killpg(process.pid, signal.SIGCONT)
    assert outcome[pair[0].name] is None
    assert isinstance(outcome[pair[1].name], ControlTimeout)
    assert await made.publish(2, pair) == {engine.name: None for engine in pair}
    for engine in pair:
        await assert_has(engine, models[1], models[0], 2, tmp_path)
    await made.aclose()


async def test_a_cancelled_publish_frees_a_server_that_waits_for_a_broadcast(
    engine: SGLangEngine,
    models: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer has made it wait for weights, and is cancelled before it sends any."""
    reached, never = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def send_nothing(group: TrainerGroup, flat: Tensor) -> None:
        loop.call_soon_threadsafe(reached.set)
        never.wait()

    made = publisher(lambda: tensors(models[1]))
    with monkeypatch.context() as patch:
        patch.setattr(TrainerGroup, "broadcast", send_nothing)
        task = asyncio.create_task(made.publish(1, [engine]))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        never.set()
    assert await made.publish(2, [engine]) == {engine.name: None}
    await assert_has(engine, models[1], models[0], 2, tmp_path)
    await made.aclose()


async def test_a_trainer_that_went_away_leaves_nothing_in_the_way_of_the_next(
    engine: SGLangEngine, models: tuple[Path, Path]
) -> None:
    """It went away without telling the server. The groups of the next trainer have other names."""

    async def half() -> AsyncIterator[tuple[str, Tensor]]:
        for index, pair in enumerate(tensors(models[1])):
            if index == 8:
                raise ZeroDivisionError
            yield pair

    with pytest.raises(ZeroDivisionError):
        await publisher(half).publish(1, [engine])
    made = publisher(lambda: tensors(models[1]))
    assert await made.publish(1, [engine]) == {engine.name: None}
    await made.aclose()
    async with aclosing(engine.generate(greedy(4))) as chunks:
        await engine.resume()
        assert [chunk async for chunk in chunks]
