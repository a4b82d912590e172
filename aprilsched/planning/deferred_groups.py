"""The open groups of a trial whose schedule defers groups, and the choice of what runs."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from aprilsched.kernel.core.lengths.log_lengths import Levels, LogLengths, observed_logs
from aprilsched.kernel.core.lengths.observed import padded
from aprilsched.kernel.core.policies.refill import OpenGroups, Refill
from aprilsched.planning.setting import Setting
from aprilsched.planning.trial_groups import TrialGroup


class DeferredGroups:
    """The open groups of a schedule that defers groups, in the order of their opening."""

    def __init__(self, refill: Refill, setting: Setting) -> None:
        self.groups: list[TrialGroup] = []
        self._refill = refill
        self._remembers = setting.restarts or setting.remembered > 0
        logs = np.log(setting.lengths[setting.lengths > 0])
        self._dist = LogLengths.estimated(
            mean=float(logs.mean()),
            deviation=float(logs.std()),
            shared=setting.shared,
            cap=float(setting.lengths.max()),
        )

    def restart(self, group: TrialGroup) -> None:
        """Discard a group's tokens, and remember what they reveal of its lengths."""
        dist = self._dist
        tokens = np.array(group.have, dtype=np.int64)
        known = tokens > 0
        count = int(known.sum())
        seen = observed_logs(tokens[known], np.array(group.finished)[known], dist).mean()
        weight = dist.shared * count / (dist.shared * count + 1 - dist.shared)
        variance = dist.shared * dist.deviation**2 * (1 - weight)
        group.level = (dist.mean + weight * (float(seen) - dist.mean), variance)
        group.restart(group.later)

    def put_aside(self, batch: int) -> int:
        """Return the number of open groups that ran in a batch before this one."""
        return sum(g.first_run is not None and g.first_run < batch for g in self.groups)

    def choose(
        self,
        count: int,
        lacking: int,
        batch: int,
        *,
        busy: Collection[int] = (),
        tail: bool = False,
    ) -> list[tuple[TrialGroup, int]]:
        """Choose the members that run in this batch, which still takes `lacking` groups.

        `count` is the number of groups by the over-provision ratio. In the `tail`, the groups whose
        identities are in `busy` keep running.
        """
        groups = self.groups
        since = [-1 if g.first_run is None else batch - g.first_run for g in groups]
        view = OpenGroups(
            tokens=padded([group.have for group in groups], 0, np.int64),
            finished=padded([group.finished for group in groups], True, np.bool_),
            sizes=np.array([len(group.lengths) for group in groups], dtype=np.int64),
            ages=np.array([batch - group.opened for group in groups], dtype=np.int64),
            since_first_run=np.array(since, dtype=np.int64),
            running=np.array([id(group) in busy for group in groups], dtype=np.bool_),
            wanted=count,
            lacking=lacking,
            tail=tail,
            log_lengths=self._dist,
            levels=self._levels(),
        )
        runs: list[tuple[TrialGroup, int]] = []
        for group, started in zip(groups, self._refill.members(view).tolist(), strict=True):
            if id(group) in busy:
                continue
            if started and group.first_run is None:
                group.first_run = batch
            group.chosen = (batch, started)
            runs += [(group, m) for m in range(started) if not group.finished[m]]
        return runs

    def _levels(self) -> Levels | None:
        """Return the remembered levels of the groups; None if the run remembers none."""
        if not self._remembers:
            return None
        unknown = (
            self._dist.mean,
            self._dist.shared * self._dist.deviation**2,
        )
        known = np.array([group.level or unknown for group in self.groups]).reshape(-1, 2)
        return Levels(mean=known[:, :1], variance=known[:, 1:])
