"""Watches a run of the campaign: invariants, recoveries, the time to the next token."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from aprilsched.core.invariants import check
from aprilsched.core.messages import facts as of
from aprilsched.core.state.state import SchedulerState

__all__ = ["Watch"]


class Watch:
    """A listener; `state` is given once the scheduler is there."""

    def __init__(self) -> None:
        self.state: SchedulerState | None = None
        self.losses: Counter[str] = Counter()
        """Engines lost, by what was said of them."""
        self.standby = 0
        self.readmitted = 0
        self.recoveries: list[float] = []
        """Seconds from an engine's loss to its readmission."""
        self.failed_attempts = 0
        self.waits_for_fleet = 0
        self._heard: dict[int, float] = {}
        """When a request was sent, or gave a token, the last time."""
        self._lost_at: dict[str, float] = {}
        self._engine_of: dict[int, str] = {}
        self._tokens_at: dict[str, list[float]] = {}

    def on_facts(self, facts: Sequence[of.Fact], now: float) -> None:
        for fact in facts:
            self._note(fact, now)
        # Most facts are chunks of tokens, which come alone and change nothing that is checked.
        if self.state is not None and not isinstance(facts[-1], of.TokensReceived):
            check(self.state)

    def _note(self, fact: of.Fact, now: float) -> None:
        match fact:
            case of.TokensReceived():
                self._heard[fact.request_id] = now
                self._tokens_at.setdefault(self._engine_of[fact.request_id], []).append(now)
            case of.AttemptSent():
                self._engine_of[fact.request_id] = fact.engine
                self._heard[fact.request_id] = now
            case of.AttemptEnded(outcome="failed"):
                self.failed_attempts += 1
            case of.EngineLost():
                self.standby += fact.standby
                if not fact.standby:
                    self.losses[cause_of(fact.cause)] += 1
                self._lost_at.setdefault(fact.engine, now)
            case of.EngineAdmitted():
                self.readmitted += 1
                lost_at = self._lost_at.pop(fact.engine, None)
                if lost_at is not None:
                    self.recoveries.append(now - lost_at)
            case of.FleetAwaited():
                self.waits_for_fleet += 1
            case _:
                pass

    def silences(self, now: float) -> list[float]:
        """Seconds since each request that is with an engine now was heard of."""
        if self.state is None:
            return []
        return [now - self._heard[r.request_id] for r in self.state.in_flight.open_requests()]

    def next_token(self, after: float, engine: str | None = None) -> float | None:
        """Seconds to the next token of an engine, or of any."""
        times = [self._tokens_at.get(engine, [])] if engine else list(self._tokens_at.values())
        found = [t[place] for t in times if (place := bisect_right(t, after)) < len(t)]
        return min(found) - after if found else None


def cause_of(message: str) -> str:
    """A class of causes: the words before the details."""
    for word in (
        "refused at attempt",
        "attempts broke off",
        "cannot connect",
        "the connection broke",
        "every token needs one",
        "cannot be read",
        "the stream ended",
        "answered 4",
        "answered 5",
        "a fault of the script",
        "bytes",
        "not the tokens of",
        "asked for",
        "refused what",
        "was lost",
        "no token for",
        "tokens/s a request",
        "attempts in a row",
        "pause failed",
        "flush failed",
        "continue failed",
        "refit failed",
    ):
        if word in message:
            return word
    return "others"
