"""Tests that the scheduler delivers what was drawn, with the real coordinator in virtual time.

Lengths are drawn beforehand, and the policy does not change what is sampled, so the right result is
known. Every check here has a control, which breaks the property and must fail the same check.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aprilsched import (
    Batch,
    Group,
    LongTailWorkload,
    RolloutScheduler,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
)
from aprilsched.__main__ import main
from aprilsched.config import Dispatch, Staleness
from aprilsched.kernel.core.lengths.distributions import kaplan_meier
from aprilsched.kernel.core.lengths.observed import GroupLengths, pooled
from aprilsched.kernel.core.messages.commands import Send
from aprilsched.kernel.core.messages.events import Event
from aprilsched.kernel.core.messages.facts import BatchDelivered, Fact, GroupLaunched
from aprilsched.kernel.core.state.records import group_lengths
from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.observe.figures.summary import Summary
from aprilsched.observe.log.run import read_run
from aprilsched.planning.presets import PRESETS
from aprilsched.simulation import Simulation
from aprilsched.simulation.engine import run_virtual
from aprilsched.simulation.results import remainder
from aprilsched.simulation.virtual import TIMED
from tests.support.equivalence import Equivalence, equivalence
from tests.support.observations import delivered_lengths, lengths_by_batch

pytestmark = pytest.mark.virtual_time

CAP = 400
GROUP = 4
BATCH_GROUPS = 64
BATCHES = 90
BURN_IN = 10
Ints = NDArray[np.int64]


def workload(
    count: int | None = None,
    seed: int = 11,
    epoch_prompts: int | None = None,
    drift: float = 0.0,
) -> LongTailWorkload:
    return LongTailWorkload(
        median=60,
        sigma=0.7,
        cap=CAP,
        group_size=GROUP,
        count=count,
        seed=seed,
        epoch_prompts=epoch_prompts,
        drift=drift,
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run: groups by batch (length by member), ids, and what was left when it stopped."""

    batches: list[list[list[int]]]
    """Lengths by batch, group, member."""
    keys: list[int]
    """Prompt numbers of the delivered groups, in order."""
    delivered: list[int]
    sent: set[int]
    in_flight: list[int]
    open_groups: list[GroupLengths]
    evicted: list[tuple[int, int]]
    """Rollout and token counts in the ledger."""

    @property
    def lengths(self) -> list[Ints]:
        """int64 [n] by batch."""
        return [np.array([n for group in batch for n in group]) for batch in self.batches]


class Sent:
    """Records the ids of all rollouts that reach an engine."""

    def __init__(self) -> None:
        self.ids: set[int] = set()

    def on_event(self, event: Event, now: float) -> None: ...

    def on_command(self, command: Any, now: float) -> None:
        if isinstance(command, Send):
            self.ids.add(command.rollout_id)


@cache
def outcome(
    count: int | None = None,
    batches: int = BATCHES,
    seed: int = 11,
    epoch_prompts: int | None = None,
    drift: float = 0.0,
    engines: int = 1,
    **changes: Any,
) -> Outcome:
    """Run for `batches` batches, or to the end of `count` prompts, with an update after each."""
    values: dict[str, Any] = {
        "batch_groups": BATCH_GROUPS,
        "group_size": GROUP,
        "over_provision": 2.0,
        "dispatch": Dispatch(rate=100_000),
    }
    config = SchedulerConfig(**{**values, **changes})
    listener = Sent()

    async def main() -> Outcome:
        async with RolloutScheduler(
            SimFleet(engines, stream_interval=100_000),
            workload(count, seed, epoch_prompts, drift),
            config=config,
            listeners=[listener],
        ) as rollouts:
            taken: list[Batch] = []
            async for batch in rollouts:
                taken.append(batch)
                if len(taken) == batches:
                    break
                await rollouts.update_weights(SimPublisher())
            # Until the pause has brought all tokens: what is reported late is not censored
            # where it is, and the estimate of the distribution would be too short.
            await asyncio.sleep(1.0)
            in_flight = rollouts.state.in_flight
            groups = [group for batch in taken for group in batch.groups]
            return Outcome(
                batches=[[_lengths(group) for group in batch.groups] for batch in taken],
                keys=[int(group.prompt.key) for group in groups],  # type: ignore[arg-type]
                delivered=[r.rollout_id for batch in taken for r in batch.rollouts],
                sent=set(listener.ids),
                in_flight=list(in_flight.rollouts),
                open_groups=[group_lengths(group) for group in in_flight.groups.values()],
                evicted=[(e.rollout_id, e.tokens) for e in in_flight.ledger.entries],
            )

    return run_virtual(main())


def _lengths(group: Group) -> list[int]:
    return [len(rollout) for rollout in group.rollouts]


@cache
def drawn(count: int, seed: int = 11) -> Ints:
    """Return the lengths drawn for the first `count` prompts, int64 [count, GROUP]."""
    distribution = workload(seed=seed)
    return np.stack([distribution.lengths(i) for i in range(count)])


def compared(batches: Sequence[Ints], *, block: int = 1) -> Equivalence:
    """Compare batches after the burn-in with the draws for a third more prompts."""
    return equivalence(
        batches[BURN_IN:],
        [drawn(BATCHES * BATCH_GROUPS * 4 // 3).ravel()],
        cap=CAP,
        resamples=500,
        block=block,
    )


SCHEDULES: dict[str, dict[str, Any]] = {
    "wave": {},
    "pool": {"refill": "pool", "straggler": "in_place"},
    "abort": {"straggler": "abort"},
    "buckets": {"refill": "buckets", "over_provision": 1.5},
}


ROLLING: dict[str, Any] = {
    "pace": "asynchronous",
    "straggler": "run",
    "refit": "rolling",
    "refill": "pool",
    "engines": 3,
}
TAIL: dict[str, Any] = {"refill": "tail", "over_provision": 1.5}
CYCLE = 3
"""Tail batching at ratio 1.5 has two races and a long batch in turn."""


AT_LENGTH = [
    "wave",
    pytest.param("pool", marks=pytest.mark.long),
    pytest.param("abort", marks=pytest.mark.long),
    pytest.param("buckets", marks=pytest.mark.long),
]
"""Of a property that only many batches show: the plainest schedule; the others at length. One
drained run shows of each that all is delivered as drawn."""


# --- 1. conservation -----------------------------------------------------------------------------


def misplaced(launched: Iterable[int], *places: Sequence[int]) -> set[int]:
    """Return the ids that are not in exactly one place, or were never launched."""
    found = Counter(rollout_id for place in places for rollout_id in place)
    known = set(launched)
    return {i for i in known | found.keys() if i not in known or found[i] != 1}


def test_what_is_in_no_place_in_two_or_unknown_is_misplaced():
    assert misplaced([1, 2, 3, 4], [1, 2], [3], [4]) == set()
    assert misplaced([1, 2, 3, 4], [1, 1, 2], [2, 9]) == {1, 2, 3, 4, 9}


@pytest.mark.parametrize("name", [*SCHEDULES, "rolling", "tail"])
def test_after_a_drain_the_multisets_are_equal(name: str):
    """Every drawn group is delivered exactly once, and unchanged."""
    count = 300
    settings = {**SCHEDULES, "rolling": ROLLING, "tail": TAIL}[name]
    run = outcome(count, batch_groups=16, **settings)
    assert sorted(run.keys) == list(range(count))
    delivered = [group for batch in run.batches for group in batch]
    assert sorted(delivered) == sorted(drawn(count).tolist())
    assert misplaced(run.sent, run.delivered) == set()


@pytest.mark.parametrize("drift", [0.0, 1.0])
def test_what_is_remembered_of_a_prompt_changes_no_response(drift: float):
    """Length buckets over three epochs of the same prompts. With a drift of 1, every key lies: its
    prompt is another one each time. The control keeps what the memory expects to be short."""
    count, epoch = 300, 100
    run = outcome(
        count,
        epoch_prompts=epoch,
        drift=drift,
        batch_groups=16,
        refill="buckets",
        over_provision=1.5,
    )
    distribution = workload(count, epoch_prompts=epoch, drift=drift)
    lengths = [distribution.lengths(i).tolist() for i in range(count)]
    delivered = [group for batch in run.batches for group in batch]
    assert sorted(delivered) == sorted(lengths)
    assert sorted(run.keys) == sorted(3 * list(range(epoch)))
    assert misplaced(run.sent, run.delivered) == set()
    before = np.array([np.log(lengths[i - epoch]).mean() for i in range(epoch, count)])
    now = np.array([np.log(lengths[i]).mean() for i in range(epoch, count)])
    kept = now[before < np.median(before)].mean()
    assert bool(kept < now.mean() - 0.2) is (drift == 0)


@pytest.mark.parametrize("migrate", [True, False])
async def test_requests_moved_from_full_pools_keep_their_outcome(migrate: bool):
    """Four engines with room for few responses: groups stay together, so one pool is full while
    another has room. The control leaves them where they are."""
    count = 96
    distribution = LongTailWorkload(
        median=60, sigma=0.7, cap=CAP, group_size=GROUP, within_group=0.9, count=count
    )
    config = SchedulerConfig(
        batch_groups=16,
        group_size=GROUP,
        over_provision=1.0,
        dispatch=Dispatch(rate=100_000, migrate=migrate),
    )
    fleet = SimFleet(4, stream_interval=8, kv_tokens=1000)
    async with RolloutScheduler(fleet, distribution, config=config) as rollouts:
        groups: list[Group] = []
        moved: list[int] = []
        async for batch in rollouts:
            groups += batch.groups
            moved += [len({s.engine for s in r.segments}) for r in batch.rollouts]
            await rollouts.update_weights(SimPublisher())
        again = rollouts.state.in_flight.counters.tokens_reprefilled
        delivered, again, moved = [_lengths(group) for group in groups], again, moved
    assert sorted(delivered) == sorted(distribution.lengths(i).tolist() for i in range(count))
    assert (again > 0) is (max(moved) == 2) is migrate


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_id_is_delivered_once_or_in_flight(name: str):
    run = outcome(batches=4, **SCHEDULES[name])
    # Groups that length buckets have opened and not started were never sent.
    held = sorted(run.sent & set(run.in_flight))
    assert len(held) >= BATCH_GROUPS * GROUP // 2
    assert misplaced(run.sent, run.delivered, held) == set()
    assert misplaced(run.sent, run.delivered) == set(held), "rollouts left out are found"


# --- 2. and 3. equivalence, and what must fail it ------------------------------------------------


@pytest.mark.parametrize("name", AT_LENGTH)
def test_after_the_burn_in_delivered_equals_drawn(name: str):
    # Neighbouring batches of length buckets differ in length by design.
    found = compared(outcome(**SCHEDULES[name]).lengths, block=8 if name == "buckets" else 1)
    assert found.equivalent, found


def test_the_first_batch_is_too_short():
    """The reason for the burn-in."""
    first = outcome().lengths[0]
    assert first.mean() < 0.75 * drawn(BATCHES * BATCH_GROUPS).mean()


def discarded(batches: int) -> list[Ints]:
    """Each batch is the first of its own run, so its stragglers are dropped."""
    waves = drawn(2 * BATCH_GROUPS * batches).reshape(batches, 2 * BATCH_GROUPS, GROUP)
    out: list[Ints] = []
    for wave in waves:
        soonest = np.argsort(wave.max(axis=1), kind="stable")[:BATCH_GROUPS]
        out.append(wave[soonest].ravel())
    return out


def test_discarding_the_stragglers_fails():
    found = compared(discarded(40))
    assert not found["mean"].equivalent
    assert found["mean"].high < -0.05


def test_a_first_batch_is_what_discarding_delivers():
    """The control above behaves like the scheduler's own first batch."""
    model, real = discarded(1)[0], outcome().lengths[0]
    assert real.mean() == pytest.approx(model.mean(), rel=0.05)


def first_of_group(run: Outcome, k: int) -> list[Ints]:
    """Return the `k` members of each group that finish first: all start together, so the
    shortest."""
    return [np.array([n for group in batch for n in sorted(group)[:k]]) for batch in run.batches]


def test_the_first_of_each_group_fail():
    found = compared(first_of_group(outcome(), GROUP - 1))
    assert not found["mean"].equivalent
    assert found["mean"].high < -0.05


@pytest.mark.long
def test_evicting_the_stale_fails():
    run = outcome(batches=50, max_staleness=Staleness(1, rule="evict"))
    assert run.evicted
    dropped = [rollout_id for rollout_id, _ in run.evicted]
    places = (run.delivered, run.in_flight, dropped)
    assert misplaced(run.sent, *places) == set(), "dropped rollouts are listed"
    found = compared(run.lengths)
    assert not found["mean"].equivalent
    assert found["mean"].high < -0.05
    assert not found["truncation_rate"].estimate >= 0


@pytest.mark.long
def test_finishing_the_stale_first_does_not():
    """This rule keeps the bound without censoring; short and long batches alternate."""
    run = outcome(batches=50, max_staleness=Staleness(2, rule="finish"))
    assert run.evicted == []
    assert compared(run.lengths, block=4)["mean"].equivalent


@pytest.mark.long
def test_after_the_burn_in_rolling_refits_deliver_what_was_drawn():
    """The control drops the rollouts of engines that are a version behind."""
    assert compared(outcome(batches=80, **ROLLING).lengths, block=4)["mean"].equivalent
    censored = outcome(batches=50, max_staleness=Staleness(1, rule="evict"), **ROLLING)
    assert censored.evicted
    found = compared(censored.lengths)
    assert not found["mean"].equivalent
    assert found["mean"].high < -0.05


def tail_batches() -> list[Ints]:
    """Whole cycles, with the partials of the losers kept."""
    return outcome(batches=BURN_IN + 20 * CYCLE + 2, **TAIL).lengths[:-2]


@pytest.mark.long
def test_tail_batching_with_partials_is_unbiased_per_cycle():
    found = compared(tail_batches(), block=CYCLE)
    assert all(found[name].equivalent for name in ("mean", "p90", "truncation_rate")), found


@pytest.mark.long
def test_the_races_alone_fail():
    """Tail batching whose losers never return."""
    lengths = tail_batches()
    races = [batch for batch in lengths if batch.max() < CAP]
    assert len(lengths) // 2 < len(races) < len(lengths) * 3 // 4
    found = compared(races)
    assert not found["mean"].equivalent
    assert found["mean"].high < -0.05


# Dropped responses are drawn again here, as by a model, and not as drawn beforehand.


class Again:
    """Records the lengths of each delivered batch, and the first draws of its prompts."""

    def __init__(self, prompts: LongTailWorkload) -> None:
        self.delivered: list[int] = []
        """Tokens by batch."""
        self.first: list[int] = []
        """Tokens by batch, if every prompt had been sampled once."""
        self._prompts = prompts
        self._index: dict[int, int] = {}
        self._launched = 0

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, GroupLaunched) and fact.again is not None:
                self._index[fact.group_id] = self._index[fact.again]
            elif isinstance(fact, GroupLaunched):
                self._index[fact.group_id] = self._launched
                self._launched += 1
            elif isinstance(fact, BatchDelivered):
                groups = {rollout.group_id for rollout in fact.rollouts}
                first = [
                    GROUP * self._prompts.lengths(self._index[group]).mean() for group in groups
                ]
                self.delivered.append(sum(rollout.tokens for rollout in fact.rollouts))
                self.first.append(int(sum(first)))

    def bias(self) -> tuple[float, float]:
        """The relative bias of the mean length, and its standard error."""
        differences = np.array(self.delivered) - np.array(self.first)
        error = differences.std(ddof=1) * np.sqrt(differences.size)
        return differences.sum() / sum(self.first), float(error) / sum(self.first)


def drawn_again(preset: str) -> tuple[Again, RunSummary]:
    """Return a run of a preset without stale tokens, and its summary."""
    config = PRESETS[preset](SchedulerConfig(batch_groups=32, group_size=GROUP))
    prompts = workload()
    listener, summary = Again(prompts), Summary()
    simulation = Simulation(
        config, prompts, engine=TIMED, batches=100, listeners=[listener, summary]
    )
    simulation.run()
    return listener, summary.result(remainder(simulation.state), clock="virtual")


@pytest.mark.long
def test_redrawn_prompts_are_unbiased():
    run, summary = drawn_again("on_policy")
    estimate, error = run.bias()
    assert summary.staleness_max == 0
    assert 0 < summary.bias.dropped_tokens["begun_again"] < 0.25 * summary.tokens.delivered
    assert error < 0.01
    assert abs(estimate) < 2.5 * error
    assert summary.bias.censoring.policies == []


@pytest.mark.long
def test_generating_the_losers_of_a_race_again_fails():
    run, summary = drawn_again("rollpacker")
    estimate, error = run.bias()
    assert summary.staleness_max == 0
    assert summary.bias.dropped_tokens["begun_again"] > 0.2 * summary.tokens.delivered
    assert estimate < -0.02
    assert estimate < -4 * error


# --- 4. a run that is stopped in the middle ------------------------------------------------------


SEEDS = 5
STOPPED_AFTER = {"wave": 4, "pool": 7, "abort": 4, "buckets": 6}
"""Batches; soon enough that much is in flight, and late enough that the longest can have ended:
a pool holds more, and what no response has reached yet is unknown to any estimate."""


def stopped(name: str, seed: int) -> tuple[Ints, Ints, Ints, Ints]:
    """A run so far: delivered lengths, those finished since, tokens so far, and the truth.

    The truth is what was drawn for just these prompts, so that only what is unfinished can make
    an estimate differ from it.
    """
    batches = STOPPED_AFTER[name]
    run = outcome(batches=batches, seed=seed, batch_groups=32, **SCHEDULES[name])
    tokens, finished = pooled(run.open_groups)
    launched = batches * 32 + len(run.open_groups)
    assert max(run.keys) < launched
    truth = drawn(launched, seed).ravel()
    return np.concatenate(run.lengths), tokens[finished], tokens[~finished], truth


def ratios(name: str, seed: int) -> tuple[float, float, float, float]:
    """Mean and 90th percentile, by Kaplan and Meier and of the finished alone, over the truth."""
    delivered, finished, unfinished, truth = stopped(name, seed)
    assert unfinished.size > 40
    naive = np.concatenate((delivered, finished))
    censored = np.repeat([False, True], [naive.size, unfinished.size])
    distribution = kaplan_meier(np.concatenate((naive, unfinished)), censored)
    mean, p90 = float(truth.mean()), float(np.quantile(truth, 0.9))
    return (
        distribution.mean() / mean,
        float(distribution.quantile(0.9)) / p90,
        float(naive.mean()) / mean,
        float(np.quantile(naive, 0.9)) / p90,
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in ("pool", "buckets")))
        for name in SCHEDULES
    ],
)
def test_kaplan_meier_recovers_the_law_of_a_run_that_was_stopped(name: str):
    found = np.array([ratios(name, seed) for seed in range(SEEDS)])
    mean, p90, naive_mean, naive_p90 = found.mean(axis=0)
    assert mean == pytest.approx(1, abs=0.03)
    assert p90 == pytest.approx(1, abs=0.05)
    assert naive_mean < 0.9
    assert naive_p90 < 0.9


def test_a_drained_run_folder_obeys_the_identity(tmp_path: Path):
    """End to end: a run to the end of its prompts, its files, the arrays, both sides."""
    prompts = workload(60)
    lines = [
        json.dumps(
            {
                "input_ids": prompt.input_ids.tolist(),
                "sampling": {"max_tokens": int(n), "ignore_eos": True},
            }
        )
        for i, prompt in enumerate(prompts)
        for n in prompts.lengths(i)
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(lines) + "\n")
    out = tmp_path / "run"
    options = ["--batch-groups", "16", "--group-size", "1", "--over-provision", "2"]
    arguments = ["run", "--quiet", *options, "--batches", "99", "--prompts", str(file)]
    assert main([*arguments, "--out", str(out)]) == 0
    run = read_run(out)
    data = delivered_lengths(run)
    assert data.lengths.size == len(lines)
    assert [batch.size for batch in lengths_by_batch(run)] == np.bincount(
        data.delivered_in
    ).tolist()
    assert sorted(data.lengths.tolist()) == sorted(drawn(60).ravel().tolist())
    assert run.summary.rollouts.in_flight == 0
    transient = run.summary.bias.transient
    assert transient is not None
    # Compared with the mean of the run's own draws, the two curves differ by the choice of prompts.
    assert transient.reference == "drawn"
    assert transient.predicted == 0
    assert transient.predicted_by_batch[-1] == pytest.approx(0, abs=1e-9)
    assert transient.measured == pytest.approx(0, abs=1e-9)
