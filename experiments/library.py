"""What the experiments share: arguments, results as JSON, tables, work in processes of its own.

A script in a folder of its own finds it after
`sys.path.insert(0, str(Path(__file__).resolve().parents[2]))`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "arguments",
    "fresh",
    "machine",
    "measured",
    "pooled",
    "say",
    "seeds",
    "table",
    "write",
]


def arguments(
    doc: str | None, *, out: Path | None = None, needs_out: bool = False
) -> argparse.ArgumentParser:
    """A parser that has `--out`, the file of the result (or a folder, if the script says so).

    Args:
        doc: the script's docstring.
        out: where the result goes if nobody says it; None writes no file.
        needs_out: whether `--out` must be given.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=out, required=needs_out, help="of the result")
    return parser


def seeds(text: str) -> range:
    """What `--seeds FIRST:LAST` means, the last one not included; one number is that seed."""
    first, _, last = text.partition(":")
    return range(int(first), int(last or int(first) + 1))


def say(*words: object) -> None:
    """Progress, on stderr."""
    print(*words, file=sys.stderr, flush=True)


def write(path: Path | None, result: object, *, shown: object = None, indent: int = 1) -> None:
    """Print a result (or `shown` in its place) as JSON, and write it to a file if one was named."""
    print(json.dumps(result if shown is None else shown, indent=indent))
    if path is not None:
        path.write_text(json.dumps(result, indent=indent) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """Where the figures are from."""
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }


def measured(script: str, *given: object) -> dict[str, Any]:
    """What `script` prints as JSON, in a fresh process."""
    command = [sys.executable, script, *map(str, given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def fresh(function: Callable[..., Any], *given: Any) -> Any:
    """What `function(*given)` returns in a process of its own, whose memory and clock nothing else
    has used. The function must be one of a module."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, given)


def pooled(
    function: Callable[[Any], Any], tasks: Sequence[Any], jobs: int, *, every_s: float = 10.0
) -> Iterator[Any]:
    """The results of all tasks, in the order in which they come; progress now and then.

    Each process is replaced after 50 tasks, so that memory that a task leaves does not add up.
    """
    started_at = printed = time.monotonic()
    # Not concurrent.futures: its executor of Python 3.11 hangs when it replaces a worker.
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=50) as pool:
        for done, result in enumerate(pool.imap_unordered(function, tasks), start=1):
            yield result
            if time.monotonic() > printed + every_s:
                printed = time.monotonic()
                say(f"{done} of {len(tasks)}, {printed - started_at:.0f} s")
