"""The commands of the command line, one file each.

:data:`COMMANDS` names them; the module of a command is imported when it is called, so that
``aprilsched --help`` does not load matplotlib's neighbours.
"""

from __future__ import annotations

__all__ = ["COMMANDS"]

COMMANDS: dict[str, str] = {
    "run": "drive batches of rollouts on the embedded engine or on SGLang servers",
    "simulate": "compare scheduling policies on one workload, in virtual time",
}
"""Every command and what it does."""
