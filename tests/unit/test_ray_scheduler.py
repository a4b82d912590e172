"""Tests the scheduler as a Ray actor, with real Ray and the SGLang-compatible test server."""

# pyright: basic
# Ray has no complete types.
from __future__ import annotations

import asyncio
import importlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import Batch, DiskPublisher, SGLangFleet
from aprilsched.errors import ConfigError, RefitError, SchedulerClosed
from aprilsched.testing.contract import WAIT_SECONDS
from aprilsched.testing.threaded import ThreadedServer
from tests.support import in_an_actor
from tests.support.ray_cluster import local_cluster, pid_of

ray = pytest.importorskip("ray")

from aprilsched.fronts.ray import (  # noqa: E402
    ActorScheduler,
    FromTrainer,
    start_scheduler,
    stop_scheduler,
)

NAME = "rollouts"
EARLY_AND_LATE = pytest.mark.parametrize(
    "late", [True, pytest.param(False, marks=pytest.mark.long)]
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_cluster():
        yield


@pytest.fixture
def server() -> Iterator[ThreadedServer]:
    with ThreadedServer() as started:
        yield started


@pytest.fixture(autouse=True)
def stopped(cluster: None) -> Iterator[None]:
    yield
    stop_scheduler(NAME)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "rollouts.store"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"1")
    return folder


def start(make: Any, *arguments: Any, **named: Any) -> None:
    start_scheduler(NAME, partial(make, *arguments, **named), num_cpus=0)


def kill() -> None:
    """End the process of the scheduler as a power failure does; Ray starts another one."""
    os.kill(pid_of(ray.get_actor(NAME)), signal.SIGKILL)


def keys(batches: list[Batch]) -> list[Any]:
    return [group.prompt.key for batch in batches for group in batch.groups]


def assert_nothing_is_lost_or_doubled(batches: list[Batch], in_flight: set[Any]) -> None:
    """Every prompt up to the last one of a batch is in one batch, or is in flight."""
    delivered = keys(batches)
    assert len(set(delivered)) == len(delivered)
    assert [batch.index for batch in batches] == list(range(len(batches)))
    assert set(range(max(delivered) + 1)) <= set(delivered) | in_flight


async def in_flight(rollouts: ActorScheduler) -> set[Any]:
    state = await rollouts.state()
    return {group.prompt.key for group in state.in_flight.groups.values()}


def mapped(array: np.ndarray) -> str:
    """What this process has mapped where the array lies."""
    at = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(each, 16) for each in line.split()[0].split("-"))
        if low <= at < high:
            return line
    return ""


async def test_the_arrays_of_a_batch_are_views_of_the_object_store(server: ThreadedServer):
    start(in_an_actor.served, server.url, tokens=in_an_actor.LONG)
    async with ActorScheduler(NAME) as rollouts:
        batch = await rollouts.next_batch()
    for group in batch.groups:
        for rollout in group.rollouts:
            arrays = (rollout.prompt_ids, rollout.token_ids, rollout.logprobs, rollout.versions)
            for array in (*arrays, rollout.loss_mask):
                assert not array.flags.owndata
                assert not array.flags.writeable
                assert "plasma" in mapped(array)
    assert batch.groups[0].prompt.input_ids.shape == (in_an_actor.LONG,)


# --- the actor dies ------------------------------------------------------------------------------


@pytest.mark.long
async def test_an_actor_that_is_killed_again_and_again(
    server: ThreadedServer, store: Path, weights: Path
):
    start(in_an_actor.served, server.url, store, pace="asynchronous")
    batches: list[Batch] = []
    async with asyncio.timeout(WAIT_SECONDS), ActorScheduler(NAME) as rollouts:
        for round_ in range(3):
            batches.append(await rollouts.next_batch())
            asked = asyncio.create_task(rollouts.next_batch())
            kill()
            if round_ == 1:
                ray.kill(ray.get_actor(NAME), no_restart=False)
            batches.append(await asked)
            if round_ == 2:
                kill()
            report = await rollouts.update_weights(DiskPublisher(weights))
            assert report.version == rollouts.version == round_ + 1
        batches.append(await rollouts.next_batch())
        assert_nothing_is_lost_or_doubled(batches, await in_flight(rollouts))
        assert {batch.version for batch in batches} == {0, 1, 2, 3}


async def streamed(rollouts: ActorScheduler) -> Batch:
    return joined([part async for part in rollouts.stream()])


def joined(parts: list[Batch]) -> Batch:
    """The batch of the parts of a stream."""
    assert len({(part.index, part.version) for part in parts}) == 1
    assert not any(part.complete for part in parts[:-1])
    return replace(parts[-1], units=tuple(unit for part in parts for unit in part.units))


async def test_a_stream_continues_when_the_actor_dies(
    server: ThreadedServer, store: Path, weights: Path
):
    """The trainer gets the groups that it does not have, and an update ends the batch."""
    start(in_an_actor.served, server.url, store, groups=4)
    batches: list[Batch] = []
    async with asyncio.timeout(WAIT_SECONDS), ActorScheduler(NAME) as rollouts:
        stream = rollouts.stream()
        parts = [await anext(stream), await anext(stream)]
        kill()
        parts += [part async for part in stream]
        batches.append(joined(parts))
        assert len(batches[0].groups) == 4
        stream = rollouts.stream()
        parts = [await anext(stream), await anext(stream)]
        await stream.aclose()
        kill()
        await rollouts.update_weights(DiskPublisher(weights))
        batches += [joined(parts), await rollouts.next_batch(), await streamed(rollouts)]
        assert [len(batch.groups) for batch in batches] == [4, 2, 4, 4]
        assert [batch.version for batch in batches] == [0, 0, 1, 1]
        assert_nothing_is_lost_or_doubled(batches, await in_flight(rollouts))


@pytest.mark.parametrize("by_group", [False, pytest.param(True, marks=pytest.mark.long)])
@EARLY_AND_LATE
async def test_an_actor_that_dies_twice_with_a_batch_on_its_way(
    server: ThreadedServer, store: Path, tmp_path: Path, late: bool, by_group: bool
):
    """It dies when the store has the batch, or a group of it, or is about to have it."""
    fuses = [tmp_path / "first", tmp_path / "second"]
    start(in_an_actor.fatal_store, server.url, store, fuses, late=late)
    async with asyncio.timeout(WAIT_SECONDS), ActorScheduler(NAME) as rollouts:
        batches = [await rollouts.next_batch()]
        for fuse in fuses:
            fuse.touch()
        for _ in range(3):
            batches.append(await (streamed(rollouts) if by_group else rollouts.next_batch()))
        assert not any(fuse.exists() for fuse in fuses)
        assert_nothing_is_lost_or_doubled(batches, await in_flight(rollouts))


@EARLY_AND_LATE
async def test_an_actor_that_dies_in_an_update(
    server: ThreadedServer, store: Path, weights: Path, tmp_path: Path, late: bool
):
    """Before or after the engines have the weights; the update is repeated."""
    fuses = [tmp_path / "first", tmp_path / "second"]
    start(in_an_actor.served, server.url, store)
    async with asyncio.timeout(WAIT_SECONDS), ActorScheduler(NAME) as rollouts:
        batches = [await rollouts.next_batch()]
        for fuse in fuses:
            fuse.touch()
        publisher = in_an_actor.FatalPublisher(weights, fuses, late=late)
        report = await rollouts.update_weights(publisher)
        assert (report.version, rollouts.version, report.quarantined) == (1, 1, {})
        assert not any(fuse.exists() for fuse in fuses)
        batches.append(await rollouts.next_batch())
        assert_nothing_is_lost_or_doubled(batches, await in_flight(rollouts))
        assert [batch.version for batch in batches] == [0, 1]


@EARLY_AND_LATE
async def test_an_actor_that_dies_while_the_trainer_moves_weights(
    server: ThreadedServer, store: Path, weights: Path, late: bool
):
    class Publisher(DiskPublisher):
        killed = False

        async def publish(self, version: int, engines: Any) -> Any:
            if not late and not self.killed:
                self.killed = True
                kill()
            outcomes = await super().publish(version, engines)
            if not self.killed:
                self.killed = True
                kill()
            return outcomes

    start(in_an_actor.served, server.url, store, pace="asynchronous")
    publisher = FromTrainer(Publisher(weights), SGLangFleet([server.url]))
    async with asyncio.timeout(WAIT_SECONDS), ActorScheduler(NAME) as rollouts:
        batches = [await rollouts.next_batch()]
        assert (await rollouts.update_weights(publisher)).version == 1
        batches.append(await rollouts.next_batch())
        assert (await rollouts.update_weights(publisher)).version == 2
        batches.append(await rollouts.next_batch())
        assert_nothing_is_lost_or_doubled(batches, await in_flight(rollouts))
        assert [batch.version for batch in batches] == [0, 1, 2]


@pytest.mark.long
async def test_an_actor_that_dies_in_a_block_of_the_trainer(server: ThreadedServer, store: Path):
    """The engines may have parts of two versions, so none is used before the next update."""

    async def load(rollouts: ActorScheduler) -> None:
        async with rollouts.paused_for_weights(label=True):
            kill()
            with pytest.raises(RefitError, match="update_weights"):
                await rollouts.next_batch()

    start(in_an_actor.served, server.url, store)
    async with asyncio.timeout(WAIT_SECONDS), ActorScheduler(NAME) as rollouts:
        await rollouts.next_batch()
        with pytest.raises(RefitError, match="load them again in another"):
            await load(rollouts)
        with pytest.raises(RefitError, match="update_weights"):
            await rollouts.next_batch()
        async with rollouts.paused_for_weights(label=True):
            pass
        assert (await rollouts.next_batch()).version == rollouts.version == 1


@pytest.mark.long
async def test_an_actor_that_dies_in_a_checkpoint(
    server: ThreadedServer, store: Path, tmp_path: Path
):
    start(in_an_actor.served, server.url, store)
    path = tmp_path / "checkpoint"
    async with asyncio.timeout(WAIT_SECONDS), ActorScheduler(NAME) as rollouts:
        first = await rollouts.next_batch()
        written = asyncio.create_task(rollouts.checkpoint(path))
        await asyncio.sleep(0)
        kill()
        await written
        second = await rollouts.next_batch()
    stop_scheduler(NAME)
    start_scheduler(
        NAME,
        partial(in_an_actor.served, server.url, tmp_path / "other.store"),
        restore=path,
        num_cpus=0,
    )
    async with asyncio.timeout(WAIT_SECONDS), ActorScheduler(NAME) as rollouts:
        again = await rollouts.next_batch()
        assert (first.index, second.index, again.index) == (0, 1, 1)
        kill()
        # The restarted actor resumes from its store, not from the checkpoint.
        last = await rollouts.next_batch()
        assert last.index == 2
        assert not set(keys([first, again])) & set(keys([last]))


async def test_batches_that_were_acknowledged_never_come_again(server: ThreadedServer, store: Path):
    start(in_an_actor.served, server.url, store)
    async with asyncio.timeout(WAIT_SECONDS), ActorScheduler(NAME) as rollouts:
        batches = [await rollouts.next_batch() for _ in range(2)]
        batches[1].acknowledge()
        kill()
        batches.append(await rollouts.next_batch())
        assert_nothing_is_lost_or_doubled(batches, await in_flight(rollouts))
    async with asyncio.timeout(WAIT_SECONDS), ActorScheduler(NAME) as rollouts:
        again = [await rollouts.next_batch() for _ in range(3)]
    assert [batch.index for batch in again] == [0, 2, 3]
    assert [batch.redelivered for batch in again] == [True, True, False]


@pytest.mark.long
async def test_a_store_that_died_with_the_actor_is_noticed(server: ThreadedServer, store: Path):
    start(in_an_actor.served, server.url, store)
    async with asyncio.timeout(WAIT_SECONDS), ActorScheduler(NAME) as rollouts:
        await rollouts.next_batch()
        for file in store.parent.glob(f"{store.name}*"):
            file.unlink()
        kill()
        with pytest.raises(Exception, match="give its scheduler a store that outlives the actor"):
            await rollouts.next_batch()


# --- the trainer dies ----------------------------------------------------------------------------


async def test_another_trainer_gets_what_the_first_has_not_acknowledged(
    server: ThreadedServer, store: Path, weights: Path
):
    start(in_an_actor.served, server.url, store)
    async with asyncio.timeout(WAIT_SECONDS):
        first = await ActorScheduler(NAME).__aenter__()
        trained = await first.next_batch()
        await first.update_weights(DiskPublisher(weights))
        untrained = [await first.next_batch() for _ in range(2)]
        lost = asyncio.create_task(first.next_batch())
        async with ActorScheduler(NAME) as second:
            assert second.version == 1
            again = [await second.next_batch() for _ in range(3)]
            # On a busy machine the first trainer may have had this batch before the other one came.
            (ended,) = await asyncio.gather(lost, return_exceptions=True)
            if isinstance(ended, Batch):
                untrained.append(ended)
            else:
                assert isinstance(ended, SchedulerClosed)
                assert "one scheduler has one trainer" in str(ended)
            with pytest.raises(SchedulerClosed, match="one scheduler has one trainer"):
                await first.update_weights(DiskPublisher(weights))
            assert_nothing_is_lost_or_doubled([trained, *again], await in_flight(second))
            for old, new in zip(untrained, again, strict=False):
                assert new.redelivered
                assert keys([old]) == keys([new])
                pairs = zip(old.rollouts, new.rollouts, strict=True)
                assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in pairs)
            await second.update_weights(DiskPublisher(weights))
            assert (await second.next_batch()).index == 4
        await first.close()


async def test_another_trainer_gets_a_streamed_batch_from_its_first_group(
    server: ThreadedServer, store: Path
):
    start(in_an_actor.served, server.url, store, groups=3)
    async with asyncio.timeout(WAIT_SECONDS):
        first = await ActorScheduler(NAME).__aenter__()
        stream = first.stream()
        had = [(await anext(stream)), (await anext(stream))]
        async with ActorScheduler(NAME) as second:
            again = await streamed(second)
            assert keys([again])[:2] == keys(had)
            assert_nothing_is_lost_or_doubled([again], await in_flight(second))
        await stream.aclose()
        await first.close()


async def test_a_trainer_that_dies_in_an_update_leaves_no_engine_paused(
    server: ThreadedServer, store: Path, weights: Path
):
    class Publisher(DiskPublisher):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            self.opened, self.never = asyncio.Event(), asyncio.Event()

        async def publish(self, version: int, engines: Any) -> Any:
            self.opened.set()
            await self.never.wait()

    start(in_an_actor.served, server.url, store)
    async with asyncio.timeout(WAIT_SECONDS):
        first = await ActorScheduler(NAME).__aenter__()
        await first.next_batch()
        publisher = Publisher(weights)
        dead = asyncio.create_task(
            first.update_weights(FromTrainer(publisher, SGLangFleet([server.url])))
        )
        await publisher.opened.wait()
        async with ActorScheduler(NAME) as second:
            assert (await second.update_weights(DiskPublisher(weights))).version == 1
            again = await second.next_batch()
            assert (again.index, again.redelivered) == (0, True)
        dead.cancel()
        await asyncio.wait([dead])
        await first.close()


# --- what goes wrong -----------------------------------------------------------------------------


async def test_a_name_that_is_taken(server: ThreadedServer):
    start(in_an_actor.served, server.url)
    with pytest.raises(ValueError, match=r"rollouts.* is already taken"):
        start(in_an_actor.served, server.url)


async def test_a_missing_actor_is_an_error():
    with pytest.raises(SchedulerClosed, match=r"was not there.*start it again"):
        async with ActorScheduler("missing", wait_s=0.5):
            pass
    stop_scheduler("missing")


async def test_an_actor_that_cannot_be_placed(
    server: ThreadedServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("aprilsched.fronts.ray.scheduler.CLOSE_S", 0.5)
    start_scheduler(NAME, partial(in_an_actor.served, server.url), num_cpus=1000)
    with pytest.raises(SchedulerClosed, match=r"did not answer.*look at `ray status`"):
        async with ActorScheduler(NAME, wait_s=2.0):
            pass
    stop_scheduler(NAME)


@pytest.mark.long
async def test_a_function_that_restores_by_itself(
    server: ThreadedServer, store: Path, tmp_path: Path
):
    start(in_an_actor.served, server.url, store)
    async with ActorScheduler(NAME) as rollouts:
        await rollouts.checkpoint(tmp_path / "checkpoint")
    stop_scheduler(NAME)
    start(in_an_actor.restoring, server.url, store, tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="as restore=path"):
        async with ActorScheduler(NAME):
            pass


async def test_a_function_that_the_actor_cannot_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "only_here.py").write_text("def make(): ...")
    monkeypatch.syspath_prepend(tmp_path)
    start(importlib.import_module("only_here").make)
    with pytest.raises(ConfigError, match="No module named 'only_here'"):
        async with ActorScheduler(NAME):
            pass


async def test_a_call_that_is_older_than_the_last_batch_brings_none_back(
    server: ThreadedServer, store: Path
):
    """Ray repeats a call that was sent before the trainer took the batches. It may come first."""
    start(in_an_actor.served, server.url, store, max_new_tokens=400)
    async with asyncio.timeout(WAIT_SECONDS), ActorScheduler(NAME) as rollouts:
        batches = [await rollouts.next_batch()]
        old = [asyncio.create_task(rollouts.state()) for _ in range(20)]
        evaluated = asyncio.create_task(rollouts.evaluate(list(in_an_actor.few())))
        await asyncio.sleep(0)
        batches.append(await rollouts.next_batch())
        kill()
        batches += [await rollouts.next_batch() for _ in range(2)]
        await asyncio.gather(evaluated, *old)
        assert_nothing_is_lost_or_doubled(batches, await in_flight(rollouts))
