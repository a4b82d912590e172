"""The KV that engines keep for sessions at their tools, as the core expects it."""

from __future__ import annotations

from dataclasses import dataclass, field

_LAST_TURNS = 500
"""Number of turns over which means are taken."""


@dataclass(slots=True)
class SessionPool:
    """The sessions whose KV one engine keeps; the least recently used one is evicted first."""

    contexts: dict[int, int] = field(default_factory=dict[int, int])
    """Context tokens by rollout, in the order in which their last turns ended."""
    tokens: int = 0
    """Sum of the context tokens."""
    unique: float = 1.0
    """Tokens in the pool for each token of a context: less than 1 if contexts share prefixes."""
    share: float = 1.0
    """Share of the pool that may be used; see :mod:`~aprilsched.kernel.core.policies.sessions`."""
    preemptions: int | None = None
    """Number of preemptions in the latest report."""

    def keep(self, rollout_id: int, tokens: int, *, room: float) -> None:
        """Add a session whose turn has ended, and evict what exceeds `room` tokens of the pool."""
        self.drop(rollout_id)
        self.contexts[rollout_id] = tokens
        self.tokens += tokens
        while self.tokens * self.unique > room and self.contexts:
            self.drop(next(iter(self.contexts)))

    def drop(self, rollout_id: int) -> None:
        """Remove a session: it runs again, or its KV is gone."""
        self.tokens -= self.contexts.pop(rollout_id, 0)


@dataclass(slots=True)
class SessionKv:
    """The pools by engine, and what turns are like."""

    pools: dict[str, SessionPool] = field(default_factory=dict[str, SessionPool])
    started: set[int] = field(default_factory=set[int])
    """Rollouts that have started, with a fixed limit; some may have ended."""
    turns: int = 0
    """Number of turns that have ended."""
    turn_tokens: float = 0.0
    """Mean number of tokens that a turn generates."""
    growth: float = 0.0
    """Mean number of tokens by which a turn and its tool lengthen the context."""

    def of(self, engine: str) -> SessionPool:
        """Return the pool of an engine."""
        return self.pools.setdefault(engine, SessionPool())

    def note_turn(self, generated: int, growth: float) -> None:
        """Add a turn to the means."""
        self.turns += 1
        weight = 1 / min(self.turns, _LAST_TURNS)
        self.turn_tokens += weight * (generated - self.turn_tokens)
        self.growth += weight * (growth - self.growth)
