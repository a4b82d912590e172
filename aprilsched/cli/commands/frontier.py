"""``aprilsched frontier``: draws speed against staleness for several schedules, simulated on the
same prompts and engines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from rich.console import Console
from rich.progress import Progress

from aprilsched import __version__
from aprilsched.cli.arguments import parsed
from aprilsched.cli.commands.simulate import EVERYDAY as SIMULATE_EVERYDAY
from aprilsched.cli.commands.simulate import ComparedSettings
from aprilsched.cli.runs.config_file import as_toml
from aprilsched.cli.runs.named_policies import chosen
from aprilsched.cli.runs.settings import COMMAS
from aprilsched.cli.runs.setup import prepare
from aprilsched.cli.runs.tables import frontier_table, point_line
from aprilsched.cli.runs.virtual_time import simulate
from aprilsched.config import SchedulerConfig
from aprilsched.errors import ConfigError
from aprilsched.kernel.values.extras import extra
from aprilsched.simulation import PolicyRow, SimulationResult, frontier

DEFAULT_ARMS = (
    "wave@1|1.25|1.5|2|2.5|3|4,pool@1|1.75|2.5,auto,samples:2@1.25|1.5|2|2.5,"
    "samples:4@1.25|1.5|2|2.5|auto,samples:6@1.25|1.5|2|2.5"
)

_NOT_HERE = {"policy", "delivery", "gpus", "train-gpu-seconds", "split"}
EVERYDAY = " ".join(
    ["arms", "width", "title", *(f for f in SIMULATE_EVERYDAY.split() if f not in _NOT_HERE)]
)
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
    width: float = 9.0
    """Inches of the picture's width: 3.3 for a column of two. Text has 8 points below 8 inches."""
    title: str = ""
    """A title in the picture; none if not given."""
    json: bool = False
    """Print a list of objects as JSON on stdout, one for each arm, with its settings and the values
    of each seed; everything else goes to stderr."""


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
        if not 2 <= command.width <= 40:
            raise ConfigError(f"width must be from 2 to 40 inches, got {command.width:g}.")
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

        points: list[PolicyRow] = []
        for name, config in arms.items():
            progress.update(task, description=name)
            points += frontier({name: config}, run, seeds=len(seeds), first_seed=command.seed)
            if not command.quiet:
                line = point_line(points[-1])
                messages.print(line, soft_wrap=True, highlight=False, markup=False)
    if command.json:
        rows = [
            asdict(point)
            | {"aprilsched": __version__}
            | {"settings": as_toml(command.settings(arms[point.policy], seed=command.seed))}
            for point in points
        ]
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(rows), indent=1).decode() + "\n")
    else:
        Console().print(frontier_table(points, command.workload.limits))
    if command.out is not None:
        from aprilsched.observe import plots
        from aprilsched.observe.report.style import save

        save(plots.frontier(points, width=command.width, title=command.title), command.out)
        messages.print(f"The picture is {command.out}", soft_wrap=True, highlight=False)
    return 0
