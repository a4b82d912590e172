"""How fast engines generate, between two deliveries."""

from __future__ import annotations

from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev

__all__ = ["Generation"]


class Generation:
    """Listens to a run; tokens count when they arrive."""

    def __init__(self) -> None:
        self._tokens = 0
        self._deliveries: list[tuple[float, int]] = []

    def on_event(self, event: ev.Event, now: float) -> None:
        if isinstance(event, ev.Progress):
            self._tokens += len(event.token_ids)

    def on_command(self, command: do.Command, now: float) -> None:
        if isinstance(command, do.Deliver):
            self._deliveries.append((now, self._tokens))

    def tokens_per_s(self, burn_in: int) -> float | None:
        """Over the batches after the first `burn_in`; None if there are none."""
        if len(self._deliveries) <= max(1, burn_in):
            return None
        begin, before = self._deliveries[max(0, burn_in - 1)]
        end, after = self._deliveries[-1]
        return (after - before) / (end - begin) if end > begin else None
