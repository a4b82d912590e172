"""``aprilsched doctor URL…``: finds what live servers can do and which hazards they have."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import tyro
from rich.console import Console
from rich.text import Text

from aprilsched.cli.arguments import parsed
from aprilsched.doctor import Finding, Status, examine
from aprilsched.engines.addresses import VLLM
from aprilsched.engines.http import ServerAddress
from aprilsched.errors import ConfigError, EngineError
from aprilsched.runs.settings import key_from

REACHED = "reached"
"""The check that alone stands for a server which could not be examined."""
_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Probe live SGLang or vLLM servers; this is harmless, and its time is bounded."""

    urls: tyro.conf.Positional[tuple[str, ...]]
    """URLs of the servers, such as http://127.0.0.1:30000; vllm+http://… for vLLM."""
    json: bool = False
    """Print a list of objects on stdout instead of lines."""
    quiet: bool = False
    """Print what warns or fails, and nothing else."""
    refit: str | None = None
    """A folder of other weights of the model, which the servers can read. Each server that nobody
    else uses is refitted with them and back, so that fresh responses show what a refit changes."""
    admin_key_env: str | None = None
    """Name of the environment variable that holds the servers' admin API key."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the servers' API key."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code, which is 1 if a check failed, and 2 if a server
    could not be examined.

    Raises:
        ConfigError: if no server is named, or a URL or a key is not valid.
    """
    command = parsed(DoctorCommand, arguments, "aprilsched doctor")
    if not command.urls:
        raise ConfigError("No server is named; give the URL of one.")
    for url in command.urls:
        # A mistake in the last one must not cost what the others showed.
        ServerAddress.parse(url.removeprefix(VLLM))
    admin_key = key_from(command.admin_key_env, "admin_key_env")
    api_key = key_from(command.api_key_env, "api_key_env")
    found = {url: _examined(url, command.refit, admin_key, api_key) for url in command.urls}
    shown = {
        url: [finding for finding in findings if not (command.quiet and finding.status == "pass")]
        for url, findings in found.items()
    }
    if command.json:
        objects = [
            {"server": url, **msgspec.to_builtins(finding)}
            for url, findings in shown.items()
            for finding in findings
        ]
        sys.stdout.write(msgspec.json.encode(objects).decode() + "\n")
    else:
        console = Console(highlight=False)
        if not command.quiet:
            _print_summary(console, found)
        _print_findings(console, shown, apart=not command.quiet)
        if not command.quiet:
            _print_meanings(console, shown)
    if any(finding.check == REACHED for findings in found.values() for finding in findings):
        return 2
    return 1 if _count(found, "fail") else 0


def _examined(
    url: str, refit: str | None, admin_key: str | None, api_key: str | None
) -> list[Finding]:
    """What was found on one server, if only that it could not be examined."""
    try:
        return asyncio.run(examine(url, admin_key=admin_key, api_key=api_key, refit=refit))
    except EngineError as error:
        finding = Finding(
            check=REACHED,
            status="fail",
            seen=" ".join(str(error).split()).rstrip("."),
            meaning="A server that refuses the key or cannot be paused is not examined.",
            action="does not open a fleet with such a server",
            to_do="start it, or correct its URL or key",
        )
        return [finding]


def _print_summary(console: Console, found: Mapping[str, Sequence[Finding]]) -> None:
    """Three lines: whether the scheduler can work with the servers, what to do for that, and what
    else could be done."""
    unreached = [url for url, findings in found.items() if findings[0].check == REACHED]
    failed = _count(found, "fail") - len(unreached)
    servers = "the server" if len(found) == 1 else f"all {len(found)} servers"
    wrong: list[str] = []
    if unreached:
        wrong.append(f"{len(unreached)} of {len(found)} not reached")
    if failed:
        wrong.append(f"{failed} {'check fails' if failed == 1 else 'checks fail'}")
    said = f"not ready: {', '.join(wrong)}" if wrong else f"ready: no check fails on {servers}"
    warnings = _count(found, "warn")
    said += f", {warnings} {'warning' if warnings == 1 else 'warnings'}"
    for name, content, style in (
        ("result", said, _STYLES["fail" if wrong else "pass"]),
        ("to do", _to_do(found, "fail"), "default"),
        ("consider", _to_do(found, "warn"), "default"),
    ):
        line = Text(f"{name:<9} ", "bold")
        line.append(content, style)
        console.print(line, soft_wrap=True)


def _to_do(found: Mapping[str, Sequence[Finding]], status: Status) -> str:
    """What can be done about findings of this status, each thing once, with the servers."""
    servers: dict[str, list[str]] = {}
    for url, findings in found.items():
        for to_do in dict.fromkeys(f.to_do for f in findings if f.status == status and f.to_do):
            servers.setdefault(to_do, []).append(url)
    return "; ".join(
        to_do if len(found) == 1 else f"{to_do} ({_named(urls, len(found))})"
        for to_do, urls in servers.items()
    ) or "nothing"  # fmt: skip


def _named(urls: Sequence[str], of: int) -> str:
    if len(urls) == 1:
        return urls[0]
    return "all servers" if len(urls) == of else f"{len(urls)} of {of} servers"


def _print_findings(
    console: Console, found: Mapping[str, Sequence[Finding]], *, apart: bool
) -> None:
    for url, findings in found.items():
        if apart:
            console.print()
        if findings:
            console.print(Text(url, "bold"), soft_wrap=True)
        for finding in findings:
            line = Text(finding.status, _STYLES[finding.status])
            line.append(f"  {finding.check}: {finding.seen}", "default")
            if finding.to_do:
                line.append(f" -> {finding.to_do}", "default")
            console.print(line, soft_wrap=True)


def _print_meanings(console: Console, found: Mapping[str, Sequence[Finding]]) -> None:
    """The prose of each check, which is the same for every server."""
    console.print(Text("\nWhat the checks mean", "bold"))
    meant = {f.check: f for findings in found.values() for f in findings}
    for check, finding in meant.items():
        line = Text(check)
        line.append(f": {finding.meaning} aprilsched: {finding.action}.", "dim")
        console.print(line, soft_wrap=True)


def _count(found: Mapping[str, Sequence[Finding]], status: Status) -> int:
    return sum(f.status == status for findings in found.values() for f in findings)
