"""What the experiments share: arguments and tables.

A script in a folder of its own finds it after
`sys.path.insert(0, str(Path(__file__).resolve().parents[2]))`.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["arguments", "machine", "say", "table"]


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


def say(*words: object) -> None:
    """Progress, on stderr."""
    print(*words, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Where the figures are from."""
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)
