"""``aprilsched simulate``: policies on the same workload and seed, in virtual time.

Every policy goes through the real RolloutScheduler on the embedded engine, with new weights after
each batch, and leaves a whole run folder.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import tyro
from rich.console import Console

from aprilsched.commands.comparison import Comparison, compare, verdict
from aprilsched.commands.drive import Run
from aprilsched.commands.pictures import draw_comparison
from aprilsched.commands.policies import POLICIES, chosen
from aprilsched.commands.settings import (
    RunSettings,
    SchedulerFlags,
    SimSettings,
    WorkloadSettings,
)
from aprilsched.commands.setup import Setup, prepare
from aprilsched.commands.tables import comparison_table
from aprilsched.telemetry.figures import RunSummary
from aprilsched.telemetry.progress import Progress
from aprilsched.telemetry.run_folder import RunFolder, default_path, write_json

__all__ = ["SimulateCommand", "main"]

_INTERRUPTED = 130

# Chunks of a quarter of a response are enough here: a batch ends at the same instant whatever the
# interval, and the run takes two thirds of the time.
_STREAM_INTERVAL = 256


@dataclass(frozen=True, kw_only=True)
class SimulateCommand:
    """Compare scheduling policies on one workload, in virtual time."""

    policy: str = ",".join(POLICIES)
    """Which, with commas between."""
    batches: int = 40
    """Of each policy."""
    seed: int = 0
    """Of the workload."""
    burn_in: int | None = None
    """Batches left out of the steady-state figures; a quarter of them if not given."""
    batch_groups: int = 32
    """Groups (prompts) in a batch."""
    group_size: int = 8
    """Rollouts of one prompt."""
    out: Path | None = None
    """The folder for the results; runs/TIME-SEED if not given. It must be new or empty."""
    json: bool = False
    """Print the comparison as JSON on stdout; everything else goes to stderr."""
    quiet: bool = False
    """No progress; the figures at the end all the same."""
    workload: Annotated[WorkloadSettings, tyro.conf.arg(name="")] = field(
        default_factory=WorkloadSettings
    )

    def settings(self, policy: str) -> RunSettings:
        """What the run of one policy does."""
        flags = SchedulerFlags(batch_groups=self.batch_groups, group_size=self.group_size)
        return RunSettings(
            batches=self.batches,
            seed=self.seed,
            burn_in=self.burn_in,
            sim=SimSettings(stream_interval=_STREAM_INTERVAL),
            workload=self.workload,
            scheduler=POLICIES[policy].apply(flags),
        )


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit code.

    Raises:
        AprilschedError: if a setting is refused or the results cannot be written.
    """
    command = tyro.cli(
        SimulateCommand,
        args=list(arguments),
        prog="aprilsched simulate",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    setups = {name: prepare(command.settings(name)) for name in chosen(command.policy)}
    root = RunFolder(command.out or default_path(command.seed)).path
    messages = Console(stderr=True)
    summaries: dict[str, RunSummary] = {}
    for name, setup in setups.items():
        progress = None if command.quiet else _progress(name, setup, messages)
        summary = Run(setup, RunFolder(root / name), progress).execute()
        if summary.interrupted:
            return _INTERRUPTED
        summaries[name] = summary
    comparison = compare(summaries)
    write_json(root / "comparison.json", comparison)
    draw_comparison(root, list(summaries), messages)
    _show(command, summaries, comparison)
    messages.print(f"The results are in {root}", soft_wrap=True, highlight=False)
    return 0


def _show(
    command: SimulateCommand, summaries: Mapping[str, RunSummary], comparison: Comparison
) -> None:
    if command.json:
        sys.stdout.write(msgspec.json.encode(comparison).decode() + "\n")
        return
    console = Console()
    console.print(comparison_table(summaries))
    for name in summaries:
        console.print(f"{name}: {POLICIES[name].what}", soft_wrap=True, highlight=False)
    console.print(verdict(comparison), soft_wrap=True, highlight=False)


def _progress(name: str, setup: Setup, console: Console) -> Progress:
    return Progress(
        console,
        title=f"{name:5}",
        batches=setup.settings.batches,
        batch_groups=setup.config.batch_groups,
        group_size=setup.config.group_size,
    )
