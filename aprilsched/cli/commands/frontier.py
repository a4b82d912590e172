"""``aprilsched frontier``: draws speed against staleness for several schedules, simulated on the
same prompts and engines."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

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
from aprilsched.observe.figures.summary import default_burn_in
from aprilsched.simulation import PolicyRow, SimulationResult, frontier

DEFAULT_ARMS = (
    "wave@1|1.25|1.5|2|2.5|3|4,pool@1|1.75|2.5,auto,samples:2@1.25|1.5|2|2.5,"
    "samples:4@1.25|1.5|2|2.5|auto,samples:6@1.25|1.5|2|2.5"
)

_NOT_HERE = {"policy", "delivery", "gpus", "train-gpu-seconds", "split"}
EVERYDAY = " ".join(
    [
        "arms",
        "redraw",
        "width",
        "title",
        *(f for f in SIMULATE_EVERYDAY.split() if f not in _NOT_HERE),
    ]
)
"""The flags that ``--help`` shows; ``--help-all`` shows the others too."""

_KV = {"keep": "kept", "recompute": "recomputed", "apart": "of each version apart"}
"""The words of a caption for the treatment of KV at an update."""
_LIMITS = {"cap": "the limit of every request", "exact": "with the length of each as its limit"}


@dataclass(frozen=True, kw_only=True)
class FrontierCommand(ComparedSettings):
    """Draw tokens per second against the staleness of tokens, for schedules on your lengths."""

    arms: Annotated[str, COMMAS] = DEFAULT_ARMS
    """Schedules, separated by commas or spaces: wave@1.5|2 is whole groups from waves of two
    ratios; pool@1.75, auto, samples:4@2 (single samples with 4 siblings), samples:4+pool@1.5, and
    the policies of aprilsched simulate."""
    out: Path | None = Path("frontier.png")
    """The picture, a PNG, SVG or PDF by its suffix; none for no picture."""
    redraw: Path | None = None
    """A file that this command wrote with --json. Its arms are shown and drawn without simulating
    again, for example with another --width; settings of the simulation do not count."""
    width: float = 9.0
    """Inches of the picture's width: 3.3 for a column of two. Text has 8 points below 8 inches."""
    title: str = ""
    """A title in the picture; none if not given."""
    json: bool = False
    """Print a list of objects as JSON on stdout, one for each arm, with its settings, the values of
    each seed and the caption; everything else goes to stderr."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        AprilschedError: if a setting is refused, or a file cannot be read or written.
    """
    command = parsed(FrontierCommand, arguments, "aprilsched frontier", everyday=EVERYDAY)
    if command.out is not None:
        with extra("plots"):
            from aprilsched.observe.report.style import picture_format
        picture_format(command.out)
        if not 2 <= command.width <= 40:
            raise ConfigError(f"width must be from 2 to 40 inches, got {command.width:g}.")
    messages = Console(stderr=True)
    rows = _stored(command.redraw) if command.redraw else _simulated(command, messages)
    points, caption = msgspec.convert(rows, list[PolicyRow]), rows[0].get("caption", "")
    if command.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(rows), indent=1).decode() + "\n")
    if not (command.json and command.quiet):
        Console(stderr=command.json).print(frontier_table(points))
    if command.out is not None:
        from aprilsched.observe import plots
        from aprilsched.observe.report.style import save

        save(plots.frontier(points, width=command.width, title=command.title), command.out)
        messages.print(f"The picture is {command.out}", soft_wrap=True, highlight=False)
    if not command.quiet:
        messages.print(caption, soft_wrap=True, highlight=False, markup=False)
    return 0


def _stored(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of ``--json``."""
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
        msgspec.convert(rows, Annotated[list[PolicyRow], msgspec.Meta(min_length=1)])
        msgspec.convert([row.get("caption", "") for row in rows], list[str])
    except (OSError, msgspec.MsgspecError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"redraw must be a file that aprilsched frontier --json wrote, got {path} ({why})."
        ) from None
    return rows


def _simulated(command: FrontierCommand, messages: Console) -> list[dict[str, Any]]:
    """Simulate the arms, and return a row for each."""
    seeds = command.every_seed
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
    caption = _caption(command, arms)
    return [
        asdict(point)
        | {"aprilsched": __version__, "caption": caption}
        | {"settings": as_toml(command.settings(arms[point.policy], seed=command.seed))}
        for point in points
    ]


def _caption(command: FrontierCommand, arms: Mapping[str, SchedulerConfig]) -> str:
    """Return the caption of the picture."""
    configs, sim, seeds = arms.values(), command.sim, command.every_seed
    sizes = " or ".join(sorted({f"{c.batch_groups} groups of {c.group_size}" for c in configs}))
    kv = " or ".join(sorted({_KV[each.cached_kv] for each in configs}))
    work = command.workload.checked(seed=command.seed, group_size=command.group_size)
    drawn = f"lognormal with median {work.median:g} and sigma {work.sigma:g}"
    values = f"means and ranges (bars) of seeds {seeds[0]} to" if len(seeds) > 1 else "seed"
    burn_in = default_burn_in(command.batches) if command.burn_in is None else command.burn_in
    return (
        "Simulated: delivered tokens per second against their mean staleness, by over-provisioning "
        f"ratio (numbers), {values} {seeds[-1]}. {command.batches} batches of {sizes}, of which "
        f"the first {burn_in} do not count; responses of at most {work.cap:,} tokens, "
        f"{_LIMITS[work.limits]} ({command.workload.lengths or drawn}; "
        f"within_group={work.within_group:g} is assumed); "
        f"{sim.engines} engine{'s' * (sim.engines != 1)} with step times of "
        f"{command.model or 'Qwen3-4B on an H200'}, {sim.kv_tokens:,} tokens of KV each, and KV "
        f"{kv} at updates; the trainer takes {command.train_seconds:g} s for a batch."
    )
