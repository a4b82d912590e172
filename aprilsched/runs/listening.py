"""The listeners of a run that its setup decides, and what samples engines and GPUs beside it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext

from aprilsched.runs.setup import Setup
from aprilsched.telemetry.event_log import EventLog
from aprilsched.telemetry.run_folder import RunFolder
from aprilsched.telemetry.sampling import Sampler
from aprilsched.telemetry.summary import Summary

__all__ = ["sampler_of", "summary_of"]


def summary_of(setup: Setup) -> Summary:
    """What sums the run up."""
    return Summary(
        trainer_waits=setup.config.pace == "synchronous",
        bound=setup.bound,
        workload_mean=setup.workload_mean,
        burn_in=setup.settings.burn_in,
    )


def sampler_of(
    setup: Setup, folder: RunFolder, log: EventLog
) -> AbstractAsyncContextManager[object]:
    """What samples engines and GPUs, on the clock of `log`; nothing, if the settings say so.

    Raises:
        ConfigError: if the GPUs are wanted and cannot be sampled.
    """
    settings, virtual = setup.settings, setup.clock == "virtual"
    if not settings.sample:
        return nullcontext()
    # A GPU's seconds are none of a virtual clock's.
    wanted = {"auto": None, "on": True, "off": False}[settings.gpu]
    return Sampler(
        folder.samples,
        setup.fleet,
        interval=settings.sample,
        gpu=False if virtual else wanted,
        clock=log.seconds,
        patient=virtual,
    )
