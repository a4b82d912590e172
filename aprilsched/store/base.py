"""What a scheduler asks of a store, and nothing else."""

from __future__ import annotations

from typing import Protocol

from aprilsched.core.saving.saved import Cut, Saved

__all__ = ["Store"]


class Store(Protocol):
    """Keeps cuts. The scheduler calls one method at a time, perhaps from different threads.

    Errors: :class:`~aprilsched.errors.StoreError`, nothing else. A cut that failed to be saved has
    left the store as it was; the next one is then a whole one.
    """

    @property
    def inline(self) -> bool:
        """Its calls are so short that they need no thread of their own, or it must not have one
        (on a virtual clock)."""
        ...

    def open(self) -> Saved | None:
        """What was saved before; None in a new store."""
        ...

    def save(self, cut: Cut, *, durable: bool) -> None:
        """Keep a cut, whole or not at all. With `durable` it survives a loss of power, otherwise
        the end of the process, however it ends."""
        ...

    def close(self) -> None: ...
