"""One sleep of the engines: their memory, lent to the trainer and taken back."""

from __future__ import annotations

from dataclasses import dataclass

from aprilsched.core.control import CUDA_GRAPH, WEIGHTS

__all__ = ["Sleep"]


@dataclass(slots=True, kw_only=True)
class Sleep:
    """From the trainer's wish to sleep until every engine has its memory back.

    `quiet` once the engines may be paused; `asleep` once the trainer was told that the memory is
    its own; `waking` once it gave it back.
    """

    tags: frozenset[str]
    inside: bool
    """Stragglers stay inside the paused engines."""
    quiet: bool = False
    asleep: bool = False
    waking: bool = False

    @property
    def away(self) -> frozenset[str]:
        """What should be released now."""
        return self.tags if self.quiet and not self.waking else frozenset()

    @property
    def away_in_refit(self) -> frozenset[str]:
        """The same while weights are loaded: they and what is captured of them are awake."""
        return self.away - {WEIGHTS, CUDA_GRAPH}
