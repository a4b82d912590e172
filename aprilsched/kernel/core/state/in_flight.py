"""Everything in flight: groups, their rollouts, their requests, and the queue.

Every rollout is in exactly one group here, is delivered, or is in the ledger. The methods carry out
the moves of the life cycle and maintain the counts. They make no decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from aprilsched.kernel.core.policies.placement import Place
from aprilsched.kernel.core.state.journal import Journal
from aprilsched.kernel.core.state.ledger import Counters, Entry, Ledger, Reason
from aprilsched.kernel.core.state.queues import Ready, Waiting
from aprilsched.kernel.core.state.records import (
    GENERATING,
    Ended,
    GroupRecord,
    RequestRecord,
    RolloutRecord,
    State,
)
from aprilsched.kernel.values.companions import Companion, CompanionLog, Rows, of_prompt
from aprilsched.types import (
    NO_VERSION,
    Answer,
    Float32Array,
    Int32Array,
    Media,
    Prompt,
    SamplingParams,
    Sibling,
    VersionSpan,
    derived_seed,
)

_MAX_AFFINITIES = 4096
"""Largest number of prompt affinities that are remembered; the least recently used one goes."""


class InFlight:
    """The records in flight by id, and their counts.

    Args:
        place: the sort key of a waiting request.
        version: the version whose engines alone may take a request; None for the newest.
        cold: whether a request needs room in a KV pool.
        changed: gets the names of engines whose number of open attempts changes.
        companions: data that engines return in addition to the tokens.
        siblings: number of siblings of a delivered sample; None if whole groups are delivered.
    """

    def __init__(
        self,
        place: Callable[[RequestRecord], Place],
        version: Callable[[RequestRecord], int | None],
        cold: Callable[[RequestRecord], bool],
        changed: dict[str, None],
        companions: Sequence[Companion] = (),
        siblings: int | None = None,
    ) -> None:
        self._changed = changed
        self.siblings = siblings
        self._companions = companions
        self.groups: dict[int, GroupRecord] = {}
        self.rollouts: dict[int, RolloutRecord] = {}
        self.requests: dict[int, RequestRecord] = {}
        """Current requests, and the requests of dropped rollouts until their attempt ends."""
        self.queue = Waiting(place, version, cold)
        """Waiting requests."""
        self.ready = Ready()
        """Complete training groups, or single samples with their siblings, in the order of their
        completion."""
        self.unsettled: dict[int, GroupRecord] = {}
        """Groups of which a sample may have become deliverable since the last check."""
        self.training = 0
        """Number of training groups and single samples."""
        self.training_rollouts = 0
        """Number of rollouts of training."""
        self.generating = 0
        """Number of unfinished rollouts in training groups."""
        self.open: Counter[str] = Counter()
        """Number of open attempts on each engine."""
        self.affinity_engines: dict[str, str] = {}
        """Engine of the latest attempt with each prompt affinity."""
        self.open_attempts = 0
        """Number of open attempts, including dropped rollouts and evaluations."""
        self.held_on: Counter[str] = Counter()
        """Prompt and response tokens of the open attempts on each engine: the expected content of
        its KV pool."""
        self._open_on: dict[str, dict[int, RequestRecord]] = {}
        self.called_back = 0
        """Number of open attempts that are being aborted."""
        self.ledger = Ledger()
        self.counters = Counters()
        self.last_id = 0
        """Last id of a group, rollout or request. Ids are never reused."""
        self.journal = Journal()
        """Changes for the next snapshot."""

    # --- opening ---------------------------------------------------------------------------

    def add_group(
        self,
        prompt: Prompt,
        samplings: tuple[SamplingParams, ...],
        *,
        evaluation_id: int | None,
        episodes: bool,
        opened: int,
        size: int,
        deferred: bool = False,
    ) -> GroupRecord:
        """Launch a group with one rollout, waiting or `deferred`, for each of `samplings`.

        The group delivers `size` rollouts.
        """
        group = GroupRecord(
            group_id=self._next_id(),
            prompt=prompt,
            evaluation_id=evaluation_id,
            opened=opened,
            size=size,
        )
        self.groups[group.group_id] = group
        for index, sampling in enumerate(samplings):
            rollout_id = self._next_id()
            rollout = RolloutRecord(
                rollout_id=rollout_id,
                index=index,
                group=group,
                sampling=_seeded(sampling, prompt, group.group_id, index, size=len(samplings)),
                state=State.THINKING,
                prompt_ids=prompt.input_ids,
                eligible=not deferred,
            )
            group.members.append(rollout)
            self._enter_flight(rollout, episodes=episodes)
        group.unfinished = len(samplings)
        self.counters.launched += len(samplings)
        if evaluation_id is None:
            self.training += 1
            self.training_rollouts += len(samplings)
            self.generating += len(samplings)
        self.journal.launch(group)
        return group

    def add_again(
        self, group: GroupRecord, lost: RolloutRecord, *, episodes: bool, failed: bool = True
    ) -> RolloutRecord:
        """Launch a replacement for a member that has left its group.

        If it has `failed`, this counts as one of its regenerations.
        """
        rollout_id = self._next_id()
        group.size += 1
        group.lost -= 1
        if not group.members and group.evaluation_id is None:
            self.training += 1
        seed = lost.again + 1 if failed else rollout_id
        rollout = RolloutRecord(
            rollout_id=rollout_id,
            index=lost.index,
            group=group,
            sampling=_seeded(lost.sampling, group.prompt, seed, size=group.size),
            state=State.THINKING,
            prompt_ids=group.prompt.input_ids,
            eligible=lost.eligible,
            again=lost.again + failed,
        )
        group.members.append(rollout)
        group.members.sort(key=lambda member: member.index)
        group.unfinished += 1
        self._enter_flight(rollout, episodes=episodes)
        self.counters.launched += 1
        self.counters.regenerated += failed
        if group.evaluation_id is None:
            self.training_rollouts += 1
            self.generating += 1
        self.journal.launch(group)
        return rollout

    def _enter_flight(self, rollout: RolloutRecord, *, episodes: bool) -> None:
        """Start a new rollout; an episode requests its turns itself."""
        self.carry_companions(rollout)
        self.rollouts[rollout.rollout_id] = rollout
        if not episodes:
            self.add_request(rollout, rollout.prompt_ids, rollout.sampling)
        elif not rollout.eligible:
            self.journal.change(rollout)

    def carry_companions(self, rollout: RolloutRecord) -> None:
        """Set up the logs of the companions that the rollout's prompt requires."""
        if self._companions:
            asked = of_prompt(self._companions, rollout.group.prompt.companions)
            rollout.log.companions = {each.name: CompanionLog(each) for each in asked}

    def add_request(
        self,
        rollout: RolloutRecord,
        input_ids: Int32Array,
        sampling: SamplingParams,
        *,
        media: tuple[Media, ...] | None = None,
        output_start: int | None = None,
    ) -> RequestRecord:
        """Start a rollout's next turn.

        Args:
            rollout: the rollout.
            input_ids: the whole context.
            sampling: the sampling parameters of the turn.
            media: all media of the context; None for those of the prompt.
            output_start: the position in the log from which on the turn's output is already known;
                None if none of it is.
        """
        if not rollout.answered:
            log = rollout.log
            if log.companions and not log.size and any(e.held for e in log.companions.values()):
                # Rows of another prompt, without a token. Saved ones are void: a resumed run would
                # mistake them for rows of this prompt.
                log.truncate(0, prompt=0)
                rollout.rewritten = True
                self.journal.change(rollout)
            rollout.prompt_ids = input_ids
        elif output_start is None and len(input_ids) > (known := rollout.context_tokens):
            added = input_ids[known:]
            self.journal.expect_rows(rollout)
            rollout.log.append_environment(added)
            nothing = np.zeros(len(added), dtype=np.float32)
            self.journal.arrive(rollout, added, nothing, version=NO_VERSION, engine=None)
        request = RequestRecord(
            request_id=self._next_id(),
            rollout=rollout,
            sampling=sampling,
            media=media,
            output_start=rollout.log.size if output_start is None else output_start,
        )
        rollout.request = request
        self.requests[request.request_id] = request
        rollout.move("next_turn")
        if rollout.eligible:
            self.queue.add(request)
        if self.journal.active and not self._is_plain(rollout, input_ids, sampling):
            self.journal.change(rollout)
        return request

    @staticmethod
    def _is_plain(rollout: RolloutRecord, ids: Int32Array, sampling: SamplingParams) -> bool:
        """Return whether the saved group already describes the rollout, so it needs no save."""
        as_launched = ids is rollout.group.prompt.input_ids and sampling is rollout.sampling
        return as_launched and rollout.eligible and not rollout.turns

    def _next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def refuse(self, reason: Reason, cause: str, *, now: float) -> Entry:
        """Enter an unusable prompt into the ledger."""
        self.counters.launched += 1
        entry = self.enter(self._next_id(), self._next_id(), reason, cause, tokens=0, now=now)
        self.journal.refuse(entry)
        return entry

    def enter(
        self, rollout_id: int, group_id: int, reason: Reason, cause: str, *, tokens: int, now: float
    ) -> Entry:
        """Enter a rollout into the ledger, with the number of its sampled tokens."""
        entry = Entry(
            rollout_id=rollout_id,
            group_id=group_id,
            reason=reason,
            cause=cause,
            tokens=tokens,
            at=now,
        )
        self.counters.tokens_discarded += tokens
        self.ledger.add(entry)
        return entry

    # --- attempts --------------------------------------------------------------------------

    def open_attempt(
        self, request: RequestRecord, engine: str, *, version: int, adapter: int | None
    ) -> None:
        """Start an attempt: the request is sent to `engine`, and sampled under `version`."""
        self.queue.discard(request)
        rollout = request.rollout
        rollout.move("send")
        rollout.engine = rollout.group.engine = engine
        self._note_affinity_engine(rollout.group.prompt.affinity, engine)
        request.media_tokens = max(request.media_tokens, rollout.group.media_tokens)
        context = rollout.context_tokens + request.media_tokens
        request.pending_prefill = context if request.attempt else 0
        request.attempt += 1
        request.attempt_start = rollout.log.size
        request.engine = engine
        request.destination = ""
        request.version = request.sent_version = version
        request.adapter = adapter
        request.open = True
        request.crossed = request.unsure = request.kept_keys = request.aborting = False
        self.open[engine] += 1
        self._changed[engine] = None
        self.open_attempts += 1
        self.held_on[engine] += context
        self._open_on.setdefault(engine, {})[request.request_id] = request

    def _note_affinity_engine(self, affinity: str | None, engine: str) -> None:
        if affinity is None:
            return
        self.affinity_engines.pop(affinity, None)
        self.affinity_engines[affinity] = engine
        if len(self.affinity_engines) > _MAX_AFFINITIES:
            del self.affinity_engines[next(iter(self.affinity_engines))]

    def context_engine(self, rollout: RolloutRecord) -> str:
        """Return the engine that caches the rollout's context; empty if no engine does.

        The context is that of its earlier turns, or the prompt of its group, or the context shared
        by prompts with its affinity.
        """
        group = rollout.group
        affinity = group.prompt.affinity
        if rollout.turns and rollout.engine:
            return rollout.engine
        if group.engine or affinity is None:
            return group.engine
        return self.affinity_engines.get(affinity, "")

    def attempt(self, request_id: int, attempt: int) -> RequestRecord | None:
        """Return the request if this attempt is open; None for a late answer to another one."""
        request = self.requests.get(request_id)
        if request is None or not request.open or request.attempt != attempt:
            return None
        return request

    def close_attempt(
        self,
        request: RequestRecord,
        spans: tuple[VersionSpan, ...] | None,
        rows: Mapping[str, Rows] | None = None,
        answer: Answer | None = None,
    ) -> None:
        """Close an attempt that has ended.

        Args:
            request: the request.
            spans: the versions of the attempt's tokens, as the engine reports them; None if it
                does not.
            rows: the rows of each companion of the context.
            answer: other fields of the engine's answer that are kept.
        """
        request.open = request.unsure = False
        self.open[request.engine] -= 1
        self._changed[request.engine] = None
        self.open_attempts -= 1
        self.held_on[request.engine] -= request.rollout.context_tokens + request.media_tokens
        del self._open_on[request.engine][request.request_id]
        self.called_back -= request.aborting
        log = request.rollout.log
        # An engine reports the version of its base model, not of the adapter.
        if spans and request.adapter is None:
            log.assign(request.attempt_start, spans, engine=request.engine)
        elif request.crossed and log.size > request.attempt_start:
            log.exact = False
        if rows is not None:
            self.journal.expect_rows(request.rollout)
            log.add_context_rows(
                rows,
                prompt=len(request.rollout.prompt_ids),
                start=request.attempt_start,
                recomputed=not request.kept_keys,
            )
        if answer is not None:
            log.answers += (replace(answer, start=request.attempt_start),)
        self.journal.change(request.rollout)

    def arrive(
        self,
        request: RequestRecord,
        ids: Int32Array,
        logprobs: Float32Array,
        rows: Mapping[str, Rows] | None = None,
    ) -> None:
        """Add new tokens of an open attempt, and their rows of each companion of tokens."""
        rollout, version, engine = request.rollout, request.version, request.engine
        self.held_on[engine] += len(ids)
        rollout.log.append(ids, logprobs, version=version, engine=engine)
        if rows is not None:
            self.journal.expect_rows(rollout)
            rollout.log.add_token_rows(rows)
        if self.journal.active:
            self.journal.arrive(rollout, ids, logprobs, version=version, engine=engine)
        if request.crossed and not request.unsure:
            # Saved, because a process that resumes from here never gets the engine's report.
            request.unsure = True
            self.journal.change(rollout)
        if request.kept_keys and not rollout.log.stale_keys:
            rollout.log.stale_keys = True
            self.journal.change(rollout)

    def expand(self, request: RequestRecord, added: int) -> None:
        """Count the `added` tokens that media expand to, in addition to their placeholders.

        The group's next attempts are expected to have the same number, unless the media belong to
        a turn.
        """
        self.held_on[request.engine] += added - request.media_tokens
        request.media_tokens = added
        if request.media is None:
            request.rollout.group.media_tokens = added

    def requeue(self, request: RequestRecord) -> None:
        """Queue the rest of a request, with all tokens known so far."""
        request.rollout.move("interrupt")
        if request.rollout.eligible:
            self.queue.add(request)

    def forget(self, request: RequestRecord) -> None:
        self.requests.pop(request.request_id, None)

    def open_requests(self, engine: str | None = None) -> Iterator[RequestRecord]:
        """Iterate over requests with an open attempt (on `engine`), dropped rollouts included."""
        engines = self._open_on if engine is None else (engine,)
        return iter([r for name in engines for r in self._open_on.get(name, {}).values()])

    def call_back(self, request: RequestRecord) -> None:
        """Mark the open attempt as being aborted."""
        request.aborting = True
        self.called_back += 1

    def finish(self, rollout: RolloutRecord, now: float) -> None:
        """Mark the rollout as finished; a complete training group becomes ready."""
        rollout.move("finish")
        self.journal.finish(rollout)
        group = rollout.group
        group.unfinished -= 1
        if group.evaluation_id is not None:
            return
        self.generating -= 1
        if self.splits(group):
            group.ended[rollout.rollout_id] = Ended(
                rollout_id=rollout.rollout_id, index=rollout.index, tokens=rollout.log.size, at=now
            )
            self.unsettle(group)
        elif group.complete:
            self.ready.add(group)

    # --- members that leave their group --------------------------------------------------------

    def splits(self, group: GroupRecord) -> bool:
        """Return whether the members of the group are delivered one by one."""
        return self.siblings is not None and group.evaluation_id is None and group.source is None

    def unsettle(self, group: GroupRecord) -> None:
        """Note that a sample of the group may have become deliverable."""
        if self.splits(group):
            self.unsettled[group.group_id] = group
            self.journal.change_group(group)

    def score(self, rollout: RolloutRecord) -> None:
        """Mark the rollout as scored."""
        rollout.move("score")
        self.journal.finish(rollout)
        ended = rollout.group.ended.get(rollout.rollout_id)
        if ended is not None:
            ended.scored, ended.reward = True, rollout.reward
            self.unsettle(rollout.group)

    def split(self, rollout: RolloutRecord, siblings: tuple[Sibling, ...]) -> GroupRecord:
        """Make a scored rollout, whose siblings are known, a ready unit of its own."""
        group = rollout.group
        own = self._leave(group, rollout, rollout.rollout_id)
        own.source, own.siblings, own.size = group.group_id, siblings, 1
        own.few = self.siblings is not None and len(siblings) < self.siblings
        times = [group.ended[each.rollout_id].at for each in siblings]
        times.append(group.ended[rollout.rollout_id].at)
        own.complete_at = max([at for at in times if at is not None], default=None)
        group.samples += 1
        self.ready.add(own)
        # Its saved tokens belong to the group, and are deleted with it.
        rollout.rewritten = True
        self.journal.finish(rollout)
        self.journal.launch(own)
        return own

    def rejoin(self, sample: GroupRecord) -> GroupRecord:
        """Return a single sample to its group, as if it had not left."""
        group, (rollout,) = self.groups[sample.origin], sample.members
        self.ready.remove(sample)
        del self.groups[sample.group_id]
        self.journal.leave(sample)
        self.training -= bool(group.members)
        group.members.append(rollout)
        group.samples -= 1
        rollout.group = group
        return group

    def lose(self, group: GroupRecord, rollout: RolloutRecord) -> GroupRecord:
        """Move a lost member into a group of its own, which the caller drops."""
        if group in self.ready:
            self.ready.remove(group)
        own = self._leave(group, rollout, self._next_id())
        group.ended.pop(rollout.rollout_id, None)
        group.size -= 1
        group.lost += 1
        self.unsettle(group)
        return own

    def _leave(self, group: GroupRecord, rollout: RolloutRecord, group_id: int) -> GroupRecord:
        own = GroupRecord(
            group_id=group_id,
            prompt=group.prompt,
            evaluation_id=group.evaluation_id,
            opened=group.opened,
        )
        own.members = [rollout]
        own.unfinished = int(rollout.state in GENERATING)
        group.members = [member for member in group.members if member is not rollout]
        group.unfinished -= own.unfinished
        rollout.group = own
        self.groups[own.group_id] = own
        # A group without members has left training, and stays for its samples in flight.
        self.training += own.evaluation_id is None and bool(group.members)
        self.journal.launch(group)
        return own

    def _settle_source(self, sample: GroupRecord) -> None:
        """Count a sample that has left flight, and forget its group if nothing else of it is
        there."""
        group = self.groups.get(sample.origin)
        if group is not None:
            group.samples -= 1
            self.forget_empty(group)

    def forget_empty(self, group: GroupRecord) -> None:
        """Forget a group of which neither a member nor a single sample is in flight."""
        if not group.members and not group.samples:
            del self.groups[group.group_id]
            self.unsettled.pop(group.group_id, None)
            self.journal.leave(group)

    # --- leaving ---------------------------------------------------------------------------

    def deliver(self, group: GroupRecord) -> None:
        """Remove a delivered group from flight."""
        for member in group.members:
            member.move("deliver")
            self.counters.delivered += 1
            self.counters.tokens_delivered += member.log.sampled_tokens
        self._remove(group)
        for member in group.members:
            member.request = None
        if not self.journal.active:
            self.release(group)

    @staticmethod
    def release(group: GroupRecord) -> None:
        """Free the members of a delivered group that will not be delivered again."""
        # Records refer to each other, and only the garbage collector frees a reference cycle.
        group.members = []

    def drop(
        self, group: GroupRecord, reason: Reason, cause: str, *, culprit: int | None, now: float
    ) -> list[Entry]:
        """Move the group to the ledger and return its entries.

        With a `culprit` the other members get the reason SIBLING_FAILED.
        """
        group.dropped = reason
        entries: list[Entry] = []
        for member in group.members:
            member.move("drop")
            is_sibling = culprit is not None and member.rollout_id != culprit
            why = Reason.SIBLING_FAILED if is_sibling else reason
            tokens = member.log.sampled_tokens
            entries.append(
                self.enter(member.rollout_id, group.group_id, why, cause, tokens=tokens, now=now)
            )
        self.journal.drop(group, entries)
        self._remove(group)
        return entries

    def _remove(self, group: GroupRecord) -> None:
        del self.groups[group.group_id]
        if group.evaluation_id is None:
            self.training -= 1
            self.training_rollouts -= len(group.members)
            self.generating -= group.unfinished
            if group in self.ready:
                self.ready.remove(group)
            if group.source is not None:
                self._settle_source(group)
        for member in group.members:
            del self.rollouts[member.rollout_id]
            request = member.request
            if request is not None:
                self.queue.discard(request)
                if not request.open:
                    self.forget(request)

    # --- looking ---------------------------------------------------------------------------

    def training_groups(self) -> Iterator[GroupRecord]:
        return (g for g in self.groups.values() if g.evaluation_id is None and g.members)


def _seeded(sampling: SamplingParams, prompt: Prompt, *path: int, size: int) -> SamplingParams:
    """Return the parameters with a seed derived for `path`, if other rollouts share them.

    With one seed, engines would sample the same response for the whole group, and in each epoch.
    """
    if sampling.sampling_seed is None:
        return sampling
    own = isinstance(prompt.sampling, tuple) or (size == 1 and prompt.sampling is not None)
    if own:
        return sampling
    return replace(sampling, sampling_seed=derived_seed(sampling.sampling_seed, *path))
