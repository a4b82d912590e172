"""A run in shards in virtual time: the core of each shard, the collector, and modelled engines.

The decisions are those of production: the same core, the same collector and the same reporter. Only
messages are modelled, which take `latency` seconds in each direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from aprilsched.config import SchedulerConfig
from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.core.messages import facts as of
from aprilsched.core.scheduler import Scheduler
from aprilsched.driver.loop import EventLoop
from aprilsched.engines.sim.settings import SimConfig
from aprilsched.shards.base import Opened, Orders, shard_config
from aprilsched.shards.collector import Collector, Post
from aprilsched.shards.local import Reporter
from aprilsched.simulation import NEVER, Costs
from aprilsched.simulation.virtual import Agenda, ModelledEngine, ModelledTrainer
from aprilsched.telemetry.base import AnyListener
from aprilsched.types import Prompt

__all__ = ["Messages", "ShardedSimulation"]


@dataclass(slots=True)
class Messages:
    """Numbers of messages between the collector and the shards.

    Attributes:
        orders: messages to shards, without those of updates.
        news: messages from shards, without those of updates.
        updates: messages of updates, in both directions.
    """

    orders: int = 0
    news: int = 0
    updates: int = 0


class _Shard:
    """The core of one shard, with its engines."""

    def __init__(
        self,
        post: Post,
        config: SchedulerConfig,
        agenda: Agenda,
        engines: int,
        costs: Costs,
        listeners: Sequence[AnyListener],
        wake: Callable[[], None],
        updated: Callable[[of.UpdateFinished], None],
    ) -> None:
        self.post = post
        self.asking = False
        self.held = False
        self._costs, self._agenda = costs, agenda
        core = Scheduler(config)
        self.state = core.state
        self.reporter = Reporter(lambda: core.state, wake)
        self._loop = EventLoop(core, [self.reporter, *listeners], clock=lambda: agenda.now)
        self.feed = self._loop.feed
        model = SimConfig(make_tokens=False, stream_interval=NEVER)
        self.engines = {
            name: ModelledEngine(name, model, agenda, self.feed, pause_seconds=costs.pause_seconds)
            for name in (f"{post.name}/sim-{index}" for index in range(engines))
        }
        nothing: Callable[[object], None] = lambda _: None  # noqa: E731
        self._loop.performers.update(
            {
                of.PromptsRequested: nothing,  # Prompts come with the orders.
                do.Send: lambda c: self.engines[c.engine].send(c),
                do.Abort: lambda c: self.engines[c.engine].abort(c),
                do.Pause: lambda c: self.engines[c.engine].pause(c),
                do.Flush: lambda c: self.engines[c.engine].flush(c),
                do.Continue: lambda c: self.engines[c.engine].resume(),
                do.Verify: lambda c: self.engines[c.engine].verify(),
                of.RefitBegun: self._refit,
                of.GroupDropped: nothing,
                of.UpdateFinished: updated,
                do.Offer: lambda c: self.feed(ev.BatchTaken(index=c.offered.index)),
                do.WithdrawOffer: nothing,
                do.Deliver: self._deliver,
            }
        )

    def open(self) -> Opened:
        infos = tuple(
            ev.EngineInfo(name=name, version=0, kv_tokens=engine.batcher.config.kv_tokens)
            for name, engine in self.engines.items()
        )
        self.feed(ev.Opened(engines=infos))
        self.reporter.opened()
        self.feed(ev.BatchRequested())
        return Opened(version=0, run_version=0, engines=len(infos))

    def take(self, orders: Orders) -> None:
        self.reporter.step = orders.step
        if orders.held != self.held:
            self.held = orders.held
            self.feed(ev.HoldChanged(held=orders.held))
        if orders.prompts:
            self.feed(ev.PromptsArrived(prompts=orders.prompts, partial=True))

    def _deliver(self, command: do.Deliver) -> None:
        self.reporter.deliver(command.batch.index, command.batch.groups)
        self.feed(ev.BatchRequested())

    def _refit(self, command: of.RefitBegun) -> None:
        def loaded() -> None:
            for name in command.engines:
                self.engines[name].refit(command.version)

        self._agenda.after(self._costs.refit_seconds, loaded)


@dataclass(slots=True)
class _Update:
    version: int
    missing: int


class ShardedSimulation:
    """One simulated run in shards, which :meth:`run` carries out.

    Args:
        config: configuration of the whole run.
        prompts: the prompts; each response has the length that ``max_new_tokens`` gives.
        shards: number of shards.
        engines: number of engines of all shards together, a multiple of `shards`.
        latency: seconds that a message takes.
        listeners: get the facts of the collector.
        of_shard: makes the listeners of a shard by its number.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        prompts: Iterable[Prompt],
        *,
        shards: int,
        engines: int,
        batches: int,
        latency: float = 0.001,
        costs: Costs | None = None,
        listeners: Sequence[AnyListener] = (),
        of_shard: Callable[[int], Sequence[AnyListener]] = lambda _: (),
    ) -> None:
        self.agenda = Agenda()
        self.messages = Messages()
        self._latency = latency
        self._prompts: Iterator[Prompt] = iter(prompts)
        self._listeners = listeners
        self._collector = Collector(config, [f"shard-{index}" for index in range(shards)])
        self._update: _Update | None = None
        self._told: dict[int, bool] = {}
        costs = costs or Costs()
        self.shards = [
            _Shard(
                post,
                shard_config(config),
                self.agenda,
                engines // shards,
                costs,
                of_shard(index),
                lambda index=index: self._wake(self.shards[index]),
                lambda command, index=index: self._answered(self.shards[index], command),
            )
            for index, post in enumerate(self._collector.posts)
        ]
        self.trainer = ModelledTrainer(
            self.agenda,
            self._of_trainer,
            batches=batches,
            update_every=1,
            train_seconds=costs.train_seconds,
            batch_groups=config.batch_groups,
            streamed=False,
        )

    def run(self) -> None:
        """Run to the last batch."""
        for shard in self.shards:
            self._collector.opened(shard.post, shard.open())
            post = shard.post
            self._tell(of.ShardOpened(shard=post.name, slot=post.slot, opening=1, version=0))
        self.trainer.begin()
        while not self.trainer.done:
            if not self.agenda.step():
                raise AssertionError("nothing is due and the trainer still waits")

    # --- the trainer ---------------------------------------------------------------------------

    def _of_trainer(self, event: ev.Event) -> None:
        if isinstance(event, ev.BatchRequested):
            self._tell(of.BatchRequested())
            self._collector.request()
            self._act()
        elif isinstance(event, ev.UpdateRequested):
            self._begin_update(event.version)

    def _begin_update(self, version: int) -> None:
        self._collector.updating = True
        self._collector.withdraw_offer()
        self._tell(of.UpdateBegun(version=version))
        self._update = _Update(version, len(self.shards))
        for shard in self.shards:
            self.messages.updates += 1
            self.agenda.after(
                self._latency, lambda s=shard: s.feed(ev.UpdateRequested(version=version))
            )

    def _answered(self, shard: _Shard, command: of.UpdateFinished) -> None:
        self.messages.updates += 1
        self.agenda.after(self._latency, lambda: self._note_answer(shard, command))

    def _note_answer(self, shard: _Shard, command: of.UpdateFinished) -> None:
        update = self._update
        if update is None or command.cause:
            raise AssertionError(f"an update failed: {command.cause}")
        shard.post.version = command.version
        update.missing -= 1
        if update.missing:
            return
        self._update = None
        self._collector.updated(update.version)
        self._collector.updating = False
        self._tell(of.UpdateFinished(version=update.version))
        self.trainer.finish_update(of.UpdateFinished(version=update.version))
        self._act()

    # --- decisions -----------------------------------------------------------------------------

    def _act(self) -> None:
        collector = self._collector
        batch = collector.offer()
        if batch is not None:
            self._tell(of.BatchOffered(batch=batch.index, version=batch.version))
            collector.take()
            rollouts = of.delivered_rollouts(batch)
            self._tell(
                of.BatchDelivered(batch=batch.index, version=batch.version, rollouts=rollouts)
            )
            self.trainer.deliver(do.Deliver(batch=batch))
        missing = collector.give()
        if missing:
            prompts = tuple(islice(self._prompts, missing))
            collector.arrived(prompts, last=len(prompts) < missing, partial=False)
            collector.give()
        all_hold = collector.held
        for shard in self.shards:
            post, held = shard.post, collector.must_hold(shard.post, held=all_hold)
            if not post.prompts and held == self._told.get(id(shard), False):
                continue
            self._told[id(shard)] = held
            orders = Orders(prompts=tuple(post.prompts), held=held, step=collector.step)
            post.prompts.clear()
            self.messages.orders += 1
            self.agenda.after(self._latency, lambda s=shard, o=orders: s.take(o))

    def _wake(self, shard: _Shard) -> None:
        """A shard has news, which it sends as soon as its last message has arrived."""
        if not shard.asking:
            shard.asking = True
            self.messages.news += 1
            self.agenda.after(self._latency, lambda: self._hear(shard))

    def _hear(self, shard: _Shard) -> None:
        shard.asking = False
        self._collector.note(shard.post, shard.reporter.news())
        self._act()

    def _tell(self, fact: of.Fact) -> None:
        for listener in self._listeners:
            listener.on_facts((fact,), self.agenda.now)  # type: ignore[union-attr]
