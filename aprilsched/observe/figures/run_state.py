"""The state of a run, computed from its facts, for everything that shows or exports the run.

:class:`RunState` receives the facts of a run in progress or of an event log, with the same result:
the rollouts in flight and their lengths, the counters, the ledger, and each engine's state and time
by part. The summary, the live view, the metrics, the trackers and the report read it here, and
compute only figures that no other reader needs.

A second :class:`~aprilsched.kernel.core.messages.facts.RunOpened` comes from a process that resumes
the run. Everything in flight is then gone, except for groups that are launched as restored
afterwards. Tokens that were generated and lost stay counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from aprilsched.kernel.core.lengths.observed import GroupLengths
from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.kernel.core.state.ledger import Counters, Entry, Ledger, Reason
from aprilsched.kernel.shell.listener import TokenChunks
from aprilsched.observe.figures.batch_figures import sampled_tokens
from aprilsched.observe.figures.engine_time import (
    PARTS,
    AttemptNow,
    Cause,
    EngineTime,
    EngineUsage,
    Part,
    Recording,
)
from aprilsched.types import EpisodeWait

_OF_NO_CAUSE = frozenset({of.AttemptEnded, of.AttemptSent, of.TokensReceived})
"""Kinds of facts that cannot change why slots are free; most facts are of these kinds."""


@dataclass(slots=True, kw_only=True, eq=False)
class RolloutNow:
    """A rollout in flight.

    Attributes:
        sampled: number of tokens of its response that a policy has sampled so far.
        environment: number of tokens of its response that came from the environment so far.
        finished: whether its response has ended.
    """

    group_id: int
    sampled: int = 0
    environment: int = 0
    finished: bool = False

    @property
    def length(self) -> int:
        # An empty response has length 1, as in the core.
        return max(self.sampled + self.environment, self.finished)


@dataclass(slots=True, kw_only=True, eq=False)
class GroupNow:
    """A group in flight.

    Attributes:
        evaluated: whether it belongs to an evaluation, and not to training.
        growing: number of members whose response has not ended.
        accepted: whether it is scored and accepted, and waits for its batch.
    """

    rollout_ids: tuple[int, ...]
    evaluated: bool
    growing: int
    accepted: bool = False


@dataclass(slots=True, kw_only=True)
class _Trainer:
    """The open calls of the trainer.

    Attributes:
        waits: whether it waits for a batch.
        offered: whether the batch that it waits for is complete and offered.
        updating: whether an update of the weights is in progress.
        evaluations: ids of the evaluations in progress.
    """

    waits: bool = False
    offered: bool = False
    updating: bool = False
    evaluations: set[int] = field(default_factory=set[int])


class RunState:
    """A listener that keeps the state of a run up to date.

    Args:
        batch_groups: number of groups per batch, as in the scheduler's configuration. None takes it
            from the first delivered batch.
        recording: receives each stretch of each engine's time.

    Attributes:
        now: time of the last fact, in seconds.
        opened_at: time at which the first process opened the run; None before.
        engines: the engines and their time by part, by name, in the order of joining.
        growing: ids of the rollouts whose response is unfinished.
        carried: ids of the rollouts in `growing` that were already in flight when an earlier batch
            was delivered.
        outside: the episodes without a request at an engine, and what they wait for.
        fetching: whether requested prompts are pending.
        version: policy version of the fleet.
        batches: number of batches that the trainer has received.
    """

    def __init__(
        self, *, batch_groups: int | None = None, recording: Recording | None = None
    ) -> None:
        self.now = 0.0
        self.counters = Counters()
        self.ledger = Ledger()
        self.rollouts: dict[int, RolloutNow] = {}
        self.groups: dict[int, GroupNow] = {}
        self.growing: set[int] = set()
        self.carried: set[int] = set()
        self.outside: dict[int, EpisodeWait] = {}
        self.fetching = False
        self.version = 0
        self.batches = 0
        self._time = EngineTime(recording)
        self.engines = self._time.engines
        self._attempts = self._time.attempts
        self._trainer = _Trainer()
        self._generated = 0
        """Number of training groups in flight whose responses have all ended."""
        self._ready = 0
        """Number of training groups in flight that are accepted."""
        self._training = 0
        """Number of training groups in flight."""
        self._batch_groups = batch_groups
        self._prompts_ended = False
        self._launches_unasked = False
        """Whether a group was launched while the trainer was not waiting for a batch, since the
        last change of pace. This happens only at the asynchronous pace, so it identifies the pace.
        An engine's mode does not: at the synchronous pace, an idle engine is not even paused while
        the trainer trains."""
        self.opened_at: float | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            of.RunOpened: self._opened,
            of.BatchRequested: self._batch_requested,
            of.PromptsEnded: self._trainer_waits_no_longer,
            of.BatchOffered: self._batch_offered,
            of.OfferWithdrawn: self._offer_withdrawn,
            of.BatchDelivered: self._batch_delivered,
            of.EvaluationRequested: self._evaluation_requested,
            of.EvaluationWithdrawn: self._evaluation_over,
            of.EvaluationDelivered: self._evaluation_delivered,
            of.UpdateWanted: self._update_wanted,
            of.ScheduleChanged: self._schedule_changed,
            of.PromptsRequested: self._prompts_requested,
            of.PromptsReceived: self._prompts_received,
            of.PromptRefused: self._prompt_refused,
            of.GroupLaunched: self._group_launched,
            of.MemberLaunched: self._member_launched,
            of.EpisodeStarted: self._episode_started,
            of.EpisodeWaiting: self._episode_waiting,
            of.TeardownFailed: self._teardown_failed,
            of.TurnBegun: self._turn_begun,
            of.TurnEnded: self._turn_ended,
            of.TokensDiscarded: self._tokens_discarded,
            of.RolloutFinished: self._rollout_finished,
            of.GroupAccepted: self._group_accepted,
            of.GroupDropped: self._group_dropped,
            of.AttemptSent: self._attempt_sent,
            of.TokensReceived: self._tokens_received,
            of.AttemptEnded: self._attempt_ended,
            of.EngineJoined: self._engine_joined,
            of.EngineAdmitted: self._engine_admitted,
            of.EngineLost: self._engine_lost,
            of.EngineModeChanged: self._engine_mode_changed,
            of.EngineRefitted: self._engine_refitted,
            of.UpdateBegun: self._update_begun,
            of.UpdateFinished: self._update_finished,
        }

    # --- listening -----------------------------------------------------------------------------

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        self.now = self._time.now = now
        handlers, may_differ = self._handlers, False
        for fact in facts:
            kind = fact.__class__
            handler = handlers.get(kind)
            if handler is not None:
                handler(fact)
                may_differ |= kind not in _OF_NO_CAUSE
        if may_differ:
            self._time.wait_for(self._free_for(), self._paused_for(), len(self.outside))

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        # The most frequent kind of fact, so one loop handles it without a call per fact.
        attempts, rollouts, counters = self._attempts, self.rollouts, self.counters
        generated = 0
        for fact, at in chunks:
            tokens = fact.tokens
            generated += tokens
            if fact.recomputed:
                counters.tokens_reprefilled += fact.recomputed
            attempt = attempts.get(fact.request_id)
            if attempt is None:
                continue
            attempt.context += tokens
            attempt.engine.tokens += tokens
            rollout = rollouts.get(attempt.rollout_id)
            if rollout is not None:
                rollout.sampled += tokens
            elif fact.dropped is not None:
                counters.tokens_discarded += tokens
                self.ledger.late_tokens(Reason(fact.dropped), tokens)
            if attempt.watched:
                self._time.watch(attempt, tokens, at)
        counters.tokens_generated += generated
        self.now = self._time.now = now

    def _tokens_received(self, fact: of.TokensReceived) -> None:
        self.on_tokens([(fact, self.now)], self.now)

    # --- what is asked -------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Count the engines' time up to `now`, a time on the clock of the facts."""
        self._time.advance(now)

    @property
    def groups_ready(self) -> int:
        """Number of accepted groups that wait for their batch."""
        return self._ready

    @property
    def attempts(self) -> Mapping[int, AttemptNow]:
        """The open attempts, by the id of their request."""
        return self._attempts

    @property
    def open_attempts(self) -> int:
        """Number of open attempts on all engines."""
        return len(self._attempts)

    def seconds(self) -> dict[Part, float]:
        """Return the seconds of all engines together, by part."""
        columns = zip(*(engine.seconds for engine in self.engines.values()), strict=True)
        sums = [sum(column) for column in columns] or [0.0] * len(PARTS)
        return dict(zip(PARTS, sums, strict=True))

    def decoding(self) -> Iterable[int]:
        """Ids of the rollouts whose response is being decoded now."""
        return self._time.decoding()

    def open_groups(self) -> list[GroupLengths]:
        """Return the lengths so far of the responses of each training group in flight."""
        return [
            self._lengths(group_id, group.rollout_ids)
            for group_id, group in self.groups.items()
            if not group.evaluated
        ]

    def _lengths(self, group_id: int, rollout_ids: tuple[int, ...]) -> GroupLengths:
        members = [self.rollouts[rollout_id] for rollout_id in rollout_ids]
        return GroupLengths(
            launched=group_id,
            tokens=np.array([member.length for member in members], dtype=np.int64),
            finished=np.array([member.finished for member in members], dtype=np.bool_),
        )

    # --- why engines have nothing to do --------------------------------------------------------

    @property
    def _wanted(self) -> bool:
        """Return whether the trainer waits for an incomplete batch. An offered batch waits for the
        trainer or the store, and needs no work from the engines."""
        return self._trainer.waits and not self._trainer.offered

    def _free_for(self) -> Cause:
        """Return why an engine that generates has free slots."""
        wanted = self._wanted or bool(self._trainer.evaluations)
        if not wanted and not self._launches_unasked:
            return "trainer"
        if self.fetching or self._prompts_ended:
            return "prompts"
        full = self._batch_groups
        if wanted:
            short = full is not None and self._ready < full <= self._generated
            return "rewards" if short else "tail"
        # While the batch size is unknown, a batch counts as full once every response has ended.
        if full is None:
            return "tail" if self._generated < self._training else "trainer"
        if self._ready >= full or not self._training:
            return "trainer"
        return "rewards" if self._generated >= full else "tail"

    def _paused_for(self) -> Literal["pause", "trainer"]:
        """Return why an engine is paused while no weights are loaded."""
        trainer = self._trainer
        busy = self._wanted or trainer.updating or bool(trainer.evaluations)
        return "pause" if busy else "trainer"

    # --- the trainer and the prompts -----------------------------------------------------------

    def _opened(self, fact: of.RunOpened) -> None:
        self.version = max(self.version, fact.version)
        self._time.forget_requests()
        for info in fact.engines:
            self._time.enter(self._time.enlist(info), "generating")
        if self.opened_at is None:
            self.opened_at = self.now
        else:
            self._forget_prior_run()

    def _forget_prior_run(self) -> None:
        """Forget everything in flight: the process of the prior run has ended."""
        for group_id, group in list(self.groups.items()):
            if group.evaluated:
                cause = "its evaluation ended with the process that asked for it"
                rows = [(i, Reason.RESTARTED, self.rollouts[i].sampled) for i in group.rollout_ids]
                self._drop(group_id, rows, cause)
        self.counters.launched -= len(self.rollouts)
        for held in (self.rollouts, self.groups, self.outside):
            held.clear()
        for ids in (self.growing, self.carried):
            ids.clear()
        self._trainer = _Trainer()
        self._generated = self._ready = self._training = 0
        self.fetching = self._prompts_ended = False

    def _batch_requested(self, _: of.BatchRequested) -> None:
        self._trainer.waits = True

    def _trainer_waits_no_longer(self, _: of.PromptsEnded) -> None:
        self._trainer.waits = False

    def _batch_offered(self, _: of.BatchOffered) -> None:
        self._trainer.offered = True

    def _offer_withdrawn(self, _: of.OfferWithdrawn) -> None:
        self._trainer.offered = False

    def _batch_delivered(self, fact: of.BatchDelivered) -> None:
        self._trainer.waits = self._trainer.offered = False
        self.batches = fact.batch + 1
        if not fact.again:
            self.counters.batches += 1
            self._arrive(fact.rollouts)
        groups = of.group_ids(fact.rollouts)
        self._batch_groups = len(groups)
        self._forget(groups)
        self.carried.update(self.growing)

    def _evaluation_requested(self, fact: of.EvaluationRequested) -> None:
        self._trainer.evaluations.add(fact.evaluation_id)

    def _evaluation_over(self, fact: of.EvaluationWithdrawn | of.EvaluationDelivered) -> None:
        self._trainer.evaluations.discard(fact.evaluation_id)

    def _evaluation_delivered(self, fact: of.EvaluationDelivered) -> None:
        self._evaluation_over(fact)
        self._arrive(fact.rollouts)
        self._forget(of.group_ids(fact.rollouts))

    def _update_wanted(self, fact: of.UpdateWanted) -> None:
        self._trainer.evaluations.difference_update(fact.evaluations)
        if fact.batch:
            self._trainer.waits = False

    def _schedule_changed(self, fact: of.ScheduleChanged) -> None:
        if fact.pace is not None:
            self._launches_unasked = fact.pace == "asynchronous"

    def _prompts_requested(self, _: of.PromptsRequested) -> None:
        self._launches_unasked |= not self._wanted
        self.fetching = True

    def _prompts_received(self, fact: of.PromptsReceived) -> None:
        self.fetching = fact.partial
        self._prompts_ended = self._prompts_ended or fact.last

    def _prompt_refused(self, fact: of.PromptRefused) -> None:
        # An unusable prompt counts as one launched rollout, which the ledger contains.
        self.counters.launched += 1
        self._drop(fact.group_id, [(fact.rollout_id, Reason.BAD_PROMPT, 0)], fact.cause)

    # --- groups and rollouts -------------------------------------------------------------------

    def _group_launched(self, fact: of.GroupLaunched) -> None:
        ids, lengths = fact.rollout_ids, fact.restored
        self.counters.launched += len(ids)
        for place, rollout_id in enumerate(ids):
            rollout = self.rollouts[rollout_id] = RolloutNow(group_id=fact.group_id)
            if lengths is not None:
                rollout.sampled = lengths.sampled[place]
                rollout.environment = lengths.tokens[place] - rollout.sampled
                rollout.finished = lengths.finished[place]
            if not rollout.finished:
                self.growing.add(rollout_id)
        growing = len(ids) if lengths is None else lengths.finished.count(False)
        evaluated = fact.evaluation_id is not None
        self.groups[fact.group_id] = GroupNow(rollout_ids=ids, evaluated=evaluated, growing=growing)
        if evaluated:
            return
        self._training += 1
        self._generated += not growing
        if lengths is None:
            self._launches_unasked |= not self._wanted

    def _member_launched(self, fact: of.MemberLaunched) -> None:
        self.counters.launched += 1
        self.counters.regenerated += 1
        self.rollouts[fact.rollout_id] = RolloutNow(group_id=fact.group_id)
        self.growing.add(fact.rollout_id)
        group = self.groups[fact.group_id]
        group.rollout_ids = (*group.rollout_ids, fact.rollout_id)
        if not group.growing and not group.evaluated:
            self._generated -= 1
        group.growing += 1

    def _teardown_failed(self, _: of.TeardownFailed) -> None:
        self.counters.teardowns_failed += 1

    def _episode_started(self, fact: of.EpisodeStarted) -> None:
        self.outside[fact.rollout_id] = "tools"

    def _episode_waiting(self, fact: of.EpisodeWaiting) -> None:
        self.outside[fact.rollout_id] = fact.what

    def _turn_begun(self, fact: of.TurnBegun) -> None:
        self.outside.pop(fact.rollout_id, None)
        rollout = self.rollouts.get(fact.rollout_id)
        if rollout is not None:
            rollout.environment += fact.environment

    def _turn_ended(self, fact: of.TurnEnded) -> None:
        self.outside[fact.rollout_id] = "tools"
        self.counters.turns_refused += bool(fact.refused)

    def _tokens_discarded(self, fact: of.TokensDiscarded) -> None:
        self.counters.tokens_discarded += fact.sampled
        self.ledger.late_tokens(Reason(fact.reason), fact.sampled)
        rollout = self.rollouts.get(fact.rollout_id)
        if rollout is not None:
            rollout.sampled -= fact.sampled
            rollout.environment -= fact.environment

    def _rollout_finished(self, fact: of.RolloutFinished) -> None:
        self.growing.discard(fact.rollout_id)
        self.carried.discard(fact.rollout_id)
        self.outside.pop(fact.rollout_id, None)
        rollout = self.rollouts.get(fact.rollout_id)
        group = self.groups.get(fact.group_id)
        if rollout is None or group is None or rollout.finished:
            return
        rollout.finished = True
        group.growing -= 1
        if not group.growing and not group.evaluated:
            self._generated += 1

    def _group_accepted(self, fact: of.GroupAccepted) -> None:
        group = self.groups.get(fact.group_id)
        if group is None or group.accepted:
            return
        group.accepted = True
        self._ready += not group.evaluated

    def _arrive(self, rollouts: Sequence[of.DeliveredRollout]) -> None:
        self.counters.delivered += len(rollouts)
        for rollout in rollouts:
            self.counters.tokens_delivered += sampled_tokens(rollout)
            self.counters.tokens_masked += rollout.masked

    def _group_dropped(self, fact: of.GroupDropped) -> None:
        rows = [(each.rollout_id, Reason(each.reason), each.tokens) for each in fact.rollouts]
        for rollout_id in fact.rollout_ids:
            rollout = self.rollouts.get(rollout_id)
            if rollout is not None and rollout.group_id != fact.group_id:
                self._leave(rollout.group_id, rollout_id)
        self._drop(fact.group_id, rows, fact.cause)
        self._forget([fact.group_id])

    def _leave(self, group_id: int, rollout_id: int) -> None:
        """Remove a lost rollout from its group, which continues."""
        grew = rollout_id in self.growing
        self._let_go(rollout_id)
        group = self.groups[group_id]
        group.rollout_ids = tuple(each for each in group.rollout_ids if each != rollout_id)
        group.growing -= grew
        if grew and not group.growing and not group.evaluated:
            self._generated += 1

    def _drop(self, group_id: int, rows: Sequence[tuple[int, Reason, int]], cause: str) -> None:
        for rollout_id, reason, tokens in rows:
            self.rollouts.pop(rollout_id, None)
            self.counters.tokens_discarded += tokens
            self.ledger.add(
                Entry(
                    rollout_id=rollout_id,
                    group_id=group_id,
                    reason=reason,
                    cause=cause,
                    tokens=tokens,
                    at=self.now,
                )
            )

    def _forget(self, group_ids: Iterable[int]) -> None:
        """Remove these groups and their rollouts: they are no longer in flight."""
        for group_id in group_ids:
            group = self.groups.pop(group_id, None)
            if group is None:
                continue
            if not group.evaluated:
                self._training -= 1
                self._generated -= not group.growing
                self._ready -= group.accepted
            for rollout_id in group.rollout_ids:
                self.rollouts.pop(rollout_id, None)
                self._let_go(rollout_id)

    def _let_go(self, rollout_id: int) -> None:
        self.growing.discard(rollout_id)
        self.carried.discard(rollout_id)
        self.outside.pop(rollout_id, None)

    # --- attempts ------------------------------------------------------------------------------

    def _attempt_sent(self, fact: of.AttemptSent) -> None:
        engine = self.engines.get(fact.engine)
        if engine is None:
            return
        self._time.close(fact.request_id)
        self._time.open(
            AttemptNow(
                request_id=fact.request_id,
                attempt=fact.attempt,
                rollout_id=fact.rollout_id,
                engine=engine,
                phase="re_prefill" if fact.attempt > 1 else "prefill",
                context=fact.tokens,
                since=self.now,
                timed=False,
            )
        )

    def _attempt_ended(self, fact: of.AttemptEnded) -> None:
        self._time.close(fact.request_id)
        self.counters.retries += fact.retried

    # --- engines -------------------------------------------------------------------------------

    def _engine_joined(self, fact: of.EngineJoined) -> None:
        """Count an engine that joins as lost until it is admitted."""
        self._time.enter(self._time.enlist(fact.info), "lost")

    def _engine_admitted(self, fact: of.EngineAdmitted) -> None:
        engine = self.engines.get(fact.engine)
        if engine is not None:
            engine.version = fact.version
            self._time.enter(engine, "generating")

    def _engine_lost(self, fact: of.EngineLost) -> None:
        engine = self.engines.get(fact.engine)
        if engine is not None:
            engine.losses += 1
            engine.released = frozenset()
            self._time.enter(engine, "lost")

    def _engine_mode_changed(self, fact: of.EngineModeChanged) -> None:
        engine = self.engines.get(fact.engine)
        if engine is not None:
            _enter_mode(self._time, engine, fact)

    def _engine_refitted(self, fact: of.EngineRefitted) -> None:
        engine = self.engines.get(fact.engine)
        if engine is not None:
            engine.version = fact.version

    def _update_begun(self, _: of.UpdateBegun) -> None:
        self._trainer.updating = True

    def _update_finished(self, fact: of.UpdateFinished) -> None:
        self._trainer.updating = False
        if not fact.cause:
            self.counters.updates += 1
            self.version = fact.version


def _enter_mode(time: EngineTime, engine: EngineUsage, fact: of.EngineModeChanged) -> None:
    """Enter the state that follows from a change of mode; a lost engine stays lost until it is
    admitted."""
    lost = engine.state == "lost"
    match fact.finish:
        case "pausing":
            engine.drops_kv = fact.pause == "retract"
            if not lost:
                time.enter(engine, "paused")
        case "flushing":
            engine.drops_kv = True
        case "refitting" if engine.state == "paused":
            time.enter(engine, "refitting")
        case "releasing":
            engine.drops_kv = True
            engine.released |= set(fact.tags)
            if not lost:
                time.enter(engine, "asleep")
        case "waking":
            engine.waking = frozenset(fact.tags)
        case "paused":
            if fact.start == "waking":
                engine.released -= engine.waking
            if not lost and not engine.released:
                time.enter(engine, "paused")
        case "running" if fact.start == "continuing" and not lost:
            time.go_on(engine)
        case _:
            pass
