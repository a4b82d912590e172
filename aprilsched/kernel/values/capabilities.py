"""What an engine can do, as it reported when it was opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """Room in the KV pool that admission leaves for tokens to come, as SGLang's PrefillAdder
    (schedule_policy.py) and NewTokenRatioTracker do.

    A waiting request is admitted if there is room for its context, for all tokens to come of the
    requests of its prefill pass, and for a share of those of the running ones. The share is 0.7
    when the engine was idle, and falls to 0.098 in the course of 600 decode steps. The server's
    --schedule-conservativeness multiplies both. When the pool overflows, the share becomes that of
    the running requests' limits that they have generated.
    """

    clip: int = 4096
    """Most tokens to come that count of a request: SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION."""
    fixed_in_full: bool = True
    """A running request with ``ignore_eos`` counts in full, as since SGLang 0.5.22."""
    conservativeness: float = 1.0
    """Factor of the share: --schedule-conservativeness."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """The capabilities that one engine reported when it was opened."""

    version_spans: bool
    """A finished or aborted request reports which version sampled each of its tokens."""
    flush_while_paused: bool
    """The KV cache can be flushed between pause(retract) and continue."""
    max_running_requests: int | None = None
    kv_tokens: int | None = None
    caches_contexts: bool = False
    """The KV of an ended request stays in the pool until others need the room, and only there."""
    reservation: Reservation | None = None
    """Room that its admission leaves for tokens to come; None if it leaves none, as vLLM."""
    ranks: int = 1
    """Number of processes that hold a part of the weights: tensor times pipeline parallel."""
    release_while_paused: bool = False
    """Memory can be released while requests wait in a pause(retract)."""
    keeps_released_weights: bool = False
    """Released weights return unchanged (from a CPU copy, or because they are not really freed)."""
    adapters: bool = False
    """Several LoRA adapters can be served at a time."""
    kv_tier: Literal["none", "keyed", "unkeyed"] = "none"
    """Whether cached KV may survive a flush, in files or a store of several servers, and whether
    requests of another `cache_key` then find it. "keyed" (they do not) also if the server does not
    show whether it has such a tier."""
    companions: frozenset[str] = frozenset()
    """The names of the companions that it returns when a request asks for them."""
    media: frozenset[str] = frozenset()
    """The kinds of media that its model understands."""
    priority: int = 0
    """Order of request priorities: 1 if small numbers run first, -1 if large ones do. 0: requests
    run in order of arrival."""
    server: str = ""
    """Name and version of the server, for people to read."""

    @property
    def stores_kv(self) -> bool:
        """Whether cached KV may survive a flush."""
        return self.kv_tier != "none"
