"""A store that is slow, fails sometimes, survives a kill, and checks what is deleted.

It checks this invariant of the scheduler: a batch is deleted as acknowledged only if the trainer
was given it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable

from aprilsched.errors import StoreError
from aprilsched.kernel.core.state.saved import Saved, Snapshot
from aprilsched.kernel.store.in_memory import Store

__all__ = ["ChaosStore"]


class ChaosStore:
    """One life's view of a store that outlives it.

    Args:
        inner: what keeps the content.
        inline: False gives it a thread of its own, which is slow.
        failing: probability that a save fails.
        given: indices of the batches that the trainer has.
        complain: told of every violation.
    """

    def __init__(
        self,
        inner: Store,
        *,
        inline: bool,
        failing: float,
        draw: random.Random,
        given: Callable[[], Iterable[int]],
        complain: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self.inline = inline
        self._inner = inner
        self._failing = failing
        self._draw = draw
        self._given = given
        self._complain = complain
        self._note = note
        self._held: set[int] = set()
        self.withdrawn: Counter[int] = Counter()
        """How often batches were offered and withdrawn, which the store forgets untaken."""
        self.dead = False
        """The process is gone: nothing that it writes from now on arrives."""
        self.replaced = False
        """A checkpoint takes the place of what it holds."""
        self.whole = True
        """What was saved last did not fail."""
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
            self._note("CHAOS the store fails to save")
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
        gone = (gone | set(snapshot.acknowledged)) - set(self._given())
        withdrawn = gone & self.withdrawn.keys()
        # Another batch may have the number next, and be withdrawn before this is saved.
        self.withdrawn -= Counter(withdrawn)
        gone -= withdrawn
        if gone:
            self._complain(
                f"batches {sorted(gone)} were deleted from the store and the trainer was never "
                "given them"
            )
        for received in self.on_saved:
            received()

    def close(self) -> None:
        self._inner.close()
