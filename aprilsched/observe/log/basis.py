"""Reads from config.toml what a summary of a run needs in addition to its facts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from aprilsched.errors import ConfigError
from aprilsched.observe.figures.batch_figures import Bound
from aprilsched.observe.figures.summary import Summary
from aprilsched.planning.step_times.model import H200_QWEN3_4B, StepTimeModel
from aprilsched.planning.step_times.model_file import load_model
from aprilsched.simulation.workload import LongTailWorkload

Clock: TypeAlias = Literal["virtual", "wall"]
_SIMULATED = ["sim"]


def basis_of(config: dict[str, Any]) -> tuple[Clock, Summary]:
    """Return the clock of a run with this resolved configuration, which is empty if unknown, and a
    new Summary with the arguments of the run's own.

    Raises:
        ValueError: if the configuration is not one of a run.
    """
    if not config:
        return "wall", Summary()
    try:
        clock: Clock = "virtual" if config["engine"] == _SIMULATED else "wall"
        return clock, Summary(
            bound=_bound(config),
            workload_mean=_workload_mean(config),
            burn_in=config.get("burn_in"),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"its configuration lacks something: {error}") from error


def batch_units_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of groups, or of single samples, in a batch of a run with this
    configuration; None if it has none."""
    scheduler: Mapping[str, Any] = config.get("scheduler", {})
    groups: int | None = scheduler.get("batch_groups")
    if groups is None or scheduler.get("delivery") != "samples":
        return groups
    stop = scheduler.get("stop", "groups")
    own: int | None = None
    if not isinstance(stop, str) and stop["rule"] == "samples":
        own = stop.get("amount")
    return own or groups * scheduler["group_size"]


def _bound(config: dict[str, Any]) -> Bound | None:
    simulated = config["engine"] == _SIMULATED
    try:
        model = _model(config)
    except ConfigError:
        return None  # the file was on another machine, or no longer exists
    if model is None and not simulated:
        return None
    engines: int = config["sim"]["engines"] if simulated else len(config["engine"])
    one = partial((model or H200_QWEN3_4B).bound_seconds, max_running=config["sim"]["max_running"])
    return lambda prompts, lengths: one(prompts, lengths) / engines


def _model(config: dict[str, Any]) -> StepTimeModel | None:
    path = config.get("model")
    return None if path is None else load_model(Path(path))


def _workload_mean(config: dict[str, Any]) -> float | None:
    if config.get("prompts") is not None:
        return None
    group_size, given = config["scheduler"]["group_size"], config["workload"]
    try:
        workload = LongTailWorkload.of(given, seed=config["seed"], group_size=group_size)
    except ConfigError:
        return None  # the file of lengths was on another machine, or no longer exists
    return workload.mean_length()
