"""What of an engine's memory the trainer has: a small state machine that refuses wrong orders.

SGLang looks at less: releasing while requests run, or waking what was not released, kills it;
continuing without the cache reads memory that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["TAGS", "Memory"]

TAGS = ("kv_cache", "weights", "cuda_graph")
"""The parts that can be released."""


class Memory:
    """The parts of one engine's memory; every method answers why not, or None."""

    def __init__(self) -> None:
        self.released: frozenset[str] = frozenset()

    def release(self, tags: Sequence[str]) -> str | None:
        """Give `tags` away."""
        if unknown := sorted(set(tags) - set(TAGS)):
            return f"memory has no part {unknown[0]!r}; release some of {', '.join(TAGS)}."
        if twice := sorted(self.released & set(tags)):
            return f"{twice[0]} is released already; release each part once."
        self.released |= set(tags)
        return None

    def wake(self, tags: Sequence[str]) -> str | None:
        """Take `tags` back."""
        if awake := sorted(set(tags) - self.released):
            return f"{awake[0]!r} was not released; wake only what was."
        self.released -= set(tags)
        return None

    def lacks(self, *needed: str) -> str | None:
        """Whether something that is `needed` is away; without names, anything at all."""
        if missing := sorted(self.released & set(needed or TAGS)):
            return f"its {missing[0]} is released; wake it first."
        return None
