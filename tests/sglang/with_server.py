"""Runs a command next to a SGLang server on the CPU, or the server alone until Ctrl-C.

The flags are the server's, each in one word: ``--dtype=bfloat16``. ``{engine}`` in the command
stands for its URL. `make example` installs what this needs.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import threading
from itertools import takewhile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.sglang.server import CpuServer


def main() -> int:
    parser = argparse.ArgumentParser(
        usage="with_server.py MODEL LOG [--FLAG=VALUE ...] [COMMAND ...]", description=__doc__
    )
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("log", type=Path, help="file for the server's output")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="runs until it ends")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it too ends the server
    words: list[str] = given.command
    flags = list(takewhile(lambda word: word.startswith("--"), words))
    given.log.parent.mkdir(parents=True, exist_ok=True)
    print("a SGLang server starts on the CPU, which takes about half a minute", file=sys.stderr)
    with CpuServer(given.model.resolve(), given.log.resolve(), *flags) as server:
        server.wait_ready()
        command = [part.replace("{engine}", server.url) for part in words[len(flags) :]]
        if command:
            return subprocess.call(command)
        print(server.url, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
