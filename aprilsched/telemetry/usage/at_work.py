"""An engine and its requests at one moment, as events and commands tell of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from aprilsched.core.messages.events import EngineInfo
from aprilsched.telemetry.usage.parts import PARTS, EngineState, Stretch

__all__ = ["At", "EngineAtWork", "Moved", "Recording", "RequestAtWork"]

At: TypeAlias = Literal["decode", "prefill", "re_prefill"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """Slot-seconds of `engine` up to `time` that were counted under `part`, and were decoding."""

    engine: str
    time: float
    part: Literal["prefill", "re_prefill"]
    slot_seconds: float


class Recording(Protocol):
    """Takes what a running sum has not."""

    def stretch(self, stretch: Stretch) -> None:
        """It has ended."""
        ...

    def moved(self, moved: Moved) -> None:
        """That was counted wrongly."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class EngineAtWork:
    """An engine now.

    Attributes:
        info: as it said of itself when it came.
        seconds: its time so far in the order of PARTS; each moment is divided by the slots that
            the engine had shown until then.
    """

    info: EngineInfo
    version: int | None
    since: float
    """Of its stretch that is under way."""
    state: EngineState = "generating"
    decode: int = 0
    prefill: int = 0
    re_prefill: int = 0
    """Its requests, by what they are at."""
    peak: int = 0
    """Requests that it had at once."""
    tokens: int = 0
    """That it generated so far."""
    beyond: int = 0
    """Tokens of its requests' contexts, less `tokens`: a chunk changes both, and this not."""
    pace: float = 0.0
    """Seconds a token of one request, a running mean; 0 until two chunks of one were seen."""
    pacers: int = 0
    """Its requests that tell it."""
    drops_kv: bool = True
    """In the pause that is under way."""
    lent: frozenset[str] = frozenset()
    """Tags of the memory that the trainer has."""
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def in_flight(self) -> int:
        return self.decode + self.prefill + self.re_prefill

    @property
    def context_tokens(self) -> int:
        """Of its requests."""
        return self.tokens + self.beyond

    def count(self, at: At, requests: int) -> None:
        """So many more, or fewer."""
        if at == "decode":
            self.decode += requests
        elif at == "prefill":
            self.prefill += requests
        else:
            self.re_prefill += requests


@dataclass(slots=True, kw_only=True, eq=False)
class RequestAtWork:
    attempt: int
    rollout_id: int
    engine: EngineAtWork
    at: At
    context: int
    """Tokens of its prompt, and those that are known of its response."""
    since: float
    """Its last sign of life, as far as it is watched: sent, let go on, or a chunk."""
    paces: bool
    watched: bool = True
    """Its next chunk tells more than the number of its tokens."""
