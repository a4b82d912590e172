"""What an engine can do, as it reported when it was opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """The capabilities that one engine reported when it was opened."""

    version_spans: bool
    """A finished or aborted request reports which version sampled each of its tokens."""
    flush_while_paused: bool
    """The KV cache can be flushed between pause(retract) and continue."""
    max_running_requests: int | None = None
    kv_tokens: int | None = None
    reserves: bool = False
    """A request waits until there is room for all that it may still generate."""
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
