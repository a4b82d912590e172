"""The program of one choice of a schedule: order on stdin, answer on stdout.

:mod:`aprilsched.kernel.shell.planning` runs this file by its path. Its arguments are the trainer's
``sys.path`` as JSON, the id of the trainer's process, and the seconds after which it ends. It
imports only the standard library, because it sets ``sys.path`` when it runs; unpickling the order
imports the rest.
"""

from __future__ import annotations

import json
import os
import pickle  # noqa: TID251 (from the parent process)
import signal
import sys
import threading
import time
import traceback

NICENESS = 5
"""Of two threads that want one core, the trainer's gets three quarters. With 10 it gets nine
tenths; choices then took a minute on a machine that had too few cores."""
PARENT_INTERVAL_S = 1.0
"""Seconds between two looks at whether the trainer's process still exists."""


def main(paths: str, parent: str, limit_s: str) -> None:
    """Read an order, carry it out, and write the answer."""
    sys.path[:] = json.loads(paths)
    # A signal, because a planner may hold Python's lock.
    signal.setitimer(signal.ITIMER_REAL, float(limit_s))
    os.nice(NICENESS)
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    answers = os.dup(1)
    try:
        os.dup2(2, 1)  # A planner may print, and the answer is the only thing in its pipe.
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with os.fdopen(answers, "wb") as pipe:
        pipe.write(pickle.dumps(_answer(sys.stdin.buffer.read())))


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
    """End this process a moment after its parent.

    The end of its pipes would come too late, because they are open in everything that the trainer's
    process has forked.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_INTERVAL_S)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
