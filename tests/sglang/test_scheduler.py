"""Tests pause, refit and continue on a real server, with every token accounted for.

There is one run for each straggler rule: six batches of 4 groups of 4, an over-provisioning of 2,
long tails, and a refit from disk with very different weights after each batch. Each test checks
another property of these runs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import DiskPublisher, RolloutScheduler, SchedulerConfig, SGLangFleet
from aprilsched.config import LengthBuckets
from aprilsched.kernel.core.policies.straggler import StragglerRule
from aprilsched.testing.contract import until
from aprilsched.types import Rollout
from tests.sglang.helpers import SOON, opened, reset, settled
from tests.sglang.recorded import (
    BATCHES,
    TOLERANCE,
    Run,
    crossing,
    long_tail,
    record,
    scores,
    try_until,
)
from tests.sglang.server import CpuServer


def wait(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, for fixtures that do not belong to one test's loop."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(work)


KINDS: dict[str, tuple[StragglerRule, dict[str, object]]] = {
    "retract": ("retract", {}),
    "in_place": ("in_place", {}),
    "abort": ("abort", {}),
    "buckets": ("retract", {"refill": LengthBuckets(store=3.0), "over_provision": 1.5}),
}
"""Straggler rules with settings, including schedules that combine several ways."""


def kinds(*names: str) -> list[Any]:
    """The names as parameters; all but the usual rule are long."""
    return [pytest.param(name, marks=[pytest.mark.long] * (name != "retract")) for name in names]


MANY_VERSIONS = ("retract", "in_place", "abort")
"""Rules under which a rollout has at least three versions."""


def _most_versions(run: Run) -> int:
    """The largest number of policy versions that sampled one rollout."""
    return max(len(set(rollout.versions.tolist())) for rollout in run.rollouts)


@pytest.fixture(scope="module")
def runs(sglang_server: CpuServer, models: tuple[Path, Path]) -> Callable[[str], Run]:
    """A function that gives the run of a kind, and makes it at its first call."""
    made: dict[str, Run] = {}

    async def make(kind: str) -> Run:
        rule, changes = KINDS[kind]
        await reset(sglang_server.url, models[0])
        try:
            return await record([sglang_server.url], models, rule, changes=changes)
        finally:
            await settled(sglang_server.url)
            await reset(sglang_server.url, models[0])

    def run(kind: str) -> Run:
        if kind not in made:
            least = 3 if kind in MANY_VERSIONS else 2
            made[kind] = wait(
                try_until(
                    lambda _: make(kind),
                    lambda run: _most_versions(run) >= least,
                    f"no rollout has {least} versions",
                )
            )
        return made[kind]

    return run


@pytest.fixture(params=kinds(*KINDS))
def rule(request: pytest.FixtureRequest) -> str:
    return request.param


def test_every_batch_is_whole_and_consumed_at_its_version(runs: Callable[[str], Run], rule: str):
    run = runs(rule)
    assert [batch.version for batch in run.batches] == list(range(BATCHES))
    for batch in run.batches:
        assert len(batch.groups) == 4
        for group in batch.groups:
            assert [r.index for r in group.rollouts] == [0, 1, 2, 3]


def test_token_data_of_a_rollout_has_one_length_and_is_complete(
    runs: Callable[[str], Run], rule: str
):
    for batch in runs(rule).batches:
        for group in batch.groups:
            assert isinstance(group.prompt.sampling, tuple)
            for rollout, sampling in zip(group.rollouts, group.prompt.sampling, strict=True):
                n = len(rollout.token_ids)
                assert n == sampling.max_new_tokens
                assert n == len(rollout.logprobs) == len(rollout.versions)
                assert n == len(rollout.loss_mask) == rollout.segments[-1].end
                assert rollout.finish_reason == "length"


def test_the_versions_are_the_spans_that_the_server_reports(runs: Callable[[str], Run], rule: str):
    run = runs(rule)
    for rollout in run.rollouts:
        assert rollout.versions_exact
        assert rollout.versions.tolist() == run.recorder.reported(rollout)


@pytest.mark.parametrize("rule", kinds(*MANY_VERSIONS))
def test_some_rollout_spans_three_versions(runs: Callable[[str], Run], rule: str):
    assert _most_versions(runs(rule)) >= 3


def test_nothing_is_lost_and_nothing_is_delivered_twice(runs: Callable[[str], Run], rule: str):
    run = runs(rule)
    times = Counter(rollout.rollout_id for rollout in run.rollouts)
    assert set(times.values()) == {1}
    assert not times.keys() & run.in_flight
    assert not run.dropped
    assert run.counters.launched == len(times) + len(run.in_flight)


def _differences(
    rollouts: list[Rollout], models: tuple[Path, Path], folder: Path
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each rollout |logprob - score| under the token's own version, and under the other."""
    by_model = scores(models, rollouts, folder)
    out: list[tuple[np.ndarray, np.ndarray]] = []
    for i, rollout in enumerate(rollouts):
        both = np.stack([by_model[0][i], by_model[1][i]])
        own = rollout.versions % 2
        at = np.arange(len(rollout))
        out.append(
            (
                np.abs(rollout.logprobs - both[own, at]),
                np.abs(rollout.logprobs - both[1 - own, at]),
            )
        )
    return out


@pytest.mark.parametrize("rule", kinds("retract", "abort", "buckets"))
def test_each_logprob_is_the_score_under_the_weights_of_its_own_version(
    runs: Callable[[str], Run],
    rule: str,
    models: tuple[Path, Path],
    tmp_path: Path,
):
    rollouts = crossing(runs(rule))
    assert rollouts
    for own, other in _differences(rollouts, models, tmp_path):
        assert own.max() < TOLERANCE
        assert np.median(other) > 0.5, "the two checkpoints are too alike to prove anything"


def test_in_place_agrees_before_the_first_update_and_not_after_it(
    runs: Callable[[str], Run], models: tuple[Path, Path], tmp_path: Path
):
    """After the first update, the KV is of one version and the weights are of another, so only the
    recorded logprob is right."""
    rollouts = crossing(runs("in_place"))
    assert rollouts
    for rollout, (own, other) in zip(
        rollouts, _differences(rollouts, models, tmp_path), strict=True
    ):
        first = int(np.argmax(rollout.versions != rollout.versions[0]))
        assert own[:first].max() < TOLERANCE
        stale = np.minimum(own[first:], other[first:])
        assert stale.max() > 0.1


@pytest.mark.parametrize("rule", kinds("retract", "in_place", "abort", "run"))
async def test_a_cancelled_trainer_leaves_the_server_running_and_idle(
    clean_server: CpuServer, models: tuple[Path, Path], rule: StragglerRule
):
    """The trainer is cancelled as by Ctrl-C, in the middle of generation and of an update."""
    scheduler = RolloutScheduler(
        SGLangFleet([clean_server.url]),
        long_tail(40),
        config=SchedulerConfig(
            batch_groups=4, group_size=4, over_provision=2.0, straggler=rule, pace="asynchronous"
        ),
    )

    async def train() -> None:
        async with scheduler as rollouts:
            async for _ in rollouts:
                await rollouts.update_weights(DiskPublisher(models[0]))

    task = asyncio.create_task(train())
    await until(lambda: scheduler.state.weights.update is not None)
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        # What is in flight would need far longer to end by itself.
        await asyncio.wait_for(task, SOON)
    async with opened(clean_server.url) as engine:
        assert await engine.is_paused() is False
    await settled(clean_server.url)
