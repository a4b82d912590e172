"""Tests rolling refits of two real servers with very different weights, amid 32 rollouts.

Every token must be the greedy one of its version's weights with their logprob, and no rollout may
have two versions. In the second test a server is killed while the servers have different versions.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aprilsched import (
    Batch,
    DiskPublisher,
    RolloutScheduler,
)
from aprilsched.config import Pool, Prices
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.testing.contract import until
from aprilsched.types import Rollout
from tests.sglang.recorded import Recorder, check_greedy, check_whole, scheduled
from tests.sglang.server import CpuServer


@dataclass
class Trainer:
    """Saves the weights of the version that is to be published: version v has models[v % 2]."""

    models: tuple[Path, Path]
    version: int = 0

    def save(self, path: Path) -> None:
        shutil.copytree(self.models[self.version % 2], path, dirs_exist_ok=True)


SETTINGS: dict[str, Any] = {
    "refill": Pool(together=1),
    "pace": "asynchronous",
    "straggler": "run",
    "refit": "rolling",
    # A decode step of a CPU server takes longer than one of a GPU.
    "prices": Prices(step_seconds=0.02, prefill_tokens_per_s=10_000),
}


async def step(rollouts: RolloutScheduler, trainer: Trainer, publisher: DiskPublisher) -> Batch:
    """A batch, then the next version's weights."""
    batch = await rollouts.next_batch()
    trainer.version = rollouts.version + 1
    await rollouts.update_weights(publisher)
    return batch


def check(
    batches: Sequence[Batch], rollouts: RolloutScheduler, models: tuple[Path, Path], folder: Path
) -> list[Rollout]:
    """Check that nothing is lost or doubled, and that each rollout is of one version's weights."""
    delivered = check_whole(rollouts, batches)
    assert {len(set(rollout.versions.tolist())) for rollout in delivered} == {1}
    assert all(rollout.versions_exact for rollout in delivered)
    assert len({int(rollout.versions[0]) for rollout in delivered}) > 2
    assert check_greedy(delivered, models, folder) == 0
    return delivered


@pytest.mark.shows("rolling refits", engine="SGLang")
@pytest.mark.long
async def test_every_token_is_of_its_version_and_no_rollout_of_two(
    clean_pair: tuple[CpuServer, CpuServer], models: tuple[Path, Path], tmp_path: Path
):
    recorder, trainer = Recorder(), Trainer(models)
    publisher = DiskPublisher(tmp_path / "weights", trainer.save)
    mixed = 0
    async with scheduled([server.url for server in clean_pair], recorder, **SETTINGS) as rollouts:
        batches: list[Batch] = []
        versions: set[int] = set()
        # How far responses come between two updates depends on the machine.
        while len(batches) < 7 or (len(batches) < 40 and not (mixed and len(versions) > 2)):
            batches.append(await step(rollouts, trainer, publisher))
            versions |= {int(rollout.versions[0]) for rollout in batches[-1].rollouts}
            mixed += len(set(rollouts.state.weights.versions.engines.values())) > 1
        delivered = check(batches, rollouts, models, tmp_path)
        for rollout in delivered:
            assert rollout.versions.tolist() == recorder.reported(rollout)
    assert rollouts.version == len(batches)
    assert mixed, "the servers always had one version"


@pytest.mark.shows("rolling refits", "lost engines", engine="SGLang")
@pytest.mark.long
async def test_a_server_killed_while_the_servers_have_different_versions_costs_nothing(
    clean_server: CpuServer, models: tuple[Path, Path], tmp_path: Path
):
    recorder, trainer = Recorder(), Trainer(models)
    publisher = DiskPublisher(tmp_path / "weights", trainer.save)
    with CpuServer(models[0], tmp_path / "victim.txt") as victim:
        name = victim.url.removeprefix("http://")
        victim.wait_ready()
        async with scheduled([clean_server.url, victim.url], recorder, **SETTINGS) as rollouts:
            versions, control = rollouts.state.weights.versions, rollouts.state.fleet.control

            def alone_with_its_version() -> bool:
                """The victim has a version that the other server has not, and decodes."""
                return len(set(versions.engines.values())) == 2 and any(
                    request.engine == name and request.generated >= 16
                    for request in rollouts.state.in_flight.open_requests()
                )

            batches = [await step(rollouts, trainer, publisher) for _ in range(2)]
            while not alone_with_its_version():
                batches.append(await step(rollouts, trainer, publisher))
                waiting = asyncio.create_task(until(alone_with_its_version))
                await asyncio.wait([waiting], timeout=1.0)
                waiting.cancel()
            old = versions.engines[name] < rollouts.version
            victim.kill()
            await until(lambda: name not in versions.engines)
            batches.append(await step(rollouts, trainer, publisher))
            lost = rollouts.state.in_flight.ledger.tokens[Reason.VERSION_LOST]
            assert lost or not old
            victim.start()
            await asyncio.to_thread(victim.wait_ready)
            while versions.engines.get(name) != rollouts.version:
                batches.append(await step(rollouts, trainer, publisher))
                await asyncio.sleep(1.0)
            assert name in control.engines
            batches += [await step(rollouts, trainer, publisher) for _ in range(2)]
            check(batches, rollouts, models, tmp_path)
