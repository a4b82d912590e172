"""Choosing schedules beside the run: a second of arithmetic must not hold the event loop up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aprilsched.coordinator.tasks import Tasks
from aprilsched.core.messages.commands import Plan
from aprilsched.core.messages.events import Event, Planned
from aprilsched.core.rules import Rules
from aprilsched.driver.callbacks import called_now
from aprilsched.planning import Planner

__all__ = ["Planning"]

log = logging.getLogger("aprilsched")


class Planning:
    """Carries out Plan; a failure keeps the schedule in force and is said once for each time."""

    def __init__(self, *, planner: Planner, rules: Rules, feed: Callable[[Event], None]) -> None:
        self._planner = planner
        self._rules = rules
        self._feed = feed
        self._tasks: Tasks | None = None

    def start(self, tasks: Tasks) -> None:
        self._tasks = tasks

    def plan(self, command: Plan) -> None:
        if self._planner.inline:
            self._feed(self._planned(command))
        elif self._tasks is not None:
            self._tasks.start(("planning", command), self._plan(command))

    async def _plan(self, command: Plan) -> None:
        self._feed(await asyncio.to_thread(self._planned, command))

    def _planned(self, command: Plan) -> Planned:
        try:
            schedule = called_now("the planner", self._planner.plan, command, self._rules)
            changes = not schedule.same_as(command.current)
        except Exception as error:
            log.exception("no schedule could be chosen; the one in force stays")
            return Planned(schedule=None, cause=repr(error))
        if changes:
            log.info("from now on %s", schedule.why)
        return Planned(schedule=schedule)
