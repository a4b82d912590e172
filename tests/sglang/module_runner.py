"""Runs functions that need the server's packages in one process, since importing takes long.

Reads ``["MODULE", "ARGUMENT", …]`` from each line, calls that module's `main` with the arguments,
and answers with a line: what went wrong or null, and what it returned. Ends when its input does.
"""

# pyright: basic
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import importlib
import json
import os
import sys
import traceback

import stand_ins


def serve() -> None:
    """Answer every line."""
    # What libraries print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    stand_ins.install()
    for line in sys.stdin:
        module, *arguments = json.loads(line)
        trouble = returned = None
        try:
            returned = importlib.import_module(module).main(*arguments)
        except Exception:
            trouble = traceback.format_exc()
        print(json.dumps([trouble, returned]), file=answers, flush=True)


if __name__ == "__main__":
    serve()
