"""The commands of the command line, one file each.

:data:`COMMANDS` names them; the module of a command is imported when it is called, so that
``aprilsched --help`` does not load matplotlib's neighbours.
"""

from __future__ import annotations

__all__ = ["COMMANDS"]

COMMANDS: dict[str, str] = {
    "calibrate": "fit the step-time model of a server to its own log",
    "doctor": "probe live SGLang servers: capabilities and hazards, pass, warn or fail",
    "drain": "say when the length bias of a run's start is gone, and what ends it at once",
    "replay": "what if a recorded run had been scheduled in another way, in virtual time",
    "report": "write one HTML page about a run, or about two side by side",
    "run": "drive batches of rollouts on the embedded engine or on SGLang servers",
    "serve-sim": "serve the embedded engine behind SGLang's own HTTP API, for tests",
    "simulate": "compare scheduling policies on one workload, in virtual time",
    "watch": "show a run that goes on in another terminal, or one that has ended",
}
"""Every command and what it does."""
