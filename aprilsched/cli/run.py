"""``aprilsched run``: runs batches of rollouts without a trainer, and writes a run folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec
import tomli_w
import tyro
from rich.console import Console

from aprilsched.cli.arguments import (
    SchedulerFlags,
    asked_for_help,
    config_of_flags,
    everyday_help,
    flags_of,
    given_flags,
    parsed,
    value_of,
)
from aprilsched.core.policies.kinds import REFILLS, STOPS
from aprilsched.core.policies.straggler import BEHAVIOURS
from aprilsched.errors import ConfigError
from aprilsched.runs.config_file import as_toml, read_settings
from aprilsched.runs.drive import Run
from aprilsched.runs.settings import RunSettings
from aprilsched.runs.setup import fitted, prepare, servers
from aprilsched.runs.showing import leave_report, leave_trace, run_table, screen_of
from aprilsched.store import SqliteStore
from aprilsched.telemetry.run_folder import CONFIG, RunFolder, default_path

_INTERRUPTED = 130
_FAILED = 2
_WITH_RESUME = frozenset({"--resume", "--batches", "--json", "--no-report", "--quiet"})

EVERYDAY = {
    "what runs": {
        "engine": '"sim" (embedded), or URLs with spaces between them (vllm+URL)',
        "prompts": "a JSONL file of prompts; without it a built-in long-tail workload",
        "input-key": "the key of a row's prompt, if it has another name than prompt",
        "tokenizer": "a folder with tokenizer.json, for text and messages",
        "batches": "batches to deliver",
        "update-every": "batches between two policy versions; 0 for one version",
        "weights": "a checkpoint that servers load as each new version",
        "train-seconds": "seconds that the trainer takes for a batch",
        "seed": "seed of the built-in workload",
        "sim.engines": "number of embedded engines",
    },
    "scheduling": {
        "batch-groups": "groups (prompts) in a batch",
        "group-size": "rollouts of one prompt",
        "over-provision": 'groups kept open over groups in a batch; "auto" chooses',
        "refill": f"{', '.join(REFILLS)}: when new groups start",
        "straggler": f"{', '.join(BEHAVIOURS)}: what happens to stragglers",
        "stop": f"{', '.join(STOPS)}: the unit that fills a batch",
        "pace": "synchronous, asynchronous (never wait for training), or auto",
        "max-staleness": "bound on the staleness of a token, in versions",
        "sampling.max-new-tokens": "tokens of the longest response",
        "sampling.temperature": "temperature of prompts that have none of their own",
    },
    "files and output": {
        "config": "a TOML file of settings, such as a run's config.toml",
        "out": "the run folder; runs/TIME-SEED if not given",
        "resume": "resume the interrupted run in this folder",
        "json": "print the summary as JSON on stdout",
        "quiet": "show only errors",
        "dry-run": "print the resolved settings as TOML and end",
        "metrics-port": "serve metrics for Prometheus on this port; 0 for none",
        "track": "tensorboard, trackio, wandb, with commas between them",
    },
}
"""The flags that ``--help`` shows, with their descriptions."""


@dataclass(frozen=True, kw_only=True)
class RunCommand:
    """Drive batches of rollouts and write a run folder."""

    config: str | None = None
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
    settings: Annotated[RunSettings, tyro.conf.arg(name="")] = field(default_factory=RunSettings)
    scheduler: Annotated[SchedulerFlags, tyro.conf.arg(name="")] = field(
        default_factory=SchedulerFlags
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        AprilschedError: if the run is refused or fails.
    """
    if asked_for_help(arguments):
        what = "Drive batches of rollouts and write a run folder."
        print(everyday_help("aprilsched run", what, EVERYDAY, RunCommand()))
        return 0
    command = _parse(["--help" if a == "--help-all" else a for a in arguments])
    if command.dry_run:
        command.settings.check()
        print(tomli_w.dumps(as_toml(command.settings)), end="")
        return 0
    command.settings.check()
    settings = fitted(command.settings, lambda: servers(command.settings))
    setup = prepare(settings)
    folder = _folder(command)
    messages = Console(stderr=True)
    screen = screen_of(setup, messages, title="run", where=str(folder.path))
    # A virtual clock does not measure the time that a thread takes, so the store uses none.
    store = SqliteStore(folder.store, inline=setup.clock == "virtual")
    summary = Run(setup, folder, None if command.quiet else screen, store=store).execute()
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
    """The command: flags override the config file, and the config file overrides the defaults."""
    path = _config_path(arguments)
    settings = RunSettings() if path is None else read_settings(Path(path))
    default = RunCommand(settings=settings, scheduler=flags_of(settings.scheduler))
    command = parsed(RunCommand, arguments, "aprilsched run", default)
    scheduler = config_of_flags(command.scheduler, settings.scheduler)
    given = given_flags(arguments)
    workload = command.settings.workload
    if "--sampling.max-new-tokens" in given:
        longest = scheduler.sampling.max_new_tokens
        if "--cap" in given and workload.cap != longest:
            raise ConfigError(
                f"cap is {workload.cap} and sampling.max_new_tokens is {longest}, and each is the "
                "length of the longest response; give one of them."
            )
        workload = replace(workload, cap=longest)
    settings = replace(command.settings, scheduler=scheduler, workload=workload)
    return replace(command, settings=settings)


def _config_path(arguments: Sequence[str]) -> str | None:
    """Path of the config file. It is looked for before the other flags are parsed, because its
    content gives their defaults."""
    resumed = value_of("--resume", arguments, "folder; give that of a run")
    if resumed is None:
        return value_of("--config", arguments, "file; give the path of a TOML file")
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag.startswith("--") and flag not in (*_WITH_RESUME, "--help"):
            raise ConfigError(
                f"{flag} cannot be used with --resume, which keeps the run's own settings; give "
                "only --batches, --json, --no-report or --quiet with it."
            )
    return str(RunFolder.resume(Path(resumed)).path / CONFIG)
