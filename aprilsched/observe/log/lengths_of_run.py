"""Reads the response lengths of a run from its event log, and estimates their distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from aprilsched.kernel.core.lengths.distributions import KaplanMeier, kaplan_meier
from aprilsched.kernel.core.lengths.observed import GroupLengths, pooled
from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.observe.figures.run_state import RunState
from aprilsched.observe.log.reading import read_facts
from aprilsched.observe.log.run import readable
from aprilsched.observe.log.run_folder import EVENTS


class Launches:
    """A listener that keeps the lengths of all training groups, also of those that are delivered or
    dropped. If a prompt was generated again, only its last group counts."""

    def __init__(self) -> None:
        self._state = RunState()
        self._settled: dict[int, dict[int, tuple[int, bool]]] = {}
        """Length of each rollout that was delivered or dropped, and whether it had ended, by the id
        of its group. Single samples of a group settle one by one."""
        self._sent: set[int] = set()
        """Ids of the groups with a request that was sent, now or by the process before."""

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            match fact:
                case of.GroupLaunched():
                    self._launch(fact)
                case of.AttemptSent():
                    self._sent.add(fact.group_id)
                case of.GroupDropped():
                    self._drop(fact.group_id)
                case of.BatchDelivered(again=False):
                    for each in fact.rollouts:
                        self._sent.add(each.group_id)
                        # An empty response has length 1, as in the core.
                        self._settle(each.group_id, each.rollout_id, max(1, each.tokens), True)
                case _:
                    pass
            self._state.on_facts((fact,), now)

    def by_group(self) -> list[GroupLengths]:
        """Return the groups in the order of launch, their members in the order of their ids. A
        member that was launched but never sent has no tokens."""
        groups = {group_id: dict(members) for group_id, members in self._settled.items()}
        for group_id in self._state.groups:
            groups.setdefault(self._origin(group_id), {}).update(self._open(group_id))
        return [
            GroupLengths(
                launched=group_id,
                tokens=np.array([tokens for _, (tokens, _) in members], dtype=np.int64),
                finished=np.array([ended for _, (_, ended) in members], dtype=np.bool_),
            )
            for group_id, found in sorted(groups.items())
            if group_id in self._sent and (members := sorted(found.items()))
        ]

    def _launch(self, fact: of.GroupLaunched) -> None:
        if fact.again is not None:
            self._settled.pop(fact.again, None)
        if fact.restored is None:
            # The ids of groups that were not saved are used again.
            self._settled.pop(fact.group_id, None)
            return
        self._sent.add(fact.group_id)
        for rollout_id in fact.rollout_ids:
            self._settled.get(fact.group_id, {}).pop(rollout_id, None)

    def _drop(self, group_id: int) -> None:
        """Keep the lengths of a group, or of a single sample, that is about to be dropped."""
        for rollout_id, (tokens, ended) in self._open(group_id).items():
            self._settle(self._origin(group_id), rollout_id, tokens, ended)

    def _settle(self, group_id: int, rollout_id: int, tokens: int, ended: bool) -> None:
        self._settled.setdefault(group_id, {})[rollout_id] = tokens, ended

    def _open(self, group_id: int) -> dict[int, tuple[int, bool]]:
        """Return the length so far of each member of a training group in flight."""
        group, rollouts = self._state.groups.get(group_id), self._state.rollouts
        if group is None or group.evaluated:
            return {}
        return {i: (rollouts[i].length, rollouts[i].finished) for i in group.rollout_ids}

    def _origin(self, group_id: int) -> int:
        """Return the id of the group as it was launched, from that of a single sample too."""
        group = self._state.groups.get(group_id)
        return group_id if group is None or group.source is None else group.source


def known_lengths(folder: Path, *, until: float | None = None) -> list[GroupLengths]:
    """Return the training groups launched in the first `until` seconds of the run in `folder`, with
    the tokens known at that time.

    The tokens of unfinished responses are exact after an update, and otherwise up to a chunk
    behind.

    Raises:
        RunFolderError: if the log is missing or cannot be understood.
    """
    launches = Launches()
    with readable(folder):
        for facts, at in read_facts(folder / EVENTS):
            if until is not None and at > until:
                break
            launches.on_facts(facts, at)
    return [replace(group, launched=place) for place, group in enumerate(launches.by_group())]


def distribution_of(groups: Sequence[GroupLengths]) -> KaplanMeier:
    """Return the Kaplan-Meier estimate, in which unfinished responses are censored.

    Raises:
        ValueError: if `groups` is empty.
    """
    tokens, finished = pooled(groups)
    return kaplan_meier(tokens, ~finished)
