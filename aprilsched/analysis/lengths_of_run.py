"""Reads what a run launched from its event log: every group, its prompt and its response lengths.

Invariants:

- Groups are in the order of their launches, and members in that of their ids. Evaluations are left
  out.
- The length of a response that ended is the recorded one, whether it was delivered or not. Other
  lengths are imputed: they are drawn from the law of all lengths (Kaplan and Meier, unfinished ones
  censored) given the tokens so far, so they are longer than those. The draws are a function of the
  log and the seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aprilsched.analysis.costs_of_run import CostsOfRun, RecordedCosts
from aprilsched.analysis.launches import Launches, Member, RecordedBatch
from aprilsched.analysis.rebuild import summary_of_run
from aprilsched.analysis.run import readable
from aprilsched.core.lengths.laws import kaplan_meier
from aprilsched.core.lengths.observed import hashed_uniforms
from aprilsched.errors import RunFolderError
from aprilsched.telemetry.event_log.reading import replay
from aprilsched.telemetry.figures import RunSummary
from aprilsched.telemetry.run_folder import EVENTS

__all__ = ["RecordedGroup", "RecordedRun", "read_record"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedGroup:
    """The lengths of a prompt and of its responses, in tokens.

    Attributes:
        so_far: the known tokens of the members whose length is imputed, by their position.
    """

    prompt_tokens: int
    lengths: tuple[int, ...]
    so_far: Mapping[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """What a run had to do according to its folder, whatever its schedule was."""

    summary: RunSummary
    groups: tuple[RecordedGroup, ...]
    batches: tuple[RecordedBatch, ...]
    costs: RecordedCosts
    updates: int
    """Number of updates that engines have taken."""
    kv_tokens: int | None
    """Number of tokens of the smallest KV pool; None if an engine does not say it."""
    whole: bool
    """Whether the source of prompts ended and all its prompts were launched."""

    @property
    def imputed(self) -> int:
        """Number of responses whose length is imputed."""
        return sum(len(group.so_far) for group in self.groups)

    @property
    def known(self) -> int:
        """Number of responses whose length is recorded."""
        return sum(len(group.lengths) for group in self.groups) - self.imputed


def read_record(folder: Path, *, seed: int = 0) -> RecordedRun:
    """Read the run in `folder` with groups of `group_size`; `seed` is the seed of the imputed
    lengths.

    Raises:
        RunFolderError: if a file is missing, incomplete or cannot be understood, if the run
            delivered nothing, or if it has episodes.
    """
    launches, costs = Launches(), CostsOfRun()
    with readable(folder):
        summary = summary_of_run(folder)
        replay(folder / EVENTS, [launches, costs])
        _check(folder, summary, launches)
        groups = _groups(launches.by_group(), seed)
    return RecordedRun(
        summary=summary,
        groups=groups,
        batches=tuple(launches.batches),
        costs=costs.costs(),
        updates=launches.updates,
        kv_tokens=launches.kv_tokens,
        whole=launches.ended and launches.fetched == len(groups),
    )


def _check(folder: Path, summary: RunSummary, launches: Launches) -> None:
    found = len(launches.batches)
    whole = found == summary.batches == len(summary.per_batch)
    if summary.event_log_error is not None or not whole:
        raise RunFolderError(
            f"{folder} has {found} of {summary.batches} batches in its event log; name a run "
            "whose log is complete."
        )
    if not found:
        raise RunFolderError(f"{folder} has no delivered batch; name a longer run.")
    if launches.episodes:
        raise RunFolderError(
            f"{folder} was driven by episodes, whose tools' time is not in it; name a run of "
            "single turns."
        )


def _groups(members: Sequence[Sequence[Member]], seed: int) -> tuple[RecordedGroup, ...]:
    drawn = iter(_lengths([member for group in members for member in group], seed).tolist())
    return tuple(
        RecordedGroup(
            prompt_tokens=group[0].prompt,
            lengths=tuple(islice(drawn, len(group))),
            so_far={i: m.tokens for i, m in enumerate(group) if not m.finished},
        )
        for group in members
    )


def _lengths(members: Sequence[Member], seed: int) -> NDArray[np.int64]:
    """The lengths, int64 [n]: recorded ones, and draws for unfinished responses."""
    finished = np.array([member.finished for member in members], dtype=np.bool_)
    tokens = np.array([member.tokens for member in members], dtype=np.int64)
    seen = np.where(finished, np.maximum(tokens, 1), tokens)
    law = kaplan_meier(seen, ~finished)
    drawn = law.residual_quantile(hashed_uniforms(seen.shape, seed=seed), seen)
    return np.where(finished, seen, drawn)
