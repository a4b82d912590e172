"""The command line, also as ``python -m aprilsched``: it runs a command, and prints an error as one
line.

Exit codes: 0 means done; 2 means refused or failed, with one sentence on stderr; 130 means ended by
Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module  # noqa: TID251 (a name of COMMANDS)

from aprilsched import __version__
from aprilsched.errors import AprilschedError
from aprilsched.kernel.values.extras import extra

_REFUSED = 2
_INTERRUPTED = 130  # as shells say it: 128 + SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    if arguments[0] == "--version":
        print(f"aprilsched {__version__}")
        return 0
    try:
        return _call(arguments[0], arguments[1:])
    except AprilschedError as error:
        # An engine's message may have several lines.
        print(f"aprilsched: {' '.join(str(error).split())}", file=sys.stderr)
        return _REFUSED
    except KeyboardInterrupt:
        return _INTERRUPTED


def _call(command: str, arguments: list[str]) -> int:
    if command not in COMMANDS:
        near = get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "see aprilsched --help."
        print(f"aprilsched: {command!r} is not a command; {hint}", file=sys.stderr)
        return _REFUSED
    with extra("cli"):
        module = import_module(f"aprilsched.cli.commands.{command.replace('-', '_')}")
    return module.main(arguments)


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
    return (
        "usage: aprilsched COMMAND [OPTIONS]\n\n"
        "Keeps LLM rollout engines full while a trainer trains.\n\n"
        f"commands:\n{commands}\n\n"
        "aprilsched COMMAND --help lists a command's options; aprilsched --version the version."
    )


COMMANDS: dict[str, str] = {
    "calibrate": "fit the step-time model of a server to its own log",
    "doctor": "check live servers against the contract of an engine",
    "frontier": "draw speed against staleness for several schedules, in virtual time",
    "gateway": "serve one address in front of servers, through pauses and failures",
    "report": "write one HTML page about a run, or about two side by side",
    "run": "drive batches of rollouts on the embedded engine or on SGLang servers",
    "serve-sim": "serve the embedded engine behind SGLang's own HTTP API, for tests",
    "simulate": "compare scheduling policies on one workload, in virtual time",
    "watch": "show a run that is in progress in another terminal, or one that has ended",
}
"""Every command with a description."""

if __name__ == "__main__":
    sys.exit(main())
