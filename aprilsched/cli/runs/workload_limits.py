"""Fits the built-in workload to the servers of a run before it is made.

A server refuses every request with a token id beyond the model's vocabulary or a response beyond
its context, so group after group would fail. Therefore defaults are chosen to fit the servers, and
a setting that does not fit is refused at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aprilsched.cli.runs.settings import VOCABULARY, RunSettings, WorkloadSettings
from aprilsched.cli.runs.setup import Setup
from aprilsched.errors import ConfigError
from aprilsched.kernel.engines.addresses import ServerFleet
from aprilsched.kernel.engines.server import HttpEngine
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.figures.summary import Summary
from aprilsched.simulation.workload import Limits


def fitted(settings: RunSettings, fleet: Callable[[], ServerFleet]) -> RunSettings:
    """Return `settings` with the vocabulary and longest response of the built-in workload.

    Args:
        settings: the settings as given. For a file of prompts or for the embedded engine, only the
            defaults are filled in.
        fleet: creates the fleet of the servers, which this function opens and closes.

    Raises:
        ConfigError: if the given workload does not fit the servers.
        EngineError: if a call to a server fails.
    """
    workload = settings.workload
    if settings.simulated or settings.prompts is not None:
        return replace(settings, workload=_filled(workload, VOCABULARY, workload.longest, "cap"))
    return replace(settings, workload=asyncio.run(_fitted(workload, fleet())))


async def _fitted(workload: WorkloadSettings, fleet: ServerFleet) -> WorkloadSettings:
    await fleet.open()
    try:
        if any(engine.facts.vocab_size is None for engine in fleet.engines):
            # A paused server does not report its vocabulary. The run would continue it anyway.
            for engine in fleet.engines:
                await engine.resume()
            await fleet.close()
            await fleet.open()
        for engine in fleet.engines:
            _check(workload, engine)
        known = [e.facts.vocab_size for e in fleet.engines if e.facts.vocab_size is not None]
        room = [_room(workload, e) for e in fleet.engines if e.facts.context_tokens is not None]
        longest = min([workload.longest, *room])
        return _filled(workload, min(known, default=VOCABULARY), longest, "exact")
    finally:
        await fleet.close()


def _check(workload: WorkloadSettings, engine: HttpEngine[Any]) -> None:
    known, context = engine.facts.vocab_size, engine.facts.context_tokens
    if known is not None and (workload.vocab_size or 0) > known:
        raise ConfigError(
            f"vocab_size is {workload.vocab_size}, and the model of {engine.name} knows {known} "
            f"token ids; give {known} or less, or leave it out."
        )
    if context is None:
        return
    room = _room(workload, engine)
    if room < 1:
        raise ConfigError(
            f"prompt_tokens is {workload.prompt_tokens}, and {engine.name} has room for {context} "
            "tokens of a prompt and its response together; give fewer."
        )
    if (workload.cap or 0) > room:
        raise ConfigError(
            f"cap is {workload.cap}, and {engine.name} has room for {room} tokens behind a prompt "
            f"of {workload.prompt_tokens}; give {room} or less, or leave it out."
        )


def _room(workload: WorkloadSettings, engine: HttpEngine[Any]) -> int:
    """Return the number of tokens of the longest response that fits the engine's context."""
    return (engine.facts.context_tokens or 0) - workload.prompt_tokens


def _filled(
    workload: WorkloadSettings, vocab_size: int, cap: int, limits: Limits
) -> WorkloadSettings:
    return replace(
        workload,
        vocab_size=vocab_size if workload.vocab_size is None else workload.vocab_size,
        cap=cap if workload.cap is None else workload.cap,
        limits=workload.limits or limits,
    )


def summary_of(setup: Setup) -> Summary:
    """Return the listener that summarizes the run described by `setup`."""
    return Summary(
        bound=setup.bound, workload_mean=setup.workload_mean, burn_in=setup.settings.burn_in
    )


def live_figures_of(setup: Setup, summary: Summary) -> LiveFigures:
    """Return the figures of a run, shared by all its displays. They read `summary`, which must be
    an earlier listener."""
    return LiveFigures(
        meter=summary.meter,
        batch_units=setup.config.batch_units,
        clock=None if setup.clock == "virtual" else time.monotonic,
    )
