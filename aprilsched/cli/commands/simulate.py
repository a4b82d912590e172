"""``aprilsched simulate``: compares policies on the same workload and seeds, in virtual time.

Every policy runs on the production core with modelled engines, and with new weights after each
batch. All policies get the same prompts and lengths. Each writes a complete run folder of the first
seed. With ``--gpus`` each policy runs under each division of the GPUs among engines and trainer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from rich.console import Console
from rich.progress import Progress

from aprilsched.cli.arguments import parsed
from aprilsched.cli.runs.comparison import describe, verdict
from aprilsched.cli.runs.named_policies import Policy, chosen, delivery
from aprilsched.cli.runs.pictures import draw_comparison, leave_report
from aprilsched.cli.runs.settings import COMMAS, RunSettings, SimSettings, WorkloadSettings
from aprilsched.cli.runs.setup import Setup, prepare
from aprilsched.cli.runs.tables import comparison_table, point_line
from aprilsched.cli.runs.virtual_time import simulate
from aprilsched.config import SchedulerConfig
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.policies.schedule import Pace
from aprilsched.observe.log.run_folder import REPORT, RunFolder, default_path, write_json
from aprilsched.simulation import NEVER, SimulationResult, compare
from aprilsched.simulation.virtual import checked_count

DEFAULT_POLICIES = "sync,april,slime,areal,copris,auto"

COLOCATED = "colocated"
EVERYDAY = (
    "policy delivery seeds gpus train-gpu-seconds split batches batch-groups group-size kv "
    "max-staleness train-seconds sim.engines sim.max-running sim.kv-tokens model median sigma cap "
    "lengths within-group seed out json quiet"
)
"""The flags that ``--help`` shows; ``--help-all`` shows the others too."""


@dataclass(frozen=True, kw_only=True)
class ComparedSettings:
    """The settings that all policies of a comparison share."""

    batches: int = 60
    """Batches of each policy."""
    seed: int = 0
    """Seed of the workload."""
    seeds: int = 1
    """Number of seeds, from `seed` on. Figures are means, with half the range of the seeds; run
    folders are of the first seed."""
    burn_in: int | None = None
    """Batches left out of the steady-state figures; a quarter of the batches if not given."""
    batch_groups: int = 32
    """Groups (prompts) in a batch."""
    group_size: int = 8
    """Rollouts of one prompt."""
    kv: Literal["recompute", "keep"] = "recompute"
    """What a refit does to the KV of rollouts in flight: recompute it, or keep its older keys."""
    max_staleness: int | None = None
    """Bound on staleness, for policies that set none. If not given, none has a bound, unlike runs,
    so that schedules are compared by their own staleness."""
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

    @property
    def every_seed(self) -> range:
        """Return the seeds.

        Raises:
            ConfigError: if `seeds` is less than 1.
        """
        checked_count("seeds", self.seeds, least=1)
        return range(self.seed, self.seed + self.seeds)

    def configs(
        self,
        policies: Sequence[Policy],
        messages: Console,
        unit: str = "groups",
        pace: Pace = "synchronous",
    ) -> dict[Policy, SchedulerConfig]:
        """Return the configuration of each policy that is possible.

        A policy that is impossible with single samples is left out, with a message. `pace` is the
        pace of policies that set none.

        Raises:
            ConfigError: if a setting is refused, or if no policy is possible.
        """
        base = SchedulerConfig(
            batch_groups=self.batch_groups,
            group_size=self.group_size,
            straggler="in_place" if self.kv == "keep" else "retract",
            max_staleness=self.max_staleness,
            pace=pace,
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
        return found

    def warn(self, messages: Console) -> None:
        """Print a warning if the cap of the workload cuts many responses."""
        workload = self.workload.checked(seed=self.seed, group_size=self.group_size)
        if (warning := workload.cap_warning()) is not None:
            _print(messages, f"Warning: {warning}")


COLOCATED_S = 0.081
"""Seconds for which colocated engines fall asleep and wake at each update, in addition to the
refit: measured on an H200 (docs/guides/colocated.md)."""


@dataclass(frozen=True, kw_only=True)
class SimulateCommand(ComparedSettings):
    """Compare scheduling policies on one workload, in virtual time."""

    policy: Annotated[str, COMMAS] = DEFAULT_POLICIES
    """Policies, separated by commas or spaces. Settings follow a colon each:
    april:over_provision=1.25|1.5|2:pace=asynchronous is three policies. The arms of aprilsched
    frontier are policies too."""
    delivery: str = "groups"
    """What a batch consists of: groups, or samples:4 for single samples with 4 siblings each.
    Policies that cannot deliver samples are left out, with the reason."""
    gpus: int | None = None
    """Number of GPUs that engines and trainer divide among them, each engine on one GPU. Each
    policy then runs under each `split`. Engines on their own GPUs generate while the trainer
    trains, unless the policy sets pace=synchronous, as sync does."""
    train_gpu_seconds: float = 0.0
    """Seconds that one GPU would train on a batch. With `gpus`; the trainer's GPUs share them
    evenly."""
    split: Annotated[str, COMMAS] = "all"
    """Divisions of the GPUs, as ENGINES:TRAINER or colocated, with commas; all for every one.
    Colocated engines sleep while all GPUs train, and lose their KV."""
    out: Path | None = None
    """The folder for the results; runs/TIME-SEED if not given. It must be new or empty."""
    json: bool = False
    """Print a list of objects as JSON on stdout, one for each policy; everything else goes to
    stderr. There is no report then."""

    def arms(self, messages: Console) -> list[Arm]:
        """Return what is simulated. What is impossible is left out, with a message.

        Raises:
            ConfigError: if a setting is refused, or if nothing is possible.
        """
        policies = chosen(self.policy)
        if self.gpus is None:
            if self.split != "all" or self.train_gpu_seconds:
                raise ConfigError("split and train_gpu_seconds divide GPUs; set gpus too.")
            configs = self.configs(policies, messages, self.delivery)
            return [Arm(name=p.name, policy=p, shared=self, config=configs[p]) for p in configs]
        arms: list[Arm] = []
        refusals: dict[tuple[str, str], list[str]] = {}
        for split, shared in self._splits():
            pace: Pace = "synchronous" if split == COLOCATED else "asynchronous"
            for policy in policies:
                try:
                    (config,) = shared.configs([policy], messages, self.delivery, pace).values()
                    if split == COLOCATED and dict(policy.changes).get("pace") == "asynchronous":
                        raise ConfigError('pace must be "synchronous", got "asynchronous".')
                    fitting = replace(config, pace="synchronous") if split == COLOCATED else config
                except ConfigError as error:
                    refusals.setdefault((policy.name, str(error)), []).append(split)
                    continue
                placed = replace(policy, name=f"{policy.name} {split}")
                arms.append(
                    Arm(name=policy.name, split=split, policy=placed, shared=shared, config=fitting)
                )
        if not arms:
            raise ConfigError(next(message for _, message in refusals))
        for (name, message), splits in refusals.items():
            _print(messages, f"{name} {', '.join(splits)} is left out: {message}")
        return arms

    def _splits(self) -> list[tuple[str, ComparedSettings]]:
        gpus = self.gpus or 0
        checked_count("gpus", gpus, least=2)
        if not self.train_gpu_seconds > 0:
            raise ConfigError(
                f"train_gpu_seconds must be above 0 with gpus, got {self.train_gpu_seconds:g}."
            )
        if self.train_seconds or self.sim.engines != 1:
            raise ConfigError("gpus sets train_seconds and sim.engines; leave these out.")
        every = [COLOCATED, *(f"{engines}:{gpus - engines}" for engines in range(1, gpus))]
        names = every if self.split == "all" else [name.strip() for name in self.split.split(",")]
        splits: list[tuple[str, ComparedSettings]] = []
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"split names {name} twice; name each division once.")
            if name not in every:
                raise ConfigError(
                    f"split must be all, or some of {', '.join(every)}, got {name!r}."
                )
            colocated = name == COLOCATED
            engines = gpus if colocated else int(name.split(":")[0])
            sleep_s = COLOCATED_S if colocated else 0.0
            shared = replace(
                self,
                train_seconds=self.train_gpu_seconds / (gpus if colocated else gpus - engines),
                sim=replace(
                    self.sim, engines=engines, refit_seconds=self.sim.refit_seconds + sleep_s
                ),
                kv="recompute" if colocated else self.kv,
            )
            splits.append((name, shared))
        return splits


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One row of the table: a policy on its engines."""

    name: str
    """The policy without the division of the GPUs."""
    split: str = ""
    policy: Policy
    shared: ComparedSettings
    config: SchedulerConfig

    def setups(self) -> list[Setup]:
        """Return the run of each seed.

        Raises:
            ConfigError: if a setting is refused.
        """
        return [prepare(self.shared.settings(self.config, seed=s)) for s in self.shared.every_seed]


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        AprilschedError: if a setting is refused or the results cannot be written.
    """
    command = parsed(SimulateCommand, arguments, "aprilsched simulate", everyday=EVERYDAY)
    messages = Console(stderr=True)
    arms = command.arms(messages)
    command.warn(messages)
    setups = {arm.policy.name: arm.setups() for arm in arms}
    root = RunFolder(command.out or default_path(command.seed)).path
    outcomes: dict[str, list[SimulationResult]] = {}
    with Progress(console=messages, disable=command.quiet) as progress:
        task = progress.add_task("runs", total=sum(map(len, setups.values())))
        for arm in arms:
            progress.update(task, description=arm.policy.name)
            outcomes[arm.policy.name] = []
            for place, setup in enumerate(setups[arm.policy.name]):
                folder = None if place else RunFolder(root / arm.policy.folder)
                outcomes[arm.policy.name].append(simulate(setup, folder))
                progress.advance(task)
            if not command.quiet:
                (row,) = compare({arm.policy.name: outcomes[arm.policy.name]}).policies
                _print(messages, point_line(row))
    comparison = compare(outcomes)
    write_json(root / "comparison.json", comparison)
    folders = {arm.policy.name: arm.policy.folder for arm in arms}
    draw_comparison(root, folders, comparison.policies, messages)
    if command.json:
        sys.stdout.write(msgspec.json.encode(comparison.policies).decode() + "\n")
    else:
        console = Console()
        first = next(iter(outcomes.values()))[0]
        burn_in = first.summary.steady_state.burn_in
        table = comparison_table(comparison.policies, burn_in, command.workload.limits)
        console.print(table)
        splits: dict[tuple[str, str], list[str]] = {}
        for arm in arms:
            result, trains = outcomes[arm.policy.name][-1], arm.shared.train_seconds > 0
            text = describe(arm.policy, result, trains=trains)
            splits.setdefault((arm.name, text), []).append(arm.split)
        for (name, text), alike in splits.items():
            _print(console, f"{name} {', '.join(alike)}".rstrip() + f": {text}")
        _print(console, verdict(comparison))
        model = command.model or "SGLang on one H200 with a 4B model"
        _print(console, f"Modelled engines: {model}.")
    _print(messages, f"The results are in {root}")
    if not command.json and not command.quiet:
        baseline = comparison.baseline or comparison.policies[0].policy
        best = comparison.best
        other = None if best is None or best == baseline else root / folders[best]
        leave_report(messages, root / folders[baseline], other, out=root / REPORT)
    return 0


def _print(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)
