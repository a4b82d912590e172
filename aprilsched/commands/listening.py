"""The listeners of a run that its setup decides."""

from __future__ import annotations

from rich.console import Console

from aprilsched.commands.setup import Setup
from aprilsched.telemetry.progress import Progress
from aprilsched.telemetry.summary import Summary

__all__ = ["progress_of", "summary_of"]


def summary_of(setup: Setup) -> Summary:
    """What sums the run up."""
    return Summary(
        trainer_waits=setup.config.pace == "synchronous",
        bound=setup.bound,
        workload_mean=setup.workload_mean,
        burn_in=setup.settings.burn_in,
    )


def progress_of(setup: Setup, console: Console, *, title: str) -> Progress:
    """What shows it while it goes on."""
    return Progress(
        console,
        title=title,
        batches=setup.settings.batches,
        batch_groups=setup.config.batch_groups,
        group_size=setup.config.group_size,
    )
