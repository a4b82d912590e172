"""Tests rolling refits with the coordinator and embedded engines, in virtual time."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import (
    Batch,
    DiskPublisher,
    ExternalWeights,
    LongTailWorkload,
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SimFleet,
    SimPublisher,
    SqliteStore,
)
from aprilsched.config import Pool, Prices
from aprilsched.errors import ConfigError
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.weights.disk import VersionsOnDisk
from aprilsched.simulation.engine.toy_model import ContextState, ToyModel, weights_key_of_version
from tests.support import small
from tests.support.publishers import SimAdapterPublisher

pytestmark = pytest.mark.virtual_time


def workload() -> LongTailWorkload:
    return LongTailWorkload(median=100, sigma=0.9, cap=1_000, group_size=4, seed=5)


config = partial(
    small.config,
    over_provision=1.5,
    refill=Pool(together=1),
    pace="asynchronous",
    straggler="run",
    refit="rolling",
    prices=Prices(step_seconds=3.6e-3, prefill_tokens_per_s=60_000),
)


def versions_of(batches: Sequence[Batch]) -> list[set[int]]:
    return [set(r.versions.tolist()) for batch in batches for r in batch.rollouts]


async def steps(rollouts: RolloutScheduler, number: int, publisher: Any) -> list[Batch]:
    taken: list[Batch] = []
    async for batch in rollouts:
        taken.append(batch)
        if len(taken) == number:
            return taken
        await rollouts.update_weights(publisher)
    return taken


class Timed(SimPublisher):
    """Records the version and the engines of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, tuple[str, ...]]] = []

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        self.calls.append((version, tuple(engine.name for engine in engines)))
        return await super().publish(version, engines)


@pytest.mark.parametrize("delivery", ["groups", "samples"])
async def test_each_rollout_has_one_version_and_engines_refit_alone(delivery: str) -> None:
    publisher, settings = Timed(), config(delivery=delivery)
    fleet = SimFleet(4, refit_seconds=0.5)
    async with RolloutScheduler(
        fleet, workload(), reward=small.by_length, config=settings
    ) as rollouts:
        batches = await steps(rollouts, 8, publisher)
    assert {len(found) for found in versions_of(batches)} == {1}
    assert any(len({v for r in b.rollouts for v in r.versions}) > 1 for b in batches)
    assert all(len(engines) == 1 for _, engines in publisher.calls)
    assert len({engine for _, (engine,) in publisher.calls}) == 4


async def test_an_update_ends_while_engines_have_the_old_version() -> None:
    async with RolloutScheduler(
        SimFleet(4, refit_seconds=30.0), workload(), config=config()
    ) as rollouts:
        await anext(rollouts)
        report = await rollouts.update_weights(SimPublisher())
        seconds, versions = report.seconds, dict(rollouts.state.weights.versions.engines)
    assert seconds == 0.0
    assert set(versions.values()) == {0}


@pytest.mark.parametrize("delivery", ["groups", "samples"])
async def test_losing_the_last_engine_of_a_version_is_accounted(delivery: str) -> None:
    fleet, settings = SimFleet(3), config(delivery=delivery)
    async with RolloutScheduler(
        fleet, workload(), reward=small.by_length, config=settings
    ) as rollouts:
        taken = await steps(rollouts, 4, SimPublisher())
        await rollouts.update_weights(SimPublisher())
        versions = rollouts.state.weights.versions
        for engine in fleet.engines:
            has = versions.engines[engine.name]
            if list(versions.engines.values()).count(has) == 1:
                engine.crash()
                break
        else:
            fleet.engines[0].crash()
        async for batch in rollouts:
            taken.append(batch)
            if len(taken) == 7:
                break
            await rollouts.update_weights(SimPublisher())
        in_flight = rollouts.state.in_flight
        known = in_flight.counters.delivered + len(in_flight.rollouts) + in_flight.ledger.total
        taken, launched, known = taken, in_flight.counters.launched, known
    assert launched == known
    assert {len(found) for found in versions_of(taken)} == {1}
    delivered = [r.rollout_id for batch in taken for r in batch.rollouts]
    assert len(set(delivered)) == len(delivered)


async def test_evaluations_and_sleep_between_rolling_updates() -> None:
    taken: list[Batch] = []
    evaluated: list[Batch] = []
    async with RolloutScheduler(SimFleet(3), workload(), config=config()) as rollouts:
        async for batch in rollouts:
            taken.append(batch)
            if len(taken) == 6:
                break
            await rollouts.update_weights(SimPublisher())
            evaluation, _ = await asyncio.gather(
                rollouts.evaluate(list(islice(workload(), 2)), group_size=4),
                rollouts.update_weights(SimPublisher()),
            )
            evaluated.append(evaluation)
            async with rollouts.asleep():
                await rollouts.update_weights(SimPublisher())
    assert {len(found) for found in versions_of(taken)} == {1}
    for evaluation in evaluated:
        assert len({v for r in evaluation.rollouts for v in r.versions}) == 1


@pytest.mark.parametrize("delivery", ["groups", "samples"])
async def test_a_resumed_run_keeps_one_version_for_each_rollout(
    tmp_path: Path, delivery: str
) -> None:
    store, settings = tmp_path / "store.sqlite", config(delivery=delivery)

    async def once(fleet: SimFleet) -> list[Batch]:
        async with RolloutScheduler(
            fleet, workload(), reward=small.by_length, config=settings, store=SqliteStore(store)
        ) as rollouts:
            return await steps(rollouts, 4, SimPublisher())

    fleet = SimFleet(3)
    batches = [*await once(fleet), *await once(fleet)]
    assert {len(found) for found in versions_of(batches)} == {1}


def save(path: Path, version: int) -> None:
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(str(version).encode())


def on_disk(folder: Path) -> DiskPublisher:
    """A publisher that keeps one version, and saves 1, 2 and so on."""
    number = count(1)
    return DiskPublisher(folder, lambda path: save(path, next(number)), keep=1)


def test_files_stay_until_the_last_engine_has_loaded_them(tmp_path: Path) -> None:
    """The oldest version beyond `keep` is deleted, but not under an engine that loads it."""

    class Loader:
        def __init__(self, name: str) -> None:
            self.name = name
            self.may_end = asyncio.Event()
            self.found: bytes = b""

        async def update_from_disk(self, path: Path, version: int) -> None:
            await self.may_end.wait()
            self.found = (path / "model.safetensors").read_bytes()

    async def main() -> tuple[bytes, bool, bool]:
        publisher = on_disk(tmp_path)
        slow, fast = Loader("slow"), Loader("fast")
        fast.may_end.set()
        await publisher.prepare(1)
        first = asyncio.create_task(publisher.publish(1, [slow]))  # type: ignore[list-item]
        await asyncio.sleep(0)
        for version in (2, 3):
            await publisher.prepare(version)
            await publisher.publish(version, [fast])  # type: ignore[list-item]
        kept = publisher.holds(1)
        await publisher.prepare(4)
        slow.may_end.set()
        assert await first == {"slow": None}
        return slow.found, kept, publisher.holds(4)

    assert asyncio.run(main()) == (b"1", True, True)


class Reader:
    """Reads the files of a version, as a server does."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def update_from_disk(self, path: Path, version: int) -> None:
        assert (path / "model.safetensors").read_bytes() == str(version).encode()


async def test_files_stay_from_the_request_of_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of the files runs in a thread, during which other loads may end."""
    publisher = on_disk(tmp_path)
    check, looking, may_go_on = publisher._versions.check, asyncio.Event(), asyncio.Event()

    async def slow(path: Path) -> None:
        await check(path)
        if path.name.endswith("1"):
            looking.set()
            await may_go_on.wait()

    monkeypatch.setattr(publisher._versions, "check", slow)
    await publisher.prepare(1)
    first = asyncio.create_task(publisher.publish(1, [Reader("slow")]))  # type: ignore[list-item]
    await looking.wait()
    for version in (2, 3):
        await publisher.prepare(version)
        await publisher.publish(version, [Reader("fast")])  # type: ignore[list-item]
    may_go_on.set()
    assert await first == {"slow": None}


async def test_the_age_of_a_version_ignores_file_times(tmp_path: Path) -> None:
    """`shutil.copytree` and `cp -a` keep the times of the original files."""

    def copied(path: Path) -> None:
        save(path, next(number))
        os.utime(path, (0, next(times)))

    number, times = iter(range(1, 9)), iter((3e9, 2e9, 1e9))
    versions = VersionsOnDisk(tmp_path, check=lambda path: None, keep=2)
    for version in (1, 2, 3):
        await versions.write(version, copied)
    await versions.forget(2)
    assert [versions.path(version).is_dir() for version in (1, 2, 3)] == [False, True, True]


async def test_a_version_written_at_the_end_of_a_load_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = on_disk(tmp_path)
    await publisher.prepare(1)
    write, written, may_go_on = publisher._versions.write, asyncio.Event(), asyncio.Event()

    async def slow(version: int, fill: Callable[[Path], object]) -> None:
        await write(version, fill)
        written.set()
        await may_go_on.wait()

    monkeypatch.setattr(publisher._versions, "write", slow)
    second = asyncio.create_task(publisher.prepare(2))
    await written.wait()
    assert await publisher.publish(1, [Reader("one")]) == {"one": None}  # type: ignore[list-item]
    may_go_on.set()
    await second
    assert publisher.holds(2)
    assert await publisher.publish(2, [Reader("one")]) == {"one": None}  # type: ignore[list-item]


async def test_two_engines_that_finish_together_are_both_refitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them deletes old versions, and one may find versions deleted by the other."""
    publisher = on_disk(tmp_path)
    for version in (1, 2, 3):
        await publisher.prepare(version)
    stat = Path.stat

    def deleted_meanwhile(path: Path, **more: Any) -> Any:
        if path.name.endswith(("1", "2")):
            shutil.rmtree(path, ignore_errors=True)
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", deleted_meanwhile)
    assert await publisher.publish(3, [Reader("one")]) == {"one": None}  # type: ignore[list-item]


async def test_what_publishes_to_all_engines_at_once_is_refused() -> None:
    async with RolloutScheduler(SimFleet(2), workload(), config=config()) as rollouts:
        for publisher in (SimAdapterPublisher(), ExternalWeights()):
            with pytest.raises(ConfigError, match='refit="rolling" gives a version to each engine'):
                await rollouts.update_weights(publisher)
        with pytest.raises(ConfigError, match='or refit="together"'):
            async with rollouts.paused_for_weights():
                pass
        await rollouts.update_weights(SimPublisher())


def greedy() -> Iterator[Prompt]:
    """Endless prompts, with greedy responses of 20 to 600 tokens."""
    for index in count():
        yield Prompt(
            input_ids=np.array([index, 7, 9], dtype=np.int32),
            sampling=SamplingParams(
                max_new_tokens=20 + index * 157 % 580, temperature=0.0, ignore_eos=True
            ),
        )


async def test_every_token_is_sampled_by_the_weights_of_its_version() -> None:
    """The embedded engine's tokens follow from its weights and the context alone."""
    model = ToyModel(32_000)
    async with RolloutScheduler(SimFleet(3), greedy(), config=config(group_size=1)) as rollouts:
        batches = await steps(rollouts, 8, SimPublisher())
    assert len({v for batch in batches for r in batch.rollouts for v in r.versions}) > 4
    for batch in batches:
        for rollout in batch.rollouts:
            (version,) = set(rollout.versions.tolist())
            key, prompt = weights_key_of_version(version), rollout.prompt_ids
            hashed = model.absorb(0, prompt[:-1], key)
            state = ContextState(hash=hashed, last=int(prompt[-1]), length=len(prompt), seed=0)
            ((ids, logprobs),) = model.sample([state], [len(rollout)], key)
            assert np.array_equal(ids, rollout.token_ids)
            assert np.array_equal(logprobs, rollout.logprobs)
