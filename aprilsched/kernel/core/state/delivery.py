"""The batch in work, the batches that the trainer has, and the trainer's demand for the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from aprilsched.kernel.core.policies.parts import Part
from aprilsched.kernel.core.state.queues import MustDeliver
from aprilsched.kernel.core.state.records import DeliveredBatch, GroupRecord
from aprilsched.types import Batch, Unit

Demand: TypeAlias = Literal["none", "left", "waiting", "between_parts"]
"""The trainer's demand for the batch in work.

=============  ====================================================================================
none           no batch is requested
left           the call for a batch was cancelled; the next call continues with the same batch
waiting        a call waits for the next part
between_parts  the trainer has taken a part that is not the last, and has not requested the next yet
=============  ====================================================================================
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Offered:
    """A part that the trainer may take, and the data to withdraw the offer."""

    part: Part[Unit]
    content: Batch
    """The units of the part, as the trainer gets them."""
    batch: Batch
    """The batch as a whole, if the part is the last one; otherwise the same as `content`."""
    record: DeliveredBatch | None = None
    """The groups of the whole batch. None if the part is not the last one, or if the batch was
    delivered before a restart."""
    target_groups: int = 0
    """The target number of open groups before the offer."""

    @property
    def groups(self) -> tuple[GroupRecord, ...]:
        """Groups that leave flight when the trainer takes the part."""
        return () if self.record is None else self.record.groups


@dataclass(slots=True, kw_only=True, eq=False)
class BatchInWork:
    """A batch that the trainer takes in parts; a whole batch has one part.

    Taken units stay in flight, as ready groups, until the last part is taken, so a resumed run
    delivers them again.
    """

    known: Batch | None = None
    """The batch, if it is a redelivery after a restart; None if it is made of new ready groups."""
    taken: dict[int, Unit] = field(default_factory=dict[int, Unit])
    """Units of the parts that the trainer has taken, by their id, in the order of the parts."""
    seen: frozenset[int] = frozenset()
    """Ids of units that the trainer may have taken before a restart. They come first."""

    def take(self, part: Part[Unit]) -> None:
        """Record that the trainer has taken a part."""
        self.taken |= {unit.unit_id: unit for unit in part.units}

    def rest(self, units: Iterable[Unit]) -> tuple[Unit, ...]:
        """Return those of `units` that the trainer has not taken."""
        return tuple(unit for unit in units if unit.unit_id not in self.taken)


@dataclass(slots=True)
class Delivery:
    """The batches between the scheduler and the trainer. Steps: ``batch``."""

    must_deliver: MustDeliver
    """Groups that the next batch must contain (staleness rule "finish")."""
    demand: Demand = "none"
    """The trainer's demand for the batch in work."""
    by_group: bool = False
    """Whether the trainer takes the batch unit by unit."""
    offer: Offered | None = None
    """The part of the batch in work that the trainer may take now; None without one."""
    fresh: BatchInWork = field(default_factory=BatchInWork)
    """The batch made of new ready groups."""
    redelivery: deque[BatchInWork] = field(default_factory=deque[BatchInWork])
    """Unacknowledged batches still to be redelivered in the resumed run, before the fresh one."""
    unacknowledged: dict[int, DeliveredBatch] = field(default_factory=dict[int, DeliveredBatch])
    """Delivered batches, by index, that a resumed run would have to deliver again."""
    batches_since_update: int = 0
    """Number of batches delivered since the policy version last changed."""
    first_new_batch: int = 0
    """Index below which the trainer may have batches that the store has lost."""

    @property
    def work(self) -> BatchInWork:
        """The batch that the trainer's next part comes from."""
        return self.redelivery[0] if self.redelivery else self.fresh

    @property
    def batches_again(self) -> list[Batch]:
        """Batches that wait for redelivery, in the order of their delivery."""
        return [work.known for work in self.redelivery if work.known is not None]

    @property
    def collecting(self) -> bool:
        """Whether the batch in work is requested and not yet offered as a whole."""
        if self.demand == "none":
            return False
        return self.offer is None or not self.offer.part.last

    @property
    def offered_groups(self) -> int:
        """Number of groups in the offered batch."""
        return 0 if self.offer is None else len(self.offer.groups)

    def involves(self, unit_id: int) -> bool:
        """Return whether the trainer has taken a unit in flight, or may take it now."""
        offered = () if self.offer is None else self.offer.part.units
        return unit_id in self.fresh.taken or any(unit.unit_id == unit_id for unit in offered)

    @property
    def batch_requested(self) -> bool:
        """Whether the trainer has requested the batch in work."""
        return self.demand != "none"

    @property
    def trainer_waits(self) -> bool:
        """Whether a call of the trainer waits for the next part."""
        return self.demand == "waiting"

    @property
    def takes_parts(self) -> bool:
        """Whether the trainer waits for the next part, or is between two parts."""
        return self.demand in ("waiting", "between_parts")
