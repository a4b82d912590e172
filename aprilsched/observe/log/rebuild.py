"""Sums a run up from its event log, without its scheduler."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from aprilsched.errors import ConfigError
from aprilsched.kernel.shell.listener import Listener
from aprilsched.kernel.values.files import read_regular, read_text
from aprilsched.observe.figures.batch_figures import Bound
from aprilsched.observe.figures.figures import SUMMARY_VERSION, RunSummary
from aprilsched.observe.figures.run_state import RunState
from aprilsched.observe.figures.summary import Remainder, Summary
from aprilsched.observe.log.reading import Versioned, refuse_newer, replay
from aprilsched.observe.log.run_folder import CONFIG, EVENTS, SUMMARY
from aprilsched.planning.step_times.calibration import load_model
from aprilsched.planning.step_times.model import H200_QWEN3_4B, StepTimeModel
from aprilsched.simulation.workload import LongTailWorkload

NOT_ENDED = "The run was killed or has not ended; the figures are those of its event log so far."


def summary_of_run(folder: Path) -> RunSummary:
    """The figures in summary.json, or rebuilt from the event log if the run did not write them.

    Raises:
        OSError, ValueError, MsgspecError, RunFolderError: as for :func:`replay`.
    """
    return written_summary(folder) or rebuilt_summary(folder)


def written_summary(folder: Path) -> RunSummary | None:
    """The figures in summary.json; None if the run did not write them.

    Raises:
        OSError, MsgspecError: if they cannot be read.
        RunFolderError: if they are of a newer format.
    """
    try:
        written = read_regular(folder / SUMMARY)
    except FileNotFoundError:
        return None
    found = msgspec.json.decode(written, type=Versioned).schema
    refuse_newer(folder / SUMMARY, found, SUMMARY_VERSION)
    return msgspec.json.decode(written, type=RunSummary)


def rebuilt_summary(folder: Path) -> RunSummary:
    """Compute the run's own summary from its configuration and its event log.

    Raises:
        OSError, ValueError, MsgspecError, RunFolderError: as for :func:`replay`.
    """
    config = tomllib.loads(read_text(folder / CONFIG))
    rebuilding = Rebuilding(config)
    replay(folder / EVENTS, rebuilding.listeners)
    return rebuilding.result()


class Rebuilding:
    """Sums up a run with this configuration. Replay its log for `listeners`.

    Raises:
        ValueError: if the configuration is not one of a run.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._basis, self._state = basis_of(config), RunState()
        self._summary = self._basis.summary()
        self.listeners: tuple[Listener, ...] = (self._state, self._summary)

    def result(self) -> RunSummary:
        """The summary up to now."""
        return self._summary.result(
            remainder_of(self._state), clock=self._basis.clock, error=NOT_ENDED
        )


def remainder_of(state: RunState) -> Remainder:
    """The figures that the scheduler would give at the end."""
    return Remainder(
        in_flight=list(state.rollouts),
        counters=state.counters,
        ledger=state.ledger,
        open_groups=state.open_groups(),
    )


# --- basis ---------------------------------------------------------------------------------------

# Reads what is needed to sum a run up, besides its facts, from its config.toml.

_SIMULATED = ["sim"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Basis:
    """The arguments of the run's own Summary."""

    clock: Literal["virtual", "wall"]
    trainer_waits: bool
    bound: Bound | None
    workload_mean: float | None
    burn_in: int | None

    def summary(self) -> Summary:
        """A new Summary with these arguments."""
        return Summary(
            trainer_waits=self.trainer_waits,
            bound=self.bound,
            workload_mean=self.workload_mean,
            burn_in=self.burn_in,
        )


def basis_of(config: dict[str, Any]) -> Basis:
    """The basis of a run with this resolved configuration.

    Raises:
        ValueError: if the configuration is not one of a run.
    """
    try:
        return Basis(
            clock="virtual" if config["engine"] == _SIMULATED else "wall",
            trainer_waits=config["scheduler"]["pace"] != "asynchronous",
            bound=_bound(config),
            workload_mean=_workload_mean(config),
            burn_in=config.get("burn_in"),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"its configuration lacks something: {error}") from error


def _bound(config: dict[str, Any]) -> Bound | None:
    simulated = config["engine"] == _SIMULATED
    try:
        model = _model(config)
    except ConfigError:
        return None  # the file was the other machine's, or is not there any more
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
        return None  # the file of lengths was the other machine's, or is not there any more
    return workload.mean_length()
