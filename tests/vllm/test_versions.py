"""Tests pause, refit and continue on a real vLLM server, with every token accounted for.

There is one run for each straggler rule, with long tails, an over-provisioning of 2, and a refit
from a folder with very different weights after each batch.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from aprilsched import DiskPublisher, Rollout, RolloutScheduler, SchedulerConfig
from aprilsched.config import Dispatch
from aprilsched.core.policies.straggler import StragglerRule
from aprilsched.engines.vllm.engine import VLLMFleet
from aprilsched.testing.contract import until
from tests.sglang.recorded import TOLERANCE, Recorder, Run, crossing, long_tail, record, scores
from tests.sglang.server import write_model
from tests.vllm.conftest import KEY, reset
from tests.vllm.server import VLLMServer

TRIES = 5
fleet = partial(VLLMFleet, api_key=KEY, stream_interval=16)

KINDS: dict[str, tuple[StragglerRule, dict[str, object]]] = {
    "retract": ("retract", {}),
    "in_place": ("in_place", {}),
    "abort": ("abort", {}),
    "choose": ("choose", {"dispatch": Dispatch(order="longest")}),
    "run": ("run", {}),
}


def differences(
    rollouts: Sequence[Rollout], models: Sequence[Path], folder: Path, python: Path
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each rollout |logprob - score| under the token's own version, and under the next one.

    Version v has the weights of ``models[v % len(models)]``.
    """
    by_model = scores(models, rollouts, folder, python=python)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for index, rollout in enumerate(rollouts):
        each = np.stack([scored[index] for scored in by_model])
        of, at = rollout.versions % len(models), np.arange(len(rollout))
        found.append(
            (
                np.abs(rollout.logprobs - each[of, at]),
                np.abs(rollout.logprobs - each[(of + 1) % len(models), at]),
            )
        )
    return found


async def run_and_check(
    url: str, models: Sequence[Path], folder: Path, python: Path, kind: str, batches: int
) -> tuple[int, float]:
    """Run a rule, and check every token of it; gives the number of tokens that were held to their
    version, and their largest difference."""
    rule, changes = KINDS[kind]

    async def once() -> Run:
        prompts = long_tail(10 * batches, longest=400, every=2)
        return await record(
            [url], models, rule, prompts=prompts, batches=batches, changes=changes, fleet=fleet
        )

    run, tries = await once(), 1
    while rule != "run" and not crossing(run) and tries < TRIES:
        # A busy machine kept the scheduler waiting until the stragglers had ended by themselves.
        await reset(url, models[0])
        run, tries = await once(), tries + 1
    assert [batch.version for batch in run.batches] == list(range(batches))
    ids = [rollout.rollout_id for rollout in run.rollouts]
    assert len(set(ids)) == len(ids)
    assert not run.dropped
    assert run.counters.launched == len(ids) + len(run.in_flight)
    for rollout in run.rollouts:
        assert rollout.versions_exact
        assert rollout.versions.tolist() == run.recorder.reported(rollout)
    assert bool(crossing(run)) == (rule != "run"), "no response outlived an update"
    tokens, largest = 0, 0.0
    for rollout, (own, other) in zip(
        run.rollouts, differences(run.rollouts, models, folder, python), strict=True
    ):
        exact = len(rollout)
        if rule == "in_place":  # Later tokens attend to the keys of older weights.
            exact = int(np.argmax(np.append(rollout.versions, -1) != rollout.versions[0]))
        assert own[:exact].max() < TOLERANCE
        assert np.median(other[:exact]) > 0.5, "the checkpoints are too alike to prove anything"
        tokens, largest = tokens + exact, max(largest, float(own[:exact].max()))
    return tokens, largest


@pytest.mark.parametrize("kind", list(KINDS))
async def test_every_token_is_of_the_version_that_it_was_given(
    clean_server: VLLMServer,
    models: tuple[Path, Path],
    tmp_path: Path,
    vllm_python: Path,
    kind: str,
) -> None:
    await run_and_check(clean_server.url, models, tmp_path, vllm_python, kind, 6)


@pytest.mark.long
async def test_a_hundred_thousand_tokens_under_six_sets_of_weights(
    clean_server: VLLMServer,
    models: tuple[Path, Path],
    tmp_path: Path,
    vllm_python: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = (
        write_model(tmp_path / f"model-{seed}", seed=seed, python=vllm_python)
        for seed in range(2, 6)
    )
    several, total = (*models, *more), 0
    for kind in KINDS:
        await reset(clean_server.url, models[0])
        tokens, largest = await run_and_check(
            clean_server.url, several, tmp_path, vllm_python, kind, 24
        )
        total += tokens
        with capsys.disabled():
            print(f"\n{kind}: {tokens:,} tokens, at most {largest:.1e} from transformers")
    assert total > 100_000


@pytest.mark.long
async def test_a_server_that_is_killed_amid_generation_and_in_a_refit_costs_nothing(
    clean_server: VLLMServer,
    models: tuple[Path, Path],
    tmp_path: Path,
    vllm_python: Path,
) -> None:
    """It comes back with the weights that it was started with, under the label of version 0."""
    victim = VLLMServer(models[0], tmp_path / "victim.txt")
    recorder = Recorder()
    try:
        victim.start()
        victim.wait_ready()
        name = victim.url.removeprefix("http://")
        scheduler = RolloutScheduler(
            fleet([clean_server.url, victim.url]),
            long_tail(400, longest=400, every=2),
            config=SchedulerConfig(batch_groups=4, group_size=4, over_provision=2.0),
            listeners=[recorder],
        )
        recorder.scheduler = scheduler
        async with scheduler as rollouts:
            versions = rollouts.state.weights.versions

            saved = 0

            async def update() -> None:
                """Version v has the weights of ``models[v % 2]``."""
                nonlocal saved
                saved = rollouts.version + 1
                await rollouts.update_weights(publisher)

            def decodes() -> bool:
                """The victim is in the middle of a response."""
                return any(
                    request.engine == name and request.generated
                    for request in rollouts.state.in_flight.open_requests()
                )

            publisher = DiskPublisher(
                tmp_path / "weights",
                lambda path: shutil.copytree(models[saved % 2], path, dirs_exist_ok=True),
            )
            batches = [await rollouts.next_batch()]
            await update()
            taking = asyncio.create_task(rollouts.next_batch())
            await until(lambda: decodes() or taking.done())
            victim.kill()
            batches.append(await taking)
            await update()
            assert name not in versions.engines
            victim.start()
            await asyncio.to_thread(victim.wait_ready)
            while versions.engines.get(name) != rollouts.version:
                batches.append(await rollouts.next_batch())
                await update()
            updating = asyncio.create_task(update())
            await until(lambda: rollouts.state.weights.update is not None or updating.done())
            victim.kill()
            await updating
            batches += [await rollouts.next_batch() for _ in range(2)]
            in_flight = rollouts.state.in_flight
            delivered = [rollout for batch in batches for rollout in batch.rollouts]
            ids = {rollout.rollout_id for rollout in delivered}
            assert len(ids) == len(delivered)
            assert in_flight.ledger.total == 0
            assert in_flight.counters.launched == len(ids) + len(in_flight.rollouts)
    finally:
        victim.stop()
    # Nobody can tell the versions of a response that an update met before its server was lost.
    exact = [rollout for rollout in delivered if rollout.versions_exact]
    assert len(exact) > len(delivered) // 2
    for own, _ in differences(exact, models, tmp_path, vllm_python):
        assert own.max() < TOLERANCE
