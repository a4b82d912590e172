"""Run a command in a process group that does not outlive the process that started this one.

``python launcher.py COMMAND...`` is started in a process group of its own, with a pipe as its
standard input. The pipe closes when the starting process ends, however that happens, and the group
is killed. It imports nothing of aprilsched, so it starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import subprocess  # noqa: TID251 (a command of `ray.servers`)
import sys

if __name__ == "__main__":
    # A process of its own, because Ray kills the children of a worker that it ends.
    if os.fork() == 0:
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)
    code = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL)  # noqa: S603
    sys.exit(code if code >= 0 else 128 - code)
