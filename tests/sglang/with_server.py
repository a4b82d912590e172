"""Runs a command next to a SGLang server on the CPU: with_server.py MODEL LOG [FLAGS] COMMAND ...

The flags are the server's, each in one word: ``--dtype=bfloat16``. ``{engine}`` in the command
stands for its URL.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import takewhile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.sglang.server import CpuServer


def main() -> int:
    model, log, *command = sys.argv[1:]
    flags = list(takewhile(lambda part: part.startswith("--"), command))
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    print("a SGLang server starts on the CPU, which takes about half a minute", file=sys.stderr)
    with CpuServer(Path(model).resolve(), Path(log).resolve(), *flags) as server:
        server.wait_ready()
        return subprocess.call(
            [part.replace("{engine}", server.url) for part in command[len(flags) :]]
        )


if __name__ == "__main__":
    sys.exit(main())
