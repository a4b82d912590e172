"""The batch in work, the batches that the trainer has, and whether it waits for one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from aprilsched.kernel.core.policies.parts import Part
from aprilsched.kernel.core.state.queues import MustDeliver
from aprilsched.kernel.core.state.records import DeliveredBatch, GroupRecord
from aprilsched.types import Batch, Group


class Demand(Enum):
    """What the trainer does about the batch in work."""

    NONE = auto()
    """It has not requested one."""
    LEFT = auto()
    """It requested one, and its call gave up. The next call continues with the same batch."""
    WAITING = auto()
    """A call waits for the next part."""
    BETWEEN_PARTS = auto()
    """It has taken a part that is not the last one, and has not requested the next one yet."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Offered:
    """A part that the trainer may take, with what is needed to withdraw the offer."""

    part: Part[Group]
    given: Batch
    """What the trainer gets: the units of the part."""
    batch: Batch
    """The batch as a whole, if the part is the last one; otherwise the same as `given`."""
    record: DeliveredBatch | None = None
    """The groups of the whole batch. None if the part is not the last one, or if the batch was
    delivered before a restart."""
    target_groups: int = 0
    """The number of groups to keep open that was in force before the offer."""

    @property
    def groups(self) -> tuple[GroupRecord, ...]:
        """Groups that leave flight when the trainer has taken this."""
        return () if self.record is None else self.record.groups


@dataclass(slots=True, kw_only=True, eq=False)
class BatchInWork:
    """A batch that the trainer takes in parts; a whole batch has one.

    Units that were taken stay in flight, as ready groups, until the last part is taken. So a
    resumed run gives them again.
    """

    known: Batch | None = None
    """The batch, if it was delivered before a restart and is delivered again; None if it is made of
    what becomes ready."""
    taken: dict[int, Group] = field(default_factory=dict[int, Group])
    """Units of the parts that the trainer has taken, by their id, in the order of the parts."""
    offer: Offered | None = None
    """The part that the trainer may take and has not taken yet."""
    seen: frozenset[int] = frozenset()
    """Ids of units that the trainer may have taken before a restart. They come first."""

    def take(self, part: Part[Group]) -> None:
        """Note that the trainer has taken a part."""
        self.taken |= {unit.group_id: unit for unit in part.units}

    def rest(self, groups: Iterable[Group]) -> tuple[Group, ...]:
        """Return those of `groups` that the trainer has not taken."""
        return tuple(group for group in groups if group.group_id not in self.taken)

    def involves(self, group_id: int) -> bool:
        """Whether the trainer has taken the unit, or may take it now."""
        offered = () if self.offer is None else self.offer.part.units
        return group_id in self.taken or any(unit.group_id == group_id for unit in offered)


@dataclass(slots=True)
class Delivery:
    """The batches between the scheduler and the trainer. Steps: ``batch``."""

    must_deliver: MustDeliver
    """Groups that the next batch must contain (staleness rule "finish")."""
    demand: Demand = Demand.NONE
    """What the trainer does about the batch in work."""
    by_group: bool = False
    """The trainer takes the batch unit by unit."""
    fresh: BatchInWork = field(default_factory=BatchInWork)
    """The batch that is made of what becomes ready."""
    redelivery: deque[BatchInWork] = field(default_factory=deque[BatchInWork])
    """Unacknowledged batches that the trainer has not been given again since the run was
    resumed. They go before the fresh one."""
    unacknowledged: dict[int, DeliveredBatch] = field(default_factory=dict[int, DeliveredBatch])
    """Delivered batches, by index, that a resumed run would have to deliver again."""
    batches_since_update: int = 0
    """Batches that were delivered since the policy version last changed."""
    first_new_batch: int = 0
    """Batches with a smaller index may be with the trainer although the store has lost them."""

    @property
    def work(self) -> BatchInWork:
        """The batch of which the trainer gets the next part."""
        return self.redelivery[0] if self.redelivery else self.fresh

    @property
    def batches_again(self) -> list[Batch]:
        """The batches that wait to be delivered again, in the order of their delivery."""
        return [work.known for work in self.redelivery if work.known is not None]

    @property
    def offer(self) -> Offered | None:
        """The part that the trainer may take and has not taken yet."""
        return self.work.offer

    @property
    def batch_requested(self) -> bool:
        """Whether the trainer has requested the batch in work."""
        return self.demand is not Demand.NONE

    @property
    def trainer_waits(self) -> bool:
        """Whether a call of the trainer waits for the next part."""
        return self.demand is Demand.WAITING

    @property
    def takes_parts(self) -> bool:
        """Whether the trainer waits for the next part, or returns for it."""
        return self.demand in (Demand.WAITING, Demand.BETWEEN_PARTS)
