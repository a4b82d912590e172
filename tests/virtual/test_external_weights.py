"""Tests weights that the trainer moves itself, on the real coordinator with the embedded engine.

The tokens of the engine follow from its weights, so they verify the versions in each rollout.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count

import numpy as np
import pytest

from aprilsched import (
    Batch,
    ExternalWeights,
    Handshake,
    Prompt,
    Rollout,
    RolloutScheduler,
    SamplingParams,
    SimFleet,
    SimPublisher,
)
from aprilsched.config import Timeouts
from aprilsched.errors import ConfigError, RefitError, SchedulerClosed
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.engines.base import PauseMode
from aprilsched.kernel.shell.listener import ProtocolListener
from aprilsched.simulation.engine import SimEngine, run_virtual
from aprilsched.simulation.engine.toy_model import ContextState, ToyModel, weights_key_of_version
from tests.support import small
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time

MODEL = ToyModel(32_000)


def prompts() -> Iterator[Prompt]:
    """Endless prompts, with greedy responses of 20 to 600 tokens."""
    for index in count():
        length = 20 + index * 157 % 580
        yield Prompt(
            input_ids=np.array([index, 7, 9], dtype=np.int32),
            sampling=SamplingParams(max_new_tokens=length, temperature=0.0, ignore_eos=True),
        )


config = partial(small.config, batch_groups=8, group_size=1)


class Calls(ProtocolListener):
    """Records the control calls of the scheduler, and the engines that it gives up."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.lost: list[facts.EngineLost] = []

    def on_event(self, event: ev.Event, now: float) -> None:
        pass

    def on_command(self, command: do.Command, now: float) -> None:
        if isinstance(command, do.Pause | do.Flush | do.Continue):
            self.made.append(type(command).__name__)
        if isinstance(command, facts.EngineLost):
            self.lost.append(command)


@asynccontextmanager
async def running(
    calls: Calls | None = None, **changes: object
) -> AsyncGenerator[tuple[RolloutScheduler, Sequence[SimEngine]]]:
    """Open a scheduler; yields it and its two engines."""
    fleet, listeners = SimFleet(2), [] if calls is None else [calls]
    async with RolloutScheduler(
        fleet, prompts(), config=config(**changes), listeners=listeners
    ) as rollouts:
        yield rollouts, fleet.engines


async def move(
    engines: Sequence[SimEngine],
    version: int,
    *,
    key: int | None = None,
    mode: PauseMode = "retract",
    seconds: float = 0.0,
) -> None:
    """Perform the trainer's own update: pause, flush, load, label, continue."""
    for engine in engines:
        await engine.pause(mode)
    if mode == "retract":
        for engine in engines:
            await engine.flush()
    await asyncio.sleep(seconds)
    for engine in engines:
        await engine.refit(version, key)
    for engine in engines:
        await engine.resume()


def true_to_its_versions(rollout: Rollout) -> bool:
    """Return whether each token follows from the tokens before it under the weights of its version,
    if a flush follows every refit."""
    changes: list[int] = (np.flatnonzero(np.diff(rollout.versions)) + 1).tolist()
    for start, end in zip([0, *changes], [*changes, len(rollout)], strict=True):
        key = weights_key_of_version(int(rollout.versions[start]))
        context = np.concatenate((rollout.prompt_ids, rollout.token_ids[:start]))
        hashed = MODEL.absorb(0, context[:-1], key)
        state = ContextState(hash=hashed, last=int(context[-1]), length=len(context), seed=0)
        ((ids, logprobs),) = MODEL.sample([state], [end - start], key)
        same = np.array_equal(ids, rollout.token_ids[start:end])
        if not (same and np.array_equal(logprobs, rollout.logprobs[start:end])):
            return False
    return True


def check_whole(rollouts: RolloutScheduler, batches: Sequence[Batch]) -> None:
    """Check that nothing is lost, nothing is doubled, and every version is true."""
    in_flight = rollouts.state.in_flight
    delivered = [rollout for batch in batches for rollout in batch.rollouts]
    assert len({rollout.rollout_id for rollout in delivered}) == len(delivered)
    assert in_flight.ledger.total == 0
    assert in_flight.counters.launched == len(delivered) + len(in_flight.rollouts)
    for rollout in delivered:
        assert rollout.versions_exact
        assert true_to_its_versions(rollout)


def versions(batches: Sequence[Batch]) -> set[int]:
    return {int(v) for batch in batches for rollout in batch.rollouts for v in rollout.versions}


# --- after the fact ------------------------------------------------------------------------------


async def test_a_trainer_may_report_an_update_after_moving_weights():
    calls = Calls()
    async with running(calls, straggler="abort") as (rollouts, engines):
        batches: list[Batch] = []
        for version in (1, 2, 5):
            batches.append(await rollouts.next_batch())
            made = len(calls.made)
            await move(engines, version)
            report = await rollouts.update_weights(ExternalWeights(), version=version)
            assert (report.version, report.quarantined) == (version, {})
            assert calls.made[made:] == []
        batches.append(await rollouts.next_batch())
        assert [batch.version for batch in batches] == [0, 1, 2, 5]
        assert versions(batches) == {0, 1, 2, 5}
        assert not calls.lost
        check_whole(rollouts, batches)


@each_row("straggler", ["retract", "abort", "run"])
@each_row("pace", ["synchronous", "asynchronous"])
async def test_requests_under_a_foreign_pause_survive_three_updates(straggler: str, pace: str):
    async with running(straggler=straggler, pace=pace) as (rollouts, engines):
        batches: list[Batch] = []
        for version in (1, 2, 3):
            batches.append(await rollouts.next_batch())
            await move(engines, version, seconds=0.2)
            await rollouts.update_weights(ExternalWeights(), version=version)
            assert set(rollouts.state.weights.versions.engines.values()) == {version}
        for _ in range(3):
            batches.append(await rollouts.next_batch())
        assert versions(batches) == {0, 1, 2, 3}
        check_whole(rollouts, batches)


async def test_a_label_that_comes_a_little_later_is_waited_for():
    async with running() as (rollouts, engines):
        await rollouts.next_batch()
        async with asyncio.TaskGroup() as group:
            update = group.create_task(rollouts.update_weights(ExternalWeights(), version=1))
            await asyncio.sleep(3)
            await move(engines, 1)
        assert not update.result().quarantined
        batch = await rollouts.next_batch()
        assert batch.version == 1


async def test_a_version_that_no_engine_has_is_refused_at_no_cost():
    async with running() as (rollouts, _):
        batches = [await rollouts.next_batch()]
        with pytest.raises(RefitError, match="has version 0 and not 7; use label=True"):
            await rollouts.update_weights(ExternalWeights(timeout_s=0), version=7)
        batches.append(await rollouts.next_batch())
        assert rollouts.version == 0
        check_whole(rollouts, batches)


def test_a_missing_label_is_set_and_open_requests_are_inexact(
    caplog: pytest.LogCaptureFixture,
):

    async def main() -> None:
        async with running(pace="asynchronous") as (rollouts, engines):
            await rollouts.next_batch()
            # The weights become those of version 1, but keep the label of version 0.
            await move(engines, 0, key=weights_key_of_version(1))
            there = set(rollouts.state.in_flight.rollouts)
            await rollouts.update_weights(ExternalWeights(label=True), version=1)
            batches = [await rollouts.next_batch() for _ in range(6)]
            assert versions(batches) == {0, 1}
            for batch in batches:
                for rollout in batch.rollouts:
                    if set(rollout.versions.tolist()) == {0, 1}:
                        assert not rollout.versions_exact
                        assert rollout.rollout_id in there
                    if rollout.rollout_id not in there:
                        assert rollout.versions_exact
                        assert set(rollout.versions.tolist()) == {1}
                        assert true_to_its_versions(rollout)

    with caplog.at_level(logging.WARNING, "aprilsched"):
        run_virtual(main())
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("version 1 is labelled after it was loaded: ")


async def test_external_weights_are_refused_while_the_engines_sleep():
    async with running() as (rollouts, _):
        await rollouts.next_batch()
        async with rollouts.asleep():
            with pytest.raises(ConfigError, match="the engines are asleep"):
                await rollouts.update_weights(ExternalWeights(), version=1)


def test_a_wrong_timeout_is_refused():
    with pytest.raises(ConfigError, match=r"timeout_s is -1; give seconds, 0 or more\."):
        ExternalWeights(timeout_s=-1)


# --- a handshake ---------------------------------------------------------------------------------


async def load(engines: Sequence[SimEngine], version: int, *, seconds: float = 0.5) -> None:
    """The trainer loads and labels weights while the scheduler pauses the engines."""
    for engine in engines:
        await asyncio.sleep(seconds)
        assert engine.batcher.paused == "retract"
        assert engine.batcher.kv_in_use == 0
        await engine.refit(version)


@each_row("straggler", ["retract", "abort", "run"])
@each_row("pace", ["synchronous", "asynchronous"])
async def test_the_engines_are_paused_while_the_trainer_loads(straggler: str, pace: str):
    async with running(straggler=straggler, pace=pace) as (rollouts, engines):
        batches: list[Batch] = []
        for version in (1, 2, 4):
            batches.append(await rollouts.next_batch())
            async with rollouts.paused_for_weights(version=version) as paused:
                assert paused == ("sim-0", "sim-1")
                await load(engines, version)
            assert rollouts.version == version
        for _ in range(3):
            batches.append(await rollouts.next_batch())
        assert {0, 4} <= versions(batches) <= {0, 1, 2, 4}
        check_whole(rollouts, batches)


async def test_pause_and_continue_may_be_two_functions():
    async with running() as (rollouts, engines):
        await rollouts.next_batch()
        handshake = Handshake(label=True)
        update = asyncio.create_task(rollouts.update_weights(handshake))
        with pytest.raises(ConfigError, match="the engines are not paused yet"):
            handshake.done()
        assert await handshake.paused() == ("sim-0", "sim-1")
        for engine in engines:  # without a label, so under the old version
            await engine.refit(0, weights_key_of_version(1))
        handshake.done()
        assert (await update).version == 1
        batch = await rollouts.next_batch()
        assert true_to_its_versions(next(batch.rollouts))
        with pytest.raises(ConfigError, match="this handshake was used already"):
            await rollouts.update_weights(handshake)


async def test_a_load_inside_a_sleep_has_the_memory_of_the_weights():
    async with running() as (rollouts, engines):
        batches = [await rollouts.next_batch()]
        async with rollouts.asleep(), rollouts.paused_for_weights():
            for engine in engines:
                assert await engine.released() == {"kv_cache"}
                await engine.refit(1)
        batches.append(await rollouts.next_batch())
        check_whole(rollouts, batches)


class Failing(Exception):
    pass


async def take_all(rollouts: RolloutScheduler, batches: list[Batch]) -> None:
    """Take all remaining batches."""
    while True:
        batches.append(await rollouts.next_batch())


@each_row("moved", [0, 1, 2])
async def test_a_trainer_that_raises_is_repaired_by_the_next_update(moved: int):

    async def fail(rollouts: RolloutScheduler) -> None:
        async with rollouts.paused_for_weights():
            await load(engines[:moved], 1)
            raise Failing

    async with running(pace="asynchronous") as (rollouts, engines):
        batches = [await rollouts.next_batch()]
        with pytest.raises(Failing):
            await fail(rollouts)
        assert rollouts.version == 0
        assert not rollouts.state.weights.versions.engines
        with pytest.raises(RefitError, match="no engine has the fleet's weights"):
            await take_all(rollouts, batches)  # batches that were already complete are delivered
        async with rollouts.paused_for_weights():
            await load(engines, 1)
        batches.append(await rollouts.next_batch())
        check_whole(rollouts, batches)


async def test_a_trainer_that_never_reports_done_times_out():
    async with running(timeouts=Timeouts(refit_s=30.0)) as (rollouts, engines):
        batches = [await rollouts.next_batch()]
        with pytest.raises(RefitError, match="the publisher did not finish within 30 s"):
            async with rollouts.paused_for_weights():
                await asyncio.sleep(60)
        handshake = Handshake()
        with pytest.raises(RefitError, match="the publisher did not finish within 30 s"):
            await rollouts.update_weights(handshake)
        with pytest.raises(RefitError, match="the update of this handshake is over"):
            handshake.done()
        with pytest.raises(RefitError, match="the update of this handshake is over"):
            handshake.fail(Failing())
        async with rollouts.paused_for_weights():
            await load(engines, 1)
        batches.append(await rollouts.next_batch())
        check_whole(rollouts, batches)


async def test_a_label_of_another_version_is_not_taken():
    async with running() as (rollouts, engines):
        await rollouts.next_batch()
        with pytest.raises(RefitError, match="has version 3 and not 1"):
            async with rollouts.paused_for_weights(version=1):
                await load(engines, 3)
        async with rollouts.paused_for_weights(version=3):
            pass  # the engines already have it
        await rollouts.next_batch()
        assert rollouts.version == 3


@each_row("back", [False, True])
@each_row("label", [False, True])
async def test_an_engine_may_die_while_the_trainer_loads(back: bool, label: bool):
    """An engine that restarts at once has its initial weights, whatever its label."""
    async with running() as (rollouts, engines):
        batches = [await rollouts.next_batch()]
        async with rollouts.paused_for_weights(label=label):
            engines[0].crash()
            if back:
                await engines[0].restart()
            await load(engines[1:], 1)
        assert rollouts.state.weights.versions.engines == {"sim-1": 1}
        batches.append(await rollouts.next_batch())
        if not back:
            await engines[0].restart()
        await asyncio.sleep(200)
        async with rollouts.paused_for_weights(label=label):
            await load(engines, 2)
        batches.append(await rollouts.next_batch())
        assert rollouts.state.weights.versions.engines == {"sim-0": 2, "sim-1": 2}
        check_whole(rollouts, batches)


async def test_a_trainer_cancelled_before_the_pause_changes_nothing():

    async def block(rollouts: RolloutScheduler) -> None:
        async with rollouts.paused_for_weights():
            raise AssertionError("the engines were paused")

    async with running(straggler="run", pace="asynchronous") as (rollouts, _):
        batches = [await rollouts.next_batch()]
        with pytest.raises(TimeoutError):  # the stragglers are still running then
            await asyncio.wait_for(block(rollouts), 0.1)
        batches.append(await rollouts.next_batch())
        assert rollouts.state.weights.versions.engines == {"sim-0": 0, "sim-1": 0}
        check_whole(rollouts, batches)


@each_row("step", range(12))
async def test_a_trainer_cancelled_at_any_moment_can_update_again(step: int):

    async def block(rollouts: RolloutScheduler) -> None:
        async with rollouts.paused_for_weights(version=1):
            await load(engines, 1, seconds=0.004)

    async with running() as (rollouts, engines):
        batches = [await rollouts.next_batch()]
        with suppress(TimeoutError):
            async with asyncio.timeout(step * 0.001):
                await block(rollouts)
        version = 1 if rollouts.version == 0 else 2
        async with rollouts.paused_for_weights(version=version):
            await load(engines, version)
        batches.append(await rollouts.next_batch())
        check_whole(rollouts, batches)


async def test_a_refused_update_fails_the_wait_for_the_pause():
    async with running() as (rollouts, _):
        await rollouts.next_batch()
        handshake = Handshake()
        waiting = asyncio.create_task(handshake.paused())
        with pytest.raises(ConfigError, match="version 0 is not newer"):
            await rollouts.update_weights(handshake, version=0)
        with pytest.raises(RefitError, match="ended before the engines were paused"):
            await waiting
        with pytest.raises(RefitError, match="ended before the engines were paused"):
            handshake.wait_paused(1)
        with pytest.raises(ConfigError, match="version 0 is not newer"):
            async with rollouts.paused_for_weights(version=0):
                raise AssertionError("the engines were paused")
    with pytest.raises(SchedulerClosed):
        async with rollouts.paused_for_weights():
            raise AssertionError("the engines were paused")


@each_row("straggler", ["retract", "in_place", "abort"])
async def test_the_next_update_pauses_engines_the_trainer_resumed(
    straggler: str,
):
    async with running(straggler=straggler) as (rollouts, engines):
        for version in (1, 3, 5):
            await rollouts.next_batch()
            await move(engines, version)
            await rollouts.update_weights(ExternalWeights(), version=version)
            await rollouts.update_weights(SimPublisher(), version=version + 1)
            assert set(rollouts.state.weights.versions.engines.values()) == {version + 1}


# --- following -----------------------------------------------------------------------------------


async def until_at(rollouts: RolloutScheduler, version: int) -> None:
    """Wait until every engine is in use at `version`."""
    while True:
        engines = rollouts.state.weights.versions.engines
        if rollouts.version == version and set(engines.values()) == {version}:
            return
        await asyncio.sleep(0.01)


@each_row(
    ("straggler", "pace"),
    [
        *((rule, "asynchronous") for rule in ("retract", "abort", "run")),
        *((rule, "synchronous") for rule in ("abort", "run")),
    ],
)
async def test_foreign_updates_are_followed_without_a_word(straggler: str, pace: str):
    """Updates arrive when batches are complete, and in the middle of batches."""
    calls = Calls()

    async def trainer() -> None:
        for version in (1, 2, 5, 6):
            await asyncio.sleep(1.5)
            await move(engines, version, seconds=0.7)

    changes = {"straggler": straggler, "pace": pace, "follow_weights": True}
    async with running(calls, **changes) as (rollouts, engines), asyncio.TaskGroup() as group:
        moving = group.create_task(trainer())
        batches: list[Batch] = []
        while not moving.done():
            batches.append(await rollouts.next_batch())
            await asyncio.sleep(0.3)
        await until_at(rollouts, 6)
        batches.append(await rollouts.next_batch())
        assert not calls.lost
        assert len(versions(batches)) > 3
        check_whole(rollouts, batches)


async def test_a_fleet_that_waits_for_the_next_version_is_watched():
    """With this bound nothing is launched before the next version, so no token would reveal it."""
    async with running(straggler="abort", follow_weights=True, max_staleness=0) as (
        rollouts,
        engines,
    ):
        batches: list[Batch] = []
        for version in (1, 2, 3):
            batches.append(await rollouts.next_batch())
            await move(engines, version)
            await until_at(rollouts, version)
        batches.append(await rollouts.next_batch())
        assert [batch.version for batch in batches] == [0, 1, 2, 3]
        check_whole(rollouts, batches)
