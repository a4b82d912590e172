"""What the collector and a shard say to each other, and the protocol that a transport implements.

A shard is a scheduler with a part of the fleet. The collector gives it prompts and takes its
complete groups. The messages are few and plain, so that a shard can be in the same process
(:class:`~aprilsched.shards.local.LocalShard`) or behind any transport.

Every prompt has a number, its *serial*, which travels in its metadata. A group is known by the
serial of its prompt, so it is counted once, whatever is sent twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from aprilsched.coordinator.refits import RefitReport
from aprilsched.core.config import SchedulerConfig
from aprilsched.errors import AprilschedError
from aprilsched.telemetry.event_log.merging import qualified_engine, qualified_id
from aprilsched.types import Batch, Group, Prompt, Rollout, Segment
from aprilsched.weights.base import WeightPublisher

__all__ = [
    "NOTHING",
    "SERIAL",
    "Complete",
    "News",
    "Opened",
    "Orders",
    "Shard",
    "ShardLost",
    "answer_s",
    "numbered",
    "qualified",
    "serial_of",
    "unnumbered",
]

SERIAL = "aprilsched.serial"
"""Key of a prompt's serial in its metadata, while a shard has the prompt."""


class ShardLost(AprilschedError):
    """A shard has ended and answers no more; the collector opens it again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Complete:
    """Groups that are generated to their end and have not been received from their shard.

    Attributes:
        groups: their number.
        samples: number of their rollouts.
        tokens: number of the response tokens in them.
    """

    groups: int = 0
    samples: int = 0
    tokens: int = 0


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


def unnumbered(prompt: Prompt) -> Prompt:
    """The prompt as the user gave it."""
    metadata = {key: value for key, value in prompt.metadata.items() if key != SERIAL}
    return replace(prompt, metadata=metadata)


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
    return replace(
        rollout,
        rollout_id=qualified_id(rollout.rollout_id, slot),
        group_id=group_id,
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
