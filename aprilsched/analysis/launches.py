"""Collects the launched groups and the delivered batches of a run from its facts.

Invariant: the number of a member's tokens is the one known at the last fact, however often its
request was interrupted, failed and sent again before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aprilsched.core.messages import facts as of
from aprilsched.core.messages.events import EngineInfo
from aprilsched.core.messages.facts import Fact
from aprilsched.core.state.ledger import Reason

__all__ = ["Launches", "Member", "RecordedBatch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedBatch:
    """A delivered batch: the lengths of its prompts and of its responses, one for each rollout."""

    prompts: Sequence[int]
    lengths: Sequence[int]


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
        self.batches: list[RecordedBatch] = []
        self.episodes = False
        """Whether the run has episodes."""
        self.updates = 0
        """Number of updates that engines have taken."""
        self.kv_tokens: int | None = None
        """Number of tokens of the smallest KV pool; None if an engine does not say it."""
        self.fetched = 0
        """Number of prompts that arrived from the source."""
        self.ended = False
        """Whether the source of prompts has ended."""
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
            of.PromptsReceived: self._received,
            of.GroupLaunched: self._launched,
            of.EpisodeStarted: self._episode,
            of.AttemptSent: self._sent,
            of.TokensReceived: self._tokens,
            of.RolloutFinished: self._finished,
            of.GroupDropped: self._dropped,
            of.PromptRefused: self._dropped,
            of.UpdateFinished: self._updated,
            of.BatchDelivered: self._delivered,
            of.EvaluationDelivered: self._evaluation_delivered,
        }

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            handler = self._handlers.get(fact.__class__)
            if handler is not None:
                handler(fact)

    def members(self) -> list[Member]:
        """The members whose request was sent, in the order of their ids, without evaluations."""
        return [m for _, m in sorted(self._members.items()) if m.group_id not in self._evaluated]

    def by_group(self) -> list[list[Member]]:
        """Groups in the order of launches, without those that were only evaluated. A member that
        was launched and never sent has no tokens. Of a prompt that was generated again, this is
        the last group."""
        groups: dict[int, list[Member]] = {}
        for member in self.members():
            if member.group_id in self._begun_again:
                continue
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
        # The context of a request that is sent again has only the tokens that arrived.
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
        self.kv_tokens = _smallest_pool(fact.engines)
        if self._began:
            self._forget_open()
        self._began = True

    def _forget_open(self) -> None:
        """Forget what was in flight: it is launched again, as restored or from its beginning if it
        was not saved."""
        kept = {id_: m for id_, m in self._members.items() if m.group_id in self._settled}
        self._members = kept
        self._requests.clear()
        groups = {member.group_id for member in kept.values()}
        self.fetched = len(groups - self._evaluated - self._begun_again)

    def _launched(self, fact: of.GroupLaunched) -> None:
        if fact.evaluation_id is not None:
            self._evaluated.add(fact.group_id)
            return
        # The ids of rollouts that were not saved are given to other rollouts.
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
        self.fetched += 1
        ended = zip(fact.rollout_ids, lengths.tokens, lengths.finished, strict=True)
        for rollout_id, tokens, finished in ended:
            self._members[rollout_id] = Member(
                group_id=fact.group_id,
                prompt=fact.prompt_tokens,
                tokens=tokens,
                finished=finished,
            )

    def _received(self, fact: of.PromptsReceived) -> None:
        self.fetched += fact.prompts
        self.ended = self.ended or fact.last

    def _updated(self, fact: of.UpdateFinished) -> None:
        self.updates += not fact.cause

    def _dropped(self, fact: of.GroupDropped | of.PromptRefused) -> None:
        self._settled.add(fact.group_id)
        if isinstance(fact, of.GroupDropped) and fact.reason == Reason.OUTRACED:
            self._outraced(fact)

    def _outraced(self, fact: of.GroupDropped) -> None:
        """Forget members that their group goes on without."""
        for rollout_id in fact.rollout_ids:
            group_id = self._groups.get(rollout_id)
            if group_id is not None:
                self._members.pop(rollout_id, None)
                self._sizes[group_id] -= 1

    def _episode(self, _: of.EpisodeStarted) -> None:
        self.episodes = True

    def _evaluation_delivered(self, fact: of.EvaluationDelivered) -> None:
        self._settled.update(rollout.group_id for rollout in fact.rollouts)

    def _delivered(self, fact: of.BatchDelivered) -> None:
        if fact.again:
            return
        self._settled.update(rollout.group_id for rollout in fact.rollouts)
        for rollout in fact.rollouts:
            # A request that began before the log has no AttemptSent, or its context has tokens of
            # the response.
            self._members[rollout.rollout_id] = Member(
                group_id=rollout.group_id,
                prompt=rollout.prompt_tokens,
                tokens=rollout.tokens,
                finished=True,
            )
        self.batches.append(
            RecordedBatch(
                prompts=[rollout.prompt_tokens for rollout in fact.rollouts],
                lengths=[rollout.tokens for rollout in fact.rollouts],
            )
        )


def _smallest_pool(engines: Sequence[EngineInfo]) -> int | None:
    known = [engine.kv_tokens for engine in engines if engine.kv_tokens is not None]
    return min(known) if known and len(known) == len(engines) else None
