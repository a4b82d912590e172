"""Makes the parts of a run from its settings: engines, prompts, publisher, planner, time bound.

Nothing is opened or launched here. All errors in the settings are raised here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from aprilsched.cli.runs.prompts_file import read_prompts
from aprilsched.cli.runs.settings import VOCABULARY, RunSettings, WorkloadSettings, key_from
from aprilsched.config import SchedulerConfig
from aprilsched.errors import ConfigError
from aprilsched.kernel.engines.addresses import ServerFleet, fleet_at
from aprilsched.kernel.engines.base import Fleet
from aprilsched.kernel.engines.server import HttpEngine
from aprilsched.kernel.shell.prompts import checked
from aprilsched.kernel.weights.disk import DiskPublisher
from aprilsched.kernel.weights.publisher import WeightPublisher
from aprilsched.observe.figures.batch_figures import Bound
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.figures.summary import Summary
from aprilsched.planning import Planner
from aprilsched.planning.step_times.calibration import load_model
from aprilsched.planning.step_times.model import H200_QWEN3_4B, StepTimeModel
from aprilsched.simulation.engine import SimFleet, SimPublisher
from aprilsched.simulation.workload import LongTailWorkload
from aprilsched.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The parts of a run that has not begun."""

    settings: RunSettings
    config: SchedulerConfig
    prompts: Iterable[Prompt]
    fleet: Fleet
    publisher: WeightPublisher | None
    """Moves new weights; None if the run never updates them."""
    bound: Bound | None
    """Least time in which the engines can generate given lengths; None if it is not known."""
    workload_mean: float | None
    """Mean length of the built-in workload; None for other prompts."""
    clock: Literal["virtual", "wall"]
    timing: StepTimeModel
    """Step times of the engines: those that the settings name, or else the default."""
    planner: Planner
    """Chooses schedules for automatic over-provisioning. On the virtual clock it has the engines'
    own step times; otherwise it begins with them, and learns during the run."""
    run_id: str | None
    """Prefix of the request ids; None for a random one, which is unique on a shared server."""


def prepare(settings: RunSettings) -> Setup:
    """Make the parts that `settings` ask for.

    Raises:
        ConfigError: if a setting is wrong, or if a file that it names cannot be used.
    """
    settings.check()
    config = settings.scheduler
    workload = settings.workload.checked(seed=settings.seed, group_size=config.group_size)
    timing = H200_QWEN3_4B if settings.model is None else load_model(Path(settings.model))
    simulated, sim = settings.simulated, settings.sim
    known = simulated or settings.model is not None
    return Setup(
        settings=settings,
        config=config,
        prompts=_prompts(settings, config, workload),
        fleet=_fleet(settings, timing),
        publisher=_publisher(settings) if settings.updates_every else None,
        bound=bound_of(settings, timing) if known else None,
        timing=timing,
        planner=(
            Planner(timing, max_running=sim.max_running, inline=True)
            if simulated
            else Planner(timing)
        ),
        workload_mean=workload.mean_length() if settings.prompts is None else None,
        clock="virtual" if simulated else "wall",
        run_id="run" if simulated else None,
    )


def run_on_clock(setup: Setup, program: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `program` to its end, on the clock that the setup's engines need.

    Raises:
        KeyboardInterrupt: after Ctrl-C, when the program has cleaned up.
    """
    from aprilsched.simulation.engine import run_virtual

    run = run_virtual if setup.clock == "virtual" else asyncio.run
    run(program())


def _prompts(
    settings: RunSettings, config: SchedulerConfig, workload: LongTailWorkload
) -> Iterable[Prompt]:
    if settings.prompts is None:
        return workload
    tokenizer = None if settings.tokenizer is None else Path(settings.tokenizer)
    prompts = read_prompts(
        Path(settings.prompts),
        tokenizer=tokenizer,
        input_key=settings.input_key,
        apply_chat_template=settings.apply_chat_template,
    )
    return [checked(prompt, config.group_size) for prompt in prompts]


def _fleet(settings: RunSettings, timing: StepTimeModel) -> Fleet:
    sim = settings.sim
    if not settings.simulated:
        return servers(settings)
    return SimFleet(
        sim.engines,
        max_running=sim.max_running,
        kv_tokens=sim.kv_tokens,
        stream_interval=sim.stream_interval,
        refit_seconds=sim.refit_seconds,
        prefix_cache=sim.prefix_cache,
        timing=timing,
    )


def servers(settings: RunSettings) -> ServerFleet:
    """The servers of a run.

    Raises:
        ConfigError: if a URL or a key cannot be used, or the servers are of two programs.
    """
    return fleet_at(
        settings.engine,
        admin_key=key_from(settings.admin_key_env, "admin_key_env"),
        api_key=key_from(settings.api_key_env, "api_key_env"),
    )


def _publisher(settings: RunSettings) -> WeightPublisher | None:
    if settings.simulated:
        return SimPublisher()
    return None if settings.weights is None else DiskPublisher(settings.weights)


def bound_of(settings: RunSettings, timing: StepTimeModel) -> Bound:
    """The least time in which all engines of a run can generate given lengths."""
    engines = settings.sim.engines if settings.simulated else len(settings.engine)
    most = settings.sim.max_running
    return partial(timing.bound_seconds, max_running=most, engines=engines)


# --- workload limits -----------------------------------------------------------------------------

# Fits the built-in workload to the servers of a run before it is made.
#
# A server would refuse each request that has a token id beyond the model's vocabulary or a
# response beyond its context, and group after group would fail. So defaults are chosen to fit the
# servers, and a setting that does not fit is refused at once.


def fitted(settings: RunSettings, fleet: Callable[[], ServerFleet]) -> RunSettings:
    """`settings` with the vocabulary and the longest response of the built-in workload.

    Args:
        settings: the settings as given. For a file of prompts or for the embedded engine, only the
            defaults are filled in.
        fleet: makes the fleet of the servers, which is opened and closed here.

    Raises:
        ConfigError: if the given workload does not fit the servers.
        EngineError: if a call to a server fails.
    """
    workload = settings.workload
    if settings.simulated or settings.prompts is not None:
        return replace(settings, workload=_filled(workload, VOCABULARY, workload.longest))
    return replace(settings, workload=asyncio.run(_fitted(workload, fleet())))


async def _fitted(workload: WorkloadSettings, fleet: ServerFleet) -> WorkloadSettings:
    await fleet.open()
    try:
        if any(engine.facts.vocab_size is None for engine in fleet.engines):
            # A paused server does not tell its vocabulary. The run would continue it anyway.
            for engine in fleet.engines:
                await engine.resume()
            await fleet.close()
            await fleet.open()
        for engine in fleet.engines:
            _check(workload, engine)
        known = [e.facts.vocab_size for e in fleet.engines if e.facts.vocab_size is not None]
        room = [_room(workload, e) for e in fleet.engines if e.facts.context_tokens is not None]
        return _filled(workload, min(known, default=VOCABULARY), min([workload.longest, *room]))
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
    """Number of tokens of the longest response that fits the engine's context."""
    return (engine.facts.context_tokens or 0) - workload.prompt_tokens


def _filled(workload: WorkloadSettings, vocab_size: int, cap: int) -> WorkloadSettings:
    return replace(
        workload,
        vocab_size=vocab_size if workload.vocab_size is None else workload.vocab_size,
        cap=cap if workload.cap is None else workload.cap,
    )


def summary_of(setup: Setup) -> Summary:
    """The listener that sums up the run which `setup` describes."""
    return Summary(
        trainer_waits=setup.config.trainer_waits,
        bound=setup.bound,
        workload_mean=setup.workload_mean,
        burn_in=setup.settings.burn_in,
    )


def live_figures_of(setup: Setup, summary: Summary) -> LiveFigures:
    """The figures of a run, shared by all that show it. They read `summary`, so the summary must
    be the earlier listener."""
    return LiveFigures(
        meter=summary.meter,
        batch_groups=setup.config.batch_groups,
        clock=None if setup.clock == "virtual" else time.monotonic,
    )
