"""Tests pause, refit and continue on a real vLLM server, with every token accounted for.

There is one run for each straggler rule, with long tails, an over-provisioning of 2, and a refit
from a folder with very different weights after each batch.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from aprilsched import DiskPublisher
from aprilsched.kernel.core.messages.commands import Command
from aprilsched.testing.contract import until
from tests.sglang.held import KINDS, Site, check_two_runs, differences, run_and_check
from tests.sglang.recorded import TOLERANCE, Recorder, check_whole, long_tail, scheduled
from tests.vllm.conftest import fleet, reset
from tests.vllm.server import VLLMServer

pytestmark = pytest.mark.long


@pytest.mark.shows(
    "abort",
    "retract",
    "in_place",
    "rolling refits",
    "weights from disk",
    "single samples",
    engine="vLLM",
)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "buckets"])
async def test_every_token_is_of_the_version_that_it_was_given(
    clean_pair: tuple[VLLMServer, VLLMServer],
    models: tuple[Path, Path],
    tmp_path: Path,
    vllm_python: Path,
    kind: str,
) -> None:
    urls = [server.url for server in clean_pair]
    site = Site(urls, models, tmp_path, lambda url: reset(url, models[0]), fleet, vllm_python)
    await run_and_check(site, kind, batches=4)


@dataclass
class Killer(Recorder):
    """Kills a server when the scheduler sends it the command of this name."""

    victim: VLLMServer | None = None
    name: str = ""
    at: str = ""

    def on_command(self, command: Command, now: float) -> None:
        super().on_command(command, now)
        engines = getattr(command, "engines", (getattr(command, "engine", ""),))
        if self.victim and type(command).__name__ == self.at and self.name in engines:
            self.at = ""
            self.victim.kill()


@pytest.mark.shows("lost engines", engine="vLLM")
async def test_a_server_that_is_killed_three_times_costs_nothing(
    clean_server: VLLMServer,
    models: tuple[Path, Path],
    tmp_path: Path,
    vllm_python: Path,
) -> None:
    """During generation, in the pause and during the load. The server always restarts with its
    initial weights, labelled as version 0."""
    with VLLMServer(models[0], tmp_path / "victim.txt") as victim:
        killer = Killer(victim=victim, name=victim.url.removeprefix("http://"))
        victim.wait_ready()
        scheduler = scheduled(
            [],
            killer,
            prompts=long_tail(2_000, longest=400, every=2),
            fleet=fleet([clean_server.url, victim.url]),
        )
        publisher = DiskPublisher(
            tmp_path / "weights",
            lambda path: shutil.copytree(
                models[(scheduler.version + 1) % 2], path, dirs_exist_ok=True
            ),
        )
        async with scheduler as rollouts:
            versions, in_flight = rollouts.state.weights.versions, rollouts.state.in_flight
            batches = [await rollouts.next_batch()]
            await rollouts.update_weights(publisher)

            def decodes() -> bool:
                """Return whether the victim is in the middle of a response."""
                return any(
                    request.engine == killer.name and request.generated
                    for request in in_flight.open_requests()
                )

            for moment in ("generation", "Flush", "RefitBegun"):
                killer.at = moment
                # An engine without a request in a batch is not flushed after it.
                while victim.alive():
                    taking = asyncio.create_task(rollouts.next_batch())
                    if moment == "generation":
                        await until(lambda taking=taking: decodes() or taking.done())
                        if decodes():
                            victim.kill()
                    batches.append(await taking)
                    await rollouts.update_weights(publisher)
                assert killer.name not in versions.engines
                victim.start()
                await asyncio.to_thread(victim.wait_ready)
                while versions.engines.get(killer.name) != rollouts.version:
                    batches.append(await rollouts.next_batch())
                    await rollouts.update_weights(publisher)
            batches += [await rollouts.next_batch() for _ in range(2)]
            delivered = check_whole(rollouts, batches)
    # The versions of a response are unknown if an update reached it before its server was lost.
    exact = [rollout for rollout in delivered if rollout.versions_exact]
    assert len(exact) > len(delivered) // 2
    for own, _ in differences(exact, models, tmp_path, vllm_python):
        assert own.max() < TOLERANCE


async def test_a_resumed_run_takes_no_weights_of_another_run_for_its_own(
    clean_server: VLLMServer, models: tuple[Path, Path], tmp_path: Path, vllm_python: Path
) -> None:
    site = Site(
        [clean_server.url],
        models,
        tmp_path,
        lambda url: reset(url, models[0]),
        fleet,
        vllm_python,
    )
    await check_two_runs(site)
