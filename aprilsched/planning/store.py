"""The store of open groups in a trial of rounds: the same choice as the scheduler's own."""

from __future__ import annotations

import numpy as np

from aprilsched.core.policies.refill import Refill
from aprilsched.core.policies.rounds import LogLaw, Rounds, rest_of_groups, window
from aprilsched.planning.group import TrialGroup
from aprilsched.planning.setting import Setting

__all__ = ["Store"]


class Store:
    """Groups that are open, in the order in which they were opened."""

    def __init__(self, refill: Refill, setting: Setting) -> None:
        if not isinstance(refill, Rounds):
            raise TypeError(f"{refill} parks nothing")
        self.groups: list[TrialGroup] = []
        self._refill = refill
        logs = np.log(setting.lengths)
        self._law = LogLaw.estimated(
            mean=float(logs.mean()),
            deviation=float(logs.std()),
            shared=setting.shared,
            cap=float(setting.lengths.max()),
        )

    def choose(self, count: int, batch: int) -> list[tuple[TrialGroup, int]]:
        """The members that run in this batch: those of chosen groups, and probes of others."""
        groups, refill = self.groups, self._refill
        tokens = np.array([group.have for group in groups], dtype=np.int64)
        finished = np.array([group.finished for group in groups], dtype=np.bool_)
        age = np.array([batch - group.opened for group in groups], dtype=np.int64)
        rest = rest_of_groups(tokens, finished, self._law)
        chosen = set(window(rest, age, max(1, count)).tolist())
        runs: list[tuple[TrialGroup, int]] = []
        for place, group in enumerate(groups):
            first = group.first_run
            if place in chosen or (first is not None and batch - first >= refill.oldest):
                members = [m for m, done in enumerate(group.finished) if not done]
            else:
                probes = refill.probed(len(group.lengths))
                members = list(range(probes)) if first is None else []
            if members and first is None:
                group.first_run = batch
            runs += [(group, member) for member in members]
        return runs
