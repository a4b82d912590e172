"""``aprilsched replay RUN``: predicts a recorded run under other scheduling policies.

The run's own settings are replayed first and compared with what really happened. So every
prediction comes with the error of a prediction whose true answer is known.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from aprilsched.analysis.lengths_of_run import (
    PredictionError,
    RecordedCosts,
    RecordedGroup,
    RecordedRun,
    prediction_error,
    read_record,
    recorded_summary,
)
from aprilsched.cli.arguments import parsed
from aprilsched.config import SchedulerConfig
from aprilsched.errors import ConfigError, PromptsExhausted, RunFolderError
from aprilsched.runs.config_file import RECORDED, Policy, read_settings, variants
from aprilsched.runs.drive import simulate
from aprilsched.runs.settings import COMMAS, RunSettings, SimSettings, WorkloadSettings
from aprilsched.runs.setup import Setup, bound_of, prepare
from aprilsched.runs.showing import (
    describe,
    draw_comparison,
    number,
    percent,
    screen_of,
    signed_percent,
)
from aprilsched.simulation import NEVER, Costs, PolicyRow, SimulationResult, compare
from aprilsched.telemetry.run_folder import CONFIG, RunFolder, write_json
from aprilsched.types import Prompt, SamplingParams


@dataclass(frozen=True, kw_only=True)
class ReplayCommand:
    """Replay a recorded run in virtual time, under its own settings and under other policies."""

    run: tyro.conf.Positional[Path]
    """The folder of a run, as aprilsched run and simulate write it."""
    policy: Annotated[str, COMMAS] = "sync,april,auto"
    """Policies, with commas or spaces between them, as in simulate. "recorded" is the run's own
    settings, which always come first; recorded:over_provision=1.5 changes one of them."""
    model: Path | None = None
    """Step times of the engines (TOML), as aprilsched calibrate --out writes them; those of one
    H200 with a 4B model if not given."""
    max_running: int | None = None
    """Most requests that one engine decodes together. If not given, the value of a run on the
    embedded engine, otherwise 512."""
    kv_tokens: int | None = None
    """Tokens in one engine's KV pool. If not given, the value that the run's engines reported,
    otherwise 1,000,000."""
    batches: int | None = None
    """Batches of each replay; as many as the run delivered if not given."""
    burn_in: int | None = None
    """Batches left out of the steady-state figures; the run's own value if not given."""
    seed: int = 0
    """Seed of the lengths that are drawn for responses that had not finished."""
    out: Path | None = None
    """A folder for the run folders of the replays; none are written if not given. It must be new
    or empty."""
    json: bool = False
    """Print an object as JSON on stdout; everything else goes to stderr."""
    quiet: bool = False
    """Show no progress, only the figures at the end."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        AprilschedError: if the run cannot be read, or a setting is refused.
    """
    command = parsed(ReplayCommand, arguments, "aprilsched replay")
    messages = Console(stderr=True)
    if command.out is not None:
        RunFolder(command.out)  # raises an error if the folder is not empty
    replay = _prepare(command)
    outcomes: dict[str, SimulationResult] = {}
    for policy, setup in replay.setups:
        folder = None if command.out is None else RunFolder(command.out / policy.folder)
        screen = screen_of(setup, messages, title=f"{policy.name:8}", compact=True)
        shown = None if command.quiet else screen
        outcomes[policy.name] = simulate(setup, folder, shown, costs=replay.costs)
    found = _report(replay, outcomes)
    if command.out is not None:
        write_json(command.out / "replay.json", found)
        draw_comparison(command.out, {p.name: p.folder for p, _ in replay.setups}, messages)
    if command.json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        show(found, [policy for policy, _ in replay.setups])
    return 0


def what_if(command: ReplayCommand) -> ReplayReport:
    """Replay as `command` says, for callers from Python; its folders and output are ignored.

    Raises:
        AprilschedError: if the run cannot be read, or a setting is refused.
    """
    replay = _prepare(command)
    outcomes = {policy.name: simulate(setup, costs=replay.costs) for policy, setup in replay.setups}
    return _report(replay, outcomes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Replay:
    """A record, and the policies that are tried on it; the run's own is the first."""

    record: RecordedRun
    setups: Sequence[tuple[Policy, Setup]]

    @property
    def costs(self) -> Costs:
        return Costs(**asdict(self.record.costs))


def _prepare(command: ReplayCommand) -> _Replay:
    if not command.run.is_dir():
        raise RunFolderError(
            f"there is no folder {command.run}; name one that aprilsched run or simulate has "
            "written."
        )
    if not (command.run / CONFIG).is_file():
        raise RunFolderError(
            f"{command.run} is not a run folder (it has no {CONFIG}); name one that aprilsched run "
            "has written, or one of the policies' folders that simulate has."
        )
    if command.seed < 0:
        raise ConfigError(f"seed is {command.seed}; give 0 or more.")
    run = read_settings(command.run / CONFIG)
    record = read_record(command.run, seed=command.seed)
    settings = _settings(command, run, record)
    return _Replay(
        record=record,
        setups=[
            (policy, prepare_replay(settings, record, config))
            for policy, config in variants(command.policy, settings.scheduler)
        ],
    )


def _settings(command: ReplayCommand, run: RunSettings, record: RecordedRun) -> RunSettings:
    """The run's settings with modelled engines and with the latencies of the record."""
    delivered, burn_in = record.summary.batches, record.summary.steady_state.burn_in
    return replace(
        run,
        engine=("sim",),
        prompts=None,
        tokenizer=None,
        weights=None,
        model=None if command.model is None else str(command.model),
        batches=delivered if command.batches is None else command.batches,
        burn_in=burn_in if command.burn_in is None else command.burn_in,
        update_every=run.updates_every if record.updates else 0,
        train_seconds=record.costs.train_seconds,
        sim=_engines(command, run, record),
    )


def _engines(command: ReplayCommand, run: RunSettings, record: RecordedRun) -> SimSettings:
    """As many engines as the run had, with the values of the flags, the run or the defaults."""
    sim = run.sim if run.simulated else SimSettings()
    kv_tokens = sim.kv_tokens
    if not run.simulated and record.kv_tokens is not None:
        kv_tokens = record.kv_tokens
    return replace(
        sim,
        engines=record.summary.engines,
        max_running=sim.max_running if command.max_running is None else command.max_running,
        kv_tokens=kv_tokens if command.kv_tokens is None else command.kv_tokens,
        stream_interval=NEVER,
        refit_seconds=record.costs.refit_seconds,
        reward_seconds=record.costs.reward_seconds,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayReport:
    """What ``aprilsched replay --json`` prints.

    The rows are like those of ``simulate``, except `speedup`: it is delivered tokens/s divided by
    those of the replay under the run's own settings.
    """

    schema: int = 2
    recorded: PolicyRow
    """The run as it really was; rates and shares are over the batches that its replay has too."""
    replayed: list[PolicyRow]
    """The replays; that of the run's own settings is first."""
    prediction_error: PredictionError
    imputed: int
    """Number of responses that had not finished, so that their lengths were drawn."""
    known: int
    """Number of responses whose lengths are known."""
    costs: RecordedCosts
    batches_wanted: int
    """Requested batches of each replay. A replay has fewer if it needed more groups than were
    recorded."""


def _report(replay: _Replay, outcomes: Mapping[str, SimulationResult]) -> ReplayReport:
    record, (_, setup) = replay.record, replay.setups[0]
    settings, burn_in = setup.settings, setup.settings.burn_in or 0
    own = next(iter(outcomes.values())).summary
    bound = bound_of(settings, setup.timing)
    real = recorded_summary(record, batches=own.batches, burn_in=burn_in, bound=bound)
    rows = compare(outcomes).policies
    base = rows[0].delivered_tokens_per_s
    return ReplayReport(
        recorded=compare({RECORDED: real}).policies[0],
        replayed=[replace(row, speedup=_over(row.delivered_tokens_per_s, base)) for row in rows],
        prediction_error=prediction_error(real, own, burn_in=burn_in),
        imputed=record.imputed,
        known=record.known,
        costs=record.costs,
        batches_wanted=settings.batches,
    )


def show(found: ReplayReport, policies: Sequence[Policy]) -> None:
    """Print the report of these policies."""
    console = Console(highlight=False)
    console.print(_table(found))
    sentences = [_error(found), _lengths(found), _costs(found.costs)]
    rows = zip(policies, found.replayed, strict=True)
    sentences += [describe(policy, row.schedule) for policy, row in rows][1:]
    sentences += [
        _short(row, found) for row in found.replayed if row.batches < found.batches_wanted
    ]
    for sentence in sentences:
        console.print(sentence, soft_wrap=True)


def _table(found: ReplayReport) -> Table:
    burn_in = found.prediction_error.burn_in
    table = Table("policy", title=f"steady state, after the first {burn_in} batches")
    columns = (
        "delivered tokens/s",
        "efficiency",
        "off-policy tokens",
        "seconds a step",
        "against the replayed run",
    )
    for name in columns:
        table.add_column(name, justify="right")
    rows = [("the run", found.recorded), *((row.policy, row) for row in found.replayed)]
    for name, row in rows:
        table.add_row(
            name,
            number(row.delivered_tokens_per_s),
            percent(row.efficiency),
            percent(row.off_policy_share),
            number(row.step_s, 1),
            signed_percent(None if row.speedup is None else row.speedup - 1),
        )
    return table


def _error(found: ReplayReport) -> str:
    error = found.prediction_error
    if not error.batches:
        return (
            "The prediction error is unknown, because no batch is left after the burn-in; lower "
            "--burn-in."
        )
    return (
        f"Prediction error, replayed against real over {error.batches} batches: tokens/s "
        f"{_exact(error.delivered_tokens_per_s)}, efficiency {_exact(error.efficiency)}, "
        f"off-policy share {_exact(error.off_policy_share)}, seconds a step "
        f"{_exact(error.step_s)}."
    )


def _lengths(found: ReplayReport) -> str:
    total = found.known + found.imputed
    return (
        f"The lengths of {found.known:,} of {total:,} responses are known; {found.imputed:,} "
        "responses had not finished, and their lengths were drawn."
    )


def _costs(costs: RecordedCosts) -> str:
    return (
        f"Medians of the log: trainer {costs.train_seconds:.3g} s, refit {costs.refit_seconds:.3g} "
        f"s, pause {1e3 * costs.pause_seconds:.3g} ms, reward {costs.reward_seconds:.3g} s."
    )


def _short(row: PolicyRow, found: ReplayReport) -> str:
    return (
        f"{row.policy} needed more groups than were recorded: it has {row.batches} of "
        f"{found.batches_wanted} batches."
    )


def _over(rate: float | None, base: float | None) -> float | None:
    return rate / base if rate is not None and base else None


def _exact(error: float | None) -> str:
    return "unknown" if error is None else f"{error:+z.2%}"


# --- the replay's prompts -------------------------------------------------------------------------

# Prepares the replay of a recorded run under another policy, for ``aprilsched replay``.
#
# The prompts, the costs and the number of engines are those of the record.
#
# Invariant: every policy gets the groups of the record in the order in which the run launched them,
# and ends when it needs a group that the record does not have.


class RecordedPrompts:
    """The groups of a record as prompts; iterating again begins at the first one.

    If the run did not launch all of its prompts, its prompts continued after the record. Then the
    end of the record raises PromptsExhausted, because the next batch cannot be completed as it
    would have been.
    """

    def __init__(self, record: RecordedRun) -> None:
        self._groups = record.groups
        self._whole = record.whole

    def __iter__(self) -> Iterator[Prompt]:
        for index, group in enumerate(self._groups):
            yield _prompt(index, group)
        if not self._whole:
            raise PromptsExhausted("The record has no more groups; replay fewer batches.")


def _prompt(index: int, group: RecordedGroup) -> Prompt:
    return Prompt(
        input_ids=np.zeros(max(1, group.prompt_tokens), dtype=np.int32),
        sampling=tuple(
            SamplingParams(max_new_tokens=length, ignore_eos=True) for length in group.lengths
        ),
        key=index,
        group_size=len(group.lengths),
    )


def prepare_replay(settings: RunSettings, record: RecordedRun, scheduler: SchedulerConfig) -> Setup:
    """The parts of a replay of `record` with the given settings of the scheduler.

    Raises:
        ConfigError: if the settings contradict each other.
    """
    settings = replace(settings, scheduler=scheduler)
    # A file of lengths may be another machine's, and the record has the lengths.
    setup = prepare(replace(settings, workload=WorkloadSettings()))
    return replace(
        setup,
        settings=settings,
        prompts=RecordedPrompts(record),
        workload_mean=None,
    )
