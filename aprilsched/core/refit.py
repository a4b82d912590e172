"""One update of the policy version, from the trainer's call to the engines' own word for it."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Answer", "Update"]

Answer = tuple[int | None, str]
"""The version an engine says it has, None if its weights are torn, and the cause of a failure."""


@dataclass(slots=True, kw_only=True)
class Update:
    """`quiet` once the engines may be paused for the refit; `answers` has one for each engine
    that was asked and has answered, or is lost."""

    version: int
    beside: bool = False
    """An adapter, loaded beside what runs: nothing is paused."""
    republishable: bool = False
    acknowledges: tuple[int, ...] = ()
    """Batches that the trainer has made the version from."""
    quiet: bool = False
    refitting: frozenset[str] = frozenset()
    answers: dict[str, Answer] = field(default_factory=dict[str, Answer])

    @property
    def answered(self) -> bool:
        """Every engine that was asked has answered or is lost."""
        return bool(self.refitting) and self.refitting <= self.answers.keys()

    def took(self) -> frozenset[str]:
        """Engines that have the version."""
        return frozenset(
            engine
            for engine, (version, cause) in self.answers.items()
            if version == self.version and not cause
        )

    def failed(self) -> tuple[tuple[str, str], ...]:
        """Engines that do not have it, and why."""
        took = self.took()
        return tuple(
            (engine, cause or f"says it has version {version} after the refit to {self.version}")
            for engine, (version, cause) in self.answers.items()
            if engine not in took
        )
