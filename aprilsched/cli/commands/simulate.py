"""``aprilsched simulate``: compares policies on the same workload and seed, in virtual time.

Every policy runs on the production core with modelled engines, and with new weights after each
batch. All policies get the same prompts and lengths. Each writes a complete run folder.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from rich.console import Console

from aprilsched.cli.arguments import parsed
from aprilsched.cli.runs.comparison import describe, verdict
from aprilsched.cli.runs.named_policies import Policy, chosen, delivery
from aprilsched.cli.runs.pictures import draw_comparison, leave_report
from aprilsched.cli.runs.settings import COMMAS, RunSettings, SimSettings, WorkloadSettings
from aprilsched.cli.runs.setup import prepare
from aprilsched.cli.runs.showing import screen_of
from aprilsched.cli.runs.tables import comparison_table
from aprilsched.cli.runs.virtual_time import simulate
from aprilsched.config import SchedulerConfig
from aprilsched.errors import ConfigError
from aprilsched.observe.log.run_folder import REPORT, RunFolder, default_path, write_json
from aprilsched.simulation import NEVER, Comparison, SimulationResult, compare

DEFAULT_POLICIES = "sync,april,slime,areal,copris,auto"

EVERYDAY = (
    "policy delivery batches batch-groups group-size kv max-staleness train-seconds sim.engines "
    "sim.max-running sim.kv-tokens model median sigma cap lengths seed out json quiet"
)
"""The flags that ``--help`` shows; ``--help-all`` shows the others too."""


@dataclass(frozen=True, kw_only=True)
class ComparedSettings:
    """The settings that all policies of a comparison share."""

    batches: int = 60
    """Batches of each policy."""
    seed: int = 0
    """Seed of the workload."""
    burn_in: int | None = None
    """Batches left out of the steady-state figures; a quarter of the batches if not given."""
    batch_groups: int = 32
    """Groups (prompts) in a batch."""
    group_size: int = 8
    """Rollouts of one prompt."""
    kv: Literal["recompute", "keep"] = "recompute"
    """What a refit does to the KV of rollouts in flight: recompute it, or keep its older keys."""
    max_staleness: int | None = None
    """Bound on staleness, for policies that set none."""
    train_seconds: float = 0.0
    """Seconds that the trainer takes for a batch."""
    streamed: bool = False
    """The trainer takes each batch group by group as groups are scored, and spends an equal part of
    its seconds on each."""
    model: str | None = None
    """Step times of the engines: a TOML file that aprilsched calibrate wrote."""
    sim: SimSettings = field(default_factory=lambda: SimSettings(stream_interval=NEVER))
    quiet: bool = False
    """Show no progress, only the figures at the end."""
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)

    def settings(self, config: SchedulerConfig, *, seed: int) -> RunSettings:
        """Return the settings of the run of one policy."""
        return RunSettings(
            batches=self.batches,
            seed=seed,
            burn_in=self.burn_in,
            train_seconds=self.train_seconds,
            streamed=self.streamed,
            model=self.model,
            sim=self.sim,
            workload=self.workload,
            scheduler=config,
        )

    def configs(
        self, policies: Sequence[Policy], messages: Console, unit: str = "groups"
    ) -> dict[Policy, SchedulerConfig]:
        """Return the configuration of each policy that is possible.

        A policy that is impossible with single samples is left out, with a message. A warning is
        printed if the cap of the workload cuts many responses.

        Raises:
            ConfigError: if a setting is refused, or if no policy is possible.
        """
        base = SchedulerConfig(
            batch_groups=self.batch_groups,
            group_size=self.group_size,
            straggler="in_place" if self.kv == "keep" else "retract",
            max_staleness=self.max_staleness,
            **delivery(unit),
        )
        found: dict[Policy, SchedulerConfig] = {}
        for policy in policies:
            try:
                found[policy] = policy.apply(base)
            except ConfigError as error:
                units = (base.delivery, dict(policy.changes).get("delivery"))
                if "samples" not in units or (policy is policies[-1] and not found):
                    raise
                _print(messages, f"{policy.name} is left out: {error}")
        workload = self.workload.checked(seed=self.seed, group_size=self.group_size)
        if (warning := workload.cap_warning()) is not None:
            _print(messages, f"Warning: {warning}")
        return found


@dataclass(frozen=True, kw_only=True)
class SimulateCommand(ComparedSettings):
    """Compare scheduling policies on one workload, in virtual time."""

    policy: Annotated[str, COMMAS] = DEFAULT_POLICIES
    """Policies, separated by commas or spaces. Settings follow a colon:
    april:over_provision=1.25|1.5|2 is three policies. The arms of aprilsched frontier are policies
    too."""
    delivery: str = "groups"
    """What a batch consists of: groups, or samples:4 for single samples with 4 siblings each.
    Policies that cannot deliver samples are left out, with the reason."""
    out: Path | None = None
    """The folder for the results; runs/TIME-SEED if not given. It must be new or empty."""
    json: bool = False
    """Print a list of objects as JSON on stdout, one for each policy; everything else goes to
    stderr. There is no report then."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        AprilschedError: if a setting is refused or the results cannot be written.
    """
    command = parsed(SimulateCommand, arguments, "aprilsched simulate", everyday=EVERYDAY)
    messages = Console(stderr=True)
    configs = command.configs(chosen(command.policy), messages, command.delivery)
    setups = [
        (policy, prepare(command.settings(config, seed=command.seed)))
        for policy, config in configs.items()
    ]
    root = RunFolder(command.out or default_path(command.seed)).path
    outcomes: dict[str, SimulationResult] = {}
    for policy, setup in setups:
        screen = screen_of(setup, messages, title=f"{policy.name:6}", compact=True)
        shown = None if command.quiet else screen
        outcomes[policy.name] = simulate(setup, RunFolder(root / policy.folder), shown)
    comparison = compare(outcomes)
    write_json(root / "comparison.json", comparison)
    folders = {policy.name: policy.folder for policy in configs}
    draw_comparison(root, folders, messages)
    if command.json:
        sys.stdout.write(msgspec.json.encode(comparison.policies).decode() + "\n")
    else:
        _show(list(configs), outcomes, comparison)
    _print(messages, f"The results are in {root}")
    if not command.json and not command.quiet:
        first = comparison.baseline or comparison.policies[0].policy
        best = comparison.best
        other = None if best is None or best == first else root / folders[best]
        leave_report(messages, root / folders[first], other, out=root / REPORT)
    return 0


def _show(
    policies: Sequence[Policy], outcomes: Mapping[str, SimulationResult], comparison: Comparison
) -> None:
    console = Console()
    console.print(comparison_table({name: each.summary for name, each in outcomes.items()}))
    for policy in policies:
        _print(console, describe(policy, outcomes[policy.name]))
    _print(console, verdict(comparison))


def _print(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)
