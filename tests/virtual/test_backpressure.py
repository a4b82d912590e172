"""Tests the asynchronous pace with a trainer that is slow or takes nothing: what is held for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aprilsched import Batch, Group, Prompt, Rollout, RolloutScheduler, SimFleet, SimPublisher, Turn
from aprilsched.config import Pool
from aprilsched.kernel.core.invariants import check
from aprilsched.kernel.core.messages.commands import Command
from aprilsched.kernel.core.messages.events import Event
from aprilsched.kernel.core.messages.facts import Fact, GroupLaunched
from aprilsched.simulation.engine import run_virtual
from tests.support import small
from tests.support.table import each_row

GROUPS, SIZE, RATIO, READY, CAP = 4, 4, 2, 2, 600
FLYING = RATIO * GROUPS * SIZE
"""Largest number of rollouts that generate at a time."""
HELD_GROUPS = READY * GROUPS + FLYING
"""Largest number of groups that are complete and wait for the trainer, or of which a rollout
generates."""
LONG = 1000.0
"""Seconds; a batch takes two."""


class Watching:
    """A listener that records the maximum held at a time, and the launches."""

    def __init__(self) -> None:
        self.scheduler: RolloutScheduler | None = None
        self.rollouts = self.tokens = self.tasks = self.launched = self.events = 0

    def on_event(self, event: Event, now: float) -> None:
        assert self.scheduler is not None
        held = self.scheduler.state.in_flight.rollouts
        self.rollouts = max(self.rollouts, len(held))
        self.events += 1
        if self.events % 20 == 0:
            check(self.scheduler.state)
            self.tokens = max(self.tokens, sum(rollout.log.size for rollout in held.values()))
            self.tasks = max(self.tasks, len(asyncio.all_tasks()))

    def on_command(self, command: Command, now: float) -> None:
        """Commands are not counted."""

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        self.launched += sum(isinstance(fact, GroupLaunched) for fact in facts)


@dataclass
class Outcome:
    """The outcome of a program under back-pressure."""

    watching: Watching
    batches: list[Batch]
    dropped: int


Program = Callable[[RolloutScheduler, Watching], Awaitable[list[Batch]]]


def run(program: Program, *, changes: dict[str, Any] | None = None, **parts: Any) -> Outcome:
    values = {"pace": "asynchronous", "refill": Pool(together=1), "ready_batches": READY}
    watching = Watching()

    async def main() -> Outcome:
        scheduler = RolloutScheduler(
            SimFleet(2),
            small.workload(),
            config=small.config(**{**values, **(changes or {})}),
            listeners=[watching],
            **parts,
        )
        watching.scheduler = scheduler
        async with scheduler:
            batches = await program(scheduler, watching)
            return Outcome(watching, batches, scheduler.state.in_flight.ledger.total)

    return run_virtual(main())


def bounded(watching: Watching) -> None:
    """Check that rollouts, tokens and tasks stay within the bounds of the configuration."""
    assert 0 < watching.rollouts <= HELD_GROUPS * SIZE
    assert 0 < watching.tokens <= HELD_GROUPS * SIZE * CAP
    assert watching.tasks <= 2 * watching.rollouts + 20


async def never(scheduler: RolloutScheduler, watching: Watching) -> list[Batch]:
    """Take nothing for hours, and then a few batches to check that the run continues."""
    await asyncio.sleep(LONG)
    launched = watching.launched
    assert scheduler.state.in_flight.open_attempts == 0, "the engines still generate"
    await asyncio.sleep(LONG)
    assert watching.launched == launched
    return [await scheduler.next_batch() for _ in range(6)]


@each_row("refill", ["pool", "wave"])
@each_row("straggler", ["retract", "abort", "run"])
def test_a_trainer_that_takes_nothing_is_waited_for(refill: str, straggler: str) -> None:
    outcome = run(never, changes={"refill": refill, "straggler": straggler})
    bounded(outcome.watching)
    assert outcome.dropped == 0
    assert [batch.index for batch in outcome.batches] == list(range(6))
    ids = [rollout.rollout_id for batch in outcome.batches for rollout in batch.rollouts]
    assert len(ids) == len(set(ids)) == 6 * GROUPS * SIZE


def test_finished_batches_are_bounded_and_taken_at_once() -> None:
    async def program(scheduler: RolloutScheduler, watching: Watching) -> list[Batch]:
        await asyncio.sleep(LONG)
        now = asyncio.get_running_loop().time
        started_at = now()
        batches = [await scheduler.next_batch() for _ in range(READY)]
        assert now() == started_at
        assert watching.launched * SIZE <= HELD_GROUPS * SIZE + READY * GROUPS * SIZE
        return batches

    assert len(run(program).batches) == READY


def test_launches_keep_step_with_a_slow_trainer() -> None:
    """Generation takes a hundredth of the trainer's time, and nothing is dropped."""

    async def program(scheduler: RolloutScheduler, watching: Watching) -> list[Batch]:
        batches: list[Batch] = []
        for taken in range(1, 16):
            batches.append(await scheduler.next_batch())
            await asyncio.sleep(1000.0)
            await scheduler.update_weights(SimPublisher())
            assert watching.launched <= taken * GROUPS + HELD_GROUPS
        return batches

    outcome = run(program)
    bounded(outcome.watching)
    assert outcome.dropped == 0
    assert outcome.watching.launched < 15 * GROUPS + HELD_GROUPS


@each_row("scope", ["rollout", "group"])
def test_rewards_that_do_not_come_are_waited_for(scope: str) -> None:
    """A generated rollout counts as held, whether it is scored or not."""
    come = asyncio.Event()
    waiting = most = 0

    async def slow(count: int) -> None:
        nonlocal waiting, most
        waiting += count
        most = max(most, waiting)
        await come.wait()
        waiting -= count

    async def reward(rollout: Rollout, prompt: Prompt) -> float:
        await slow(1)
        return 1.0

    async def group_reward(group: Group) -> list[float]:
        await slow(len(group.rollouts))
        return [1.0] * len(group.rollouts)

    async def program(scheduler: RolloutScheduler, watching: Watching) -> list[Batch]:
        first = asyncio.create_task(scheduler.next_batch())
        await asyncio.sleep(LONG)
        launched = watching.launched
        await asyncio.sleep(LONG)
        assert watching.launched == launched
        assert not first.done()
        come.set()
        return [await first, *[await scheduler.next_batch() for _ in range(3)]]

    chosen = group_reward if scope == "group" else reward
    outcome = run(program, reward=chosen, reward_scope=scope)
    bounded(outcome.watching)
    assert READY * GROUPS * SIZE <= most <= HELD_GROUPS * SIZE
    assert outcome.dropped == 0
    assert all(rollout.reward == 1.0 for batch in outcome.batches for rollout in batch.rollouts)


def test_verdicts_that_do_not_come_are_waited_for() -> None:
    come = asyncio.Event()

    async def accept(group: Group) -> bool:
        await come.wait()
        return True

    async def program(scheduler: RolloutScheduler, watching: Watching) -> list[Batch]:
        await asyncio.sleep(LONG)
        launched = watching.launched
        await asyncio.sleep(LONG)
        assert watching.launched == launched
        come.set()
        return [await scheduler.next_batch() for _ in range(4)]

    outcome = run(program, accept=accept)
    bounded(outcome.watching)
    assert outcome.dropped == 0


def test_episodes_are_held_back_like_single_turns() -> None:
    """Episodes whose tools never answer count as in flight, although they generate nothing."""
    tools = asyncio.Event()

    async def episode(turn: Turn, prompt: Prompt) -> float:
        answer = await turn.generate(prompt.input_ids)
        await tools.wait()
        context = np.concatenate((prompt.input_ids, answer.token_ids, prompt.input_ids))
        await turn.generate(context)
        return 0.5

    async def program(scheduler: RolloutScheduler, watching: Watching) -> list[Batch]:
        await asyncio.sleep(LONG)
        assert watching.launched == RATIO * GROUPS
        tools.set()
        return await never(scheduler, watching)

    outcome = run(program, episode=episode)
    assert outcome.dropped == 0
    assert 0 < outcome.watching.rollouts <= HELD_GROUPS * SIZE
