"""Prepares the replay of a recorded run under another policy, for ``aprilsched replay``.

The prompts, the costs and the number of engines are those of the record.

Invariant: every policy gets the groups of the record in the order in which the run launched them,
and ends when it needs a group that the record does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from aprilsched.analysis.lengths_of_run import RecordedGroup, RecordedRun
from aprilsched.config import SchedulerConfig
from aprilsched.errors import PromptsExhausted
from aprilsched.runs.settings import RunSettings
from aprilsched.runs.setup import Setup, prepare
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


def _prompt(index: int, group: RecordedGroup) -> Prompt:
    return Prompt(
        input_ids=np.zeros(max(1, group.prompt_tokens), dtype=np.int32),
        sampling=tuple(
            SamplingParams(max_new_tokens=length, ignore_eos=True) for length in group.lengths
        ),
        key=index,
        group_size=len(group.lengths),
    )


def prepare_replay(settings: RunSettings, record: RecordedRun, scheduler: SchedulerConfig) -> Setup:
    """The parts of a replay of `record` with the given settings of the scheduler.

    Raises:
        ConfigError: if the settings contradict each other.
    """
    return replace(
        prepare(replace(settings, scheduler=scheduler)),
        prompts=RecordedPrompts(record),
        workload_mean=None,
    )
