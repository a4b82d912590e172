"""Writes the whole help of every command as the command prints it at a width of 80 characters."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from unittest.mock import patch

from aprilsched.__main__ import COMMANDS, main

__all__ = ["command_line", "help_of"]

_WIDTH = 80
_SHORT = ("run", "simulate", "frontier")
"""Commands whose ``--help`` has the everyday options alone."""
_PLAIN = {"COLUMNS": str(_WIDTH), "LINES": "50", "NO_COLOR": "1", "TERM": "dumb"}


def command_line() -> str:
    """A section for each command."""
    return "\n\n".join(
        f"## aprilsched {name}\n\n{what[0].upper()}{what[1:]}.\n\n```text\n{help_of(name)}\n```"
        for name, what in COMMANDS.items()
    )


def help_of(name: str) -> str:
    """Return the output of ``aprilsched NAME --help``, or of ``--help-all`` if it has one."""
    output = io.StringIO()
    with patch.dict(os.environ, _PLAIN), redirect_stdout(output):
        try:
            main([name, "--help-all" if name in _SHORT else "--help"])
        except SystemExit as end:
            if end.code:
                raise ValueError(f"aprilsched {name} --help ended with {end.code}") from end
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())
