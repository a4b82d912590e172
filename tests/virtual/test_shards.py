"""Tests schedulers that a trainer uses as one, with embedded engines in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import (
    Batch,
    Group,
    LongTailWorkload,
    MemoryStore,
    Prompt,
    PromptQueue,
    Rollout,
    RolloutScheduler,
    SamplingParams,
    SimFleet,
    SimPublisher,
)
from aprilsched.analysis.run import read_run
from aprilsched.config import Dispatch, Health, Samples, Staleness, Timeouts, Tokens
from aprilsched.core.invariants import check as check_invariants
from aprilsched.core.state.saved import Saved, Snapshot
from aprilsched.engines.sim import SimConfig, SimEngine
from aprilsched.errors import (
    ConfigError,
    FleetLost,
    PromptsExhausted,
    RefitError,
    RunFolderError,
    SchedulerClosed,
    StoreError,
)
from aprilsched.runs.drive import merged_run
from aprilsched.runs.settings import RunSettings
from aprilsched.shards import LocalShard, ShardedScheduler, ShardLost, ShardParts
from aprilsched.shards.base import SERIAL
from aprilsched.store.codec import encode
from aprilsched.telemetry.metrics import Metrics
from aprilsched.telemetry.prometheus import MetricsCollector
from tests.support import small

pytestmark = pytest.mark.virtual_time

COUNT = 40


def workload(count: int | None = COUNT, **changes: Any) -> LongTailWorkload:
    values = {"median": 60, "sigma": 0.9, "cap": 600, "group_size": 4, "seed": 3}
    return LongTailWorkload(**{**values, "count": count, **changes})  # type: ignore[arg-type]


config = partial(small.config, batch_groups=6)


class Mortal(MemoryStore):
    """A store of which a process can be killed: nothing is written after that."""

    def __init__(self) -> None:
        super().__init__()
        self.dead = False
        self.locked = 0
        """How often it cannot be opened, because the process that was killed is still there."""

    def open(self) -> Saved | None:
        if self.locked:
            self.locked -= 1
            raise StoreError("the database is locked.")
        self.dead = False
        return super().open()

    def save(self, snapshot: Snapshot, *, durable: bool) -> None:
        if not self.dead:
            super().save(snapshot, durable=durable)


class Killable(LocalShard):
    """A shard that can be killed as by kill -9: its store has what was saved, and no more."""

    def __init__(self, name: str, *, stored: bool = True, engines: int = 1, **parts: Any) -> None:
        self.store = Mortal() if stored else None
        self.engines = engines
        self.deaths = 0
        self.openings = 0
        self._gone = asyncio.Event()
        self.hangs: Callable[[str], bool] = lambda call: False
        """Whether a call of this name never returns."""
        self.more = parts
        super().__init__(name, self._make)

    def _make(self) -> ShardParts:
        self.openings += 1
        self._gone.clear()
        fleet = SimFleet(self.engines, stream_interval=8)
        parts: dict[str, Any] = {"fleet": fleet, "store": self.store}
        return ShardParts(**{**parts, **self.more})

    @property
    def there(self) -> bool:
        return self._rollouts is not None

    @property
    def state(self) -> Any:
        assert self._rollouts is not None
        return self._rollouts.state

    def kill(self) -> None:
        if self.store is not None:
            self.store.dead = True
        self.deaths += 1
        self._gone.set()

    async def _hang(self, call: str) -> None:
        if self.hangs(call):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1e9)
            # It does not end when its call is cancelled, until the test is over.
            await asyncio.sleep(1e9)

    async def _or_death(self, call: Any) -> Any:
        try:
            await self._hang(call.__name__)
        except asyncio.CancelledError:
            call.close()
            raise
        work, death = asyncio.ensure_future(call), asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                raise ShardLost("killed")
            return work.result()
        finally:
            for task in (work, death):
                task.cancel()

    async def tell(self, orders: Any) -> None:
        await self._or_death(super().tell(orders))

    async def ask(self) -> Any:
        return await self._or_death(super().ask())

    async def update(self, publisher: Any, version: int) -> Any:
        return await self._or_death(super().update(publisher, version))

    async def evaluate(self, prompts: Any, group_size: int) -> Any:
        return await self._or_death(super().evaluate(prompts, group_size))

    async def checkpoint(self, path: Path) -> Any:
        return await self._or_death(super().checkpoint(path))

    async def open(self, *arguments: Any, **named: Any) -> Any:
        await self._hang("open")
        return await super().open(*arguments, **named)

    async def close(self) -> None:
        await self._hang("close")
        await super().close()


def shards(count: int = 3, **changes: Any) -> list[Killable]:
    return [Killable(f"shard-{index}", **changes) for index in range(count)]


def content(rollout: Rollout) -> tuple[Any, ...]:
    """What a response is, wherever it was generated."""
    return tuple(rollout.token_ids.tolist()), rollout.finish_reason


def keys(batches: Sequence[Batch]) -> list[Any]:
    return [group.prompt.key for batch in batches for group in batch.groups]


def check(batches: Sequence[Batch], bound: int | None = None) -> None:
    """What holds for every batch of every run: ids and prompts come once, and the tokens that count
    are within the bound."""
    assert [batch.index for batch in batches] == list(range(len(batches)))
    assert max(Counter(keys(batches)).values()) == 1
    rollouts = [rollout for batch in batches for rollout in batch.rollouts]
    assert len({rollout.rollout_id for rollout in rollouts}) == len(rollouts)
    groups = [group for batch in batches for group in batch.groups]
    assert len({group.group_id for group in groups}) == len(groups)
    for batch in batches:
        for group in batch.groups:
            assert SERIAL not in group.prompt.metadata
            for rollout in group.rollouts:
                assert rollout.group_id == group.group_id
                assert len(rollout.versions) == len(rollout.loss_mask) == len(rollout)
                assert rollout.versions.max() <= batch.version
                if bound is not None:
                    counted = rollout.versions[rollout.loss_mask]
                    assert not counted.size or counted.min() >= batch.version - bound


def check_all(batches: Sequence[Batch], count: int = COUNT, bound: int | None = None) -> None:
    """Every prompt has come, and once."""
    check(batches, bound)
    assert sorted(keys(batches)) == list(range(count))


async def to_the_end(
    members: Sequence[Killable],
    *,
    update: bool = True,
    streamed: bool = False,
    each: Callable[[int], None] | None = None,
    **changes: Any,
) -> list[Batch]:
    """Every batch of a run, with an update after each."""
    arguments: dict[str, Any] = {"prompts": workload(), "config": config(), **changes}
    batches: list[Batch] = []
    async with ShardedScheduler(members, arguments.pop("prompts"), **arguments) as rollouts:
        async for batch in by_group(rollouts) if streamed else rollouts:
            batches.append(batch)
            if update:
                await rollouts.update_weights(SimPublisher())
            if each is not None:
                each(len(batches))
        for member in members:
            if member.there:
                check_invariants(member.state)
    return batches


def joined(parts: Sequence[Batch]) -> Batch:
    """The batch of the parts of a stream."""
    assert [part.complete for part in parts[:-1]] == [False] * (len(parts) - 1)
    assert all(len(part.groups) == 1 for part in parts)
    assert len({(part.index, part.version) for part in parts}) == 1
    return replace(parts[-1], groups=tuple(group for part in parts for group in part.groups))


async def by_group(rollouts: ShardedScheduler) -> AsyncGenerator[Batch]:
    """Every batch, taken group by group."""
    while True:
        try:
            yield joined([part async for part in rollouts.stream()])
        except PromptsExhausted:
            return


async def rest(rollouts: ShardedScheduler) -> list[Batch]:
    """Every further batch."""
    return [batch async for batch in rollouts]


# --- what one scheduler would deliver ------------------------------------------------------------


@pytest.mark.parametrize(
    ("straggler", "pace", "refill"),
    [
        ("retract", "synchronous", "wave"),
        ("retract", "asynchronous", "pool"),
        ("in_place", "synchronous", "pool"),
        ("abort", "synchronous", "wave"),
        ("abort", "asynchronous", "wave"),
        ("run", "synchronous", "pool"),
    ],
)
async def test_every_prompt_is_delivered_once(pace: str, refill: str, straggler: str):
    batches = await to_the_end(
        shards(), config=config(pace=pace, refill=refill, straggler=straggler)
    )
    check_all(batches)
    assert [len(batch.groups) for batch in batches] == [6, 6, 6, 6, 6, 6, 4]
    assert [batch.version for batch in batches] == list(range(len(batches)))


async def alone(engines: int, *, update: bool) -> list[Batch]:
    """What one scheduler delivers."""
    batches: list[Batch] = []
    async with RolloutScheduler(SimFleet(engines), workload(), config=config()) as rollouts:
        async for batch in rollouts:
            batches.append(batch)
            if update:
                await rollouts.update_weights(SimPublisher())
    return batches


async def test_the_responses_are_those_of_one_scheduler():
    def by_key(batches: Sequence[Batch]) -> dict[Any, Any]:
        return {
            (group.prompt.key, rollout.index): content(rollout)
            for batch in batches
            for group in batch.groups
            for rollout in group.rollouts
        }

    expected = by_key(await alone(2, update=False))
    assert by_key(await to_the_end(shards(), update=False)) == expected


async def test_one_shard_delivers_the_batches_of_one_scheduler():
    expected = await alone(3, update=True)
    batches = await to_the_end(shards(1, engines=3))
    assert [set(keys([each])) for each in batches] == [set(keys([each])) for each in expected]


@pytest.mark.parametrize("refill", ["wave", "pool"])
async def test_a_trainer_that_polls_gets_what_one_that_waits_gets(refill: str):
    """It does something else between two calls, in which the shards had held their engines."""
    between = 0.05

    async def run(patience: float | None) -> tuple[list[list[Any]], float, int]:
        found: list[list[Any]] = []
        timeouts, clock = 0, asyncio.get_running_loop().time
        begun = clock()
        async with ShardedScheduler(shards(), workload(), config=config(refill=refill)) as rollouts:
            while len(found) < 5:
                try:
                    async with asyncio.timeout(patience):
                        found.append(keys([await rollouts.next_batch()]))
                except TimeoutError:
                    timeouts += 1
                    await asyncio.sleep(between)
                else:
                    await rollouts.update_weights(SimPublisher())
            return found, clock() - begun, timeouts

    batches, seconds, _ = await run(None)
    polled_batches, polled_seconds, timeouts = await run(0.05)
    assert timeouts
    assert polled_batches == batches
    assert polled_seconds <= seconds + 5 * between + 1e-6


# --- groups one by one ---------------------------------------------------------------------------


@pytest.mark.parametrize(("pace", "refill"), [("synchronous", "wave"), ("asynchronous", "pool")])
async def test_streamed_batches_are_the_batches_of_the_same_run_without_streams(
    pace: str, refill: str
):
    """The trainer does nothing in between, so every batch has the same groups."""
    settings = config(pace=pace, refill=refill)
    whole = await to_the_end(shards(), config=settings)
    streamed = await to_the_end(shards(), config=settings, streamed=True)
    check(streamed)
    assert [keys([batch]) for batch in streamed] == [keys([batch]) for batch in whole]


@pytest.mark.parametrize("pace", ["synchronous", "asynchronous"])
async def test_a_stream_that_is_left_goes_on_and_is_ended_by_an_update_or_a_whole_batch(pace: str):
    parts: dict[int, list[Batch]] = {}

    async def some(rollouts: ShardedScheduler, count: int) -> None:
        stream = rollouts.stream()
        for _ in range(count):
            part = await anext(stream)
            parts.setdefault(part.index, []).append(part)
        await stream.aclose()

    async with ShardedScheduler(shards(), workload(), config=config(pace=pace)) as rollouts:
        await some(rollouts, 2)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1e-6):
                await some(rollouts, 4)
        await some(rollouts, 4)
        assert parts[0][-1].complete
        await some(rollouts, 2)
        await rollouts.update_weights(SimPublisher())
        await some(rollouts, 3)
        waiting = asyncio.create_task(some(rollouts, 3))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        whole = await rollouts.next_batch()
        found = [joined(each) for each in parts.values()]
        batches = [*found, whole, *await rest(rollouts)]
    check_all(batches)
    assert [len(batch.groups) for batch in batches[:2]] == [6, 2]
    assert 3 <= len(batches[2].groups) <= 5
    assert [batch.version for batch in batches[:3]] == [0, 0, 1]


@pytest.mark.parametrize("pace", ["synchronous", "asynchronous"])
async def test_updates_come_while_a_group_is_waited_for(pace: str):
    """Each ends the batch with the groups that were taken, and the wait goes on with another."""
    parts: list[Batch] = []
    async with ShardedScheduler(shards(), workload(), config=config(pace=pace)) as rollouts:

        async def take_all() -> None:
            with suppress(PromptsExhausted):
                while True:
                    async for part in rollouts.stream():
                        parts.append(part)

        taking = asyncio.create_task(take_all())
        for _ in range(4):
            await asyncio.sleep(0.5)
            await rollouts.update_weights(SimPublisher())
        await taking
    assert sorted(keys(parts)) == list(range(COUNT))
    indices = [part.index for part in parts]
    assert indices == sorted(indices)
    assert len({(part.index, part.version) for part in parts}) == len(set(indices))
    assert {part.version for part in parts} > {0, 1}
    cut = [
        index for index in set(indices) if not any(p.index == index and p.complete for p in parts)
    ]
    assert cut, "no update came in the middle of a batch"


async def test_a_checkpoint_in_a_stream_has_its_batch_from_the_first_group(tmp_path: Path):
    async with ShardedScheduler(shards(), workload(), config=config()) as rollouts:
        await rollouts.next_batch()
        stream = rollouts.stream()
        got = keys([await anext(stream) for _ in range(3)])
        await rollouts.checkpoint(tmp_path / "saved")
        # It goes on as if nothing had been.
        assert len({*got, *keys([part async for part in stream])}) == 6
    restored = ShardedScheduler(shards(), workload(), config=config())
    restored.restore(tmp_path / "saved")
    async with restored:
        batches = [batch async for batch in by_group(restored)]
    assert batches[0].index == 1
    assert set(got) <= set(keys(batches[:1]))
    assert len(keys(batches)) == len(set(keys(batches))) == COUNT - 6


async def test_every_shard_has_a_share():
    members = shards(3)
    launched: list[int] = []

    def count(_: int) -> None:
        launched[:] = [member.state.in_flight.counters.launched for member in members]

    await to_the_end(members, each=count)
    assert sum(launched) == 4 * COUNT
    assert min(launched) > 4 * COUNT / 5


async def test_rewards_filters_and_group_sizes_work_in_shards():
    seen: list[Any] = []

    async def reward(rollout: Rollout, prompt: Prompt) -> float:
        seen.append(prompt.key)
        return float(len(rollout))

    def accept(group: Group) -> bool:
        return number(group) % 4 != 0

    def number(group: Group) -> int:
        return group.prompt.metadata["n"]

    sizes = [1, 2, 5]
    prompts = [
        Prompt(
            input_ids=np.array([i + 1]),
            key=i,
            group_size=sizes[i % 3],
            metadata={"n": i},
            sampling=SamplingParams(max_new_tokens=20 + i % 7, ignore_eos=True),
        )
        for i in range(COUNT)
    ]
    stop = Samples(10)
    batches = await to_the_end(
        shards(reward=reward, accept=accept),
        prompts=prompts,
        config=config(stop=stop, over_provision=1.5),
    )
    check(batches)
    assert sorted(keys(batches)) == [i for i in range(COUNT) if i % 4]
    assert set(seen) == set(range(COUNT))
    for batch in batches[:-1]:
        assert sum(len(group.rollouts) for group in batch.groups) >= 10
    for group in (group for batch in batches for group in batch.groups):
        assert group.prompt is prompts[number(group)]
        assert [rollout.reward for rollout in group.rollouts] == [
            float(len(rollout)) for rollout in group.rollouts
        ]


@pytest.mark.parametrize("rule", ["mask", "evict"])
@pytest.mark.parametrize("pace", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("bound", [0, 1])
async def test_the_bound_on_staleness_holds_over_all_shards(rule: Any, pace: str, bound: int):
    batches = await to_the_end(
        shards(),
        prompts=workload(60),
        config=config(pace=pace, refill="pool", max_staleness=Staleness(bound, rule)),
    )
    check(batches, bound)
    if rule == "evict":
        for batch in batches:
            assert all(rollout.staleness(batch.version) <= bound for rollout in batch.rollouts)
    else:
        assert sorted(keys(batches)) == list(range(60))


async def test_the_staleness_gate_counts_the_groups_of_all_shards():
    """Without an update, no more than two batches are ever admitted."""
    members = shards(4)

    settings = config(pace="asynchronous", refill="pool", over_provision=8, max_staleness=1)
    async with ShardedScheduler(members, workload(None), config=settings) as rollouts:
        await rollouts.next_batch()
        await asyncio.sleep(1000)
        launched = sum(member.state.in_flight.counters.launched for member in members)
    assert launched == 2 * 6 * 4


async def test_full_batches_pause_the_engines_until_the_next_is_asked_for():
    members = shards(2)

    def tokens() -> int:
        return sum(m.state.in_flight.counters.tokens_generated for m in members)

    async with ShardedScheduler(members, workload(), config=config()) as rollouts:
        await rollouts.next_batch()
        await asyncio.sleep(1)
        before = tokens()
        await asyncio.sleep(1000)
        assert tokens() == before
        assert sum(m.state.in_flight.generating for m in members)
        await rollouts.next_batch()
        assert tokens() > before


async def test_a_slow_shard_does_not_hold_a_batch_up():
    """One engine is twenty times slower. The others fill the batches without it."""

    async def run(fleet: Callable[[], SimFleet]) -> float:
        members = shards(3)
        members[0].more = {"fleet": fleet()}
        loop = asyncio.get_running_loop()
        async with ShardedScheduler(members, workload(None), config=config()) as rollouts:
            started = loop.time()
            for _ in range(4):
                await rollouts.next_batch()
            return loop.time() - started

    usual = await run(lambda: SimFleet(1))
    with_slow = await run(lambda: SimFleet(1, time_scale=20))
    assert with_slow < 4 * usual


# --- shards that are lost ------------------------------------------------------------------------


class Once(SimPublisher):
    """A publisher whose versions cannot be published again."""

    def holds(self, version: int) -> bool:
        return False


async def killing(members: Sequence[Killable], every: float, seed: int) -> None:
    """Kill a shard again and again, at any moment."""
    rng = np.random.default_rng(seed)
    for _ in range(8):
        await asyncio.sleep(float(rng.exponential(every)))
        members[int(rng.integers(len(members)))].kill()


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("pace", ["synchronous", "asynchronous"])
@pytest.mark.parametrize(("survive", "streamed"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))]
)
async def test_a_shard_that_is_killed_is_replaced(
    stored: bool, pace: str, survive: bool, streamed: bool, seed: int
):
    """Shards are killed in generation, in updates and between them. The engines outlive the shard,
    or begin again with the weights of version 0."""
    members = shards(3, stored=stored)
    for member in members if survive else ():
        member.more = {"fleet": SimFleet(1, stream_interval=8)}
    killer = asyncio.create_task(killing(members, 0.3, seed))
    settings = config(pace=pace, max_staleness=2)
    batches = await to_the_end(members, config=settings, streamed=streamed)
    killer.cancel()
    check_all(batches, bound=2)
    assert sum(member.openings for member in members) > 5


async def test_a_shard_whose_process_still_has_the_store_is_opened_later():
    """One that hangs is gone only some time after it was killed. That had ended the run."""
    members = shards(2)

    def kill(batches: int) -> None:
        if batches == 1:
            assert members[0].store is not None
            members[0].store.locked = 3
            members[0].kill()

    batches = await to_the_end(members, each=kill)
    check_all(batches)
    assert members[0].openings == 5


async def test_tokens_of_a_killed_shard_are_not_generated_again():
    """What was saved of a straggler is kept, so the run generates less than without a store."""
    long = SamplingParams(max_new_tokens=2000, ignore_eos=True)
    settings = config(batch_groups=1, over_provision=1, save_interval_s=0.1)

    async def generated(*, stored: bool) -> int:
        members = shards(2, stored=stored)
        prompts = [Prompt(input_ids=np.array([7]), sampling=long)]
        async with ShardedScheduler(members, prompts, config=settings) as rollouts:
            waiting = asyncio.create_task(rollouts.next_batch())
            busy: Killable | None = None
            while busy is None or busy.state.in_flight.counters.tokens_generated < 4000:
                await asyncio.sleep(0.1)
                busy = next((m for m in members if m.state.in_flight.generating), None)
            busy.kill()
            await waiting
            return busy.state.in_flight.counters.tokens_generated

    assert await generated(stored=True) < 9000
    assert await generated(stored=False) == 8000


async def test_a_run_without_any_shard_ends():
    class Broken(Killable):
        def _make(self) -> ShardParts:
            if self.openings:
                raise ShardLost("the machine is gone")
            return super()._make()

    members = [Broken("a"), Broken("b")]
    settings = config(health=Health(fleet_wait_s=100))
    async with ShardedScheduler(members, workload(), config=settings) as rollouts:
        for member in members:
            member.kill()
        with pytest.raises(FleetLost, match="no shard is left"):
            await rollouts.next_batch()
        with pytest.raises(FleetLost):
            await rollouts.next_batch()


# --- updates -------------------------------------------------------------------------------------


class Failing(SimPublisher):
    """Fails for the engines of one shard, and for others not at all."""

    def __init__(self, fails: Callable[[Any], bool], *, again: bool) -> None:
        super().__init__()
        self.fails = fails
        self.again = again
        self.calls: list[list[str]] = []

    def holds(self, version: int) -> bool:
        return self.again

    async def publish(self, version: int, engines: Sequence[Any]) -> Any:
        self.calls.append([engine.name for engine in engines])
        good = [engine for engine in engines if not self.fails(engine)]
        bad = {engine.name: RuntimeError("no") for engine in engines if self.fails(engine)}
        return {**await super().publish(version, good), **bad}


def named(count: int) -> list[Killable]:
    """Shards whose engines have names of their own, as addresses are."""

    class Named(SimFleet):
        def __init__(self, name: str) -> None:
            super().__init__(1)
            self._engines = (SimEngine(name, SimConfig(stream_interval=8)),)

    return [Killable(f"s{i}", fleet=Named(f"engine-{i}")) for i in range(count)]


async def test_shards_publish_together():
    members = named(3)
    publisher = Failing(lambda engine: False, again=True)
    async with ShardedScheduler(members, workload(), config=config()) as rollouts:
        await rollouts.next_batch()
        report = await rollouts.update_weights(publisher, version=7)
        assert report.version == rollouts.version == 7
        assert not report.quarantined
        assert (await rollouts.next_batch()).version == 7
    assert [sorted(call) for call in publisher.calls] == [["engine-0", "engine-1", "engine-2"]]


async def test_a_shard_that_did_not_take_the_version_holds_until_it_has_caught_up():
    members = named(2)
    broken = True
    publisher = Failing(lambda engine: broken and engine.name == "engine-0", again=True)
    batches: list[Batch] = []
    async with ShardedScheduler(members, workload(), config=config()) as rollouts:
        batches.append(await rollouts.next_batch())
        report = await rollouts.update_weights(publisher)
        assert set(report.quarantined) == {"s0"}
        assert rollouts.version == 1
        await asyncio.sleep(0.1)
        before = members[0].state.in_flight.counters.tokens_generated
        batches.append(await rollouts.next_batch())
        assert members[0].state.in_flight.counters.tokens_generated == before
        broken = False
        await asyncio.sleep(100)
        assert members[0].state.weights.versions.trainer == 1
        async for batch in rollouts:
            batches.append(batch)
            await rollouts.update_weights(publisher)
    check_all(batches)


async def test_an_update_that_reaches_no_shard_changes_nothing():
    members = named(2)
    batches: list[Batch] = []
    async with ShardedScheduler(members, workload(), config=config()) as rollouts:
        batches.append(await rollouts.next_batch())
        with pytest.raises(RefitError, match="reached no shard"):
            await rollouts.update_weights(Failing(lambda _: True, again=True))
        assert rollouts.version == 0
        async for batch in rollouts:
            batches.append(batch)
    check_all(batches)


async def test_no_shard_with_the_version_is_said():
    members = named(2)
    async with ShardedScheduler(members, workload(), config=config()) as rollouts:
        await rollouts.next_batch()
        await rollouts.update_weights(Once())
        for member in members:
            # The engines begin again without the version, and nobody can publish it again.
            member.more = {"fleet": SimFleet(1)}
            member.kill()
        with pytest.raises(RefitError, match="no shard has version 1"):
            await rest(rollouts)
        await rollouts.update_weights(SimPublisher(), version=1)
        assert (await rollouts.next_batch()).version == 1


async def test_a_cancelled_update_runs_to_its_end_in_every_shard():
    class Slow(SimPublisher):
        async def publish(self, version: int, engines: Sequence[Any]) -> Any:
            await asyncio.sleep(10)
            return await super().publish(version, engines)

    members = named(2)
    async with ShardedScheduler(members, workload(), config=config()) as rollouts:
        await rollouts.next_batch()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await rollouts.update_weights(Slow())
        report = await rollouts.update_weights(SimPublisher())
        assert report.version == 2
        assert [m.state.weights.versions.trainer for m in members] == [2, 2]


async def test_updates_come_while_batches_are_waited_for():
    """A batch that is offered and not taken is composed again after an update, with its masks."""
    members = shards(3)
    batches: list[Batch] = []

    async def updating(rollouts: ShardedScheduler) -> None:
        while True:
            await asyncio.sleep(0.7)
            await rollouts.update_weights(SimPublisher())

    settings = config(pace="asynchronous", max_staleness=1)
    async with ShardedScheduler(members, workload(), config=settings) as rollouts:
        task = asyncio.create_task(updating(rollouts))
        try:
            while True:
                try:
                    async with asyncio.timeout(0.31):
                        batches.append(await rollouts.next_batch())
                except TimeoutError:
                    continue
        except PromptsExhausted:
            task.cancel()
    check_all(batches, bound=1)


# --- nothing waits for ever ----------------------------------------------------------------------

CALLS = ["ask", "tell", "update", "checkpoint", "open", "close"]
"""Those that have a deadline. An evaluation takes as long as it takes, while its shard answers."""


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("stored", [True, pytest.param(False, marks=pytest.mark.long)])
async def test_a_shard_that_hangs_in_a_call_is_lost(tmp_path: Path, call: str, stored: bool):
    """The other one goes on, and the run has every prompt once."""
    members = shards(2, stored=stored)

    settings = config(max_staleness=2, health=Health(fleet_wait_s=100))
    rollouts = ShardedScheduler(members, workload(), config=settings)
    async with asyncio.timeout(36_000), rollouts:
        batches = [await rollouts.next_batch()]
        members[0].hangs = lambda name: name == call
        if call in ("open", "close"):
            members[0].kill()
        for _ in range(2):
            await rollouts.update_weights(SimPublisher())
            batches.append(await rollouts.next_batch())
        await rollouts.evaluate(list(workload(4)), group_size=4)
        if stored:
            with suppress(StoreError):
                await rollouts.checkpoint(tmp_path / "saved")
        batches += await rest(rollouts)
    check_all(batches, bound=2)


@pytest.mark.parametrize("call", CALLS)
async def test_a_run_of_which_all_shards_hang_ends(tmp_path: Path, call: str):
    """They are opened again and again, and hang again."""
    members = shards(2)
    settings = config(health=Health(fleet_wait_s=100))
    rollouts = ShardedScheduler(members, workload(None), config=settings)
    async with asyncio.timeout(36_000), rollouts:
        await rollouts.next_batch()
        for member in members:
            member.hangs = lambda name: name == call
            if call in ("open", "close"):
                member.kill()

        async def train() -> None:
            while True:
                await rollouts.update_weights(SimPublisher())
                await rollouts.next_batch()
                await rollouts.checkpoint(tmp_path / "saved")

        with pytest.raises((FleetLost, RefitError, StoreError)):
            await train()


async def test_prompts_of_a_shard_that_missed_an_update_are_generated_by_the_others():
    """At the end of the prompts the trainer had waited for them for ever."""
    members = named(2)
    publisher = Failing(lambda engine: engine.name == "engine-0", again=False)
    async with ShardedScheduler(members, workload(24), config=config()) as rollouts:
        batches = [await rollouts.next_batch()]
        report = await rollouts.update_weights(publisher)
        assert set(report.quarantined) == {"s0"}
        batches += await rest(rollouts)
        await asyncio.sleep(100)
        assert members[0].state.weights.versions.trainer == 0
        # The shard takes part again, and what it has of them is not counted.
        await rollouts.update_weights(SimPublisher())
        assert members[0].state.weights.versions.trainer == 2
        await asyncio.sleep(1000)
    check_all(batches, 24)


async def test_pushed_prompts_of_a_shard_that_missed_an_update_are_generated_by_the_others():
    """The trainer pushes the prompts of a step, and no more before it has had them."""
    members, queue = named(2), PromptQueue()
    prompts = list(workload(24))
    publisher = Failing(lambda engine: engine.name == "engine-0", again=False)
    batches: list[Batch] = []
    settings = config(over_provision=1.0)
    async with ShardedScheduler(members, queue, config=settings) as rollouts:
        queue.put(*prompts[:12])
        waiting = asyncio.create_task(rollouts.next_batch())
        await asyncio.sleep(0.1)
        await rollouts.update_weights(publisher)
        batches.append(await waiting)
        batches.append(await rollouts.next_batch())
        queue.put(*prompts[12:])
        queue.close()
        batches = batches + await rest(rollouts)
    check_all(batches, 24)


@pytest.mark.parametrize("lost", [True, False])
async def test_a_shard_that_does_not_come_back_is_waited_for_no_longer_than_a_fleet(lost: bool):
    """It is opened again and again, or loads the version again and again."""
    members = named(2)
    publisher = Failing(lambda engine: not lost and engine.name == "engine-0", again=True)

    settings = config(health=Health(fleet_wait_s=200))
    clock = asyncio.get_running_loop().time
    async with ShardedScheduler(members, workload(24), config=settings) as rollouts:
        await rollouts.next_batch()
        if lost:
            members[0].hangs = lambda name: name == "open"
            members[0].kill()
        await rollouts.update_weights(publisher)
        began = clock()
        assert len(keys(await rest(rollouts))) == 18
        assert 200 < clock() - began < 300


async def test_a_shard_that_is_late_for_an_update_does_not_keep_the_others():
    members = named(2)
    settings = config(timeouts=Timeouts(refit_s=100, control_s=10))
    clock = asyncio.get_running_loop().time
    async with ShardedScheduler(members, workload(), config=settings) as rollouts:
        await rollouts.next_batch()
        members[0].hangs = lambda name: name == "update"
        began = clock()
        report = await rollouts.update_weights(SimPublisher())
        assert set(report.quarantined) == {"s0"}
        assert clock() - began < 150
        assert (await rollouts.next_batch()).version == 1


# --- evaluations ---------------------------------------------------------------------------------


async def test_an_evaluation_is_split_and_in_order():
    members = shards(3)
    asked = list(workload(10, seed=9))
    async with ShardedScheduler(members, workload(), config=config()) as rollouts:
        batches = [await rollouts.next_batch()]
        evaluating = asyncio.create_task(rollouts.evaluate(asked, group_size=4))
        await asyncio.sleep(0.01)
        members[1].kill()
        evaluated = await evaluating
        batches += [batch async for batch in rollouts]
    assert keys([evaluated]) == list(range(10))
    assert [len(group.rollouts) for group in evaluated.groups] == [4] * 10
    assert all(a.prompt is b for a, b in zip(evaluated.groups, asked, strict=True))
    ids = {rollout.rollout_id for rollout in evaluated.rollouts}
    assert len(ids) == 40
    assert not ids & {rollout.rollout_id for batch in batches for rollout in batch.rollouts}
    check_all(batches)


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_a_checkpoint_is_one_cut_of_all_shards(tmp_path: Path, after: int):
    """Nothing is lost or doubled, whatever the run did after its checkpoint."""

    batches: list[Batch] = []
    async with ShardedScheduler(shards(), workload(), config=config()) as rollouts:
        for _ in range(after):
            batches.append(await rollouts.next_batch())
            await rollouts.update_weights(SimPublisher())
        # A batch that is generated, and not taken, is in no file twice.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await rollouts.next_batch()
        await rollouts.checkpoint(tmp_path / "saved")
        await rollouts.checkpoint(tmp_path / "saved")
        await rollouts.next_batch()
    restored = ShardedScheduler(shards(), workload(), config=config())
    restored.restore(tmp_path / "saved")
    async with restored:
        if restored.version:
            await restored.update_weights(SimPublisher(), version=restored.version)
        batches += await rest(restored)
    check_all(batches)
    assert len(list((tmp_path / "saved").iterdir())) == 2


def test_a_checkpoint_of_a_newer_format_is_refused(tmp_path: Path):
    (tmp_path / "collector").write_bytes(encode([9, ["of", "another"], {"form": 1}]))
    with pytest.raises(StoreError, match=r"has format 9, .* upgrade aprilsched"):
        ShardedScheduler(shards(), workload(), config=config()).restore(tmp_path)


@pytest.mark.parametrize("comes_back", [True, False])
async def test_what_a_checkpoint_has_of_a_shard_outlives_the_shard(
    tmp_path: Path, comes_back: bool
):
    """Only the shard's file had its prompts, so their groups were lost with its store."""

    async with ShardedScheduler(shards(2), workload(), config=config()) as rollouts:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await rollouts.next_batch()
        await rollouts.checkpoint(tmp_path / "saved")
    members = shards(2)
    settings = config(health=Health(fleet_wait_s=100))
    restored = ShardedScheduler(members, workload(), config=settings)
    restored.restore(tmp_path / "saved")
    async with restored:
        members[0].store = Mortal()
        members[0].hangs = lambda name: name == "open" and not comes_back
        members[0].kill()
        batches = await rest(restored)
    check_all(batches)


async def test_a_checkpoint_that_cannot_be_written_or_read_says_why(tmp_path: Path):
    async with ShardedScheduler(shards(stored=False), workload()) as rollouts:
        with pytest.raises(ConfigError, match="needs a store in every shard"):
            await rollouts.checkpoint(tmp_path / "saved")
    (tmp_path / "file").write_text("")
    async with ShardedScheduler(shards(), workload()) as rollouts:
        with pytest.raises(StoreError, match="cannot be written"):
            await rollouts.checkpoint(tmp_path / "file")
        with pytest.raises(ConfigError, match="leave acknowledge out"):
            await rollouts.checkpoint(tmp_path / "saved", acknowledge=False)
        await rollouts.checkpoint(tmp_path / "saved")
    with pytest.raises(StoreError, match="no checkpoint"):
        ShardedScheduler(shards(), workload()).restore(tmp_path / "other")
    with pytest.raises(StoreError, match="give the same ones"):
        ShardedScheduler(shards(2), workload()).restore(tmp_path / "saved")
    (tmp_path / "saved" / "collector").write_bytes(b"no")
    with pytest.raises(StoreError, match="cannot be read"):
        ShardedScheduler(shards(), workload()).restore(tmp_path / "saved")


async def test_stores_of_another_run_are_refused():
    members = shards()
    async with ShardedScheduler(members, workload(), config=config()) as rollouts:
        await rollouts.next_batch()
    with pytest.raises(ConfigError, match="has another run"):
        async with ShardedScheduler(members, workload(), config=config()):
            pass


# --- one log -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [True, False])
async def test_the_logs_become_one_run_folder(tmp_path: Path, stored: bool):
    """The summary of the merged log has each rollout once, also where shards were killed."""
    members = shards(3, stored=stored)
    settings = config(pace="asynchronous")

    killer = asyncio.create_task(killing(members, 0.5, 1))
    batches = await to_the_end(members, config=settings, folder=tmp_path / "run")
    killer.cancel()
    assert sum(member.openings for member in members) > 3
    summary = merged_run(tmp_path / "run", tmp_path / "merged", RunSettings(scheduler=settings))
    rollouts = [rollout for batch in batches for rollout in batch.rollouts]
    assert summary.batches == len(batches)
    assert summary.rollouts.delivered == len(rollouts)
    assert summary.rollouts.lost == summary.rollouts.duplicated == 0
    assert summary.rollouts.in_flight == 0
    assert summary.engines == 3
    assert summary.tokens.delivered == sum(map(len, rollouts))
    assert summary.tokens.generated >= summary.tokens.delivered
    read = read_run(tmp_path / "merged")
    delivered = [each.rollout_id for delivery in read.deliveries for each in delivery.rollouts]
    assert delivered == [rollout.rollout_id for rollout in rollouts]
    engines = {attempt.engine for attempt in read.attempts}
    assert engines == {f"shard-{index}/sim-0" for index in range(3)}
    assert [update.version for update in read.updates] == list(range(1, len(batches) + 1))


def test_a_folder_without_shards_is_refused(tmp_path: Path):
    with pytest.raises(RunFolderError, match="no whole run folder"):
        merged_run(tmp_path / "nothing", tmp_path / "merged")


async def test_metrics_of_shards_have_their_names():
    everything = {name: Metrics() for name in ("a", "b")}
    members = [Killable(name, listeners=[metrics]) for name, metrics in everything.items()]
    await to_the_end(members)
    found: Counter[str] = Counter()
    for family in MetricsCollector(everything).collect():
        for sample in family.samples:
            assert sample.labels["shard"] in everything
            if sample.name == "aprilsched_rollouts_delivered_total":
                found[sample.labels["shard"]] += int(sample.value)
    assert found.total() == 4 * COUNT
    assert set(found) == {"a", "b"}


# --- what is refused, and what ends ---------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"over_provision": "auto"},
        {"refill": "buckets"},
        {"refill": "tail"},
        {"over_provision": 1.0, "max_staleness": Staleness(0, "restart")},
        {"straggler": "choose"},
        {"stop": Tokens(1000)},
        {"max_staleness": Staleness(1, "finish")},
        {"follow_weights": True, "straggler": "run"},
        {"dispatch": Dispatch(max_in_flight=3)},
    ],
)
def test_what_needs_the_whole_view_is_refused(changes: dict[str, Any]):
    with pytest.raises(ConfigError, match="no shard sees the others"):
        ShardedScheduler(shards(), workload(), config=config(**changes))


def test_shards_need_names_of_their_own():
    for members in ([], [Killable("a"), Killable("a")], [Killable("a/b")]):
        with pytest.raises(ConfigError):
            ShardedScheduler(members, workload())


async def test_a_source_that_fails_ends_the_run():
    def prompts() -> Any:
        yield from workload(20)
        raise RuntimeError("the disk")

    async with ShardedScheduler(shards(), prompts(), config=config()) as rollouts:
        with pytest.raises(RuntimeError, match="the disk"):
            await rest(rollouts)


async def test_bad_prompts_are_passed_over():
    prompts: list[Any] = [*workload(6), "no prompt", *list(workload(20))[6:]]
    async with ShardedScheduler(shards(), prompts, config=config()) as rollouts:
        batches = [batch async for batch in rollouts]
    assert sorted(keys(batches)) == list(range(20))


async def test_calls_end_with_the_scheduler():
    rollouts = ShardedScheduler(shards(), PromptQueue(), config=config())
    with pytest.raises(SchedulerClosed):
        await rollouts.next_batch()
    async with rollouts:
        waiting = asyncio.create_task(rollouts.next_batch())
        await asyncio.sleep(1)
        with pytest.raises(ConfigError, match="waiting already"):
            await rollouts.next_batch()
    with pytest.raises(SchedulerClosed):
        await waiting
    with pytest.raises(SchedulerClosed):
        await rollouts.update_weights(SimPublisher())
    await rollouts.close()


async def test_a_shard_that_cannot_be_opened_closes_the_others():
    members = shards(2)
    members[1].more = {"reward": None, "fleet": SimFleet(1), "nonsense": 1}
    with pytest.raises(TypeError):
        async with ShardedScheduler(members, workload()):
            pass
    members[1].more = {}
    members[0].store, members[1].store = None, None
    async with ShardedScheduler(members, workload(), config=config()) as rollouts:
        await rollouts.next_batch()
