"""Places the facts of a resumed run on one timeline, after those of the prior run.

A process that resumes a run has a clock of its own. The listeners of the run see its facts at the
time at which the prior run ended and later. The time between the two processes is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from aprilsched.core.messages.facts import Fact
from aprilsched.telemetry.base import Listener

__all__ = ["ResumedTimeline"]


class ResumedTimeline:
    """A listener that passes facts on to `listeners`, with their times on the run's timeline.

    Facts are held back until :meth:`begin` is called, so that the listeners can be shown the prior
    run first.
    """

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = tuple(listeners)
        self._held: list[tuple[Sequence[Fact], float]] = []
        self._begin: float | None = None
        """Seconds from the beginning of the run to the end of the prior run."""
        self._first: float | None = None
        """The time of the first fact that is passed on, by the clock of this process."""

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        if self._begin is None:
            self._held.append((facts, now))
            return
        if self._first is None:
            self._first = now
        at = now - self._first + self._begin
        for listener in self._listeners:
            listener.on_facts(facts, at)

    def begin(self, at: float) -> None:
        """Pass on the facts that were held back, and from now on every fact at once.

        Args:
            at: seconds from the beginning of the run to the end of the prior run.
        """
        self._begin = at
        held, self._held = self._held, []
        for facts, now in held:
            self.on_facts(facts, now)
