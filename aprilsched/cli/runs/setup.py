"""Makes the parts of a run from its settings: engines, prompts, publisher, planner, time bound.

Nothing is opened or launched here. All errors in the settings are raised here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from aprilsched.cli.runs.keys import key_from
from aprilsched.cli.runs.prompts_file import read_prompts
from aprilsched.cli.runs.settings import RunSettings
from aprilsched.config import SchedulerConfig
from aprilsched.kernel.engines.addresses import ServerFleet, fleet_at
from aprilsched.kernel.engines.base import Fleet
from aprilsched.kernel.shell.prompts import checked
from aprilsched.kernel.weights.disk import DiskPublisher
from aprilsched.kernel.weights.publisher import WeightPublisher
from aprilsched.observe.figures.batch_figures import Bound
from aprilsched.planning import Planner
from aprilsched.planning.step_times.model import H200_QWEN3_4B, StepTimeModel
from aprilsched.planning.step_times.model_file import load_model
from aprilsched.simulation.engine import SimFleet, SimPublisher
from aprilsched.simulation.workload import LongTailWorkload
from aprilsched.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The parts of a run before its start."""

    settings: RunSettings
    config: SchedulerConfig
    prompts: Iterable[Prompt]
    fleet: Fleet
    publisher: WeightPublisher | None
    """Moves new weights; None if the run never updates them."""
    bound: Bound | None
    """Least time in which the engines can generate given lengths; None if unknown."""
    workload_mean: float | None
    """Mean length of the built-in workload; None for other prompts."""
    clock: Literal["virtual", "wall"]
    timing: StepTimeModel
    """Step times of the engines, from the settings or the default."""
    planner: Planner
    """Chooses schedules for automatic over-provisioning. On the virtual clock it knows the engines'
    true step times; otherwise it starts from them, and learns during the run."""
    run_id: str | None
    """Prefix of the request ids; None for a random one, which is unique on a shared server."""


def prepare(settings: RunSettings) -> Setup:
    """Create the parts of a run from `settings`.

    Raises:
        ConfigError: if a setting is wrong, or if a file that it names cannot be used.
    """
    settings.check()
    config = settings.scheduler
    never_stale = not settings.updates_every and not config.follow_weights
    if never_stale and config.policies.staleness.rule == "mask":
        # The bound would only limit the batches of a version, here of the whole run.
        config = replace(config, max_staleness=None)
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
            Planner(timing, max_running=sim.max_running, dp_ranks=sim.dp_ranks, inline=True)
            if simulated
            else Planner(timing, dp_ranks=sim.dp_ranks, reserve_clip=sim.reserve_clip)
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
    return SimFleet(sim.engines, timing=timing, refit_seconds=sim.refit_seconds, **sim.of_engine)


def servers(settings: RunSettings) -> ServerFleet:
    """Return the servers of a run.

    Raises:
        ConfigError: if a URL or a key cannot be used, or if SGLang and vLLM servers are mixed.
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
    """Return the least time in which all engines of a run can generate given lengths."""
    sim, most = settings.sim, settings.sim.max_running
    engines = sim.dp_ranks * (sim.engines if settings.simulated else len(settings.engine))
    return partial(timing.bound_seconds, max_running=most, engines=engines)
