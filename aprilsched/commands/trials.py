"""What ``aprilsched simulate`` finds, as a call: no folders, no progress, no output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aprilsched.calibration.model_file import load_model
from aprilsched.commands.comparison import PolicyRow, compare
from aprilsched.commands.policies import chosen
from aprilsched.commands.setup import prepare
from aprilsched.commands.simulate import SimulateCommand
from aprilsched.commands.simulated import SimulatedRun
from aprilsched.telemetry.figures import RunSummary
from aprilsched.timing import H200_QWEN3_4B

__all__ = ["Trial", "simulated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A policy's row of comparison.json, and its summary.json."""

    row: PolicyRow
    summary: RunSummary


def simulated(command: SimulateCommand) -> dict[str, Trial]:
    """Each policy that `command` names, by name. What it says of folders and output is ignored.

    Raises:
        AprilschedError: if a setting is refused.
    """
    timing = H200_QWEN3_4B if command.model is None else load_model(Path(command.model))
    summaries: dict[str, RunSummary] = {}
    runs: dict[str, SimulatedRun] = {}
    for policy in chosen(command.policy):
        run = SimulatedRun(prepare(command.settings(policy)), None, None, timing=timing)
        summaries[policy.name] = run.execute()
        runs[policy.name] = run
    rows = compare(
        summaries,
        {name: run.generated_tokens_per_s for name, run in runs.items()},
        {name: run.schedule for name, run in runs.items()},
    ).policies
    return {row.policy: Trial(row=row, summary=summaries[row.policy]) for row in rows}
