"""What an experiment tracker is to a run: somewhere that a step's figures are written to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

__all__ = ["Writer"]


class Writer(Protocol):
    """May be slow: it is called in a thread of its own, one call at a time."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """The figures of one step, by name; steps come in order."""
        ...

    def close(self) -> None:
        """Everything is written; called once, in the thread of who began it."""
        ...
