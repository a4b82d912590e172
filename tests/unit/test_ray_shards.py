"""Tests shards in Ray actors, with real Ray and SGLang-compatible test servers."""

# pyright: basic
# Ray has no complete types.
from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from aprilsched import Batch, DiskPublisher, SamplingParams, SchedulerConfig, SGLangFleet
from aprilsched.errors import ConfigError
from aprilsched.shards import ShardedScheduler
from aprilsched.testing.server import SimServer, ThreadedServer
from tests.support import in_an_actor
from tests.support.ray_cluster import local_cluster, pid_of

ray = pytest.importorskip("ray")

from aprilsched.ray import FromTrainer, RayShard  # noqa: E402

pytestmark = pytest.mark.long
COUNT = 24


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ThreadedServer]]:
    with local_cluster(), ExitStack() as stack:
        yield [stack.enter_context(ThreadedServer()) for _ in range(2)]


def shards(servers: list[ThreadedServer], folder: Path) -> list[RayShard]:
    return [
        RayShard(name, partial(in_an_actor.shard_of, server.url, folder / name), num_cpus=0)
        for name, server in zip(("a", "b"), servers, strict=True)
    ]


def kill(shard: RayShard, how: signal.Signals = signal.SIGKILL) -> None:
    """End the process of a shard as a power failure does, or let it stand still."""
    os.kill(pid_of(shard._actor), how)


def config(tokens: int = 40) -> SchedulerConfig:
    return SchedulerConfig(
        batch_groups=4,
        group_size=2,
        over_provision=2.0,
        sampling=SamplingParams(max_new_tokens=tokens, ignore_eos=True),
    )


def checkpoint_files(folder: Path) -> DiskPublisher:
    def save(path: Path) -> None:
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_bytes(b"1")

    return DiskPublisher(folder / "weights", save)


def keys(batches: list[Batch]) -> list[Any]:
    return sorted(group.prompt.key for batch in batches for group in batch.groups)


@pytest.mark.parametrize(
    ("from_trainer", "how"),
    [
        (True, signal.SIGKILL),
        (False, signal.SIGKILL),
        (True, signal.SIGSTOP),
    ],
)
async def test_a_shard_whose_actor_is_killed_is_replaced(
    servers: list[ThreadedServer], tmp_path: Path, from_trainer: bool, how: signal.Signals
):
    """Each actor is killed once, one of them while it generates, or stands still; nothing is lost
    or doubled."""
    members = shards(servers, tmp_path)
    publisher: Any = checkpoint_files(tmp_path)
    if from_trainer:
        publisher = FromTrainer(publisher, SGLangFleet([server.url for server in servers]))
    batches: list[Batch] = []
    prompts = list(islice(in_an_actor.endless(), COUNT))
    async with ShardedScheduler(members, prompts, config=config()) as rollouts:
        base = rollouts.version
        async for batch in rollouts:
            batches.append(batch)
            await rollouts.update_weights(publisher)
            if len(batches) in (1, 3):
                kill(members[len(batches) // 2], how)
        await rollouts.update_weights(publisher)
        if from_trainer:
            await publisher.close()
    assert keys(batches) == list(range(COUNT))
    rollouts_ = [rollout for batch in batches for rollout in batch.rollouts]
    assert len({rollout.rollout_id for rollout in rollouts_}) == 2 * COUNT
    assert all(rollout.reward == len(rollout) == 40 for rollout in rollouts_)
    assert [batch.version for batch in batches] == list(range(base, base + len(batches)))
    engines = {part.engine for rollout in rollouts_ for part in rollout.segments}
    assert {engine.split("/")[0] for engine in engines if engine} == {"a", "b"}


async def test_a_run_goes_on_from_a_checkpoint_in_new_actors(
    servers: list[ThreadedServer], tmp_path: Path
):
    prompts = list(islice(in_an_actor.endless(), COUNT))
    async with ShardedScheduler(shards(servers, tmp_path), prompts, config=config()) as rollouts:
        batches = [await rollouts.next_batch()]
        await rollouts.checkpoint(tmp_path / "saved")
        await rollouts.next_batch()
    again = ShardedScheduler(shards(servers, tmp_path), prompts, config=config())
    again.restore(tmp_path / "saved")
    async with again as rollouts:
        evaluated = await rollouts.evaluate(prompts[:3], group_size=2)
        assert [len(group.rollouts) for group in evaluated.groups] == [2, 2, 2]
        batches += [batch async for batch in rollouts]
    assert keys(batches) == list(range(COUNT))


async def test_what_cannot_be_sent_is_said(servers: list[ThreadedServer], tmp_path: Path):
    import threading

    lock = threading.Lock()
    shard = RayShard("a", lambda: lock, num_cpus=0)  # type: ignore
    with pytest.raises(ConfigError, match="cannot be sent"):
        async with ShardedScheduler([shard], [], config=config()):
            pass


async def test_a_call_that_is_cancelled_is_withdrawn_in_the_actor(
    servers: list[ThreadedServer], tmp_path: Path
):
    """An evaluation that nobody waits for had gone on there, and an update waited for its end."""
    endless = config(tokens=100_000)
    prompts = list(islice(in_an_actor.endless(), 2))
    with ThreadedServer(SimServer(time_scale=1.0)) as slow:
        shard = RayShard("a", partial(in_an_actor.shard_of, slow.url, tmp_path / "a"), num_cpus=0)
        async with ShardedScheduler([shard], [], config=endless) as rollouts:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await rollouts.evaluate(prompts)
            async with asyncio.timeout(120):
                report = await rollouts.update_weights(checkpoint_files(tmp_path))
            assert report.quarantined == {}
