"""A listener that checks the invariants of a scheduler while it runs."""

from __future__ import annotations

from typing import Any

from aprilsched import RolloutScheduler
from aprilsched.kernel.core.invariants import check
from aprilsched.kernel.core.messages.commands import Command
from aprilsched.kernel.core.messages.events import Event


class Checking:
    """Checks the invariants after every event, as soon as it has its `scheduler`."""

    def __init__(self) -> None:
        self.scheduler: RolloutScheduler | None = None

    def on_event(self, event: Event, now: float) -> None:
        if self.scheduler is not None:
            check(self.scheduler.state)

    def on_command(self, command: Command, now: float) -> None:
        """Nothing: the state after the command is that after its event."""


def checked(*arguments: Any, **settings: Any) -> RolloutScheduler:
    """A scheduler with these arguments, whose invariants are checked after every event."""
    listener = Checking()
    listener.scheduler = RolloutScheduler(*arguments, listeners=[listener], **settings)
    return listener.scheduler
