"""``aprilsched frontier``: draws speed against staleness for several schedules, simulated on the
same prompts and engines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from rich.console import Console
from rich.progress import Progress

from aprilsched.cli.arguments import parsed
from aprilsched.cli.commands.simulate import EVERYDAY as SIMULATE_EVERYDAY
from aprilsched.cli.commands.simulate import ComparedSettings
from aprilsched.cli.runs.named_policies import chosen
from aprilsched.cli.runs.settings import COMMAS
from aprilsched.cli.runs.setup import prepare
from aprilsched.cli.runs.tables import frontier_table
from aprilsched.cli.runs.virtual_time import simulate
from aprilsched.config import SchedulerConfig
from aprilsched.kernel.values.extras import extra
from aprilsched.simulation import SimulationResult, frontier

DEFAULT_ARMS = (
    "wave@1|1.25|1.5|2|2.5|3|4,pool@1|1.75|2.5,auto,samples:2@1.25|1.5|2|2.5,"
    "samples:4@1.25|1.5|2|2.5|auto,samples:6@1.25|1.5|2|2.5"
)

_NOT_HERE = {"policy", "delivery", "gpus", "train-gpu-seconds", "split"}
EVERYDAY = " ".join(["arms", *(f for f in SIMULATE_EVERYDAY.split() if f not in _NOT_HERE)])
"""The flags that ``--help`` shows; ``--help-all`` shows the others too."""


@dataclass(frozen=True, kw_only=True)
class FrontierCommand(ComparedSettings):
    """Draw tokens per second against the staleness of tokens, for schedules on your lengths."""

    arms: Annotated[str, COMMAS] = DEFAULT_ARMS
    """Schedules, separated by commas or spaces: wave@1.5|2 is whole groups from waves of two
    ratios; pool@1.75, auto, samples:4@2 (single samples with 4 siblings), samples:4+pool@1.5, and
    the policies of aprilsched simulate."""
    out: Path | None = Path("frontier.png")
    """The picture, a PNG, SVG or PDF by its suffix; none for no picture."""
    json: bool = False
    """Print a list of objects as JSON on stdout, one for each arm; everything else goes to
    stderr."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        AprilschedError: if a setting is refused or the picture cannot be written.
    """
    command = parsed(FrontierCommand, arguments, "aprilsched frontier", everyday=EVERYDAY)
    if command.out is not None:
        with extra("plots"):
            from aprilsched.observe.report.style import picture_format
        picture_format(command.out)
    seeds = command.every_seed
    messages = Console(stderr=True)
    configs = command.configs(chosen(command.arms), messages)
    command.warn(messages)
    arms = {policy.name: config for policy, config in configs.items()}
    # Refuses wrong settings before the progress is shown.
    prepare(command.settings(next(iter(arms.values())), seed=command.seed))
    with Progress(console=messages, disable=command.quiet) as progress:
        task = progress.add_task("runs", total=len(arms) * len(seeds))

        def run(config: SchedulerConfig, seed: int) -> SimulationResult:
            result = simulate(prepare(command.settings(config, seed=seed)))
            progress.advance(task)
            return result

        points = frontier(arms, run, seeds=len(seeds), first_seed=command.seed)
    if command.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(points), indent=1).decode() + "\n")
    else:
        Console().print(frontier_table(points, command.workload.limits))
    if command.out is not None:
        from aprilsched.observe import plots
        from aprilsched.observe.report.style import save

        save(plots.frontier(points), command.out)
        messages.print(f"The picture is {command.out}", soft_wrap=True, highlight=False)
    return 0
