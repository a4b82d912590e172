"""Makes the parts of a run from its settings: engines, prompts, publisher, planner, time bound.

Nothing is opened or launched here. All errors in the settings are raised here.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from aprilsched.config import SchedulerConfig
from aprilsched.coordinator.prompts import checked
from aprilsched.engines.base import Fleet
from aprilsched.engines.sglang.fleet import SGLangFleet
from aprilsched.engines.sim import SimFleet, SimPublisher
from aprilsched.planning import Planner
from aprilsched.runs.keys import key_from
from aprilsched.runs.prompts_file import read_prompts
from aprilsched.runs.settings import RunSettings
from aprilsched.telemetry.batch_figures import Bound
from aprilsched.timing.model import H200_QWEN3_4B, StepTimeModel
from aprilsched.timing.model_file import load_model
from aprilsched.types import Prompt
from aprilsched.weights.base import WeightPublisher
from aprilsched.weights.disk import DiskPublisher
from aprilsched.workload import LongTailWorkload

__all__ = ["Setup", "prepare", "run_on_clock", "servers"]


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
    planner: Planner
    """Chooses schedules for automatic over-provisioning."""
    run_id: str | None
    """Prefix of the request ids; None for a random one, which is unique on a shared server."""


def prepare(settings: RunSettings) -> Setup:
    """Make the parts that `settings` ask for.

    Raises:
        ConfigError: if a setting is wrong, or if a file that it names cannot be used.
    """
    settings.check()
    config = settings.scheduler
    launched = config.policies.refill.launched(config.group_size)
    workload = settings.workload.checked(seed=settings.seed, group_size=launched)
    built_in = settings.prompts is None
    return Setup(
        settings=settings,
        config=config,
        prompts=_prompts(settings, config, workload),
        fleet=_fleet(settings),
        publisher=_publisher(settings) if settings.updates_every else None,
        bound=_bound(settings),
        planner=_planner(settings),
        workload_mean=workload.mean_length() if built_in else None,
        clock="virtual" if settings.simulated else "wall",
        run_id="run" if settings.simulated else None,
    )


def run_on_clock(setup: Setup, program: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `program` to its end, on the clock that the setup's engines need.

    Raises:
        KeyboardInterrupt: after Ctrl-C, when the program has cleaned up.
    """
    import asyncio

    from aprilsched.engines.sim import run_virtual

    run = run_virtual if setup.clock == "virtual" else asyncio.run
    run(program())


def _prompts(
    settings: RunSettings, config: SchedulerConfig, workload: LongTailWorkload
) -> Iterable[Prompt]:
    if settings.prompts is None:
        return workload
    tokenizer = None if settings.tokenizer is None else Path(settings.tokenizer)
    prompts = read_prompts(Path(settings.prompts), tokenizer=tokenizer)
    return [checked(prompt, config.group_size, config.policies.refill) for prompt in prompts]


def _fleet(settings: RunSettings) -> Fleet:
    sim = settings.sim
    if settings.simulated:
        return SimFleet(
            sim.engines,
            max_running=sim.max_running,
            kv_tokens=sim.kv_tokens,
            stream_interval=sim.stream_interval,
            refit_seconds=sim.refit_seconds,
            timing=_model(settings) or H200_QWEN3_4B,
        )
    return servers(settings)


def servers(settings: RunSettings) -> SGLangFleet:
    """The SGLang servers of a run.

    Raises:
        ConfigError: if a URL or a key cannot be used.
    """
    return SGLangFleet(
        settings.engine,
        admin_key=key_from(settings.admin_key_env),
        api_key=key_from(settings.api_key_env),
    )


def _publisher(settings: RunSettings) -> WeightPublisher | None:
    if settings.simulated:
        return SimPublisher()
    return None if settings.weights is None else DiskPublisher(settings.weights)


def _model(settings: RunSettings) -> StepTimeModel | None:
    return None if settings.model is None else load_model(Path(settings.model))


def _planner(settings: RunSettings) -> Planner:
    """The planner. On the virtual clock it has the engines' own model; otherwise it begins with a
    default model, or the given one, and learns during the run."""
    model = _model(settings)
    if settings.simulated:
        return Planner(model or H200_QWEN3_4B, max_running=settings.sim.max_running, inline=True)
    return Planner(model or H200_QWEN3_4B)


def _bound(settings: RunSettings) -> Bound | None:
    model = _model(settings)
    if model is None and not settings.simulated:
        return None
    one = partial((model or H200_QWEN3_4B).bound_seconds, max_running=settings.sim.max_running)
    engines = settings.sim.engines if settings.simulated else len(settings.engine)
    return lambda prompts, lengths: one(prompts, lengths) / engines
