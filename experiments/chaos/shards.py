"""Runs one seed of shards that hang, wake up late and die in any of their calls.

The trainer uses them as one scheduler: it polls, streams, evaluates, cancels and updates, and its
reward function raises for some prompts.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aprilsched import (
    Batch,
    LongTailWorkload,
    MemoryStore,
    Prompt,
    Rollout,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
)
from aprilsched.config import Health
from aprilsched.core.state.saved import Saved, Snapshot
from aprilsched.engines.base import Engine
from aprilsched.engines.sim import SimConfig, SimEngine
from aprilsched.errors import AprilschedError, FleetLost, PromptsExhausted, RefitError, StoreError
from aprilsched.shards import LocalShard, ShardedScheduler, ShardLost, ShardParts
from aprilsched.types import NO_VERSION
from experiments.chaos.history import History, Outcome, recorded
from experiments.chaos.truth import TruthModel, true_versions

__all__ = ["run"]

CALLS = ("open", "tell", "ask", "update", "evaluate", "checkpoint", "close")
ENDED, LOST, SAVED = "the prompts ended", "no shard is left", "saved"
PROMPTS = 40
PATIENCE_S = 4 * 3600.0
"""Of virtual time: a call that takes longer hangs."""
BOUND = 2
"""On staleness."""
AGAIN_S = 1.0
"""Between two calls of a trainer that polls."""


class _Store(MemoryStore):
    """Writes nothing after the end of its process."""

    dead = False

    def open(self) -> Saved | None:
        self.dead = False
        return super().open()

    def save(self, snapshot: Snapshot, *, durable: bool) -> None:
        if not self.dead:
            super().save(snapshot, durable=durable)


class _Fleet(SimFleet):
    """One engine, which outlives the shard."""

    def __init__(self, name: str) -> None:
        super().__init__(1)
        machine = SimConfig(stream_interval=8, model=TruthModel)
        self._engines = (SimEngine(name, machine),)


class _Peer(LocalShard):
    """A shard whose calls hang for ever or for a while, and whose process dies before or after what
    they do."""

    def __init__(
        self, number: int, draw: random.Random, rates: Mapping[str, float], *, stored: bool
    ) -> None:
        self._draw = draw
        self._rates = rates
        self._store = _Store() if stored else None
        self._fleet = _Fleet(f"engine-{number}")
        self.begun = False
        self._stopped = False
        super().__init__(f"shard-{number}", self._made)

    def _made(self) -> ShardParts:
        return ShardParts(fleet=self._fleet, store=self._store, reward=_reward)

    async def _met(self, call: Coroutine[Any, Any, Any]) -> Any:
        name, draw = call.__name__, self._draw
        # A run whose first opening fails is no run.
        rate = self._rates[name] if self.begun else 0.0
        what = draw.choice(["hangs", "wakes", "dies", "is killed"]) if draw.random() < rate else ""
        try:
            if what == "hangs" or self._stopped:
                # How long an evaluation takes is known to its shard only, which must answer asks.
                self._stopped = self._stopped or name == "evaluate"
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(1e9)
                # Some that hang do not even end when they are cancelled.
                await asyncio.sleep(draw.choice([0.0, 1e9]))
            if what == "wakes":
                await asyncio.sleep(draw.expovariate(1 / 30))
            if what == "dies":
                self._die()
        except BaseException:
            call.close()
            raise
        answer = await call
        if what == "is killed":
            self._die()
        return answer

    def _die(self) -> None:
        if self._store is not None:
            self._store.dead = True
        raise ShardLost("killed")

    async def open(self, *arguments: Any, **named: Any) -> Any:
        self._stopped = False
        opened = await self._met(super().open(*arguments, **named))
        self.begun = True
        return opened

    async def tell(self, orders: Any) -> Any:
        return await self._met(super().tell(orders))

    async def ask(self) -> Any:
        return await self._met(super().ask())

    async def update(self, publisher: Any, version: int) -> Any:
        return await self._met(super().update(publisher, version))

    async def evaluate(self, prompts: Any, group_size: int) -> Any:
        return await self._met(super().evaluate(prompts, group_size))

    async def checkpoint(self, path: Path) -> Any:
        return await self._met(super().checkpoint(path))

    async def close(self) -> None:
        await self._met(super().close())


class _Publisher(SimPublisher):
    """Engines refuse what it brings, and it may have the weights for later or not."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self._draw = draw
        self._share = draw.choice([0.0, 0.1, 0.4])
        self._again = draw.random() < 0.5

    def holds(self, version: int) -> bool:
        return self._again

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        bad = [engine for engine in engines if self._draw.random() < self._share]
        good = [engine for engine in engines if engine not in bad]
        refused = {engine.name: RuntimeError("its disk is full") for engine in bad}
        return {**await super().publish(version, good), **refused}


def _fails(key: Any) -> bool:
    return key % 20 == 7


def _reward(rollout: Rollout, prompt: Prompt) -> float:
    if _fails(prompt.key):
        raise KeyError(prompt.key)
    return float(len(rollout))


def run(seed: int, *, aloud: bool = False, lines: int = 200) -> Outcome:
    """Run a seed. Complaints are in the outcome; nothing is raised."""
    outcome, history = Outcome(seed), History(aloud=aloud)
    with tempfile.TemporaryDirectory() as folder:
        return recorded(outcome, history, _lives(outcome, Path(folder)), lines=lines)


async def _lives(outcome: Outcome, folder: Path) -> None:
    """A run, in one process after the other: each begins with the checkpoint of the one before."""
    draw = random.Random(outcome.seed)
    lengths = LongTailWorkload(median=60, sigma=0.9, cap=600, count=PROMPTS, group_size=4, seed=3)
    settings = SchedulerConfig(
        batch_groups=6,
        group_size=4,
        over_provision=draw.choice([1.0, 2.0]),
        pace=draw.choice(["synchronous", "asynchronous"]),
        refill=draw.choice(["wave", "pool"]),
        max_staleness=BOUND,
        health=Health(fleet_wait_s=draw.choice([100.0, 600.0])),
    )
    count, stored = draw.choice([2, 3]), draw.random() < 0.7
    batches: list[Batch] = []
    while not outcome.ending or outcome.ending[-1] == SAVED:
        rates = {name: draw.choice([0.0, 0.0, 0.01, 0.05]) for name in CALLS}
        peers = [_Peer(number, draw, rates, stored=stored) for number in range(count)]
        scheduler = ShardedScheduler(peers, lengths, config=settings)
        if outcome.ending:
            scheduler.restore(folder)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await scheduler.__aenter__()
            trainer = _Trainer(scheduler, draw, batches, folder if stored else None)
            outcome.ending.append(await trainer.train())
        finally:
            async with asyncio.timeout(PATIENCE_S):
                await scheduler.close()
    _check(outcome, batches)
    outcome.seconds = asyncio.get_running_loop().time()


class _Trainer:
    """Takes every batch.

    Args:
        batches: those of the lives before; its own are appended.
        folder: where it may save a checkpoint, which ends its life.
    """

    def __init__(
        self,
        scheduler: ShardedScheduler,
        draw: random.Random,
        batches: list[Batch],
        folder: Path | None,
    ) -> None:
        self._scheduler = scheduler
        self._draw = draw
        self._batches = batches
        self._folder = folder
        self._publisher = _Publisher(draw)
        self._polls = draw.random() < 0.5

    async def train(self) -> str:
        """Returns how it ended."""
        scheduler, draw = self._scheduler, self._draw
        if scheduler.version:
            # The engines are new ones.
            await self._repair(version=scheduler.version)
        while True:
            try:
                batch = await self._call(scheduler.next_batch(), polls=self._polls)
                if batch is None:
                    await asyncio.sleep(AGAIN_S)
                    continue
                self._batches.append(batch)
                if draw.random() < 0.1:
                    prompts = LongTailWorkload(median=60, cap=600, count=4, group_size=2, seed=5)
                    evaluating = scheduler.evaluate(list(prompts), group_size=2)
                    await self._call(evaluating, polls=draw.random() < 0.3)
                if self._folder is not None and draw.random() < 0.1:
                    with suppress(StoreError):
                        await self._call(scheduler.checkpoint(self._folder))
                        return SAVED
                updating = scheduler.update_weights(self._publisher)
                await self._call(updating, polls=draw.random() < 0.1)
            except PromptsExhausted:
                return ENDED
            except RefitError:
                await self._repair()
            except FleetLost:
                return LOST
            except AprilschedError as error:
                return repr(error)

    async def _repair(self, version: int | None = None) -> None:
        """No shard has the version, and the next update repairs that, or the one after it."""
        with suppress(RefitError):
            await self._call(self._scheduler.update_weights(self._publisher, version=version))

    async def _call(self, work: Coroutine[Any, Any, Any], *, polls: bool = False) -> Any:
        """What a call returns; None if it is cancelled before."""
        task = asyncio.ensure_future(work)
        if polls:
            await asyncio.wait([task], timeout=self._draw.choice([0.0, 0.1, 1.0, 10.0]))
            task.cancel()
        done, _ = await asyncio.wait([task], timeout=PATIENCE_S)
        if not done:
            raise RuntimeError(f"{work.__qualname__} has not come back for {PATIENCE_S:g} s")
        return None if task.cancelled() else task.result()


def _check(outcome: Outcome, batches: Sequence[Batch]) -> None:
    complain = outcome.complaints.append
    times = Counter[Any](group.prompt.key for batch in batches for group in batch.groups)
    twice = sorted(key for key, count in times.items() if count > 1)
    if twice:
        complain(f"prompts {twice} are delivered twice")
    wanted: set[Any] = {key for key in range(PROMPTS) if not _fails(key)}
    if outcome.ending[-1] not in (ENDED, LOST):
        complain(f"the run ended with {outcome.ending[-1]}")
    if outcome.ending[-1] == ENDED and times.keys() != wanted:
        complain(f"prompts {sorted(wanted ^ times.keys())} are missing, or failed and came")
    if [batch.index for batch in batches] != list(range(len(batches))):
        complain(f"the batches are {[batch.index for batch in batches]}")
    rollouts = [(batch, rollout) for batch in batches for rollout in batch.rollouts]
    for batch, rollout in rollouts:
        name = f"rollout {rollout.rollout_id} of batch {batch.index}"
        truth = true_versions(rollout.logprobs, rollout.versions != NO_VERSION)
        if rollout.versions_exact and (truth != rollout.versions).any():
            complain(f"{name} has versions that are not its own")
        counted = rollout.versions[rollout.loss_mask]
        if counted.size and not batch.version - BOUND <= counted.min() <= batch.version:
            complain(f"{name} is too stale")
    outcome.figures = {
        "rollouts": len(rollouts),
        "tokens": sum(len(rollout) for _, rollout in rollouts),
    }
