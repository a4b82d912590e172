"""``aprilsched drain RUN``: tells when the bias of a run's start is gone, and what would end it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
import tyro
from rich.console import Console

from aprilsched.analysis.bias import DrainPlan, drawn_law, plan_drain
from aprilsched.analysis.lengths_of_run import RecordedRun, read_record
from aprilsched.cli.arguments import parsed
from aprilsched.errors import ConfigError
from aprilsched.runs.showing import signed_percent
from aprilsched.timing.calibration import (
    load_model,
)
from aprilsched.timing.model import (
    H200_QWEN3_4B,
    StepTimeModel,
)


@dataclass(frozen=True, kw_only=True)
class DrainCommand:
    """Tell how long the length bias of a run's start still lasts, and what ends it at once."""

    run: tyro.conf.Positional[Path]
    """The run folder."""
    below: float = 0.01
    """The bias that is accepted, as a share of the mean length."""
    model: Path | None = None
    """Step times of the engines: a TOML file that aprilsched calibrate wrote."""
    json: bool = False
    """Print an object on stdout instead of sentences."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        AprilschedError: if the run folder or the model cannot be read, or if `below` is not a
            share.
    """
    command = parsed(DrainCommand, arguments, "aprilsched drain")
    if not 0 < command.below < 1:
        raise ConfigError(f"below is {command.below}; give a share above 0 and below 1.")
    record = read_record(command.run)
    model = H200_QWEN3_4B if command.model is None else load_model(command.model)
    plan = _plan(record, command.below, model)
    if command.json:
        sys.stdout.write(msgspec.json.encode(asdict(plan)).decode() + "\n")
    else:
        Console().print(_sentences(plan, command.below), soft_wrap=True, highlight=False)
    return 0


def _plan(record: RecordedRun, below: float, model: StepTimeModel) -> DrainPlan:
    so_far = np.array(
        [tokens for group in record.groups for tokens in group.so_far.values()], dtype=np.int64
    )
    known = np.array(
        [
            n
            for group in record.groups
            for place, n in enumerate(group.lengths)
            if place not in group.so_far
        ],
        dtype=np.int64,
    )
    law = drawn_law(known, so_far)
    engines = record.summary.engines
    prompts = float(np.mean([group.prompt_tokens for group in record.groups]))
    context = float(so_far.sum()) + prompts * len(so_far)
    delivered = record.summary.rollouts.delivered - record.summary.rollouts.evaluated
    return plan_drain(
        law,
        so_far,
        bias=below,
        delivered=delivered,
        per_batch=delivered / max(1, record.summary.batches),
        step_seconds=model.step_seconds(max(1.0, len(so_far) / engines), context / engines),
    )


def _sentences(plan: DrainPlan, below: float) -> str:
    if plan.further_batches:
        when = f"after {plan.further_batches} more batches it is below {below:.1%}"
    else:
        when = f"it is below {below:.1%} already"
    drain, ramp = plan.drained_epoch_seconds, plan.staggered_launch_seconds
    return (
        "The rollouts in flight cause a bias of the delivered lengths of "
        f"{signed_percent(plan.bias_now)}; {when}.\n"
        "To end the bias now, launch nothing until all rollouts in flight have finished; the fleet "
        f"is then idle for {drain:.0f} s in total.\n"
        "To begin a run without the bias, spread the launches over the time of the first mean "
        f"response; the fleet is then half empty for {2 * ramp:.0f} s, which costs {ramp:.0f} s."
    )
