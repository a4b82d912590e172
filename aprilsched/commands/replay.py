"""``aprilsched replay RUN``: what if a recorded run had been scheduled in another way.

The run's own settings are replayed first and held against what really happened, so that every
answer comes with the error of the question whose answer is known.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import tyro
from rich.console import Console

from aprilsched.analysis.lengths_of_run import RecordedRun, read_record
from aprilsched.analysis.prediction import prediction_error, recorded_summary
from aprilsched.calibration import load_model
from aprilsched.commands.config_file import read_settings
from aprilsched.commands.pictures import draw_comparison
from aprilsched.commands.replay_report import ReplayReport, report, show
from aprilsched.commands.replayed import Replay, bound_of, replay_settings
from aprilsched.commands.settings import RunSettings, SimSettings
from aprilsched.commands.setup import Setup
from aprilsched.commands.showing import screen_of
from aprilsched.commands.simulated import SimulatedRun
from aprilsched.commands.variants import Variant, variants
from aprilsched.errors import ConfigError, RunFolderError
from aprilsched.telemetry.figures import RunSummary
from aprilsched.telemetry.run_folder import CONFIG, RunFolder, write_json
from aprilsched.timing import H200_QWEN3_4B

__all__ = ["ReplayCommand", "main", "what_if"]


@dataclass(frozen=True, kw_only=True)
class ReplayCommand:
    """Replay a recorded run in virtual time, under its own settings and under other policies."""

    run: tyro.conf.Positional[Path]
    """The folder of a run, as aprilsched run and simulate write it."""
    policy: str = "sync,april,auto"
    """Which, with commas between, as in simulate. "recorded" is the run's own settings, which come
    first in any case; recorded:over_provision=1.5 changes one of them."""
    model: Path | None = None
    """Step times of the engines (TOML), as aprilsched calibrate --out writes them; those of one
    H200 with a 4B model if not given."""
    max_running: int | None = None
    """Most requests that one engine decodes together; the run's own on the embedded engine, else
    512."""
    kv_tokens: int | None = None
    """Tokens in one engine's KV pool; what the run's own say of themselves, else 1,000,000."""
    batches: int | None = None
    """Of each replay; as many as the run delivered if not given."""
    burn_in: int | None = None
    """Batches left out of the steady-state figures; the run's own if not given."""
    seed: int = 0
    """Of the lengths of responses that had not finished."""
    out: Path | None = None
    """A folder for the run folders of the replays; none are written if not given. It must be new
    or empty."""
    json: bool = False
    """Print an object as JSON on stdout; all else goes to stderr."""
    quiet: bool = False
    """No progress; the figures at the end all the same."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit code.

    Raises:
        AprilschedError: if the run cannot be read, or a setting is refused.
    """
    command = tyro.cli(
        ReplayCommand,
        args=list(arguments),
        prog="aprilsched replay",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    messages = Console(stderr=True)
    if command.out is not None:
        RunFolder(command.out)  # refuses one that holds something
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
    """The same as a call: what `command` says of folders and output is ignored.

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
    """What is replayed."""
    if not (command.run / CONFIG).is_file():
        raise RunFolderError(
            f"{command.run} is no run folder (it has no {CONFIG}); name one that aprilsched run "
            "has written."
        )
    if command.seed < 0:
        raise ConfigError(f"seed is {command.seed}; give 0 or more.")
    run = read_settings(command.run / CONFIG)
    group_size = run.scheduler.checked().group_size
    record = read_record(command.run, group_size=group_size, seed=command.seed)
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
    """As many as the run had, each as the flags, the run or the defaults say."""
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
