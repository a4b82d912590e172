"""Reads the response lengths of a run from its event log, and estimates their distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from aprilsched.kernel.core.lengths.laws import KaplanMeier, kaplan_meier
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
        self._settled: dict[int, GroupLengths] = {}
        """Groups that were delivered or dropped, by id."""
        self._sent: set[int] = set()
        """Ids of the groups with a request that was sent, now or by the process before."""

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            match fact:
                case of.GroupLaunched():
                    # The ids of groups that were not saved are used again.
                    self._settled.pop(fact.group_id, None)
                    if fact.again is not None:
                        self._settled.pop(fact.again, None)
                    if fact.restored is not None:
                        self._sent.add(fact.group_id)
                case of.AttemptSent():
                    self._sent.add(fact.group_id)
                case of.GroupDropped():
                    self._settle(fact.group_id)
                case of.BatchDelivered(again=False):
                    self._deliver(fact)
                case _:
                    pass
            self._state.on_facts((fact,), now)

    def by_group(self) -> list[GroupLengths]:
        """Return the groups in the order of launch, their members in the order of their ids. A
        member that was launched but never sent has no tokens."""
        groups = {**self._settled, **{each.launched: each for each in self._state.open_groups()}}
        return [group for group_id, group in sorted(groups.items()) if group_id in self._sent]

    def _settle(self, group_id: int) -> None:
        """Keep the lengths of a group that is about to be dropped."""
        group = self._state.groups.get(group_id)
        if group is not None and not group.evaluated:
            self._settled[group_id] = self._state.lengths_of(group_id)

    def _deliver(self, batch: of.BatchDelivered) -> None:
        lengths: dict[int, list[int]] = {}
        for rollout in batch.rollouts:
            lengths.setdefault(rollout.group_id, []).append(rollout.tokens)
        self._sent.update(lengths)
        for group_id, tokens in lengths.items():
            # An empty response has length 1, as in the core.
            at_least_1 = [max(1, each) for each in tokens]
            self._settled[group_id] = GroupLengths.whole(group_id, at_least_1)


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


def law_of(groups: Sequence[GroupLengths]) -> KaplanMeier:
    """Return the Kaplan-Meier estimate, in which unfinished responses are censored.

    Raises:
        ValueError: if `groups` is empty.
    """
    tokens, finished = pooled(groups)
    return kaplan_meier(tokens, ~finished)
