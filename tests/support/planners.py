"""Planners that another process can have, for the tests of choices in a process of their own."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from aprilsched.kernel.core.config import SchedulerConfig
from aprilsched.kernel.core.messages.commands import Plan
from aprilsched.kernel.core.policies.schedule import Schedule
from aprilsched.planning import Planner


class Telling(Planner):
    """Prints, and reports in `why` what it sees of its process."""

    def plan(self, command: Plan, config: SchedulerConfig) -> Schedule:
        print("x" * 100_000)
        heavy = sorted({"torch", "matplotlib", "pandas"} & sys.modules.keys())
        why = f"{os.getpid()} {os.nice(0)} {os.getpgid(0) == os.getpid()} {heavy}"
        return replace(command.current, why=why)


class Broken(Planner):
    """Always fails."""

    def plan(self, command: Plan, config: SchedulerConfig) -> Schedule:
        raise ArithmeticError("no such number")


class Exiting(Planner):
    """Asks Python to end."""

    def plan(self, command: Plan, config: SchedulerConfig) -> Schedule:
        raise SystemExit(7)


class Dying(Planner):
    """Its process ends without a word."""

    def plan(self, command: Plan, config: SchedulerConfig) -> Schedule:
        os._exit(3)


class Hanging(Planner):
    """Writes into the pipe at `path` that it has started, and never ends by itself."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def plan(self, command: Plan, config: SchedulerConfig) -> Schedule:
        self.path.write_text(str(os.getpid()))
        while True:
            time.sleep(3600)


class Unreadable(Planner):
    """Pickle takes it, and no other process can read it."""

    def __reduce__(self) -> tuple[object, ...]:
        return _only_in, (os.getpid(), self.inline)

    def plan(self, command: Plan, config: SchedulerConfig) -> Schedule:
        return replace(command.current, why=str(os.getpid()))


def _only_in(pid: int, inline: bool) -> Unreadable:
    if os.getpid() != pid:
        raise ModuleNotFoundError("No module named 'of_the_notebook'")
    return Unreadable(inline=inline)
