"""The attempts that engines are at, and what their context costs, from events and commands.

Invariant: an attempt is open from its Send to its first end: it finished, came back, failed, or its
engine was lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from aprilsched.core.messages import commands as do

__all__ = ["OpenAttempt", "OpenAttempts"]


@dataclass(slots=True, kw_only=True)
class OpenAttempt:
    """A request with an engine; `context` is its prompt and all known tokens."""

    request_id: int
    attempt: int
    rollout_id: int
    engine: str
    context: int
    left: int
    """Tokens that it may still have."""
    prefill_due: int
    """Context tokens that the engine computes again before the next chunk."""

    def progress(self, tokens: int) -> int:
        """So many tokens came; the context tokens that were computed again before."""
        again, self.prefill_due = self.prefill_due, 0
        self.context += tokens
        self.left -= tokens
        return again


class OpenAttempts:
    """By request; a request has at most one open attempt."""

    def __init__(self) -> None:
        self._open: dict[int, OpenAttempt] = {}
        self._flushed: set[str] = set()
        """Engines whose KV was flushed in their last pause."""

    def send(self, command: do.Send) -> None:
        context = len(command.input_ids)
        self._open[command.request_id] = OpenAttempt(
            request_id=command.request_id,
            attempt=command.attempt,
            rollout_id=command.rollout_id,
            engine=command.engine,
            context=context,
            left=command.sampling.max_new_tokens,
            prefill_due=context if command.attempt > 1 else 0,
        )

    def of(self, request_id: int, attempt: int) -> OpenAttempt | None:
        """The attempt, if it is open."""
        found = self._open.get(request_id)
        return found if found is not None and found.attempt == attempt else None

    def close(self, request_id: int, attempt: int) -> OpenAttempt | None:
        """The attempt, open until now."""
        found = self.of(request_id, attempt)
        if found is not None:
            del self._open[request_id]
        return found

    def lose(self, engine: str) -> list[OpenAttempt]:
        """The engine is out of use: its attempts, open until now."""
        lost = [found for found in self._open.values() if found.engine == engine]
        for found in lost:
            del self._open[found.request_id]
        return lost

    def clear(self) -> None:
        """Nothing is with any engine."""
        self._open.clear()
        self._flushed.clear()

    # --- engines -------------------------------------------------------------------------------

    def pause(self, engine: str) -> None:
        self._flushed.discard(engine)

    def flush(self, engine: str) -> None:
        self._flushed.add(engine)

    def go_on(self, engine: str) -> None:
        """A pause is over: what was in it is prefilled again if the KV was flushed."""
        if engine not in self._flushed:
            return
        for found in self._open.values():
            if found.engine == engine:
                found.prefill_due = found.context
