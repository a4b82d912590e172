"""Tests real servers that have other weights than recorded: they were restarted, or another
client has loaded weights."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from aprilsched import Batch, DiskPublisher, Prompt, RolloutScheduler, SqliteStore
from aprilsched.config import Timeouts
from aprilsched.errors import EngineError
from aprilsched.kernel.core.messages.events import EngineLost
from aprilsched.kernel.engines.address import ServerAddress
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.testing.contract import until
from tests.sglang.conftest import ADMIN_KEY
from tests.sglang.held import Site, check_two_runs, differences
from tests.sglang.helpers import opened, reset
from tests.sglang.recorded import TOLERANCE, Recorder, check_greedy, long_tail, scheduled
from tests.sglang.server import BOOT_SECONDS, CpuServer

Pair = tuple[CpuServer, CpuServer]


def name(server: CpuServer) -> str:
    return ServerAddress.parse(server.url).name


def scheduler(servers: Pair, recorder: Recorder, **changes: Any) -> RolloutScheduler:
    urls = [server.url for server in servers]
    return scheduled(urls, recorder, timeouts=Timeouts(control_s=30.0), **changes)


def questions(count: int) -> list[Prompt]:
    return long_tail(count, longest=60, temperature=0.0)


async def is_up(server: CpuServer) -> bool:
    with suppress(EngineError):
        async with opened(server.url):
            return True
    return False


def versions(batch: Batch) -> set[int]:
    return {int(version) for rollout in batch.rollouts for version in rollout.versions}


@pytest.mark.shows("lost engines", engine="SGLang")
@pytest.mark.long
@pytest.mark.parametrize("held", [True, False], ids=["with stragglers", "without"])
async def test_a_server_restarted_in_the_trainers_pause_samples_nothing_under_its_first_weights(
    clean_pair: Pair,
    models: tuple[Path, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    held: bool,
) -> None:
    first, recorder = clean_pair[0], Recorder()
    ratio = 2.0 if held else 1.0
    async with scheduler(clean_pair, recorder, over_provision=ratio) as rollouts:
        batches = [await rollouts.next_batch()]
        # One that holds the version, so that an engine which comes back is brought to it at once.
        publisher = DiskPublisher(
            tmp_path / "weights",
            lambda to: shutil.copytree(models[(rollouts.version + 1) % 2], to, dirs_exist_ok=True),
        )
        in_flight = rollouts.state.in_flight

        def ready() -> bool:
            """A restarted server has other weights. On a busy machine all responses may end."""
            return rollouts.version % 2 == 1 and (in_flight.open_attempts > 0) is held

        while not ready():  # The prompts bound the updates.
            await rollouts.update_weights(publisher)
            batches.append(await rollouts.next_batch())
        version = rollouts.version
        # Rollouts in which the place of the update stays unknown.
        uncertain = {
            request.rollout.rollout_id
            for request in in_flight.open_requests(name(first))
            if request.crossed
        }
        first.kill()
        first.start()
        # Its /ready may never answer 200, because the scheduler pauses it as soon as it is back.
        await until(lambda: is_up(first), BOOT_SECONDS)

        evaluation = await rollouts.evaluate(questions(6), group_size=4)
        batches.append(await rollouts.next_batch())
        await until(lambda: name(first) in rollouts.state.fleet.control.engines)
        batches.append(await rollouts.next_batch())

        assert versions(evaluation) == {evaluation.version} == {version}
        assert max(versions(batches[-1])) <= version
        assert not in_flight.ledger.total
    delivered = [rollout for batch in (*batches, evaluation) for rollout in batch.rollouts]
    assert {rollout.rollout_id for rollout in delivered if not rollout.versions_exact} <= uncertain
    check_greedy([r for r in delivered if r.versions_exact], models, tmp_path)
    losses = [r for r in caplog.records if r.getMessage().startswith(f"engine {name(first)} is o")]
    assert len(losses) == 1, "one line reports it"


class LoadedAlready:
    """A publisher of a trainer that has loaded the weights itself."""

    async def prepare(self, version: int) -> None:
        """There is nothing to prepare."""

    async def publish(self, version: int, engines: Sequence[Engine]) -> dict[str, Exception | None]:
        """Every engine has them."""
        return {engine.name: None for engine in engines}


async def load_behind_its_back(server: CpuServer, model: Path, version: int) -> None:
    engine = SGLangEngine(server.url, admin_key=ADMIN_KEY)
    await engine.open()
    await engine.pause("retract")
    await engine.flush()
    await engine.update_from_disk(model, version)
    await engine.resume()
    await engine.close()


@pytest.mark.long
async def test_weights_that_somebody_else_loads_are_never_taken_for_those_of_before(
    clean_pair: Pair,
    models: tuple[Path, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Recorder()
    rollouts_of_both = scheduler(clean_pair, recorder, over_provision=2.0, pace="asynchronous")
    async with rollouts_of_both as rollouts:
        batches: list[Batch] = []

        async def take_batches() -> None:
            """Take batches in a task. Otherwise nothing more is launched once there are enough
            complete batches, and the requests in flight may end before the weights are loaded."""
            while True:
                batches.append(await rollouts.next_batch())

        taking = asyncio.create_task(take_batches())
        await until(lambda: bool(batches))
        for server in clean_pair:
            await until(lambda: rollouts.state.in_flight.open[name(server)] >= 8)  # noqa: B023
            await load_behind_its_back(server, models[1], 1)
        await until(lambda: not rollouts.state.fleet.control.engines or taking.done())
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        assert not rollouts.state.fleet.control.engines
        assert not rollouts.state.in_flight.open_attempts
        # One of them is lost before the trainer reports its update.
        rollouts._feed(EngineLost(engine=name(clean_pair[0]), cause="given up by the test"))
        report = await rollouts.update_weights(LoadedAlready(), version=1)
        assert report.version == 1
        batches += [await rollouts.next_batch() for _ in range(3)]
        for batch in batches:
            assert all(rollout.staleness(batch.version) >= 0 for rollout in batch.rollouts)
        assert {1} <= versions(batches[-1]) <= {0, 1}
    delivered = [rollout for batch in batches for rollout in batch.rollouts]
    exact = [rollout for rollout in delivered if rollout.versions_exact]
    assert len(exact) >= len(delivered) - 2, "a chunk of each server may be of either version"
    check_greedy(exact, models, tmp_path)
    text = [r.getMessage() for r in caplog.records if "on standby" in r.getMessage()]
    assert len(text) == 2
    assert all("version 1 where the fleet has 0" in line for line in text)


async def test_a_resumed_run_takes_no_weights_of_another_run_for_its_own(
    clean_server: CpuServer, models: tuple[Path, Path], tmp_path: Path
) -> None:
    url = clean_server.url
    await check_two_runs(Site([url], models, tmp_path, lambda url: reset(url, models[0])))


async def test_weights_loaded_without_a_label_while_a_run_is_down_are_not_its_own(
    clean_server: CpuServer,
    models: tuple[Path, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run() -> RolloutScheduler:
        return scheduled([clean_server.url], Recorder(), store=SqliteStore(tmp_path / "run.store"))

    async with run() as rollouts:
        await rollouts.update_weights(DiskPublisher(models[1]))
        await rollouts.next_batch()
    async with opened(clean_server.url) as engine:
        label = engine.label
        await engine.pause("retract")
        # SGLang keeps the label that it has.
        body = {"model_path": str(models[0]), "flush_cache": False}
        await engine._server.call("POST", "update_weights_from_disk", body, timeout=60.0)
        await engine.resume()
    async with opened(clean_server.url) as engine:
        assert engine.label == label
    async with run() as rollouts:
        assert not rollouts.state.resumed
        shown = f'has weights labelled "{label}", but from {models[0]}, which this run has not'
        assert shown in caplog.text
        await rollouts.update_weights(DiskPublisher(models[1]), version=rollouts.version)
        batches = [await rollouts.next_batch() for _ in range(2)]
        assert [batch.redelivered for batch in batches] == [True, False]
    delivered = [rollout for batch in batches for rollout in batch.rollouts]
    for own, _ in differences(delivered, models, tmp_path, None):
        assert own.max() < TOLERANCE
