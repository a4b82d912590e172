"""What a prefix cache saves of prefill: prompts shared within a group, and a request sent again.

Only the time of prefill is modelled. Memory is counted as if nothing were shared, so a pool that
is nearly full preempts somewhat too early.

Invariants: nothing is found that was not computed since the last flush; what is remembered is at
most the pool's size, the oldest forgotten first.
"""

from __future__ import annotations

from aprilsched.engines.base import GenerationRequest

__all__ = ["PrefixCache"]


class PrefixCache:
    """Tokens that were computed and may still be there, by whose they are."""

    def __init__(self, kv_tokens: int) -> None:
        self._room = kv_tokens
        self._held = 0
        self._tokens: dict[str | int, int] = {}

    def begin(self, request: GenerationRequest) -> int:
        """The request is prefilled: how many tokens of its context need not be computed.

        The last one always is. From now on its siblings find what they share with it, which is
        no more than the shortest context that any of them came with.
        """
        own, group = _name(request), request.affinity
        context = len(request.input_ids)
        known = self._tokens.get(own, 0)
        if group:
            shared = self._tokens.get(group)
            known = max(known, shared or 0)
            self._put(group, context if shared is None else min(shared, context))
        self._put(own, max(context, self._tokens.get(own, 0)))
        return min(known, context - 1)

    def end(self, request: GenerationRequest, tokens: int) -> None:
        """It has ended, or was aborted, with so many tokens of context computed."""
        self._put(_name(request), tokens)

    def flush(self) -> None:
        """Nothing is there any more."""
        self._tokens.clear()
        self._held = 0

    def _put(self, key: str | int, tokens: int) -> None:
        self._held += tokens - self._tokens.pop(key, 0)
        self._tokens[key] = tokens
        while self._held > self._room:
            oldest = next(iter(self._tokens))
            self._held -= self._tokens.pop(oldest)


def _name(request: GenerationRequest) -> str:
    """The request without the number of its attempt: all attempts begin alike."""
    return request.request_id.rpartition("-")[0] or request.request_id
