"""Reads the response lengths of a run from its event log, and estimates their distribution.

Invariants:

- Groups are in the order of launch, and members in the order of their ids. Evaluations are omitted.
- A member's tokens are the tokens known at the last fact, regardless of how often its request was
  interrupted, failed or sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aprilsched.kernel.core.lengths.laws import KaplanMeier, kaplan_meier
from aprilsched.kernel.core.lengths.observed import GroupLengths, pooled
from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.observe.log.reading import read_facts
from aprilsched.observe.log.run import readable
from aprilsched.observe.log.run_folder import EVENTS

_LEAVING = frozenset({Reason.MEMBER_LOST})
"""Reasons for which a rollout leaves its group and the group continues."""


@dataclass(kw_only=True, slots=True)
class Member:
    """A rollout according to the log so far; `prompt` and `tokens` are lengths."""

    group_id: int
    prompt: int
    tokens: int = 0
    finished: bool = False


class Launches:
    """Takes the facts of a run in order."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}
        self._sizes: dict[int, int] = {}
        """Number of members that each group was launched with."""
        self._groups: dict[int, int] = {}
        """Group id of each rollout that was launched."""
        self._requests: dict[int, int] = {}
        """Rollout id of each request."""
        self._evaluated: set[int] = set()
        self._settled: set[int] = set()
        """Ids of the groups that were delivered or dropped."""
        self._begun_again: set[int] = set()
        """Ids of the dropped groups whose prompts were launched again as other groups."""
        self._began = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            of.RunOpened: self._opened,
            of.GroupLaunched: self._launched,
            of.MemberLaunched: self._launched_again,
            of.AttemptSent: self._sent,
            of.TokensReceived: self._tokens,
            of.RolloutFinished: self._finished,
            of.GroupDropped: self._dropped,
            of.PromptRefused: self._dropped,
            of.BatchDelivered: self._delivered,
            of.EvaluationDelivered: self._evaluation_delivered,
        }

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            handler = self._handlers.get(fact.__class__)
            if handler is not None:
                handler(fact)

    def by_group(self) -> list[list[Member]]:
        """Return the training groups in the order of launch. A member that was launched but never
        sent has no tokens. If a prompt was generated again, only its last group is included."""
        left_out = self._evaluated | self._begun_again
        groups: dict[int, list[Member]] = {}
        for _, member in sorted(self._members.items()):
            if member.group_id not in left_out:
                groups.setdefault(member.group_id, []).append(member)
        for group_id, group in groups.items():
            missing = self._sizes.get(group_id, 0) - len(group)
            group.extend(Member(group_id=group_id, prompt=group[0].prompt) for _ in range(missing))
        return [group for _, group in sorted(groups.items())]

    def _sent(self, fact: of.AttemptSent) -> None:
        self._requests[fact.request_id] = fact.rollout_id
        member = self._members.setdefault(
            fact.rollout_id, Member(group_id=fact.group_id, prompt=fact.tokens)
        )
        # The context of a request that is sent again contains only tokens that arrived.
        member.tokens = fact.tokens - member.prompt
        member.finished = False

    def _tokens(self, fact: of.TokensReceived) -> None:
        rollout_id = self._requests.get(fact.request_id)
        if rollout_id is not None:
            self._members[rollout_id].tokens += fact.tokens

    def _finished(self, fact: of.RolloutFinished) -> None:
        member = self._members.get(fact.rollout_id)
        if member is not None:
            member.finished = True

    def _opened(self, fact: of.RunOpened) -> None:
        if self._began:
            self._forget_open()
        self._began = True

    def _forget_open(self) -> None:
        """Forget everything in flight: it is launched again, as restored, or from its start if it
        was not saved."""
        kept = {id_: m for id_, m in self._members.items() if m.group_id in self._settled}
        self._members = kept
        self._requests.clear()

    def _launched(self, fact: of.GroupLaunched) -> None:
        if fact.evaluation_id is not None:
            self._evaluated.add(fact.group_id)
            return
        # The ids of rollouts that were not saved are reused.
        self._evaluated.discard(fact.group_id)
        self._settled.discard(fact.group_id)
        self._begun_again.discard(fact.group_id)
        self._sizes[fact.group_id] = len(fact.rollout_ids)
        self._groups.update(dict.fromkeys(fact.rollout_ids, fact.group_id))
        if fact.again is not None:
            self._begun_again.add(fact.again)
        if fact.restored is not None:
            self._restore(fact, fact.restored)

    def _restore(self, fact: of.GroupLaunched, lengths: of.RestoredLengths) -> None:
        ended = zip(fact.rollout_ids, lengths.tokens, lengths.finished, strict=True)
        for rollout_id, tokens, finished in ended:
            self._members[rollout_id] = Member(
                group_id=fact.group_id,
                prompt=fact.prompt_tokens,
                tokens=tokens,
                finished=finished,
            )

    def _dropped(self, fact: of.GroupDropped | of.PromptRefused) -> None:
        self._settled.add(fact.group_id)
        if isinstance(fact, of.GroupDropped) and fact.reason in _LEAVING:
            self._left(fact)

    def _launched_again(self, fact: of.MemberLaunched) -> None:
        if fact.group_id in self._sizes:
            self._sizes[fact.group_id] += 1
            self._groups[fact.rollout_id] = fact.group_id

    def _left(self, fact: of.GroupDropped) -> None:
        """Forget members that left a group which continues without them."""
        for rollout_id in fact.rollout_ids:
            group_id = self._groups.get(rollout_id)
            if group_id is not None:
                self._members.pop(rollout_id, None)
                self._sizes[group_id] -= 1

    def _evaluation_delivered(self, fact: of.EvaluationDelivered) -> None:
        self._settled.update(rollout.group_id for rollout in fact.rollouts)

    def _delivered(self, fact: of.BatchDelivered) -> None:
        if fact.again:
            return
        self._settled.update(rollout.group_id for rollout in fact.rollouts)
        for rollout in fact.rollouts:
            # A request older than the log has no AttemptSent, or its context already contains
            # tokens of the response.
            self._members[rollout.rollout_id] = Member(
                group_id=rollout.group_id,
                prompt=rollout.prompt_tokens,
                tokens=rollout.tokens,
                finished=True,
            )


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
    return [
        GroupLengths(
            launched=place,
            tokens=np.array([max(m.tokens, m.finished) for m in members], dtype=np.int64),
            finished=np.array([m.finished for m in members], dtype=np.bool_),
        )
        for place, members in enumerate(launches.by_group())
    ]


def law_of(groups: Sequence[GroupLengths]) -> KaplanMeier:
    """Return the Kaplan-Meier estimate, in which unfinished responses are censored.

    Raises:
        ValueError: if `groups` is empty.
    """
    tokens, finished = pooled(groups)
    return kaplan_meier(tokens, ~finished)
