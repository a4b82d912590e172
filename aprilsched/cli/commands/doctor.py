"""``aprilsched doctor URL…``: finds what live servers can do and which hazards they have."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from rich.console import Console
from rich.text import Text

from aprilsched.cli.arguments import POSITIONAL, parsed
from aprilsched.cli.doctor import Finding, examine, one_line
from aprilsched.cli.runs.keys import key_from
from aprilsched.errors import ConfigError, EngineError
from aprilsched.kernel.engines.address import ServerAddress
from aprilsched.kernel.engines.addresses import VLLM

REACHED = "reached"
"""The only check in the findings of a server that could not be examined."""
_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Probe live SGLang or vLLM servers; this is harmless, and its time is bounded."""

    urls: Annotated[tuple[str, ...], POSITIONAL] = ()
    """URLs of the servers, such as http://127.0.0.1:30000; vllm+http://… for vLLM."""
    json: bool = False
    """Print a list of objects on stdout instead of lines."""
    quiet: bool = False
    """Print what warns or fails, and nothing else."""
    refit: str | None = None
    """A folder of other weights of the model, which the servers can read. Each idle server is
    refitted with them and back, so that fresh responses show what a refit changes."""
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
        # An invalid last URL must not discard the findings about the other servers.
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
        _print(found, shown, quiet=command.quiet)
    findings = [finding for each in found.values() for finding in each]
    if any(finding.check == REACHED for finding in findings):
        return 2
    return 1 if any(finding.status == "fail" for finding in findings) else 0


def _examined(
    url: str, refit: str | None, admin_key: str | None, api_key: str | None
) -> list[Finding]:
    """Return the lines of one server; a single one if it could not be examined."""
    try:
        return asyncio.run(examine(url, admin_key=admin_key, api_key=api_key, refit=refit))
    except EngineError as error:
        finding = Finding(
            check=REACHED,
            status="fail",
            seen=one_line(error),
            meaning="A server that refuses the key or cannot be paused is not examined.",
            to_do="start it, or correct its URL or key",
        )
        return [finding]


def _print(
    found: Mapping[str, Sequence[Finding]], shown: Mapping[str, Sequence[Finding]], *, quiet: bool
) -> None:
    """Print what to do first, then the lines of each server, and what the checks mean."""
    console = Console(highlight=False, soft_wrap=True)
    if not quiet:
        for line in _summary(found):
            console.print(line)
    for url, findings in shown.items():
        if not quiet:
            console.print()
        if findings:
            console.print(Text(url, "bold"))
        for finding in findings:
            line = Text(finding.status, _STYLES[finding.status])
            to_do = f" -> {finding.to_do}" if finding.to_do else ""
            line.append(f"  {finding.check}: {finding.seen}{to_do}", "default")
            console.print(line)
    if not quiet:
        console.print(Text("\nWhat the checks mean", "bold"))
        for check, meaning in {f.check: f.meaning for each in found.values() for f in each}.items():
            console.print(Text(f"{check}: {meaning}"))


def _summary(found: Mapping[str, Sequence[Finding]]) -> Iterator[Text]:
    """Return whether the scheduler can work with the servers, and what the user can do."""
    findings = [finding for each in found.values() for finding in each]
    counts = Counter(finding.status for finding in findings)
    result = f"servers {len(found)}, failures {counts['fail']}, warnings {counts['warn']}"
    yield Text(f"{'not ready' if counts['fail'] else 'ready'}: {result}", "bold")
    for title, status in (("to do", "fail"), ("consider", "warn")):
        remedies = dict.fromkeys(f.to_do for f in findings if f.status == status and f.to_do)
        yield Text(f"{title}: {'; '.join(remedies) or 'nothing'}")
