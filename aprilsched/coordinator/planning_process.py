"""Makes one choice of a schedule in a process of its own.

A choice is seconds of Python code. In a thread of the trainer's process it would take Python's lock
from the trainer for that time. So it is made by a process that begins for it, with low priority,
and ends with it. That process is a plain ``python -c`` and no process of :mod:`multiprocessing`,
which would begin by importing the trainer's main module: a script without ``if __name__ ==
"__main__"`` would train a second time.

Invariants:
- The process ends when its choice is made, when it is not wanted any more, after :data:`LIMIT_S`,
  and a moment after the trainer's process, whatever ended that.
- What goes through its pipes was pickled by the other end, and nobody else has them.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing.spawn
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback

from aprilsched.core.config import SchedulerConfig
from aprilsched.core.messages.commands import Plan
from aprilsched.core.policies.schedule import Schedule
from aprilsched.planning import Planner

__all__ = ["LIMIT_S", "NoProcess", "child", "planned_apart"]

LIMIT_S = 600.0
"""Seconds after which a choice is given up. It takes seconds on an idle core, and much longer
beside a trainer that uses all of them."""
_NICENESS = 5
"""Of two threads that want one core, the trainer's gets three quarters. With 10 it gets nine
tenths; choices then took a minute on a machine that had too few cores."""
_BEGUN = b"\0"
"""What the process says when it has imported everything. Without it, it could not begin."""
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from aprilsched.coordinator.planning_process import child
child(int(sys.argv[2]))
"""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class NoProcess(Exception):
    """This choice cannot be made in a process of its own; the message says why."""


class _Failed(Exception):
    """The choice failed in its process."""


class _RaisedThere(_Failed):
    """An exception of the planner, which looks here as it did there."""

    def __init__(self, shown: str, trace: str) -> None:
        super().__init__(shown)
        self.add_note(f"In the process of the planner:\n{trace}")

    def __repr__(self) -> str:
        return str(self)


# --- the trainer's process -----------------------------------------------------------------------


async def planned_apart(planner: Planner, command: Plan, config: SchedulerConfig) -> Schedule:
    """The result of ``planner.plan(command, config)`` on copies of all three.

    Raises:
        NoProcess: if pickle cannot take one of them, if the process cannot read it, or if no
            process can be started.
        Exception: if the planner raises, or if the process ends or takes too long.
    """
    try:
        order = pickle.dumps((planner, command, config))
    except Exception as error:
        raise NoProcess(f"pickle cannot take it ({error})") from error
    process = _Process()
    try:
        answer = await asyncio.to_thread(process.ask, order)
    finally:
        process.end()
    if not answer:
        raise NoProcess("the process ended before it began, which its output explains")
    try:
        kind, *rest = pickle.loads(answer.removeprefix(_BEGUN))  # noqa: S301
    except Exception as error:
        raise _Failed(
            f"its process ended with exit code {process.exit_code} and without an answer"
        ) from error
    match kind:
        case "unreadable":
            raise NoProcess(f"its process cannot read it ({rest[0]})")
        case "raised":
            raise _RaisedThere(*rest)
        case _:
            return rest[0]


class _Process:
    """The process of one choice. :meth:`ask` is for a thread, :meth:`end` for any other one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted = True

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.returncode

    def ask(self, order: bytes) -> bytes:
        """Start the process, and wait for its answer."""
        with self._lock:
            if not self._wanted:
                return b""
            self._process = _started()
        with self._process as process:
            try:
                return process.communicate(order, timeout=LIMIT_S)[0]
            except subprocess.TimeoutExpired as late:
                raise _Failed(f"its process had no answer after {LIMIT_S:g} s") from late
            finally:
                process.kill()

    def end(self) -> None:
        with self._lock:
            self._wanted = False
            if self._process is not None:
                self._process.kill()


def _started() -> subprocess.Popen[bytes]:
    # A program in which Python is embedded says here what its Python is.
    python = multiprocessing.spawn.get_executable()
    if not python:
        raise NoProcess("nothing says where Python is")
    paths = json.dumps(sys.path, default=str)
    try:
        return subprocess.Popen(  # noqa: S603 (our own program)
            # -P keeps a file in the current directory from taking the place of a module.
            [os.fsdecode(python), "-P", "-c", _PROGRAM, paths, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_ONE_THREAD},
            # Ctrl-C on a terminal is for the trainer.
            process_group=0,
        )
    except OSError as error:
        raise NoProcess(f"no process can be started ({error})") from error


# --- the process of the choice -------------------------------------------------------------------


def child(parent: int) -> None:
    """Read an order, carry it out, and write the answer; `parent` is the trainer's process."""
    os.nice(_NICENESS)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    answers = os.dup(1)
    try:
        os.dup2(2, 1)  # A planner may print, and the answer is the only thing in its pipe.
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with os.fdopen(answers, "wb") as pipe:
        order = sys.stdin.buffer.read()
        pipe.write(_BEGUN)
        pipe.flush()
        pipe.write(pickle.dumps(_answer(order)))


def _answer(order: bytes) -> tuple[object, ...]:
    try:
        planner, command, config = pickle.loads(order)  # noqa: S301
    except Exception as error:
        return "unreadable", repr(error)
    try:
        schedule = planner.plan(command, config)
        pickle.dumps(schedule)
    except BaseException as error:
        return "raised", repr(error), traceback.format_exc()
    return "schedule", schedule


def _end_with(parent: int) -> None:
    """End this process a moment after its parent. Its pipes do not say when that is, because they
    are open in everything that the trainer's process has forked."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
