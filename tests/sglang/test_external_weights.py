"""Tests weights that the trainer moves itself between two real servers, while they generate.

The trainer is a client of its own. It pauses both servers, flushes them, loads very different
weights, labels them and lets the servers continue. Greedy tokens and their logprobs prove the
version of every token.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from aprilsched import Batch, ExternalWeights, RolloutScheduler
from aprilsched.config import Dispatch
from aprilsched.kernel.core.messages.facts import EngineLost
from aprilsched.testing.contract import WAIT_SECONDS, until
from tests.sglang.conftest import ADMIN_KEY
from tests.sglang.recorded import Recorder, check_greedy, check_whole, long_tail, scheduled
from tests.sglang.server import CpuServer

pytestmark = pytest.mark.long


class Trainer:
    """Moves the weights of ``models[version % 2]`` into the servers by calls of its own."""

    def __init__(self, servers: Sequence[CpuServer], models: Sequence[Path]) -> None:
        self._models = models
        self._urls = [server.url for server in servers]
        self._sessions: list[aiohttp.ClientSession] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Trainer:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        for url in self._urls:
            session = aiohttp.ClientSession(url, headers=headers)
            self._sessions.append(await self._stack.enter_async_context(session))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def call(self, path: str, **body: Any) -> None:
        async def one(session: aiohttp.ClientSession) -> None:
            async with session.post(path, json=body) as answer:
                assert answer.status == 200, await answer.text()

        await asyncio.gather(*(one(session) for session in self._sessions))

    async def load(self, version: int, *, label: str | None = None) -> None:
        """Load `version` into both servers, which are paused."""
        await self.call(
            "/update_weights_from_disk",
            model_path=str(self._models[version % 2]),
            load_format="auto",
            flush_cache=False,
            abort_all_requests=False,
            weight_version=str(version) if label is None else label,
        )

    async def update(
        self, version: int, *, mode: str, label: str | None = None, flush: bool = True
    ) -> None:
        await self.call("/pause_generation", mode=mode)
        if flush:
            await self.flushed()
        await self.load(version, label=label)
        await self.call("/continue_generation")

    async def flushed(self) -> None:
        """Flush both caches; a pause takes a moment until it holds."""
        for session in self._sessions:
            while True:
                async with session.post("/flush_cache") as answer:
                    if answer.status == 200:
                        break
                await asyncio.sleep(0.01)


def opened(servers: Sequence[CpuServer], recorder: Recorder, **changes: Any) -> RolloutScheduler:
    """A scheduler with sixteen rollouts in flight over both servers, some of 900 tokens."""
    settings: dict[str, Any] = {"batch_groups": 1, "over_provision": 4.0, **changes}
    prompts = long_tail(200, longest=900, temperature=0.0, every=2)
    spread = Dispatch(placement="spread")
    urls = [server.url for server in servers]
    return scheduled(urls, recorder, prompts=prompts, dispatch=spread, **settings)


def check(
    rollouts: RolloutScheduler,
    batches: Sequence[Batch],
    models: Sequence[Path],
    folder: Path,
    *,
    stood_by: bool = False,
) -> None:
    """Check that nothing is lost, and that each token is of its recorded version, across several
    versions in some rollouts. If an engine `stood_by`, its responses are marked as inexact."""
    delivered = check_whole(rollouts, batches)
    exact = [rollout for rollout in delivered if rollout.versions_exact]
    assert stood_by or len(exact) == len(delivered)
    assert check_greedy(exact, models, folder) > 0


def crossed(batches: Sequence[Batch]) -> bool:
    """Whether a delivered rollout is of several versions. How many updates that takes depends on
    how fast the servers are."""
    rollouts = [rollout for batch in batches for rollout in batch.rollouts]
    return any(r.versions_exact and len(set(r.versions.tolist())) > 1 for r in rollouts)


async def halfway(rollouts: RolloutScheduler, batches: list[Batch]) -> int:
    """Wait for a long response to be in its middle; returns the id of its rollout."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            for request in rollouts.state.in_flight.open_requests():
                if request.generated >= 20 and request.remaining >= 500:
                    return request.rollout.rollout_id
            if rollouts.state.in_flight.open_attempts:
                await asyncio.sleep(0.01)
            else:  # Nothing is launched while batches wait to be taken.
                batches.append(await rollouts.next_batch())


@pytest.mark.shows("weights that the trainer moves", engine="SGLang")
async def test_the_trainer_says_afterwards_what_it_has_loaded(
    clean_pair: tuple[CpuServer, CpuServer], models: tuple[Path, Path], tmp_path: Path
):
    recorder = Recorder()
    async with (
        Trainer(clean_pair, models) as trainer,
        opened(clean_pair, recorder, straggler="retract") as rollouts,
    ):
        batches: list[Batch] = []
        modes = itertools.cycle(("retract", "abort"))
        while rollouts.version < 3 or not crossed(batches):
            batches.append(await rollouts.next_batch())
            version = rollouts.version + 1
            await trainer.update(version, mode=next(modes))
            report = await rollouts.update_weights(ExternalWeights(), version=version)
            assert not report.quarantined
            assert rollouts.version == version
        batches.append(await rollouts.next_batch())
        # A server that shows the new version before the scheduler knows of it stands by until
        # then, as on a machine that is busy between the two calls.
        stood_by = any(isinstance(command, EngineLost) for command in recorder.commands)
        check(rollouts, batches, models, tmp_path, stood_by=stood_by)


@pytest.mark.shows("weights that the trainer moves", engine="SGLang")
async def test_a_trainer_whose_labels_are_no_numbers_has_its_weights_labelled(
    clean_pair: tuple[CpuServer, CpuServer], models: tuple[Path, Path]
):
    async with (
        Trainer(clean_pair, models) as trainer,
        opened(clean_pair, Recorder(), straggler="abort", over_provision=1.0) as rollouts,
    ):
        await rollouts.next_batch()
        await trainer.update(1, mode="abort", label="step-1")
        report = await rollouts.update_weights(ExternalWeights(label=True), version=1)
        assert not report.quarantined
        batch = await rollouts.next_batch()
        assert batch.version == 1
        assert {int(v) for rollout in batch.rollouts for v in rollout.versions} == {1}


@pytest.mark.shows("weights that the trainer moves", engine="SGLang")
async def test_the_trainer_loads_while_the_scheduler_holds_the_servers(
    clean_pair: tuple[CpuServer, CpuServer], models: tuple[Path, Path], tmp_path: Path
):
    async with (
        Trainer(clean_pair, models) as trainer,
        opened(clean_pair, Recorder(), straggler="retract") as rollouts,
    ):
        batches: list[Batch] = []
        while rollouts.version < 3 or not crossed(batches):
            batches.append(await rollouts.next_batch())
            version = rollouts.version + 1
            async with rollouts.paused_for_weights(version=version) as engines:
                assert len(engines) == 2
                await trainer.load(version)
        batches.append(await rollouts.next_batch())
        check(rollouts, batches, models, tmp_path)
        # A trainer that gives up leaves weights that the next update repairs. Requests in
        # flight continue, and the versions of their earlier tokens are unknown.
        version = rollouts.version + 1
        with pytest.raises(ZeroDivisionError):
            async with rollouts.paused_for_weights(version=version):
                raise ZeroDivisionError
        assert not rollouts.state.weights.versions.engines
        async with rollouts.paused_for_weights(version=version, label=True):
            await trainer.load(version, label=f"step-{version}")
        batch = await rollouts.next_batch()
        assert batch.version == rollouts.version == version
        assert rollouts.state.in_flight.ledger.total == 0


@pytest.mark.shows("weights that the trainer moves", engine="SGLang")
async def test_the_trainer_pauses_and_continues_the_servers_itself_while_the_scheduler_holds_them(
    clean_pair: tuple[CpuServer, CpuServer], models: tuple[Path, Path], tmp_path: Path
):
    """The order of verl's own update, whose label is not a number. No token is sampled between its
    continue and the scheduler's label."""
    async with (
        Trainer(clean_pair, models) as trainer,
        opened(clean_pair, Recorder(), straggler="abort", pace="asynchronous") as rollouts,
    ):
        batches: list[Batch] = []
        while rollouts.version < 3 or not crossed(batches):
            batches.append(await rollouts.next_batch())
            version = rollouts.version + 1
            async with rollouts.paused_for_weights(version=version, label=True):
                await trainer.update(version, mode="abort", label=f"step-{version}")
        batches.append(await rollouts.next_batch())
        check(rollouts, batches, models, tmp_path)


@pytest.mark.shows("weights that the trainer moves", engine="SGLang")
@pytest.mark.parametrize(
    ("mode", "straggler"),
    [
        ("retract", "retract"),
        ("abort", "retract"),
        ("abort", "abort"),
        ("in_place", "in_place"),
    ],
)
async def test_a_foreign_update_in_mid_generation_is_followed_without_a_word(
    clean_pair: tuple[CpuServer, CpuServer],
    models: tuple[Path, Path],
    tmp_path: Path,
    mode: str,
    straggler: str,
):
    recorder = Recorder()
    in_place = mode == "in_place"  # whose cache cannot be flushed
    changes = {
        "straggler": straggler,
        "pace": "asynchronous",
        "follow_weights": True,
    }
    async with (
        Trainer(clean_pair, models) as trainer,
        opened(clean_pair, recorder, **changes) as rollouts,
    ):
        engines = rollouts.state.weights.versions.engines
        batches: list[Batch] = []
        met: set[int] = set()
        for version in itertools.count(1):
            met.add(await halfway(rollouts, batches))
            await trainer.update(version, mode=mode, flush=not in_place)
            await until(lambda version=version: list(engines.values()) == [version] * 2)
            if version < 3:
                continue
            while not met <= {r.rollout_id for batch in batches for r in batch.rollouts}:
                batches.append(await rollouts.next_batch())
            if crossed(batches):
                break
        delivered = [rollout for batch in batches for rollout in batch.rollouts]
        for rollout in delivered:
            assert rollout.versions.tolist() == recorder.reported(rollout)
        if not in_place:
            check(rollouts, batches, models, tmp_path)
        assert not [command for command in recorder.commands if isinstance(command, EngineLost)]
