"""One outage: no engine is in use, from the loss of the last one until one takes part again."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Outage"]


@dataclass(slots=True)
class Outage:
    """`since`: when no engine at all was there for the first time in it; None if some stand by.

    `said_at`: when that was said last. `given_up`: the trainer was told that the fleet is lost.
    """

    since: float | None = None
    said_at: float | None = None
    given_up: bool = False
