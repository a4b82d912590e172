"""Tests scores with parts and info: in batches, after a restart, in the log and in the summary."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from aprilsched import (
    Batch,
    Group,
    LongTailWorkload,
    MemoryStore,
    Prompt,
    Rollout,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    Score,
    SimFleet,
    SqliteStore,
    Turn,
)
from aprilsched.config import Retries
from aprilsched.kernel.core.messages.facts import RolloutScored
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.records import State
from aprilsched.kernel.shell.callbacks import Reward
from aprilsched.kernel.store import Store
from aprilsched.observe.exports.trackers import StepTracker
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.observe.figures.summary import Summary
from aprilsched.observe.log import EventLog
from aprilsched.observe.log.reading import read_facts, replay
from aprilsched.simulation.engine import run_virtual
from aprilsched.simulation.results import remainder
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time

CONFIG = SchedulerConfig(
    batch_groups=2, group_size=2, over_provision=2.0, retries=Retries(failed_groups=3)
)
SHORT = SamplingParams(max_new_tokens=8, ignore_eos=True)


def workload(count: int | None = None) -> LongTailWorkload:
    return LongTailWorkload(median=30, sigma=0.8, cap=200, group_size=2, count=count, seed=2)


def scored(rollout: Rollout) -> Score:
    """Returns the same score for the same rollout in every run."""
    return Score(
        reward=rollout.index,
        parts={"format": 0.5, "answer": rollout.rollout_id / 100},
        info={"seen": [rollout.rollout_id], **rollout.info},
    )


async def by_rollout(rollout: Rollout, prompt: Prompt) -> Score:
    return scored(rollout)


async def by_group(group: Group) -> list[Score]:
    return [scored(rollout) for rollout in group.rollouts]


async def with_info(turn: Turn, prompt: Prompt) -> Score:
    await turn.generate(prompt.input_ids, SHORT)
    return Score(parts={"turns": 1.0}, info={"place": turn.index})


async def take(count: int, **arguments: Any) -> list[Batch]:
    async with RolloutScheduler(SimFleet(2), workload(), config=CONFIG, **arguments) as rollouts:
        return [await rollouts.next_batch() for _ in range(count)]


@each_row(
    "arguments",
    [{"reward": by_rollout}, {"reward": by_group, "reward_scope": "group"}],
    ids=["rollout", "group"],
)
@each_row("episode", [None, with_info], ids=["single", "episode"])
def test_parts_and_info_reach_the_batch(arguments: dict[str, Any], episode: Any):
    asked: list[Group] = []

    async def accept(group: Group) -> bool:
        asked.append(group)
        return all(rollout.reward_parts["format"] == 0.5 for rollout in group.rollouts)

    batches = run_virtual(take(3, episode=episode, accept=accept, **arguments))
    assert asked
    own = {} if episode is None else {"turns": 1.0}
    for rollout in (rollout for batch in batches for rollout in batch.rollouts):
        place = {} if episode is None else {"place": rollout.index}
        answer = rollout.rollout_id / 100
        assert rollout.reward == rollout.index
        assert rollout.reward_parts == {"format": 0.5, "answer": answer, **own}
        assert rollout.info == {"seen": [rollout.rollout_id], **place}


def test_without_a_reward_function_the_episode_s_score_counts():
    async def episode(turn: Turn, prompt: Prompt) -> Score:
        await turn.generate(prompt.input_ids, SHORT)
        return Score(info={"tool_calls": 3})

    (batch,) = run_virtual(take(1, episode=episode))
    assert {rollout.reward for rollout in batch.rollouts} == {None}
    assert all(rollout.info == {"tool_calls": 3} for rollout in batch.rollouts)


def test_nothing_that_a_callback_changes_reaches_the_scheduler():
    async def reward(rollout: Rollout, prompt: Prompt) -> Score:
        score = scored(rollout)
        cleared = cast("dict[str, Any]", score.info).clear
        asyncio.get_running_loop().call_later(0.1, cleared)
        return score

    async def accept(group: Group) -> bool:
        for rollout in group.rollouts:
            rollout.info["seen"].append(object())
            cast("dict[str, Any]", rollout.reward_parts).clear()
        return True

    (batch,) = run_virtual(take(1, reward=reward, accept=accept, store=MemoryStore()))
    assert all(rollout.info == {"seen": [rollout.rollout_id]} for rollout in batch.rollouts)
    assert all(set(rollout.reward_parts) == {"format", "answer"} for rollout in batch.rollouts)


def episodes_in(store: Store, reward: Reward) -> RolloutScheduler:
    return RolloutScheduler(
        SimFleet(2), workload(), config=CONFIG, reward=reward, episode=with_info, store=store
    )


@each_row("kind", ["sqlite", "memory"])
def test_they_survive_a_restart(kind: str, tmp_path: Path):
    """Scores of delivered batches survive a restart, and scores of an episode whose reward is not
    known yet."""
    store = MemoryStore() if kind == "memory" else SqliteStore(tmp_path / "s", inline=True)

    async def stuck(rollout: Rollout, prompt: Prompt) -> Score:
        if rollout.rollout_id > 15:
            await asyncio.Event().wait()
        return scored(rollout)

    async def before() -> list[Batch]:
        got: list[Batch] = []
        async with episodes_in(store, stuck) as rollouts:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(100):
                    while True:
                        got.append(await rollouts.next_batch())
        return got

    async def after() -> tuple[list[dict[str, Any]], list[Batch]]:
        async with episodes_in(store, by_rollout) as rollouts:
            waiting = [
                member.info
                for group in rollouts.state.in_flight.training_groups()
                for member in group.members
                if member.state is State.SCORING
            ]
            return waiting, [await rollouts.next_batch() for _ in range(4)]

    first = run_virtual(before())
    waiting, batches = run_virtual(after())
    assert first
    assert waiting
    assert all(info.keys() == {"place"} for info in waiting)
    assert [batch.index for batch in batches if batch.redelivered] == [b.index for b in first]
    for rollout in (rollout for batch in [*first, *batches] for rollout in batch.rollouts):
        assert rollout.info == {"seen": [rollout.rollout_id], "place": rollout.index}
        answer = rollout.rollout_id / 100
        assert rollout.reward_parts == {"format": 0.5, "answer": answer, "turns": 1.0}


BAD: dict[str, Callable[[], Any]] = {
    "nan": lambda: Score(reward=math.nan),
    "object": lambda: Score(reward=1.0, info={"model": object()}),
    "large": lambda: Score(reward=1.0, info={"text": "x" * 20_000}),
    "no reward": lambda: Score(parts={"answer": 1.0}),
}


@each_row("bad", BAD.values(), ids=BAD.keys())
@each_row("scope", ["rollout", "group"])
async def test_a_score_that_cannot_be_kept_is_an_entry_of_the_ledger(
    bad: Callable[[], Any], scope: str
):
    async def reward(*_: Any) -> Any:
        return bad() if scope == "rollout" else [bad(), bad()]

    scheduler = RolloutScheduler(
        SimFleet(1), workload(), config=CONFIG, reward=reward, reward_scope=cast("Any", scope)
    )
    async with scheduler as rollouts:
        with pytest.raises(Exception, match="groups in a row failed"):
            await rollouts.next_batch()
        ledger = rollouts.state.in_flight.ledger
    assert set(ledger.rollouts) == {Reason.REWARD_FAILED}
    cause = ledger.entries[0].cause
    text = "returned" if bad is BAD["no reward"] else "raised ConfigError("
    assert cause.startswith(f"the reward function {text}")
    assert len(cause) < 300


def run_with_log(folder: Path) -> tuple[RunSummary, dict[int, Mapping[str, float]], list[Batch]]:
    """Return the summary of a run, the figures that a tracker got, and the batches."""
    log, summary = EventLog(folder / "events.jsonl", patient=True), Summary()
    figures = LiveFigures(clock=None)
    steps: dict[int, Mapping[str, float]] = {}

    class Kept:
        def write(self, step: int, figures: Mapping[str, float]) -> None:
            steps[step] = figures

        def close(self) -> None:
            pass

    async def program() -> tuple[RunSummary, list[Batch]]:
        log.start()
        with StepTracker(Kept(), figures) as tracker:
            scheduler = RolloutScheduler(
                SimFleet(2),
                workload(),
                config=CONFIG,
                reward=cast("Reward", by_rollout),
                listeners=[log, summary, figures, tracker],
            )
            async with scheduler as rollouts:
                batches = [await rollouts.next_batch() for _ in range(3)]
                result = summary.result(remainder(rollouts.state), clock="virtual")
        log.close()
        return result, batches

    result, batches = run_virtual(program())
    return result, steps, batches


def test_the_log_the_summary_and_trackers_have_them(tmp_path: Path):
    summary, steps, batches = run_with_log(tmp_path)
    rollouts = [rollout for batch in batches for rollout in batch.rollouts]
    means = {
        "format": 0.5,
        "answer": pytest.approx(sum(r.rollout_id for r in rollouts) / 100 / len(rollouts)),
    }
    assert summary.rewards.rollouts == len(rollouts)
    assert summary.rewards.mean == 0.5
    assert summary.rewards.parts == means
    for batch, figures in zip(batches, summary.per_batch, strict=True):
        answers = [rollout.reward_parts["answer"] for rollout in batch.rollouts]
        assert figures.rewards.parts["answer"] == pytest.approx(sum(answers) / len(answers))
        step = steps[batch.index]
        assert step["batch/reward"] == figures.rewards.mean
        assert step["batch/reward/answer"] == figures.rewards.parts["answer"]
    logged = {
        fact.rollout_id: (fact.reward, fact.reward_parts, fact.info)
        for facts, _ in read_facts(tmp_path / "events.jsonl")
        for fact in facts
        if isinstance(fact, RolloutScored)
    }
    for rollout in rollouts:
        assert logged[rollout.rollout_id] == (rollout.reward, rollout.reward_parts, rollout.info)
    again = Summary()
    replay(tmp_path / "events.jsonl", [again])
    assert [batch.figures.rewards for batch in again.batches] == [
        figures.rewards for figures in summary.per_batch
    ]
