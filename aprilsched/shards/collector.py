"""Decides for all shards together: how many groups each may start, when all hold, and which groups
make a batch.

Like the core, it is told what happened and carries nothing out, so the asyncio shell
(:mod:`aprilsched.shards.scheduler`) and a simulation use the same decisions. Prompts are permits: a
shard starts a group for every prompt that it gets, so the refill rule, the over-provision ratio and
the staleness gate of the run are asked here, once, about the sums over all shards, by the core's
own :func:`~aprilsched.core.steps.launch.admitted`.

Invariants:
- A serial is with one shard, or its group is ready here, or it was delivered or dropped.
- A group of a serial that is not with its shard any more was counted before, and is not counted.
- A shard takes part while its version is the version of the run. Otherwise it holds, and the groups
  that it has open do not count, so that others are started in their place.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from aprilsched.core.config import SchedulerConfig
from aprilsched.core.policies.refill import PoolView, Wave
from aprilsched.core.policies.schedule import Schedule
from aprilsched.core.state.ledger import Outcome
from aprilsched.core.state.saved import SavedGroup
from aprilsched.core.state.state import Plan, PromptSupply
from aprilsched.core.steps.launch import admitted
from aprilsched.errors import ConfigError, InvariantViolation, StoreError
from aprilsched.shards.base import (
    NOTHING,
    Complete,
    News,
    Opened,
    check_shardable,
    numbered,
    qualified,
    serial_of,
)
from aprilsched.store.codec import decode, encode, group_from, group_record
from aprilsched.telemetry.event_log.merging import SLOTS
from aprilsched.types import Batch, Group, Prompt, RefusedPrompt, Rollout


@dataclass(slots=True, eq=False, kw_only=True)
class Post:
    """What the collector knows of one shard.

    Attributes:
        name: name of the shard.
        slot: which part of the ids is the shard's.
        version: the version under which it generates; None if it cannot generate, or is lost.
        engines: number of its engines in use.
        serials: the prompts that it was given and that have not come back, with their group sizes.
        generating: number of its rollouts that generate, as it said last.
        complete: its complete groups that have not arrived, as it said last.
        told: group sizes of the prompts that were given and are not launched, as it said last.
        launched: number of prompts that it had launched, as it said last.
        prompts: prompts that are to be given.
        received: numbers of groups that it need not keep any longer.
    """

    name: str
    slot: int
    version: int | None = None
    engines: int = 1
    serials: dict[int, int] = field(default_factory=dict[int, int])
    generating: int = 0
    complete: Complete = NOTHING
    told: deque[int] = field(default_factory=deque[int])
    launched: int = 0
    prompts: list[Prompt] = field(default_factory=list[Prompt])
    received: list[int] = field(default_factory=list[int])

    @property
    def running(self) -> int:
        """Number of its rollouts that generate or soon will."""
        return self.generating + sum(self.told)


@dataclass(slots=True, eq=False)
class _Arrived:
    """A complete group, where it came from, and the number by which that knows it."""

    group: Group
    post: Post
    number: int
    serial: int
    size: Complete

    @property
    def members(self) -> Sequence[Rollout]:
        return self.group.rollouts

    @property
    def tokens(self) -> int:
        return self.size.tokens


class Collector:
    """The decisions over N shards.

    Args:
        config: the settings of the run.
        names: the names of the shards.

    Attributes:
        version: the trainer's policy version.
        batches: number of batches that the trainer has taken.
        serials: number of serials that were given out.
        prompts: the prompts that have come from the source and are not given to a shard, and what
            became of the others.
        requested: whether a batch is in work that the trainer has asked for.
        updating: whether an update is under way.
        evicted: groups that were dropped here because they became too stale, since this was
            emptied.

    Raises:
        ConfigError: if the settings cannot work in shards.
    """

    def __init__(self, config: SchedulerConfig, names: Sequence[str]) -> None:
        check_shardable(config)
        policies = config.policies
        if policies.over_provision is None:
            raise ConfigError("over_provision is not known beforehand; give a ratio.")
        self.config = config
        self._stop, self._staleness = policies.stop, policies.staleness
        self._plan = Plan(
            Schedule(over_provision=policies.over_provision, refill=policies.refill),
            usual_group=self._stop.amount / config.batch_groups,
            wave_pending=False,
        )
        self.posts = [Post(name=name, slot=place) for place, name in enumerate(names)]
        self._slots = len(self.posts)
        self.version = 0
        self.batches = 0
        self.serials = 0
        self.prompts = PromptSupply(usual_size=float(config.group_size))
        self.requested = False
        self.updating = False
        self.evicted: list[Group] = []
        self._given: dict[int, Prompt] = {}
        """The prompts that are with a shard, as the user gave them."""
        self._ready: list[_Arrived] = []
        self._ready_size = NOTHING
        self._offer: tuple[Batch, list[_Arrived]] | None = None
        self.by_group = False
        """Whether the trainer takes the groups of a batch one by one."""
        self._part_offered = False
        """Whether a group is offered that is not the last one of its batch."""
        self._streamed = 0
        """Number of groups that the trainer has of the batch in work, which are the first of
        `_ready`."""
        self._batches_since_update = 0
        self._aim()

    # --- the trainer ---------------------------------------------------------------------------

    def request(self, *, streamed: bool = False) -> None:
        """The trainer waits for a batch, or with `streamed` for the next group of one."""
        # A call that gave up its wait has not ended the batch in work, as in the core.
        if self._synchronous and not self.requested:
            self._plan.wave_pending = True
        self.requested, self.by_group = True, streamed

    def end_request(self) -> None:
        """The batch that the trainer had asked for is not in work any more."""
        self.requested = False

    def offer(self) -> Batch | None:
        """Compose the next batch, or the next part of one that is taken group by group; None if it
        is not complete, not requested, or offered already."""
        if not self._collecting or self.updating or self._part_offered:
            return None
        if self.by_group:
            return self._next_part()
        count = self._stop.take(self._ready)
        if count is None:
            if not self.drained:
                return None
            count = len(self._ready)
        if not count:
            return None
        return self._composed(count)

    def _next_part(self) -> Batch | None:
        """The next group of a batch. The last part may have none, if the prompts have ended."""
        has = self._streamed
        then = self._ready[: has + 1]
        at_end = self.drained and len(self._ready) == len(then)
        if len(then) == has and not (has and at_end):
            return None
        if at_end or self._stop.take(then) is not None:
            batch = self._composed(len(then))
            return replace(batch, groups=batch.groups[has:])
        self._part_offered = True
        return replace(self._batch(then[has:]), complete=False)

    def _batch(self, groups: Sequence[_Arrived]) -> Batch:
        oldest = self._staleness.oldest_unmasked(self.version)
        return Batch(
            index=self.batches,
            version=self.version,
            groups=tuple(_masked(each.group, oldest) for each in groups),
        )

    def _composed(self, count: int) -> Batch:
        """Offer the first `count` groups, which are not ready for another batch any more."""
        taken = self._ready[:count]
        self._keep(self._ready[count:])
        batch = self._batch(taken)
        self._offer = (batch, taken)
        self._aim()
        self._plan.wave_pending = self._plan.wave_pending or not self._synchronous
        return batch

    def withdraw_offer(self) -> None:
        """A new version comes, or the trainer asks for something else, so what is offered is
        composed again."""
        self._part_offered = False
        if self._offer is not None:
            (_, taken), self._offer = self._offer, None
            self._keep([*taken, *self._ready])

    def take(self) -> Batch | None:
        """The trainer has taken what was offered; returns the batch that it has as a whole now."""
        if self._part_offered:
            self._part_offered = False
            self._streamed += 1
            return None
        if self._offer is None:
            raise InvariantViolation("a batch was taken that is not offered")
        return self._delivered(*self._offer)

    def end_stream(self) -> Batch | None:
        """End a batch that is taken group by group with the groups that the trainer has, and return
        it; None if it has none."""
        if not self._streamed:
            return None
        self.withdraw_offer()
        taken = self._ready[: self._streamed]
        batch = self._composed(self._streamed)
        return self._delivered(batch, taken)

    def _delivered(self, batch: Batch, taken: Sequence[_Arrived]) -> Batch:
        self.end_request()
        self._offer = None
        self._streamed = 0
        self.batches += 1
        self.prompts.outcome.delivered += len(taken)
        self._batches_since_update += 1
        for each in taken:
            each.post.received.append(each.number)
        return batch

    def updated(self, version: int) -> None:
        """The shards that take part have this version now."""
        self.version = version
        self._batches_since_update = 0
        self._evict()

    @property
    def drained(self) -> bool:
        """Whether the prompts have ended and no shard has one."""
        waiting = (
            self.prompts.stock or self.prompts.fetching or any(post.serials for post in self.posts)
        )
        return self.prompts.exhausted and not waiting

    @property
    def ended(self) -> bool:
        """Whether the trainer waits for a batch that will never come, because the prompts have
        ended."""
        return self._collecting and self.drained and not self._ready

    @property
    def awaited(self) -> list[Post]:
        """The shards that do not take part and have all that the trainer can still get: it waits,
        and those that take part have nothing left, and no prompts to start."""
        waits = self._collecting and not self.updating
        more = self.prompts.stock or not (
            self.prompts.dry or (self.prompts.exhausted and not self.prompts.fetching)
        )
        working = list(self._working())
        if not waits or more or not working or any(post.serials for post in working):
            return []
        return [post for post in self.posts if post.serials and not self.takes_part(post)]

    @property
    def held(self) -> bool:
        """Whether the shards pause their engines with the requests inside."""
        return self._synchronous and not (self._collecting and not self._full)

    @property
    def step(self) -> int:
        """The number of rollouts whose end a shard reports: with all shards together, a group. A
        wave counts groups only."""
        if isinstance(self._plan.schedule.refill, Wave):
            return 0
        return max(1, self.config.group_size // len(self.posts))

    def takes_part(self, post: Post) -> bool:
        """Whether a shard has the version of the run."""
        return post.version == self.version

    def must_hold(self, post: Post, *, held: bool | None = None) -> bool:
        """Whether this shard holds: with all of them, or because its version is another one.

        Who asks for each shard gives :attr:`held`, which is a sum over all of them.
        """
        if not (self.updating or self.takes_part(post)):
            return True
        return self.held if held is None else held

    # --- shards --------------------------------------------------------------------------------

    def opened(self, post: Post, opened: Opened) -> None:
        """A shard is there, for the first time or again. Prompts of which it knows nothing are to
        be given to it again."""
        known = set(opened.serials)
        if not opened.continued and post.launched:
            # Its ids begin again, and must not be those of the groups that it gave before.
            if self._slots >= SLOTS:
                raise ConfigError(
                    f"shards were begun again {SLOTS} times without their stores; give them stores."
                )
            post.slot, self._slots = self._slots, self._slots + 1
        lost = [serial for serial in post.serials if serial not in known]
        post.version, post.engines = opened.version, max(1, opened.engines)
        post.launched, post.complete = 0, NOTHING
        post.generating = sum(size for serial, size in post.serials.items() if serial in known)
        post.prompts = [numbered(self._given[serial], serial) for serial in lost]
        post.told = deque(post.serials[serial] for serial in lost)
        # Those that it keeps nevertheless arrive again, and are received once more.
        post.received.clear()

    def lost(self, post: Post) -> None:
        """A shard has ended. What it has open does not count until it is opened again."""
        post.version = None

    def give_up(self, post: Post) -> int:
        """Give the prompts of a shard that does not take part to those that do, which generate them
        from their beginning; returns their number. What it has of them is not counted."""
        serials, post.serials = post.serials, {}
        post.prompts.clear()
        post.told.clear()
        loads = self._loads()
        for serial, size in serials.items():
            self._give_to_least(loads, serial, self._given[serial], size)
        return len(serials)

    def note(self, post: Post, news: News) -> None:
        """A shard has news."""
        # A message that was under way during an update must not take the new version back.
        if news.version is None or post.version is None or news.version > post.version:
            post.version = news.version
        post.engines = max(1, news.engines)
        post.generating, post.complete = news.generating, news.complete
        for _ in range(min(news.launched - post.launched, len(post.told))):
            post.told.popleft()
        post.launched = max(post.launched, news.launched)
        for serial, cause in news.dropped.items():
            if post.serials.pop(serial, None) is not None:
                self._given.pop(serial, None)
                if cause:
                    self.prompts.outcome.fail(cause)
        for number, group in news.groups:
            self._arrive(post, number, group)

    def _arrive(self, post: Post, number: int, group: Group) -> None:
        serial = serial_of(group.prompt)
        if serial is None or post.serials.pop(serial, None) is None:
            # It was counted before the shard was opened again, or was given to another one.
            if not self._renumbered(post, number, serial):
                post.received.append(number)
            return
        group = qualified(group, self._given.pop(serial), slot=post.slot, shard=post.name)
        size = Complete(groups=1, samples=len(group.rollouts), tokens=sum(map(len, group.rollouts)))
        arrived = _Arrived(group, post, number, serial, size)
        if self._too_stale(arrived):
            post.received.append(number)
            self.evicted.append(arrived.group)
            return
        self._ready.append(arrived)
        self._ready_size = Complete.sum((self._ready_size, size))

    def _kept(self) -> Iterable[_Arrived]:
        """The groups that have arrived and are not taken."""
        yield from self._ready
        if self._offer is not None:
            yield from self._offer[1]

    def _renumbered(self, post: Post, number: int, serial: int | None) -> bool:
        """Whether a group of this shard is kept here, which it knows by another number now."""
        for each in self._kept():
            if each.serial == serial and each.post is post:
                each.number = number
                return True
        return False

    # --- prompts -------------------------------------------------------------------------------

    def arrived(
        self, prompts: Iterable[Prompt | RefusedPrompt], *, last: bool, partial: bool
    ) -> None:
        """Prompts have come from the source."""
        self.prompts.stock.extend(prompts)
        self.prompts.fetching = self.prompts.dry = partial
        self.prompts.exhausted = self.prompts.exhausted or last

    def give(self) -> int:
        """Distribute the prompts that may be started now to the shards, in `post.prompts`; returns
        how many more prompts are needed from the source."""
        if self.updating or not self._may_launch() or not any(map(self.takes_part, self.posts)):
            return 0
        count = self._launches()
        missing = self.prompts.missing(count)
        ask = 0 if self.prompts.fetching else missing
        if not (missing and self.prompts.waits):
            self._distribute(count)
        return ask

    def _distribute(self, count: int) -> None:
        """Give each prompt to the shard with the fewest rollouts for each engine."""
        loads = self._loads()
        while count and self.prompts.stock:
            prompt = self.prompts.stock.popleft()
            self.prompts.cursor += 1
            if isinstance(prompt, RefusedPrompt):
                continue
            count -= 1
            size = prompt.group_size or self.config.group_size
            self.prompts.note_size(size, self.config.group_size)
            self._given[self.serials] = prompt
            self._give_to_least(loads, self.serials, prompt, size)
            self.serials += 1

    def _loads(self) -> list[tuple[float, int]]:
        """A heap of the shards that take part: the rollouts for each engine, and the place."""
        loads = [
            (post.running / post.engines, place)
            for place, post in enumerate(self.posts)
            if self.takes_part(post)
        ]
        heapq.heapify(loads)
        return loads

    def _give_to_least(
        self, loads: list[tuple[float, int]], serial: int, prompt: Prompt, size: int
    ) -> None:
        load, place = loads[0]
        post = self.posts[place]
        post.serials[serial] = size
        post.told.append(size)
        post.prompts.append(numbered(prompt, serial))
        heapq.heapreplace(loads, (load + size / post.engines, place))

    def _may_launch(self) -> bool:
        if self._synchronous:
            return self._collecting
        return not self._stop.enough(self._merged(), batches=self.config.ready_batches)

    def _launches(self) -> int:
        refill, view = self._plan.schedule.refill, self._view()
        count = refill.launches(view)
        if count and self._stop.learns:
            self._aim()
            view = self._view()
            count = refill.launches(view)
        return admitted(
            self._plan,
            self.prompts,
            self._staleness,
            view,
            count,
            batches_since_update=self._batches_since_update + (self._offer is not None),
            wanted=self._collecting,
        )

    # --- sums over the shards ------------------------------------------------------------------

    @property
    def _synchronous(self) -> bool:
        return self.config.pace == "synchronous"

    @property
    def _collecting(self) -> bool:
        return self.requested and self._offer is None

    @property
    def _full(self) -> bool:
        return self._stop.enough(self._merged())

    @property
    def _batch_groups(self) -> int:
        return self._stop.batch_groups(self._plan.usual_group)

    def _working(self) -> Iterable[Post]:
        return (post for post in self.posts if self.takes_part(post))

    def _merged(self) -> Complete:
        """What is complete, here and in the shards."""
        return Complete.sum((self._ready_size, *(post.complete for post in self._working())))

    def _view(self) -> PoolView:
        merged = self._merged()
        working = list(self._working())
        return PoolView(
            batch_groups=self._batch_groups,
            group_size=self.prompts.usual_size,
            target_groups=self._plan.target_groups,
            open_groups=sum(len(post.serials) - post.complete.groups for post in working),
            ready_groups=self._stop.as_groups(merged, self._plan.usual_group),
            in_flight=sum(post.running for post in working),
            wave_due=self._plan.wave_pending,
            batch_open=not self._stop.enough(merged),
            asynchronous=not self._synchronous,
        )

    def _aim(self) -> None:
        """Decide how many groups are kept open for the next batch."""
        plan = self._plan
        usual = self._stop.usual_group(self.prompts.usual_size, lambda: None)
        plan.usual_group = plan.usual_group if usual is None else usual
        plan.target_groups = plan.schedule.target_groups(self._batch_groups)

    # --- groups that are ready -----------------------------------------------------------------

    def _keep(self, groups: list[_Arrived]) -> None:
        self._ready = groups
        self._ready_size = Complete.sum(each.size for each in groups)

    def _evict(self) -> None:
        stale = [each for each in self._ready if self._too_stale(each)]
        if stale:
            self._keep([each for each in self._ready if not self._too_stale(each)])
        for each in stale:
            each.post.received.append(each.number)
            self.evicted.append(each.group)

    def _too_stale(self, arrived: _Arrived) -> bool:
        if self._staleness.rule != "evict":
            return False
        versions = [rollout.oldest_version for rollout in arrived.members]
        oldest = min((version for version in versions if version is not None), default=None)
        return self._staleness.evicts(oldest, self.version)

    # --- a saved run ---------------------------------------------------------------------------

    def cut(self, folder: str) -> Callable[[], bytes]:
        """The state of this moment, for a checkpoint with the files of the shards in the folder of
        this name. What is returned makes the content of a file, in any thread; it raises
        ConfigError if a prompt holds a value that cannot be stored."""
        kept = {each.serial: each.group.prompt for each in self._kept()}
        saved = _Saved(
            schema=FORMAT_VERSION,
            folder=folder,
            version=self.version,
            batches=self.batches,
            batches_since_update=self._batches_since_update,
            serials=self.serials,
            cursor=self.prompts.cursor,
            delivered=self.prompts.outcome.delivered,
            failed=dict(self.prompts.outcome.causes),
            slots=self._slots,
            shards=[
                _SavedShard(
                    name=post.name,
                    slot=post.slot,
                    # What has arrived and is not taken is in the file of its shard.
                    serials=post.serials
                    | {e.serial: len(e.members) for e in self._kept() if e.post is post},
                )
                for post in self.posts
            ],
            prompts=[],
        )
        return partial(_encoded, saved, self._given | kept)

    def restore(self, saved: bytes) -> str:
        """Begin with the content of a file of :meth:`cut`; returns the name of the folder with the
        files of the shards.

        Raises:
            StoreError: if it cannot be read, or if the run had other shards.
        """
        try:
            found = decode(saved, _Versioned).schema
            if found > FORMAT_VERSION:
                raise StoreError(
                    f"the checkpoint of the shards has format {found}, and this aprilsched reads "
                    f"formats up to {FORMAT_VERSION}; upgrade aprilsched."
                )
            record = decode(saved, _Saved)
            prompts = {group.group_id: group.prompt for group in map(group_from, record.prompts)}
        except (msgspec.MsgspecError, ValueError) as error:
            raise StoreError(f"the checkpoint of the shards cannot be read ({error}).") from error
        names = [post.name for post in self.posts]
        if [shard.name for shard in record.shards] != names:
            had = ", ".join(shard.name for shard in record.shards)
            raise StoreError(
                f"the checkpoint has the shards {had}, and this run has {', '.join(names)}; give "
                "the same ones in the same order."
            )
        self.version, self.batches = record.version, record.batches
        self._batches_since_update = record.batches_since_update
        self.serials, self.prompts.cursor, self._slots = record.serials, record.cursor, record.slots
        self.prompts.outcome = Outcome(delivered=record.delivered, causes=Counter(record.failed))
        self._given.update(prompts)
        for post, shard in zip(self.posts, record.shards, strict=True):
            post.slot, post.serials = shard.slot, dict(shard.serials)
        return record.folder


FORMAT_VERSION = 1


class _Versioned(msgspec.Struct, array_like=True):
    """What the record of any release begins with."""

    schema: int


class _SavedShard(msgspec.Struct, array_like=True):
    name: str
    slot: int
    serials: dict[int, int]
    """The group size of each prompt that the shard has."""


class _Saved(_Versioned, array_like=True):
    folder: str
    version: int
    batches: int
    batches_since_update: int
    serials: int
    cursor: int
    delivered: int
    failed: dict[str, int]
    slots: int
    shards: list[_SavedShard]
    prompts: list[bytes]
    """Those of all shards. The others generate them if a shard does not come back."""


def _encoded(saved: _Saved, prompts: Mapping[int, Prompt]) -> bytes:
    saved.prompts = [
        group_record(SavedGroup(group_id=serial, prompt=prompt, opened=0, members=()))
        for serial, prompt in prompts.items()
    ]
    return encode(saved)


def _masked(group: Group, oldest: int | None) -> Group:
    """The group as a batch has it, in which tokens older than version `oldest` are masked."""
    if oldest is None:
        return group
    return replace(group, rollouts=tuple(_masked_rollout(each, oldest) for each in group.rollouts))


def _masked_rollout(rollout: Rollout, oldest: int) -> Rollout:
    first = rollout.oldest_version
    if first is None or first >= oldest:
        return rollout
    return msgspec.structs.replace(
        rollout, loss_mask=rollout.loss_mask & (rollout.versions >= oldest)
    )
