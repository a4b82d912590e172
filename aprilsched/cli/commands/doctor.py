"""``aprilsched doctor URL…``: finds what live servers can do and which hazards they have."""

from __future__ import annotations

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from rich.console import Console
from rich.text import Text

from aprilsched.cli.arguments import POSITIONAL, parsed
from aprilsched.cli.commands.simulate import ComparedSettings
from aprilsched.cli.doctor import (
    ROWS,
    SCORES,
    Finding,
    Judge,
    LeftOut,
    Row,
    Server,
    Verdict,
    examine,
    one_line,
)
from aprilsched.cli.runs.keys import key_from
from aprilsched.cli.runs.more_room import gains
from aprilsched.cli.runs.named_policies import chosen
from aprilsched.cli.runs.settings import RunSettings
from aprilsched.cli.runs.setup import prepare
from aprilsched.config import SchedulerConfig
from aprilsched.errors import ConfigError, EngineError
from aprilsched.kernel.engines.address import ServerAddress
from aprilsched.kernel.engines.addresses import VLLM

REACHED = "reached"
"""The only check in the findings of a server that could not be examined."""
_GAIN = 0.03
"""Smallest gain of a setting that is recommended, as a share of the tokens a second."""
_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}

EVERYDAY = (
    "urls json quiet score refit admin-key-env api-key-env policy lengths median sigma cap "
    "batch-groups group-size model"
)
"""The flags that ``--help`` shows; ``--help-all`` shows the others too."""


@dataclass(frozen=True, kw_only=True)
class DoctorCommand(ComparedSettings):
    """Probe live SGLang or vLLM servers; this is harmless, and its time is bounded."""

    urls: Annotated[tuple[str, ...], POSITIONAL] = ()
    """URLs of the servers, such as http://127.0.0.1:30000; vllm+http://… for vLLM."""
    json: bool = False
    """Print a list of objects on stdout instead of lines."""
    quiet: bool = False
    """Print what warns or fails, and nothing else."""
    score: bool = False
    """Compare the log-probabilities of a response with those of transformers, from the folder or
    name of the servers' model. It takes 4 bytes of this machine's memory for each weight."""
    refit: str | None = None
    """A folder of other weights of the model, which the servers can read. Each idle server is
    refitted with them and back, so that fresh responses show what a refit changes."""
    admin_key_env: str | None = None
    """Name of the environment variable that holds the servers' admin API key."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the servers' API key."""
    policy: str | None = None
    """A schedule, such as auto or pool@1.75, for which to simulate what more room would change, for
    your lengths and step times, and an equal share of each batch on every server."""
    batches: int = 12
    """Batches of each simulation."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """The lines of a report.

        Raises:
            ConfigError: if a setting of the simulation is refused.
        """
        rows = (*ROWS, SCORES) if self.score else ROWS
        if self.policy is None:
            return rows
        config = chosen(self.policy)[0].apply(
            SchedulerConfig(
                batch_groups=math.ceil(self.batch_groups / len(self.urls)),
                group_size=self.group_size,
                straggler="in_place" if self.kv == "keep" else "retract",
                max_staleness=self.max_staleness,
            )
        )
        settings = [self.settings(config, seed=seed) for seed in self.every_seed]
        prepare(settings[0])
        return (*rows, Row("more room", _forecast(settings)))


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code, which is 1 if a check failed, and 2 if a server
    could not be examined.

    Raises:
        ConfigError: if no server is named, or a URL or a key is not valid.
    """
    command = parsed(DoctorCommand, arguments, "aprilsched doctor", everyday=EVERYDAY)
    if not command.urls:
        raise ConfigError("No server is named; give the URL of one.")
    for url in command.urls:
        # An invalid last URL must not discard the findings about the other servers.
        ServerAddress.parse(url.removeprefix(VLLM))
    admin_key = key_from(command.admin_key_env, "admin_key_env")
    api_key = key_from(command.api_key_env, "api_key_env")
    rows = command.rows
    found = {url: _examined(url, command.refit, admin_key, api_key, rows) for url in command.urls}
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
    url: str,
    refit: str | None,
    admin_key: str | None,
    api_key: str | None,
    rows: Sequence[Row],
) -> list[Finding]:
    """Return the lines of one server; a single one if it could not be examined."""
    try:
        keys = {"admin_key": admin_key, "api_key": api_key}
        return asyncio.run(examine(url, **keys, refit=refit, rows=rows, gateways=False))
    except EngineError as error:
        finding = Finding(
            check=REACHED,
            status="fail",
            seen=one_line(error),
            meaning="A server that refuses the key or cannot be paused is not examined.",
            to_do="start it, or correct its URL or key",
        )
        return [finding]


def _forecast(settings: Sequence[RunSettings]) -> Judge:
    """Return the judge of what more room would change for these settings."""

    async def judge(server: Server) -> Verdict:
        """What the simulator expects of each change, in generated tokens a second. A setting that
        gains 3 % is recommended."""
        able = server.facts.capabilities
        if able.kv_tokens is None or able.max_running_requests is None:
            raise LeftOut("it does not report its KV pool and its running requests")
        now, *changes = await asyncio.to_thread(gains, settings, able)
        seen = [f"{now.tokens_per_s:,.0f} tokens/s"]
        seen += [f"{change.name}: {change.share:+.0%}" for change in changes]
        able_to = [c for c in changes if c.is_setting and c.share >= _GAIN]
        best = max(able_to, key=lambda change: change.share, default=None)
        to_do = "" if best is None else f"start it with {best.name}"
        return Verdict("warn" if to_do else "pass", ", ".join(seen), to_do)

    return judge


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
