"""Carries out the command Plan: chooses a schedule in a separate process.

A choice takes seconds of Python code, which must stop neither the event loop nor the trainer. In a
thread it would take Python's lock from the trainer. So each choice is made by a process that is
started for it, with low priority. The process runs one file
(:mod:`~aprilsched.kernel.shell.planning_child`). It does not use :mod:`multiprocessing`, which
would import the trainer's main module first: a script without ``if __name__ == "__main__"`` would
train a second time.

The process ends when its choice is made, when its caller is cancelled, after :data:`LIMIT_S`, and a
moment after the trainer's process. Its pipes carry only data that the other end pickled.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing.spawn
import os
import pickle  # noqa: TID251 (an own child process)
import signal
import subprocess  # noqa: TID251 (an own child process)
import sys

from aprilsched.kernel.core.config import SchedulerConfig
from aprilsched.kernel.core.messages.commands import Plan
from aprilsched.kernel.core.messages.events import Planned
from aprilsched.kernel.core.policies.schedule import Schedule
from aprilsched.kernel.shell import planning_child
from aprilsched.kernel.shell.callbacks import called_now
from aprilsched.kernel.shell.tasks import Part, Shell
from aprilsched.planning import Planner

log = logging.getLogger("aprilsched")

LIMIT_S = 600.0
"""Seconds after which a choice is given up. It takes seconds on an idle core, and much longer on
cores that a trainer uses."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class PlanningFailed(Exception):
    """No schedule could be chosen; the message is the cause."""


class Planning(Part):
    """Carries out Plan. A failure is logged, and the current schedule stays in use."""

    def __init__(self, shell: Shell, planner: Planner) -> None:
        super().__init__(shell)
        self._planner = planner

    def plan(self, command: Plan) -> None:
        if self._planner.inline:
            self._feed(self._plan_here(command))
        else:
            self._tasks.start(("planning", command), self._plan(command))

    async def _plan(self, command: Plan) -> None:
        try:
            schedule = await plan_in_process(self._planner, command, self._config)
            self._feed(_planned(schedule, command))
        except Exception as error:
            self._feed(_failed(error))

    def _plan_here(self, command: Plan) -> Planned:
        try:
            schedule = called_now("the planner", self._planner.plan, command, self._config)
            return _planned(schedule, command)
        except Exception as error:
            return _failed(error)


def _planned(schedule: Schedule, command: Plan) -> Planned:
    if not schedule.same_as(command.current):
        log.info("from now on %s", schedule.why)
    return Planned(schedule=schedule)


def _failed(error: Exception) -> Planned:
    log.error("no schedule could be chosen; the current one stays in use", exc_info=error)
    cause = str(error) if isinstance(error, PlanningFailed) else repr(error)
    return Planned(schedule=None, cause=cause)


async def plan_in_process(planner: Planner, command: Plan, config: SchedulerConfig) -> Schedule:
    """Return the result of ``planner.plan(command, config)`` on copies of all three.

    Raises:
        PlanningFailed: if pickle cannot take one of them, if no process can be started, if the
            process cannot read them, ends or takes too long, or if the planner raises.
    """
    try:
        order = pickle.dumps((planner, command, config))
    except Exception as error:
        raise PlanningFailed(
            f"the planner must be picklable ({error}); define its class in a module"
        ) from error
    process = _started()
    # In a thread: a virtual clock waits for threads, and not for the pipes of a process. A thread
    # that has not started must run after a cancellation too, since it waits for the killed process.
    work = asyncio.get_running_loop().run_in_executor(None, process.communicate, order)
    try:
        answer, _ = await asyncio.shield(work)
    finally:
        process.kill()
    return _schedule(answer, process.returncode)


def _started() -> subprocess.Popen[bytes]:
    # A program that embeds Python sets the path of its interpreter here.
    python = multiprocessing.spawn.get_executable()
    if not python:
        raise PlanningFailed("the path of Python is unknown")
    paths = json.dumps(sys.path, default=str)
    arguments = (paths, str(os.getpid()), str(LIMIT_S))
    try:
        return subprocess.Popen(  # noqa: S603 (our own program)
            # -P keeps a file in the directory of the program from replacing a module.
            [os.fsdecode(python), "-P", planning_child.__file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_ONE_THREAD},
            # Ctrl-C on a terminal is for the trainer.
            process_group=0,
        )
    except OSError as error:
        raise PlanningFailed(f"no process can be started ({error})") from error


def _schedule(answer: bytes, exit_code: int | None) -> Schedule:
    if exit_code == -signal.SIGALRM:
        raise PlanningFailed(f"its process had no answer after {LIMIT_S:g} s")
    try:
        kind, *rest = pickle.loads(answer)  # noqa: S301
    except Exception as error:
        raise PlanningFailed(
            f"its process ended with exit code {exit_code} and without an answer"
        ) from error
    if kind == "unreadable":
        raise PlanningFailed(
            f"its process cannot import the planner ({rest[0]}); define it in a module"
        )
    if kind == "raised":
        failure = PlanningFailed(rest[0])
        failure.add_note(f"In the process of the planner:\n{rest[1]}")
        raise failure
    return rest[0]
