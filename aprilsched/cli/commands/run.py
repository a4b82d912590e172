"""``aprilsched run``: runs batches of rollouts without a trainer, and writes a run folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import tomli_w
from rich.console import Console

from aprilsched.cli.arguments import flag_of, made, values_of
from aprilsched.cli.runs.config_file import as_toml, read_settings
from aprilsched.cli.runs.drive import Run
from aprilsched.cli.runs.pictures import leave_report, leave_trace
from aprilsched.cli.runs.settings import RunSettings
from aprilsched.cli.runs.setup import prepare, servers
from aprilsched.cli.runs.tables import run_table
from aprilsched.cli.runs.workload_limits import fitted
from aprilsched.errors import ConfigError
from aprilsched.kernel.store import SqliteStore
from aprilsched.observe.log.run_folder import CONFIG, RunFolder, default_path

_INTERRUPTED = 130
_FAILED = 2
_WITH_RESUME = frozenset({"resume", "settings.batches", "json", "no_report", "quiet"})

EVERYDAY = (
    "engine prompts input-key tokenizer batches update-every weights train-seconds seed "
    "sim.engines batch-groups group-size over-provision refill straggler stop pace "
    "max-staleness sampling.max-new-tokens sampling.temperature config out resume json quiet "
    "dry-run"
)
"""The flags that ``--help`` shows; ``--help-all`` shows the others too."""


@dataclass(frozen=True, kw_only=True)
class RunCommand:
    """Drive batches of rollouts and write a run folder."""

    config: Path | None = None
    """A TOML file of settings, such as a run folder's config.toml; flags override it."""
    out: Path | None = None
    """The run folder; runs/TIME-SEED if not given. It must be new or empty."""
    resume: Path | None = None
    """Resume the interrupted run in this folder with its own settings. Only --batches,
    --json, --no-report and --quiet may be given with it."""
    json: bool = False
    """Print the summary as JSON on stdout; everything else goes to stderr."""
    quiet: bool = False
    """Show only errors: no progress and no figures; also write no report and no trace."""
    no_report: bool = False
    """Write neither report.html nor trace.json."""
    dry_run: bool = False
    """Print the resolved settings as TOML and end."""
    settings: RunSettings = field(default_factory=RunSettings)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        AprilschedError: if the run is refused or fails.
    """
    command = _parse(arguments)
    command.settings.check()
    if command.dry_run:
        print(tomli_w.dumps(as_toml(command.settings)), end="")
        return 0
    settings = fitted(command.settings, lambda: servers(command.settings))
    setup = prepare(settings)
    folder = _folder(command)
    messages = Console(stderr=True)
    # A virtual clock does not measure the time that a thread takes, so the store uses none.
    store = SqliteStore(folder.store, inline=setup.clock == "virtual")
    summary = Run(setup, folder, None if command.quiet else messages, store=store).execute()
    if command.json:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
    elif not command.quiet:
        Console().print(run_table(summary))
    if not command.quiet:
        messages.print(f"The run is in {folder.path}", soft_wrap=True, highlight=False)
        if not command.no_report:
            leave_trace(messages, folder.path)
            leave_report(messages, folder.path)
    if summary.interrupted:
        return _INTERRUPTED
    if summary.error is not None:
        print(f"aprilsched: {' '.join(summary.error.split())}", file=sys.stderr)
        return _FAILED
    return 0


def _folder(command: RunCommand) -> RunFolder:
    if command.resume is not None:
        return RunFolder.resume(command.resume)
    return RunFolder(command.out or default_path(command.settings.seed))


def _parse(arguments: Sequence[str]) -> RunCommand:
    """Return the command: flags override the config file, which overrides the defaults."""
    values = values_of(RunCommand, arguments, "aprilsched run", EVERYDAY)
    path: Path | None = values.get("config")
    if "resume" in values:
        for other in values.keys() - _WITH_RESUME:
            raise ConfigError(
                f"{flag_of(other)} cannot be used with --resume, which keeps the run's own "
                "settings; give only --batches, --json, --no-report or --quiet with it."
            )
        path = RunFolder.resume(values["resume"]).path / CONFIG
    start = RunCommand() if path is None else RunCommand(settings=read_settings(path))
    command: RunCommand = made(start, values)
    longest = values.get("settings.scheduler.sampling.max_new_tokens")
    if longest is None:
        return command
    cap = values.get("settings.workload.cap", longest)
    if cap != longest:
        raise ConfigError(
            f"cap is {cap} and sampling.max_new_tokens is {longest}, and each is the length of the "
            "longest response; give one of them."
        )
    return made(command, {"settings.workload.cap": longest})
