"""From settings to the parts of a run: engines, prompts, weights, and what is known of them.

Nothing is opened here and nothing is launched; whatever is wrong with the settings shows here.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from aprilsched.commands.keys import key_from
from aprilsched.commands.prompts_file import read_prompts
from aprilsched.commands.settings import RunSettings
from aprilsched.config import SchedulerConfig
from aprilsched.coordinator.prompts import checked
from aprilsched.engines.base import Fleet
from aprilsched.engines.fleet import SGLangFleet
from aprilsched.engines.sim import H200_QWEN3_4B, SimFleet, SimPublisher
from aprilsched.telemetry.batch_figures import Bound
from aprilsched.types import Prompt
from aprilsched.weights.base import WeightPublisher
from aprilsched.weights.disk import DiskPublisher
from aprilsched.workload import LongTailWorkload

__all__ = ["Setup", "prepare", "run_on_clock"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The parts of a run that has not begun."""

    settings: RunSettings
    config: SchedulerConfig
    prompts: Iterable[Prompt]
    fleet: Fleet
    publisher: WeightPublisher | None
    """None: no new versions."""
    bound: Bound | None
    workload_mean: float | None
    clock: Literal["virtual", "wall"]
    run_id: str | None
    """Prefix of the request ids; None for a random one, which a shared server needs."""


def prepare(settings: RunSettings) -> Setup:
    """The parts that `settings` ask for.

    Raises:
        ConfigError: if they cannot be had.
    """
    settings.check()
    config = settings.scheduler.checked()
    workload = settings.workload.checked(seed=settings.seed, group_size=config.group_size)
    built_in = settings.prompts is None
    return Setup(
        settings=settings,
        config=config,
        prompts=_prompts(settings, config, workload),
        fleet=_fleet(settings),
        publisher=_publisher(settings) if settings.update_every else None,
        bound=_bound(settings) if settings.simulated else None,
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
    return [checked(prompt, config.group_size) for prompt in prompts]


def _fleet(settings: RunSettings) -> Fleet:
    sim = settings.sim
    if settings.simulated:
        return SimFleet(
            sim.engines,
            max_running=sim.max_running,
            kv_tokens=sim.kv_tokens,
            stream_interval=sim.stream_interval,
            refit_seconds=sim.refit_seconds,
        )
    return SGLangFleet(
        settings.engine,
        admin_key=key_from(settings.admin_key_env),
        api_key=key_from(settings.api_key_env),
    )


def _publisher(settings: RunSettings) -> WeightPublisher | None:
    if settings.simulated:
        return SimPublisher()
    return None if settings.weights is None else DiskPublisher(settings.weights)


def _bound(settings: RunSettings) -> Bound:
    sim = settings.sim
    one = partial(H200_QWEN3_4B.bound_seconds, max_running=sim.max_running)
    return lambda prompts, lengths: one(prompts, lengths) / sim.engines
