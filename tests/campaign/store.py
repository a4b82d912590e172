"""A store that is slow, fails sometimes, survives a kill, and checks what is deleted.

It checks this invariant of the scheduler: a batch is deleted as acknowledged only if the trainer
was given it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from aprilsched.errors import StoreError
from aprilsched.kernel.core.state.saved import Saved, Snapshot
from aprilsched.kernel.store.in_memory import Store

if TYPE_CHECKING:
    from tests.campaign.life import Life


class ChaosStore:
    """One life's view of a store that outlives it; without `inline` it has a slow thread."""

    def __init__(self, inner: Store, life: Life) -> None:
        self.inline = life.mix.inline_store
        self._inner = inner
        self._life = life
        self._failing = 0.05 if life.mix.has("failing_store") else 0.0
        self._draw = life.mix.draw(f"store {life.number}")
        self._held: set[int] = set()
        self.withdrawn: Counter[int] = Counter()
        """Number of batches that were offered and withdrawn untaken, which the store forgets."""
        self.dead = False
        """Whether the process is gone: later writes of it are dropped."""
        self.replaced = False
        """Whether a checkpoint replaces the content at the next full save."""
        self.whole = True
        """Whether the last save succeeded."""
        self.on_saved: list[Callable[[], None]] = []

    def open(self) -> Saved | None:
        saved = self._inner.open()
        if saved is not None:
            self._held = {batch.index for batch in saved.batches}
        return saved

    def save(self, snapshot: Snapshot, *, durable: bool) -> None:
        if self.dead:
            return
        if self._draw.random() < self._failing:
            self.whole = False
            self._life.note("CHAOS the store fails to save")
            raise StoreError("the disk is full; this is a fault of the campaign.")
        self._inner.save(snapshot, durable=durable)
        self.whole = True
        if self.replaced and snapshot.full:
            self.replaced, self._held = False, set()
        now = {batch.index for batch in snapshot.batches}
        if snapshot.full:
            gone = self._held - now
            self._held = now
        else:
            gone = set(snapshot.acknowledged) & (self._held | now)
            self._held = (self._held | now) - set(snapshot.acknowledged)
        gone = (gone | set(snapshot.acknowledged)) - self._life.trainer.may_acknowledge
        withdrawn = gone & self.withdrawn.keys()
        # Before this is saved, another batch may get the same number and be withdrawn.
        self.withdrawn -= Counter(withdrawn)
        gone -= withdrawn
        if gone:
            self._life.complain(
                f"batches {sorted(gone)} were deleted from the store and the trainer was never "
                "given them"
            )
        for received in self.on_saved:
            received()

    def close(self) -> None:
        self._inner.close()
