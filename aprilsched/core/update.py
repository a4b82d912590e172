"""One update of the policy version, from the trainer's call to the engines' own word for it."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Update"]


@dataclass(slots=True, kw_only=True)
class Update:
    """`quiet` once the engines may be paused for the refit; `answers` maps each engine to the
    version it says it has afterwards and the cause of a failure."""

    version: int
    quiet: bool = False
    refitting: frozenset[str] = frozenset()
    answers: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])

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
