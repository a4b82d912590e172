"""``aprilsched replay RUN``: predicts a recorded run under other scheduling policies.

The run's own settings are replayed first and compared with what really happened. So every
prediction comes with the error of a prediction whose true answer is known.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import tyro
from rich.console import Console
from rich.table import Table

from aprilsched.analysis.lengths_of_run import (
    PredictionError,
    RecordedCosts,
    RecordedRun,
    prediction_error,
    read_record,
    recorded_summary,
)
from aprilsched.cli.arguments import parsed
from aprilsched.errors import ConfigError, RunFolderError
from aprilsched.runs.config_file import read_settings
from aprilsched.runs.policies import RECORDED, Variant, variants
from aprilsched.runs.replayed import Replay, bound_of, replay_settings
from aprilsched.runs.settings import COMMAS, RunSettings, SimSettings
from aprilsched.runs.setup import Setup
from aprilsched.runs.showing import draw_comparison, screen_of
from aprilsched.runs.simulated import SimulatedRun
from aprilsched.runs.tables import PolicyRow, compare, number, percent, signed_percent
from aprilsched.telemetry.figures import RunSummary
from aprilsched.telemetry.run_folder import CONFIG, RunFolder, write_json
from aprilsched.timing import load_model
from aprilsched.timing.model import H200_QWEN3_4B


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
    replay = _replay(command)
    setups = [(v, replay.setup(v)) for v in variants(command.policy, replay.settings.scheduler)]
    runs = {v.name: _run(command, replay, v, setup, messages) for v, setup in setups}
    summaries = {name: run.execute() for name, run in runs.items()}
    found = _report(replay, summaries, runs)
    if command.out is not None:
        write_json(command.out / "replay.json", found)
        draw_comparison(command.out, {v.name: v.folder for v, _ in setups}, messages)
    if command.json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        show(found, {v.name: v.what for v, _ in setups})
    return 0


def what_if(command: ReplayCommand) -> ReplayReport:
    """Replay as `command` says, for callers from Python; its folders and output are ignored.

    Raises:
        AprilschedError: if the run cannot be read, or a setting is refused.
    """
    replay = _replay(command)
    runs = {
        variant.name: replay.run(replay.setup(variant), None, None)
        for variant in variants(command.policy, replay.settings.scheduler)
    }
    return _report(replay, {name: run.execute() for name, run in runs.items()}, runs)


def _replay(command: ReplayCommand) -> Replay:
    """The record and the settings that the policies are applied to."""
    if not (command.run / CONFIG).is_file():
        raise RunFolderError(
            f"{command.run} is not a run folder (it has no {CONFIG}); name one that aprilsched run "
            "has written."
        )
    if command.seed < 0:
        raise ConfigError(f"seed is {command.seed}; give 0 or more.")
    run = read_settings(command.run / CONFIG)
    record = read_record(command.run, seed=command.seed)
    delivered, burn_in = record.summary.batches, record.summary.steady_state.burn_in
    settings = replay_settings(
        run,
        record,
        _engines(command, run, record),
        batches=delivered if command.batches is None else command.batches,
        burn_in=burn_in if command.burn_in is None else command.burn_in,
    )
    model = H200_QWEN3_4B if command.model is None else load_model(command.model)
    return Replay(record=record, settings=settings, model=model)


def _engines(command: ReplayCommand, run: RunSettings, record: RecordedRun) -> SimSettings:
    """As many engines as the run had, with the values of the flags, the run or the defaults."""
    sim = run.sim if run.simulated else SimSettings()
    if not run.simulated and record.kv_tokens is not None:
        sim = replace(sim, kv_tokens=record.kv_tokens)
    if command.max_running is not None:
        sim = replace(sim, max_running=command.max_running)
    if command.kv_tokens is not None:
        sim = replace(sim, kv_tokens=command.kv_tokens)
    return replace(sim, engines=record.summary.engines)


def _run(
    command: ReplayCommand, replay: Replay, variant: Variant, setup: Setup, console: Console
) -> SimulatedRun:
    folder = None if command.out is None else RunFolder(command.out / variant.folder)
    screen = screen_of(setup, console, title=f"{variant.name:8}", compact=True)
    return replay.run(setup, folder, None if command.quiet else screen)


def _report(
    replay: Replay, summaries: Mapping[str, RunSummary], runs: Mapping[str, SimulatedRun]
) -> ReplayReport:
    settings = replay.settings
    burn_in = settings.burn_in or 0
    own = next(iter(summaries.values()))
    real = recorded_summary(
        replay.record,
        batches=own.batches,
        burn_in=burn_in,
        bound=bound_of(replay.model, settings.sim),
    )
    return report(
        replay.record,
        real,
        summaries,
        error=prediction_error(real, own, burn_in=burn_in),
        wanted=settings.batches,
        generated={name: run.generated_tokens_per_s for name, run in runs.items()},
        schedules={name: run.schedule for name, run in runs.items()},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayReport:
    """What ``aprilsched replay --json`` prints.

    The rows are like those of ``simulate``, except `speedup`: it is delivered tokens/s divided by
    those of the replay under the run's own settings.
    """

    schema: int = 1
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


def report(
    record: RecordedRun,
    real: RunSummary,
    summaries: Mapping[str, RunSummary],
    *,
    error: PredictionError,
    wanted: int,
    generated: Mapping[str, float | None],
    schedules: Mapping[str, str],
) -> ReplayReport:
    """Make the report.

    Args:
        record: the recorded run.
        real: the run's own summary.
        summaries: summaries of the replays; that of the run's own settings is first.
        error: prediction error of the first replay.
        wanted: requested batches of each replay.
        generated: as in :func:`~aprilsched.runs.tables.compare`.
        schedules: as in :func:`~aprilsched.runs.tables.compare`.
    """
    rows = compare(summaries, generated, schedules).policies
    own = compare({RECORDED: real}, {RECORDED: None}, {}).policies[0]
    base = rows[0].delivered_tokens_per_s
    return ReplayReport(
        recorded=own,
        replayed=[replace(row, speedup=_over(row.delivered_tokens_per_s, base)) for row in rows],
        prediction_error=error,
        imputed=record.imputed,
        known=record.known,
        costs=record.costs,
        batches_wanted=wanted,
    )


def show(found: ReplayReport, what: Mapping[str, str]) -> None:
    """Print the report; `what` describes each policy."""
    console = Console(highlight=False)
    console.print(_table(found))
    sentences = [_error(found), _lengths(found), _costs(found.costs)]
    sentences += [_policy(row, what[row.policy]) for row in found.replayed[1:]]
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
        "seconds a batch",
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
            number(row.seconds_a_batch, 1),
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
        f"off-policy share {_exact(error.off_policy_share)}, seconds a batch "
        f"{_exact(error.seconds_a_batch)}."
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


def _policy(row: PolicyRow, what: str) -> str:
    text = f"{row.policy}: {what}"
    return f"{text} It chose {row.schedule}." if row.schedule else text


def _short(row: PolicyRow, found: ReplayReport) -> str:
    return (
        f"{row.policy} needed more groups than were recorded: it has {row.batches} of "
        f"{found.batches_wanted} batches."
    )


def _over(rate: float | None, base: float | None) -> float | None:
    return rate / base if rate is not None and base else None


def _exact(error: float | None) -> str:
    return "unknown" if error is None else f"{error:+z.2%}"
