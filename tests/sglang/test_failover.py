"""Tests real servers that hang, die and come back while generating: nothing is lost or doubled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from aprilsched import Batch, RolloutScheduler
from aprilsched.config import Health, Timeouts
from aprilsched.errors import PromptsExhausted
from aprilsched.kernel.core.messages.facts import EngineLost
from aprilsched.kernel.core.state.assembly import rollout_of
from aprilsched.kernel.engines.address import ServerAddress
from aprilsched.testing.contract import WAIT_SECONDS, until
from tests.sglang.recorded import Recorder, check_greedy, check_whole, long_tail, scheduled
from tests.sglang.server import CpuServer

Pair = tuple[CpuServer, CpuServer]


def name(server: CpuServer) -> str:
    return ServerAddress.parse(server.url).name


def scheduler(servers: list[CpuServer], recorder: Recorder, groups: int) -> RolloutScheduler:
    """Greedy, so that every token can be checked against the model."""
    return scheduled(
        [server.url for server in servers],
        recorder,
        prompts=long_tail(groups, longest=400, temperature=0.0, every=2),
        pace="asynchronous",
        health=Health(stall_s=8.0),
        timeouts=Timeouts(control_s=20.0),
    )


async def halfway(
    rollouts: RolloutScheduler, servers: Sequence[CpuServer], batches: list[Batch]
) -> CpuServer:
    """Wait until several requests of a server are in the middle of their responses."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            for server in servers:
                requests = rollouts.state.in_flight.open_requests(name(server))
                if sum(r.generated >= 16 and r.remaining >= 100 for r in requests) >= 2:
                    return server
            if rollouts.state.in_flight.open_attempts:
                await asyncio.sleep(0.01)
            else:  # Nothing is launched while batches wait to be taken.
                batches.append(await rollouts.next_batch())


def losses(recorder: Recorder) -> list[EngineLost]:
    return [command for command in recorder.commands if isinstance(command, EngineLost)]


async def rest(rollouts: RolloutScheduler) -> list[Batch]:
    """All remaining batches."""
    batches: list[Batch] = []
    while True:
        try:
            batches.append(await rollouts.next_batch())
        except PromptsExhausted:
            return batches


@pytest.mark.shows("lost engines", engine="SGLang")
@pytest.mark.long
async def test_what_a_hanging_server_had_is_finished_by_the_other_until_it_is_back(
    clean_pair: Pair, models: tuple[Path, Path], tmp_path: Path
) -> None:
    recorder = Recorder()
    async with scheduler(list(clean_pair), recorder, groups=40) as rollouts:
        # Every second group is long, and where those go is the placement's business.
        batches = list[Batch]()
        hangs = await halfway(rollouts, clean_pair, batches)
        stays = next(server for server in clean_pair if server is not hangs)
        hangs.freeze()
        try:
            batches += [await rollouts.next_batch(), await rollouts.next_batch()]
            await until(lambda: bool(losses(recorder)))
            (loss,) = losses(recorder)
            assert loss.engine == name(hangs)
            assert loss.cause.startswith("no token for ")
            assert set(rollouts.state.weights.versions.engines) == {name(stays)}
            # On a busy machine the other server may have no place for long.
            handed = [name(hangs), name(stays)]
            delivered = [r for batch in batches for r in batch.rollouts]
            await until(
                lambda: any(
                    [segment.engine for segment in rollout.segments] == handed
                    for rollout in (
                        *delivered,
                        *map(rollout_of, rollouts.state.in_flight.rollouts.values()),
                    )
                )
            )
        finally:
            hangs.thaw()
        await until(
            lambda: set(rollouts.state.weights.versions.engines) == {name(stays), name(hangs)}
        )
        batches += await rest(rollouts)
        check_greedy(check_whole(rollouts, batches), [models[0]] * 2, tmp_path)
        moved = [r for b in batches for r in b.rollouts if len(r.segments) > 1]
        assert any([s.engine for s in r.segments][:2] == handed for r in moved)
        assert len(losses(recorder)) == 1


@pytest.mark.shows("lost engines", engine="SGLang")
@pytest.mark.long
async def test_the_only_server_is_killed_and_started_again_and_the_run_goes_on(
    clean_pair: Pair,
    models: tuple[Path, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    only, recorder = clean_pair[1], Recorder()
    async with scheduler([only], recorder, groups=16) as rollouts:
        batches = list[Batch]()
        await halfway(rollouts, [only], batches)
        only.kill()
        await until(lambda: bool(losses(recorder)))
        assert losses(recorder)[0].last
        only.start()
        await asyncio.to_thread(only.wait_ready)
        batches += await rest(rollouts)
        check_greedy(check_whole(rollouts, batches), [models[0]] * 2, tmp_path)
        assert rollouts.state.in_flight.counters.tokens_reprefilled > 0
    assert "no engine is left since" in caplog.text
