"""What the collector and a shard say to each other, and the protocol that a transport implements.

A shard is a scheduler with a part of the fleet. The collector gives it prompts and takes its
complete groups. The messages are few and plain, so that a shard can be in the same process
(:class:`~aprilsched.shards.local.LocalShard`) or behind any transport.

Every prompt has a number, its *serial*, which travels in its metadata. A group is known by the
serial of its prompt, so it is counted once, whatever is sent twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Protocol

import msgspec

from aprilsched.coordinator.refits import RefitReport
from aprilsched.core.config import SchedulerConfig
from aprilsched.core.policies.refill import PoolView, Refill
from aprilsched.core.policies.staleness import Staleness
from aprilsched.core.policies.stop import Tokens
from aprilsched.driver.callbacks import called_now
from aprilsched.engines.base import Engine
from aprilsched.errors import AprilschedError, ConfigError, RefitError
from aprilsched.telemetry.event_log.merging import qualified_engine, qualified_id
from aprilsched.types import Batch, Group, Prompt, Rollout, Segment
from aprilsched.weights.publisher import RepublishingPublisher, WeightPublisher, WholePublisher

SERIAL = "aprilsched.serial"
"""Key of a prompt's serial in its metadata, while a shard has the prompt."""


class ShardLost(AprilschedError):
    """A shard has ended and answers no more; the collector opens it again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Complete:
    """Groups that are generated to their end; a stop rule reads it.

    Attributes:
        groups: their number.
        samples: number of their rollouts.
        tokens: number of the response tokens in them.
    """

    groups: int = 0
    samples: int = 0
    tokens: int = 0

    def __len__(self) -> int:
        return self.groups

    @classmethod
    def sum(cls, parts: Iterable[Complete]) -> Complete:
        """All of them together."""
        groups = samples = tokens = 0
        for part in parts:
            groups += part.groups
            samples += part.samples
            tokens += part.tokens
        return cls(groups=groups, samples=samples, tokens=tokens)


NOTHING = Complete()
"""No complete group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """What a shard has when it is opened.

    Attributes:
        version: the policy version under which it generates; None if none of its engines has the
            version of its run.
        run_version: the policy version of its run.
        engines: number of its engines.
        serials: the prompts whose groups it has, from its store or from a checkpoint.
        continued: whether it continues an earlier run, and therefore its ids.
        stored: whether it has a store.
    """

    version: int | None
    run_version: int
    engines: int
    serials: tuple[int, ...] = ()
    continued: bool = False
    stored: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """What the collector wants of a shard.

    Attributes:
        prompts: prompts to start, each with its serial, in their order.
        held: whether its engines are paused with the requests inside them.
        received: numbers of its groups that were delivered, which it need not keep any longer.
        step: number of rollouts whose end is news before their group is complete; 0 if it never is.
    """

    prompts: tuple[Prompt, ...] = ()
    held: bool = False
    received: tuple[int, ...] = ()
    step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """What has happened in a shard since it was asked last.

    Attributes:
        groups: the groups that were completed, each with the number by which it is told received.
        dropped: for the serial of each prompt that will give no group, why it failed; empty if it
            was not a failure.
        launched: number of prompts that were launched since the shard was opened.
        generating: number of its rollouts that are not generated to their end.
        complete: its groups that are generated and not in `groups` yet.
        version: the policy version under which it generates; None if no engine can generate before
            the next update.
        engines: number of its engines that are in use.
    """

    groups: tuple[tuple[int, Group], ...] = ()
    dropped: Mapping[int, str] = field(default_factory=dict[int, str])
    launched: int = 0
    generating: int = 0
    complete: Complete = NOTHING
    version: int | None = 0
    engines: int = 1


class Shard(Protocol):
    """A scheduler with a part of the fleet, as the collector sees it.

    Calls of different methods may overlap, and calls of one method do not. Every method raises
    :class:`~aprilsched.shards.ShardLost` if the shard has ended; :meth:`open` may then be called
    again, and continues from the shard's store if it has one. Any other error is the user's to see.

    The collector cancels a call that takes too long, and takes the shard for lost.
    """

    @property
    def name(self) -> str:
        """The name of the shard in logs, metrics and errors; unique among the shards."""
        ...

    async def open(
        self,
        config: SchedulerConfig,
        *,
        log: Path | None,
        checkpoint: Path | None,
        suspect: bool,
    ) -> Opened:
        """Begin, or begin again after the shard was lost.

        Args:
            config: the settings of the shard's scheduler.
            log: file for the event log of the shard; None for no log.
            checkpoint: begin with this file of :meth:`checkpoint`, and not with the store.
            suspect: the shard was lost in an update, so its engines may have parts of two versions
                under the label of one. None of them is used before the next update.
        """
        ...

    async def tell(self, orders: Orders) -> None:
        """Carry out these orders."""
        ...

    async def ask(self) -> News:
        """Wait until there is something new, and return it. A shard that lives answers within a
        third of ``answer_s(config)`` in any case, with what has not changed."""
        ...

    async def update(self, publisher: WeightPublisher, version: int) -> RefitReport:
        """Load a version into the shard's engines; `publisher` is prepared already.

        Raises:
            RefitError: if no engine took the version.
        """
        ...

    async def evaluate(self, prompts: Sequence[Prompt], group_size: int) -> Batch:
        """Generate the responses to `prompts` under one version."""
        ...

    async def checkpoint(self, path: Path) -> None:
        """Write the shard's state to a file, with the groups that were not told received."""
        ...

    async def close(self) -> None:
        """End in any state; a shard that was lost has ended."""
        ...


def answer_s(config: SchedulerConfig) -> float:
    """Seconds after which a shard is lost that answers neither :meth:`Shard.ask` nor
    :meth:`Shard.tell`: a quarter of `health.stall_s`, and 5 at least."""
    return max(5.0, config.health.stall_s / 4)


def numbered(prompt: Prompt, serial: int) -> Prompt:
    """The prompt with its serial."""
    return replace(prompt, metadata={**prompt.metadata, SERIAL: serial})


def serial_of(prompt: Prompt) -> int | None:
    """The serial of a prompt; None if it has none."""
    return prompt.metadata.get(SERIAL)


def qualified(group: Group, prompt: Prompt, *, slot: int, shard: str) -> Group:
    """A group of a shard, with the prompt as the user gave it, and with ids and names of engines
    that no other shard gives."""
    group_id = qualified_id(group.group_id, slot)
    return Group(
        group_id=group_id,
        prompt=prompt,
        rollouts=tuple(_qualified(each, group_id, slot, shard) for each in group.rollouts),
    )


def _qualified(rollout: Rollout, group_id: int, slot: int, shard: str) -> Rollout:
    return msgspec.structs.replace(
        rollout,
        rollout_id=qualified_id(rollout.rollout_id, slot),
        group_id=group_id,
        branches=tuple([_qualified(each, group_id, slot, shard) for each in rollout.branches]),
        segments=tuple(
            part
            if part.engine is None
            else Segment(
                start=part.start,
                end=part.end,
                version=part.version,
                engine=qualified_engine(part.engine, shard),
            )
            for part in rollout.segments
        ),
    )


# --- joint ---------------------------------------------------------------------------------------

# One publication of weights for the shards of one process, each of which publishes on its own.
#
# A publisher that broadcasts has one group of ranks for all engines, and one that lends its memory
# lends it once. So the shards wait for each other, and the publisher is called once with the
# engines of all of them.

_Results = Mapping[str, Exception | None]


class JointUpdate:
    """One update of several shards.

    Args:
        publisher: the trainer's publisher, prepared already.
        shards: names of the shards that publish here.
        wait_s: seconds that a shard waits here for the others to pause their engines. It publishes
            without those that need longer.
    """

    def __init__(
        self, publisher: WeightPublisher, shards: Iterable[str], *, wait_s: float = 0
    ) -> None:
        self.publisher = publisher
        self._awaited = set(shards)
        self._late: set[str] = set()
        self._wait_s = wait_s
        self._engines: dict[str, Sequence[Engine]] = {}
        self._version = 0
        self._all_there = asyncio.Event()
        self._published: asyncio.Task[Mapping[str, _Results]] | None = None
        self._over = False

    def part(self, shard: str) -> Part:
        """The publisher for one shard."""
        return Part(self, shard)

    def left(self, shard: str) -> None:
        """The update of a shard is over, or the shard publishes nothing."""
        self._awaited.discard(shard)
        if not self._awaited:
            self._all_there.set()

    def end(self) -> None:
        """The update is over for all shards. What is published later is for single engines."""
        self._over = True

    async def publish(self, shard: str, version: int, engines: Sequence[Engine]) -> _Results:
        """Publish with all others.

        Raises:
            RefitError: if the others did so without this shard.
        """
        if shard in self._late and not self._over:
            raise RefitError(f"{shard} needed more than {self._wait_s:g} s to pause its engines.")
        if self._over or shard not in self._awaited:
            return await self.publisher.publish(version, engines)
        self._engines[shard], self._version = engines, version
        self.left(shard)
        try:
            async with asyncio.timeout(self._wait_s):
                await self._all_there.wait()
        except TimeoutError:
            self._late |= self._awaited
            self._awaited.clear()
            self._all_there.set()
        except asyncio.CancelledError:
            self._engines.pop(shard, None)
            raise
        if self._published is None:
            self._published = asyncio.create_task(self._publish(), name="aprilsched update")
        # A shard that is cancelled must not end the publication for the others.
        return (await asyncio.shield(self._published))[shard]

    async def _publish(self) -> Mapping[str, _Results]:
        names = [engine.name for engines in self._engines.values() for engine in engines]
        if len(set(names)) < len(names):
            # The results could not be told apart. Names are addresses, except in simulated fleets.
            results = [
                await self.publisher.publish(self._version, engines)
                for engines in self._engines.values()
            ]
            return dict(zip(self._engines, results, strict=True))
        every = [engine for engines in self._engines.values() for engine in engines]
        outcome = await self.publisher.publish(self._version, every)
        return dict.fromkeys(self._engines, outcome)


class Part:
    """The publisher that one shard gets; its `publish` is that of the whole update.

    Attributes:
        joint: the update.
    """

    def __init__(self, joint: JointUpdate, shard: str) -> None:
        self.joint = joint
        self._shard = shard

    def leave(self) -> None:
        """Say that this shard does not publish with the others."""
        self.joint.left(self._shard)

    @property
    def loads_whole(self) -> bool:
        """Whether the trainer's publisher says so of itself."""
        publisher = self.joint.publisher
        return isinstance(publisher, WholePublisher) and publisher.loads_whole

    async def prepare(self, version: int) -> None:
        """Do nothing: the trainer's publisher is prepared once, before the update begins."""

    async def publish(self, version: int, engines: Sequence[Engine]) -> _Results:
        """Publish with the other shards; see
        :meth:`~aprilsched.weights.publisher.WeightPublisher.publish`."""
        return await self.joint.publish(self._shard, version, engines)

    def holds(self, version: int) -> bool:
        """Whether the trainer's publisher can publish `version` again."""
        publisher = self.joint.publisher
        return isinstance(publisher, RepublishingPublisher) and called_now(
            "the publisher", publisher.holds, version
        )


# --- settings ------------------------------------------------------------------------------------

# The settings of one shard, which follow from those of the whole run.
#
# The collector makes every decision that needs the whole run. A shard starts each prompt that it
# is given, offers each group alone, and generates until it is told to hold.

_NEVER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class EveryPrompt(Refill):
    """Starts every prompt that is there: whoever gives them decides how many there are."""

    name: ClassVar[str] = "every_prompt"

    def launches(self, view: PoolView) -> int:
        return _NEVER

    def told(self, ratio: str) -> str:
        return "every prompt that is given"


@dataclass(frozen=True, slots=True)
class Ungated(Staleness):
    """The bound on staleness without its gate: the collector admits groups for all shards."""

    def admissible(
        self, *, batch_groups: int, outstanding: int, batches_since_update: int, wanted: bool
    ) -> int | None:
        return None


def check_shardable(config: SchedulerConfig) -> None:
    """Refuse settings that need to see every open rollout of the run at once.

    Raises:
        ConfigError: if `config` has one.
    """
    policies = config.policies
    refused = (
        (
            config.automatic,
            'over_provision="auto" learns from every open response; give a ratio',
        ),
        (
            policies.refill.defers,
            f'refill="{policies.refill.name}" chooses among all open groups; set "wave" or "pool"',
        ),
        (
            config.straggler == "choose",
            'straggler="choose" weighs what the whole batch waits for; set another rule',
        ),
        (
            isinstance(policies.stop, Tokens),
            "stop=Tokens(...) estimates from every open response how many groups a batch takes; "
            "let groups or samples fill a batch",
        ),
        (
            policies.staleness.finishes,
            'max_staleness.rule="finish" asks which open groups a batch must have; set "mask" or '
            '"evict"',
        ),
        (
            policies.staleness.rule == "restart",
            'max_staleness.rule="restart" is for batches that wait for all of their groups; set '
            '"mask" or "evict"',
        ),
        (
            config.follow_weights,
            "follow_weights=True would let a shard change its version alone; load weights by "
            "update_weights()",
        ),
        (
            config.refit == "rolling",
            'refit="rolling" would give the shards different versions; set refit="together"',
        ),
        (
            config.dispatch.max_in_flight is not None,
            "dispatch.max_in_flight limits the requests of all engines together; leave it out",
        ),
    )
    for holds, why in refused:
        if holds:
            raise ConfigError(f"{why}, because no shard sees the others.")


def shard_config(config: SchedulerConfig) -> SchedulerConfig:
    """The settings of a shard of a run with these settings."""
    bound = config.policies.staleness
    return replace(
        config,
        batch_groups=1,
        stop="groups",
        over_provision=1.0,
        refill=EveryPrompt(),
        pace="asynchronous",
        # Complete groups may wait for the end of an update, and must not hold new ones up.
        ready_batches=_NEVER,
        max_staleness=Ungated(bound.bound, bound.rule),
    )
