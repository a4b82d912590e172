"""``aprilsched report RUN [RUN2]``: writes one page about a run, or about two side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console

from aprilsched.cli.arguments import POSITIONAL, parsed
from aprilsched.errors import ConfigError
from aprilsched.observe.report.page import figures_json, write_report


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Write one HTML page about a run, or about two side by side; it needs no network."""

    runs: Annotated[tuple[Path, ...], POSITIONAL] = ()
    """The run folder of one run, or of two to compare the second with the first."""
    out: Path | None = None
    """The file to write; report.html in the first folder if not given."""
    json: bool = False
    """Also print the figures as JSON on stdout: an object, or a list of two. Everything else goes
    to stderr."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        AprilschedError: if a run cannot be read or the page cannot be written.
    """
    command = parsed(ReportCommand, arguments, "aprilsched report")
    if len(command.runs) not in (1, 2):
        raise ConfigError(f"{len(command.runs)} runs are named; name one, or two to compare.")
    folder, *others = command.runs
    path, data = write_report(folder, *others, out=command.out)
    if command.json:
        sys.stdout.write(figures_json(data).decode() + "\n")
    Console(stderr=True).print(f"The report is in {path}", soft_wrap=True, highlight=False)
    return 0
