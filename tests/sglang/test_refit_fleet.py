"""Tests distributed refits of two real servers while they generate, and the death of one of them.

After each batch the trainer broadcasts very different weights over gloo to both servers, whose
stragglers wait in a retract pause. In the second run one server is killed four times, at different
moments, and started again. It rejoins while the run continues.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from aprilsched import Batch, RolloutScheduler
from aprilsched.config import Pool
from aprilsched.kernel.core.messages.commands import Command, Continue, Pause
from aprilsched.kernel.core.messages.events import Event
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.kernel.weights.distributed import DistributedPublisher
from tests.sglang.conftest import ADMIN_KEY
from tests.sglang.recorded import Recorder, check_greedy, check_whole, scheduled
from tests.sglang.server import CpuServer
from tests.sglang.trained import tensors

BUCKET = 64 * 1024
"""Size of a bucket in bytes; a model of half a megabyte has several."""


@dataclass
class Trainer:
    """Holds the weights of one version at a time; it can call a function in the middle of them."""

    models: tuple[Path, Path]
    version: int = 0
    amid: Callable[[], None] | None = None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for index, named in enumerate(tensors(self.models[self.version % 2])):
            if index == 12 and self.amid is not None:
                self.amid()
            yield named


SETTINGS: dict[str, Any] = {"refill": Pool(together=2), "pace": "asynchronous"}


async def step(rollouts: RolloutScheduler, trainer: Trainer, refit: DistributedPublisher) -> Batch:
    """A batch, then the next version's weights."""
    batch = await rollouts.next_batch()
    trainer.version = rollouts.version + 1
    await rollouts.update_weights(refit)
    return batch


def crossed(batches: Sequence[Batch]) -> int:
    """Return the number of rollouts of several versions, all of them exact."""
    rollouts = [rollout for batch in batches for rollout in batch.rollouts]
    return sum(r.versions_exact and len(set(r.versions.tolist())) > 1 for r in rollouts)


async def check_running(url: str, version: int) -> None:
    """Check that the server is not paused."""
    engine = SGLangEngine(url, admin_key=ADMIN_KEY)
    await engine.open()
    assert await engine.is_paused() is False
    assert await engine.version() == version
    await engine.close()


@pytest.mark.shows("retract", "weights by broadcast", engine="SGLang")
@pytest.mark.long
async def test_distributed_refits_with_stragglers_in_the_pause(
    clean_pair: tuple[CpuServer, CpuServer], models: tuple[Path, Path], tmp_path: Path
):
    recorder, trainer = Recorder(), Trainer(models)
    refit = DistributedPublisher(trainer.weights, backend="gloo", bucket_bytes=BUCKET)
    async with scheduled([server.url for server in clean_pair], recorder, **SETTINGS) as rollouts:
        batches: list[Batch] = []
        # How many responses outlive an update depends on the machine.
        while rollouts.version < 10 or (rollouts.version < 40 and crossed(batches) <= 10):
            batches.append(await rollouts.next_batch())
            # On a busy machine all responses may have ended, with the next batches ready: then
            # nothing is launched until one of those is taken.
            while rollouts.state.in_flight.open_attempts < 8:
                batches.append(await rollouts.next_batch())
            trainer.version = rollouts.version + 1
            report = await rollouts.update_weights(refit)
            assert not report.quarantined
        delivered = check_whole(rollouts, batches)
        for rollout in delivered:
            assert rollout.versions_exact
            assert rollout.versions.tolist() == recorder.reported(rollout)
        await refit.aclose()
    for server in clean_pair:
        await check_running(server.url, rollouts.version)
    crossing = check_greedy(delivered, models, tmp_path)
    assert crossing > 10, "too few rollouts of several versions to prove anything"


@dataclass
class Killer:
    """A listener that kills a server at a chosen moment of the scheduler's work."""

    victim: CpuServer
    at: type[Pause | Continue] | None = None
    kills: int = 0

    @property
    def name(self) -> str:
        return self.victim.url.removeprefix("http://")

    def kill(self) -> None:
        if self.victim.alive():
            self.victim.kill()
            self.kills += 1

    def on_event(self, event: Event, now: float) -> None:
        pass

    def on_command(self, command: Command, now: float) -> None:
        of_it = isinstance(command, Pause | Continue) and command.engine == self.name
        if of_it and type(command) is self.at:
            self.at = None
            self.kill()


@dataclass
class Deaths:
    """How the server is killed at one of the moments, and the log message for it."""

    when: str
    reports: tuple[str, ...]
    prepare: Callable[[Killer, Trainer], None] = field(default=lambda killer, trainer: None)


MOMENTS = (
    # Found by the requests that fail, or by what is asked of it next, whichever comes first.
    Deaths("generation", ("times in a row", "verify failed", "pause failed")),
    Deaths("the pause", ("pause failed",), lambda killer, _: _at(killer, Pause)),
    Deaths("the broadcast", ("refit failed",), lambda killer, trainer: _amid(killer, trainer)),
    Deaths("continue", ("continue failed",), lambda killer, _: _at(killer, Continue)),
)
AMID_THE_BROADCAST = MOMENTS[2:3]


def _at(killer: Killer, command: type[Pause | Continue]) -> None:
    killer.at = command


def _amid(killer: Killer, trainer: Trainer) -> None:
    trainer.amid = killer.kill


def decoding(rollouts: RolloutScheduler, engine: str) -> bool:
    """Whether a request is in the middle of its response on the engine."""
    return rollouts.state.fleet.control.runs(engine) and any(
        request.engine == engine and request.generated >= 16 and request.remaining >= 100
        for request in rollouts.state.in_flight.open_requests()
    )


@pytest.mark.shows("weights by broadcast", "lost engines", engine="SGLang")
@pytest.mark.long
@pytest.mark.parametrize("moments", [AMID_THE_BROADCAST, MOMENTS], ids=["one", "all"])
async def test_a_server_killed_at_any_moment_of_a_refit_costs_nothing_and_rejoins(
    clean_server: CpuServer,
    models: tuple[Path, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    moments: tuple[Deaths, ...],
):
    recorder, trainer = Recorder(), Trainer(models)
    refit = DistributedPublisher(
        trainer.weights, backend="gloo", bucket_bytes=BUCKET, timeout_s=30.0
    )
    batches: list[Batch] = []
    text: list[str] = []
    with CpuServer(models[0], tmp_path / "victim.txt") as victim:
        killer = Killer(victim)
        victim.wait_ready()
        urls = [clean_server.url, victim.url]
        with caplog.at_level(logging.WARNING, "aprilsched"):
            async with scheduled(urls, recorder, listeners=[killer], **SETTINGS) as rollouts:
                batches.append(await step(rollouts, trainer, refit))
                for moment in moments:
                    caplog.clear()
                    await die(rollouts, killer, trainer, refit, moment, batches)
                    text += received(caplog, "aprilsched")
                    await rejoin(rollouts, killer, trainer, refit, batches)
                while crossed(batches) <= 2 * len(moments) and len(batches) < 100:
                    batches.append(await step(rollouts, trainer, refit))
                delivered = check_whole(rollouts, batches)
                await refit.aclose()
        for url in urls:
            await check_running(url, rollouts.version)
    assert killer.kills == len(moments)
    for moment, line in zip(moments, text, strict=True):
        assert line.startswith(f"engine {killer.name} is out of use: "), moment.when
        assert any(words in line for words in moment.reports), moment.when
    # A server that dies never reports the version of its last chunk; such rollouts are not exact.
    exact = [rollout for rollout in delivered if rollout.versions_exact]
    crossing = check_greedy(exact, models, tmp_path)
    assert crossing > 2 * len(moments), "too few rollouts of several versions to prove anything"


async def die(
    rollouts: RolloutScheduler,
    killer: Killer,
    trainer: Trainer,
    refit: DistributedPublisher,
    moment: Deaths,
    batches: list[Batch],
) -> None:
    """Run two batches; the server dies in the first, and the other server serves the second."""
    if moment.when == "generation":
        taking = asyncio.create_task(rollouts.next_batch())
        while not decoding(rollouts, killer.name):
            # On a busy machine a batch may come without a look at such a moment.
            if taking.done():
                batches.append(await taking)
                trainer.version = rollouts.version + 1
                await rollouts.update_weights(refit)
                taking = asyncio.create_task(rollouts.next_batch())
            await asyncio.sleep(0.01)
        killer.kill()
        batches.append(await taking)
    else:
        batches.append(await rollouts.next_batch())
        moment.prepare(killer, trainer)
    trainer.version = rollouts.version + 1
    await rollouts.update_weights(refit)
    trainer.amid = None
    batches.append(await step(rollouts, trainer, refit))
    assert set(rollouts.state.fleet.control.engines) != {killer.name}
    assert killer.name not in rollouts.state.weights.versions.engines


async def rejoin(
    rollouts: RolloutScheduler,
    killer: Killer,
    trainer: Trainer,
    refit: DistributedPublisher,
    batches: list[Batch],
) -> None:
    """Start the server again while the run continues; it takes part at the next version."""
    killer.victim.start()
    await asyncio.to_thread(killer.victim.wait_ready)
    while killer.name not in rollouts.state.weights.versions.engines:
        batches.append(await step(rollouts, trainer, refit))
        await asyncio.sleep(1.0)
    assert rollouts.state.weights.versions.engines[killer.name] == rollouts.version
    batches.append(await step(rollouts, trainer, refit))


def received(caplog: pytest.LogCaptureFixture, logger: str) -> list[str]:
    """The logged errors: there is one line for each death."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == logger and record.levelno >= logging.ERROR
    ]
