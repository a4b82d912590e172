"""``aprilsched doctor URL…``: finds what live SGLang servers can do and which hazards they have."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import tyro
from rich.console import Console
from rich.text import Text

from aprilsched.doctor import Finding, examine
from aprilsched.errors import ConfigError
from aprilsched.runs.keys import key_from

__all__ = ["DoctorCommand", "main"]

_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Probe live SGLang servers; this is harmless, and its time is bounded."""

    urls: tyro.conf.Positional[tuple[str, ...]]
    """URLs of the servers, such as http://127.0.0.1:30000."""
    json: bool = False
    """Print a list of objects on stdout instead of lines."""
    admin_key_env: str | None = None
    """Name of the environment variable that holds the servers' admin API key."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the servers' API key."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code, which is 1 if a check failed.

    Raises:
        AprilschedError: if a server cannot be reached or is not SGLang.
    """
    command = tyro.cli(
        DoctorCommand,
        args=list(arguments),
        prog="aprilsched doctor",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    if not command.urls:
        raise ConfigError("No server is named; give the URL of one.")
    admin_key, api_key = key_from(command.admin_key_env), key_from(command.api_key_env)
    findings: list[tuple[str, Finding]] = []
    for url in command.urls:
        found = asyncio.run(examine(url, admin_key=admin_key, api_key=api_key))
        findings += [(url, finding) for finding in found]
        if not command.json:
            _print(url, found)
    if command.json:
        objects = [{"server": url, **msgspec.to_builtins(finding)} for url, finding in findings]
        sys.stdout.write(msgspec.json.encode(objects).decode() + "\n")
    return 1 if any(finding.status == "fail" for _, finding in findings) else 0


def _print(url: str, findings: Sequence[Finding]) -> None:
    console = Console(highlight=False)
    console.print(url, style="bold", soft_wrap=True)
    for finding in findings:
        line = Text(finding.status, _STYLES[finding.status])
        line.append(f"  {finding.check}: {finding.seen}. ", "default")
        line.append(f"{finding.meaning} aprilsched: {finding.action}.", "dim")
        console.print(line, soft_wrap=True)
