"""Replays a recorded run under other policies in virtual time, for ``aprilsched replay``.

The prompts, the costs and the number of engines are those of the record.

Invariant: every policy gets the groups of the record in the order in which the run launched them,
and ends when it needs a group that the record does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from aprilsched.analysis.lengths_of_run import RecordedGroup, RecordedRun
from aprilsched.errors import PromptsExhausted
from aprilsched.runs.policies import Variant
from aprilsched.runs.settings import RunSettings, SimSettings
from aprilsched.runs.setup import Setup, prepare
from aprilsched.runs.showing import Screen
from aprilsched.runs.simulated import SimulatedRun
from aprilsched.simulation import NEVER, Costs
from aprilsched.telemetry.batch_figures import Bound
from aprilsched.telemetry.run_folder import RunFolder
from aprilsched.timing.model import StepTimeModel
from aprilsched.types import Prompt, SamplingParams


class RecordedPrompts:
    """The groups of a record as prompts; iterating again begins at the first one.

    If the run did not launch all of its prompts, its prompts continued after the record. Then the
    end of the record raises PromptsExhausted, because the next batch cannot be completed as it
    would have been.
    """

    def __init__(self, record: RecordedRun) -> None:
        self._groups = record.groups
        self._whole = record.whole

    def __iter__(self) -> Iterator[Prompt]:
        for index, group in enumerate(self._groups):
            yield _prompt(index, group)
        if not self._whole:
            raise PromptsExhausted("The record has no more groups; replay fewer batches.")


def replay_settings(
    run: RunSettings, record: RecordedRun, sim: SimSettings, *, batches: int, burn_in: int
) -> RunSettings:
    """The run's settings with modelled engines and with the latencies of the record."""
    costs = record.costs
    return replace(
        run,
        engine=("sim",),
        prompts=None,
        tokenizer=None,
        weights=None,
        batches=batches,
        burn_in=burn_in,
        update_every=run.updates_every if record.updates else 0,
        train_seconds=costs.train_seconds,
        sim=replace(
            sim,
            stream_interval=NEVER,
            refit_seconds=costs.refit_seconds,
            reward_seconds=costs.reward_seconds,
        ),
    )


def bound_of(model: StepTimeModel, sim: SimSettings) -> Bound:
    """T_bound of the whole fleet by `model`."""
    one = partial(model.bound_seconds, max_running=sim.max_running)
    return lambda prompts, lengths: one(prompts, lengths) / sim.engines


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A record on which policies are tried."""

    record: RecordedRun
    settings: RunSettings
    model: StepTimeModel

    def setup(self, variant: Variant) -> Setup:
        """The setup of the replay under one policy.

        Raises:
            ConfigError: if the policy's settings contradict each other.
        """
        settings = replace(self.settings, scheduler=variant.scheduler)
        return replace(
            prepare(settings),
            prompts=RecordedPrompts(self.record),
            bound=bound_of(self.model, settings.sim),
            workload_mean=None,
        )

    def run(self, setup: Setup, folder: RunFolder | None, screen: Screen | None) -> SimulatedRun:
        """A simulated run of `setup` that is ready to be executed."""
        costs = self.record.costs
        return SimulatedRun(
            setup,
            folder,
            screen,
            timing=self.model,
            costs=Costs(
                pause_seconds=costs.pause_seconds,
                refit_seconds=costs.refit_seconds,
                train_seconds=costs.train_seconds,
                reward_seconds=costs.reward_seconds,
            ),
        )


def _prompt(index: int, group: RecordedGroup) -> Prompt:
    return Prompt(
        input_ids=np.zeros(max(1, group.prompt_tokens), dtype=np.int32),
        sampling=tuple(
            SamplingParams(max_new_tokens=length, ignore_eos=True) for length in group.lengths
        ),
        key=index,
        group_size=len(group.lengths),
    )
