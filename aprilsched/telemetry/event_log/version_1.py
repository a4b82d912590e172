"""Translates event logs of version 1 to facts.

Those logs have the events and commands between the core and its shell. Events and commands do not
say everything that the core knew: whether a context was recomputed, whether a chunk came too late,
when a group was complete. :class:`Protocol1` works this out from their order, and is the only code
that does.

Invariant: the facts of an event and of the commands that answered it are passed on together, as the
core does. What arrives for an attempt that is not open is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.core.messages import facts as of
from aprilsched.core.messages.facts import Fact
from aprilsched.core.state.ledger import Reason

__all__ = ["Protocol1"]

_Answer: TypeAlias = int | Literal["rewards", "verdict"]
"""An open question about a group: the reward of one rollout (its id), the rewards of the group, or
the verdict of the accept function."""

_DELIVERIES = (of.BatchOffered, of.BatchDelivered, of.EvaluationDelivered)


@dataclass(slots=True, kw_only=True)
class _Attempt:
    attempt: int
    rollout_id: int
    engine: str
    context: int
    left: int
    """Number of tokens that it may still generate."""
    pending_prefill: int
    """Number of context tokens that are recomputed before the next chunk."""


@dataclass(slots=True, kw_only=True)
class _Rollout:
    group_id: int
    prompt: int
    sampled: int = 0
    environment: int = 0
    turns: int = 0
    asked: int | None = None
    """Length of the context of the turn that its episode waits for; None if it waits for none."""
    finished: bool = False

    @property
    def length(self) -> int:
        return max(self.sampled + self.environment, self.finished)


@dataclass(slots=True, kw_only=True)
class _Group:
    evaluated: bool
    rollout_ids: list[int]
    answers: set[_Answer] = field(default_factory=set[_Answer])
    """The answers that are open."""
    accepted: bool = False


class Protocol1:
    """Takes the events and commands of a run in order, and passes the facts to `sink`."""

    def __init__(self, sink: Callable[[Sequence[Fact], float], None]) -> None:
        self._sink = sink
        self._facts: list[Fact] = []
        """The facts of the present event, and of the commands that answer it."""
        self._now = 0.0
        self._began = False
        self._rollouts: dict[int, _Rollout] = {}
        self._prior: dict[int, _Rollout] = {}
        """The rollouts that were in flight at the end of the prior run, by id."""
        self._groups: dict[int, _Group] = {}
        self._changed: set[int] = set()
        """Ids of the groups that may be accepted because of the present event."""
        self._dropped: dict[int, str] = {}
        """The reason of each dropped rollout. Its tokens may arrive after it was dropped."""
        self._episodes: set[int] = set()
        self._attempts: dict[int, _Attempt] = {}
        self._failed: dict[int, int] = {}
        """Index in `_facts` of the failed attempt of each rollout."""
        self._modes: dict[str, str] = {}
        """Mode of each connected engine."""
        self._flushed: set[str] = set()
        """Names of the engines whose KV was flushed in their last pause."""
        self._refits: dict[str, bool] = {}
        """The engines that are being refitted, with whether they catch up."""
        self._handlers: dict[type, Callable[[Any], object]] = {
            ev.Opened: self._opened,
            ev.BatchRequested: lambda _: self._tell(of.BatchRequested()),
            ev.BatchWithdrawn: lambda _: self._tell(of.BatchRequestWithdrawn()),
            ev.BatchesAcknowledged: lambda e: self._tell(of.BatchesAcknowledged(batches=e.batches)),
            ev.EvaluationRequested: self._evaluation_requested,
            ev.EvaluationWithdrawn: lambda e: self._tell(
                of.EvaluationWithdrawn(evaluation_id=e.evaluation_id)
            ),
            ev.UpdateRequested: lambda e: self._tell(
                of.UpdateBegun(version=e.version, adapter=e.adapter, external=e.external)
            ),
            ev.UpdateWithdrawn: self._update_withdrawn,
            ev.SleepRequested: lambda e: self._tell(of.SleepRequested(tags=tuple(e.tags))),
            ev.WakeRequested: lambda _: self._tell(of.WakeRequested()),
            ev.PromptsArrived: self._prompts_arrived,
            ev.Progress: self._progress,
            ev.Finished: self._finished,
            ev.Interrupted: self._interrupted,
            ev.Failed: self._attempt_failed,
            ev.TurnRequested: self._turn_requested,
            ev.TurnWithdrawn: self._turn_withdrawn,
            ev.TurnKept: self._turn_kept,
            ev.EpisodeFinished: self._episode_finished,
            ev.Rewarded: self._rewarded,
            ev.GroupRewarded: self._group_rewarded,
            ev.Filtered: self._filtered,
            ev.Paused: lambda e: self._confirm(e.engine, "pausing", "paused"),
            ev.Flushed: self._engine_flushed,
            ev.Refitted: self._refitted,
            ev.Verified: lambda e: self._confirm(e.engine, "verifying", "running"),
            ev.Released: lambda e: self._confirm(e.engine, "releasing", "paused"),
            ev.Woken: lambda e: self._confirm(e.engine, "waking", "paused"),
            ev.Continued: self._continued,
            ev.ControlFailed: self._control_failed,
            ev.EngineJoined: self._engine_joined,
            do.FetchPrompts: lambda c: self._tell(of.PromptsRequested(count=c.count)),
            do.Launch: self._launch,
            do.Send: self._send,
            do.Abort: lambda c: self._tell(of.AttemptCalledBack(request_id=c.request_id)),
            do.Pause: self._pause,
            do.Flush: lambda c: self._enter(c.engine, "flushing"),
            do.Verify: lambda c: self._enter(c.engine, "verifying"),
            do.Refit: self._refit,
            do.Retire: lambda c: self._tell(of.AdapterRetired(engine=c.engine, version=c.version)),
            do.Release: lambda c: self._enter(c.engine, "releasing", tags=tuple(c.tags)),
            do.Wake: lambda c: self._enter(c.engine, "waking", tags=tuple(c.tags)),
            do.Continue: lambda c: self._enter(c.engine, "continuing"),
            do.LoseEngine: self._lose_engine,
            do.AdmitEngine: lambda c: self._tell(
                of.EngineAdmitted(engine=c.engine, version=c.version)
            ),
            do.ReportSlow: lambda c: self._tell(of.EngineSlow(engine=c.engine, cause=c.cause)),
            do.AwaitFleet: lambda c: self._tell(
                of.FleetAwaited(lost=c.lost, waited_s=c.waited_s, left_s=c.left_s)
            ),
            do.GiveUpFleet: lambda c: self._tell(of.FleetGivenUp(lost=c.lost, waited_s=c.waited_s)),
            do.WantUpdate: lambda c: self._tell(
                of.UpdateWanted(
                    engines=c.engines, version=c.version, batch=c.batch, evaluations=c.evaluations
                )
            ),
            do.FinishUpdate: lambda c: self._tell(
                of.UpdateFinished(version=c.version, failed=c.failed, cause=c.cause)
            ),
            do.FinishSleep: lambda c: self._tell(of.SleepBegun() if c.asleep else of.SleepEnded()),
            do.StartEpisode: self._start_episode,
            do.ResolveTurn: self._resolve_turn,
            do.DiscardTokens: self._discard_tokens,
            do.ScoreRollout: lambda c: self._ask(c.rollout.group_id, c.rollout.rollout_id),
            do.ScoreGroup: lambda c: self._ask(c.group.group_id, "rewards"),
            do.Filter: lambda c: self._ask(c.group.group_id, "verdict"),
            do.CancelWork: self._cancel_work,
            do.GiveUp: lambda c: self._tell(of.GroupsFailed(groups=c.groups, cause=c.cause)),
            do.Offer: lambda c: self._tell(
                of.BatchOffered(batch=c.offered.index, version=c.offered.version)
            ),
            do.WithdrawOffer: lambda c: self._tell(of.OfferWithdrawn(batch=c.index)),
            do.Deliver: lambda c: self._deliver(c, again=False),
            do.Redeliver: lambda c: self._deliver(c, again=True),
            do.EndOfPrompts: lambda _: self._tell(of.PromptsEnded()),
            do.DeliverEvaluation: self._deliver_evaluation,
        }

    def event(self, event: ev.Event, now: float) -> None:
        """Take the next event of the run."""
        self.flush()
        self._now = now
        self._take(event)

    def command(self, command: do.Command, now: float) -> None:
        """Take the next command, which answers the last event."""
        if now != self._now:
            self.flush()
            self._now = now
        self._take(command)

    def flush(self) -> None:
        """Pass on the facts of the last event, to which no more commands belong."""
        self._accept()
        facts, self._facts = self._facts, []
        self._failed.clear()
        for part in of.by_delivery(facts):
            self._sink(part, self._now)

    def _take(self, what: object) -> None:
        handler = self._handlers.get(what.__class__)
        if handler is not None:
            handler(what)

    def _tell(self, fact: Fact) -> None:
        self._facts.append(fact)

    # --- the run -------------------------------------------------------------------------------

    def _opened(self, event: ev.Opened) -> None:
        version = max((engine.version or 0 for engine in event.engines), default=0)
        self._tell(of.RunOpened(engines=event.engines, version=version, resumed=self._began))
        if self._began:
            self._attempts.clear()
            self._episodes.clear()
            self._prior, self._rollouts = self._rollouts, {}
            self._groups.clear()
        self._began = True
        self._modes = dict.fromkeys((engine.name for engine in event.engines), "running")
        self._flushed.clear()
        self._refits.clear()

    def _evaluation_requested(self, event: ev.EvaluationRequested) -> None:
        self._tell(
            of.EvaluationRequested(
                evaluation_id=event.evaluation_id,
                prompts=len(event.prompts),
                group_size=event.group_size,
            )
        )

    def _prompts_arrived(self, event: ev.PromptsArrived) -> None:
        self._tell(
            of.PromptsReceived(prompts=len(event.prompts), last=event.last, partial=event.partial)
        )

    def _deliver(self, command: do.Deliver | do.Redeliver, *, again: bool) -> None:
        batch = command.batch
        rollouts = of.delivered_rollouts(batch)
        self._tell(
            of.BatchDelivered(
                batch=batch.index, version=batch.version, rollouts=rollouts, again=again
            )
        )
        self._forget(rollouts)

    def _deliver_evaluation(self, command: do.DeliverEvaluation) -> None:
        rollouts = of.delivered_rollouts(command.batch)
        self._tell(
            of.EvaluationDelivered(
                evaluation_id=command.evaluation_id,
                version=command.batch.version,
                rollouts=rollouts,
            )
        )
        self._forget(rollouts)

    def _forget(self, rollouts: Iterable[of.DeliveredRollout]) -> None:
        # The groups are accepted before they are removed, because in a log of this version the
        # event that completes a batch may also deliver it.
        self._accept()
        for rollout in rollouts:
            self._rollouts.pop(rollout.rollout_id, None)
            self._groups.pop(rollout.group_id, None)

    # --- groups --------------------------------------------------------------------------------

    def _launch(self, command: do.Launch) -> None:
        ids, prompt = command.rollout_ids, len(command.prompt.input_ids)
        restored = None
        for rollout_id in ids:
            self._rollouts[rollout_id] = _Rollout(group_id=command.group_id, prompt=prompt)
        if command.restored is not None:
            restored = self._restore(ids, command.restored.tokens.tolist(), command)
        evaluated = command.evaluation_id is not None
        self._groups[command.group_id] = _Group(evaluated=evaluated, rollout_ids=list(ids))
        self._changed.add(command.group_id)
        self._tell(
            of.GroupLaunched(
                group_id=command.group_id,
                rollout_ids=ids,
                prompt_tokens=prompt,
                evaluation_id=command.evaluation_id,
                restored=restored,
            )
        )

    def _restore(
        self, ids: tuple[int, ...], tokens: list[int], command: do.Launch
    ) -> of.RestoredLengths:
        assert command.restored is not None  # noqa: S101 - the caller has checked
        finished: list[bool] = command.restored.finished.tolist()
        sampled: list[int] = []
        for rollout_id, length, is_finished in zip(ids, tokens, finished, strict=True):
            # An episode's own prompt and the tokens of its tools are not in the command, so they
            # are taken from the prior run.
            rollout = self._prior.pop(rollout_id, self._rollouts[rollout_id])
            self._rollouts[rollout_id] = rollout
            rollout.turns, rollout.asked = 0, None
            rollout.sampled = length - rollout.environment
            rollout.finished = is_finished
            sampled.append(rollout.sampled)
        return of.RestoredLengths(
            tokens=tuple(tokens), sampled=tuple(sampled), finished=tuple(finished)
        )

    def _cancel_work(self, command: do.CancelWork) -> None:
        group_id, reason = command.group_id, Reason(command.reason)
        if reason is Reason.BAD_PROMPT:
            (rollout_id,) = command.rollout_ids
            self._tell(
                of.PromptRefused(rollout_id=rollout_id, group_id=group_id, cause=command.cause)
            )
            return
        place = self._failed.get(-1 if command.culprit is None else command.culprit)
        if place is not None:
            # The request is not sent again after this failure, so the fact must not say so.
            ended = self._facts[place]
            assert isinstance(ended, of.AttemptEnded)  # noqa: S101 - only such facts are noted there
            self._facts[place] = of.AttemptEnded(
                request_id=ended.request_id, outcome=ended.outcome, cause=ended.cause
            )
        rows: list[of.DroppedRollout] = []
        for rollout_id in command.rollout_ids:
            rollout = self._rollouts.pop(rollout_id, None)
            sibling = command.culprit is not None and rollout_id != command.culprit
            self._dropped[rollout_id] = reason.value
            rows.append(
                of.DroppedRollout(
                    rollout_id=rollout_id,
                    reason=(Reason.SIBLING_FAILED if sibling else reason).value,
                    tokens=0 if rollout is None else rollout.sampled,
                )
            )
        self._groups.pop(group_id, None)
        self._tell(
            of.GroupDropped(
                group_id=group_id,
                reason=reason.value,
                cause=command.cause,
                rollouts=tuple(rows),
                culprit=command.culprit,
            )
        )

    def _accept(self) -> None:
        """Accept the changed groups that are complete and have no open question."""
        changed, self._changed = self._changed, set()
        for group_id in sorted(changed):
            group = self._groups.get(group_id)
            if group is None or group.accepted or group.answers:
                continue
            members = [self._rollouts.get(rollout_id) for rollout_id in group.rollout_ids]
            if all(member is not None and member.finished for member in members):
                group.accepted = True
                self._insert(of.GroupAccepted(group_id=group_id))

    def _insert(self, fact: Fact) -> None:
        """Add a fact before the delivery of the same event, because the batch may have the
        group."""
        for place, other in enumerate(self._facts):
            if isinstance(other, _DELIVERIES):
                self._facts.insert(place, fact)
                self._failed.clear()
                return
        self._facts.append(fact)

    def _ask(self, group_id: int, answer: _Answer) -> None:
        match answer:
            case "rewards":
                self._tell(of.RewardRequested(group_id=group_id))
            case "verdict":
                self._tell(of.VerdictRequested(group_id=group_id))
            case rollout_id:
                self._tell(of.RewardRequested(group_id=group_id, rollout_id=rollout_id))
        group = self._groups.get(group_id)
        if group is not None:
            group.answers.add(answer)

    def _answered(self, group_id: int, answer: _Answer) -> None:
        group = self._groups.get(group_id)
        if group is not None:
            group.answers.discard(answer)
            self._changed.add(group_id)

    def _rewarded(self, event: ev.Rewarded) -> None:
        rollout = self._rollouts.get(event.rollout_id)
        if rollout is not None:
            self._score(event.rollout_id, rollout.group_id, event.score.reward)
            self._answered(rollout.group_id, event.rollout_id)

    def _group_rewarded(self, event: ev.GroupRewarded) -> None:
        group = self._groups.get(event.group_id)
        if group is not None:
            for rollout_id, score in zip(group.rollout_ids, event.scores, strict=False):
                self._score(rollout_id, event.group_id, score.reward)
            self._answered(event.group_id, "rewards")

    def _score(self, rollout_id: int, group_id: int, reward: float | None) -> None:
        self._tell(of.RolloutScored(rollout_id=rollout_id, group_id=group_id, reward=reward))

    def _filtered(self, event: ev.Filtered) -> None:
        if event.accepted:
            self._answered(event.group_id, "verdict")

    # --- rollouts ------------------------------------------------------------------------------

    def _start_episode(self, command: do.StartEpisode) -> None:
        self._episodes.add(command.rollout_id)
        self._tell(of.EpisodeStarted(rollout_id=command.rollout_id))

    def _turn_requested(self, event: ev.TurnRequested) -> None:
        rollout = self._rollouts.get(event.rollout_id)
        if rollout is None:
            return
        context = rollout.asked = len(event.input_ids)
        added = 0
        if rollout.turns == 0:
            rollout.prompt = context
        else:
            added = max(0, context - rollout.prompt - rollout.length)
            rollout.environment += added
        self._tell(
            of.TurnBegun(
                rollout_id=event.rollout_id, prompt_tokens=rollout.prompt, environment=added
            )
        )

    def _resolve_turn(self, command: do.ResolveTurn) -> None:
        rollout = self._rollouts.get(command.rollout_id)
        if rollout is not None:
            rollout.turns += not command.withdrawn
            rollout.asked = None
        self._tell(
            of.TurnEnded(
                rollout_id=command.rollout_id,
                tokens=len(command.token_ids),
                finish_reason=command.finish_reason,
                withdrawn=command.withdrawn,
            )
        )

    def _turn_withdrawn(self, event: ev.TurnWithdrawn) -> None:
        rollout = self._rollouts.get(event.rollout_id)
        if rollout is not None and rollout.asked is None:
            # The turn was answered, and the episode never saw the answer.
            rollout.turns -= 1

    def _turn_kept(self, event: ev.TurnKept) -> None:
        rollout = self._rollouts.get(event.rollout_id)
        if rollout is not None:
            rollout.turns += 1

    def _discard_tokens(self, command: do.DiscardTokens) -> None:
        self._tell(
            of.TokensDiscarded(
                rollout_id=command.rollout_id,
                sampled=command.sampled,
                environment=command.environment,
                reason=command.reason,
            )
        )
        rollout = self._rollouts.get(command.rollout_id)
        if rollout is None:
            return
        rollout.sampled -= command.sampled
        rollout.environment -= command.environment
        if rollout.turns and rollout.asked is not None:
            # The environment tokens of the requested turn were counted against the tokens that are
            # discarded now, so they are counted again.
            known = rollout.asked - rollout.prompt - rollout.sampled
            added = max(rollout.environment, known) - rollout.environment
            rollout.environment += added
            if added:
                self._tell(
                    of.TurnBegun(
                        rollout_id=command.rollout_id,
                        prompt_tokens=rollout.prompt,
                        environment=added,
                    )
                )

    def _episode_finished(self, event: ev.EpisodeFinished) -> None:
        rollout = self._rollouts.get(event.rollout_id)
        if rollout is None or rollout.turns <= 0:
            return
        self._finish(event.rollout_id, rollout)
        if event.score is not None and event.score.reward is not None:
            self._score(event.rollout_id, rollout.group_id, event.score.reward)

    def _finish(self, rollout_id: int, rollout: _Rollout) -> None:
        rollout.finished = True
        self._changed.add(rollout.group_id)
        self._tell(of.RolloutFinished(rollout_id=rollout_id, group_id=rollout.group_id))

    # --- attempts ------------------------------------------------------------------------------

    def _send(self, command: do.Send) -> None:
        context = len(command.input_ids)
        rollout = self._rollouts.get(command.rollout_id)
        if rollout is None:
            rollout = self._launched_unsaid(command, context)
        # The context of a request that is sent again has only the tokens that arrived.
        rollout.sampled = context - rollout.prompt - rollout.environment
        self._attempts[command.request_id] = _Attempt(
            attempt=command.attempt,
            rollout_id=command.rollout_id,
            engine=command.engine,
            context=context,
            left=command.sampling.max_new_tokens,
            pending_prefill=context if command.attempt > 1 else 0,
        )
        self._tell(
            of.AttemptSent(
                engine=command.engine,
                request_id=command.request_id,
                attempt=command.attempt,
                rollout_id=command.rollout_id,
                group_id=command.group_id,
                tokens=context,
                max_new_tokens=command.sampling.max_new_tokens,
                adapter=command.adapter,
                cache_version=command.cache_version,
            )
        )

    def _launched_unsaid(self, command: do.Send, context: int) -> _Rollout:
        """Add a rollout whose launch the log does not have, as in the oldest logs."""
        rollout = _Rollout(group_id=command.group_id, prompt=context)
        self._rollouts[command.rollout_id] = rollout
        group = self._groups.setdefault(command.group_id, _Group(evaluated=False, rollout_ids=[]))
        group.rollout_ids.append(command.rollout_id)
        self._tell(
            of.GroupLaunched(
                group_id=command.group_id,
                rollout_ids=(command.rollout_id,),
                prompt_tokens=context,
            )
        )
        return rollout

    def _open(self, request_id: int, attempt: int) -> _Attempt | None:
        found = self._attempts.get(request_id)
        return found if found is not None and found.attempt == attempt else None

    def _progress(self, event: ev.Progress) -> None:
        attempt = self._open(event.request_id, event.attempt)
        if attempt is None:
            return
        tokens = len(event.token_ids)
        again, attempt.pending_prefill = attempt.pending_prefill, 0
        attempt.context += tokens
        attempt.left -= tokens
        rollout = self._rollouts.get(attempt.rollout_id)
        if rollout is not None:
            rollout.sampled += tokens
        self._tell(
            of.TokensReceived(
                request_id=event.request_id,
                tokens=tokens,
                recomputed=again,
                dropped=None if rollout is not None else self._dropped.get(attempt.rollout_id),
            )
        )

    def _end(
        self,
        request_id: int,
        attempt: int,
        outcome: of.Outcome,
        *,
        spans: Sequence[Any] | None = None,
        cause: str = "",
        retried: bool = False,
    ) -> _Attempt | None:
        """Close an attempt, and return it; None if it was not open."""
        found = self._open(request_id, attempt)
        if found is None:
            return None
        del self._attempts[request_id]
        rows = None if spans is None else tuple((s.version, s.start, s.end) for s in spans)
        self._tell(
            of.AttemptEnded(
                request_id=request_id, outcome=outcome, cause=cause, retried=retried, spans=rows
            )
        )
        return found

    def _finished(self, event: ev.Finished) -> None:
        attempt = self._end(event.request_id, event.attempt, "finished", spans=event.spans)
        if attempt is not None:
            self._request_ended(attempt.rollout_id)

    def _interrupted(self, event: ev.Interrupted) -> None:
        self._take_back(
            self._end(event.request_id, event.attempt, "interrupted", spans=event.spans)
        )

    def _attempt_failed(self, event: ev.Failed) -> None:
        found = self._open(event.request_id, event.attempt)
        retried = found is not None and found.rollout_id in self._rollouts
        attempt = self._end(
            event.request_id, event.attempt, "failed", cause=event.cause, retried=retried
        )
        if attempt is not None:
            self._failed[attempt.rollout_id] = len(self._facts) - 1
            self._take_back(attempt)

    def _take_back(self, attempt: _Attempt | None) -> None:
        # If an abort arrives after the last token, the request has ended and is not sent again.
        if attempt is not None and attempt.left <= 0:
            self._request_ended(attempt.rollout_id)

    def _request_ended(self, rollout_id: int) -> None:
        """End a request, and with it its rollout if the rollout has a single turn."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is not None and rollout_id not in self._episodes:
            self._finish(rollout_id, rollout)

    # --- engines -------------------------------------------------------------------------------

    def _enter(
        self, engine: str, mode: str, *, pause: str = "", tags: tuple[str, ...] = ()
    ) -> None:
        start = self._modes.get(engine, "running")
        self._modes[engine] = mode
        self._tell(
            of.EngineModeChanged(engine=engine, start=start, finish=mode, pause=pause, tags=tags)
        )

    def _confirm(self, engine: str, doing: str, done: str) -> bool:
        if self._modes.get(engine) != doing:
            return False
        self._enter(engine, done)
        return True

    def _pause(self, command: do.Pause) -> None:
        self._flushed.discard(command.engine)
        self._enter(command.engine, "pausing", pause=command.mode)

    def _engine_flushed(self, event: ev.Flushed) -> None:
        if self._confirm(event.engine, "flushing", "paused"):
            self._flushed.add(event.engine)

    def _continued(self, event: ev.Continued) -> None:
        if not self._confirm(event.engine, "continuing", "running"):
            return
        if event.engine in self._flushed:
            for attempt in self._attempts.values():
                if attempt.engine == event.engine:
                    attempt.pending_prefill = attempt.context

    def _refit(self, command: do.Refit) -> None:
        self._tell(
            of.RefitBegun(
                version=command.version,
                engines=tuple(command.engines),
                adapter=command.adapter,
                catch_up=command.catch_up,
            )
        )
        for engine in command.engines:
            self._refits[engine] = command.catch_up
            if not (command.adapter or command.external):
                self._enter(engine, "refitting")

    def _update_withdrawn(self, event: ev.UpdateWithdrawn) -> None:
        # An update goes on if its weights are being loaded already.
        if all(self._refits.values()):
            self._tell(of.UpdateWithdrawn(version=event.version))

    def _refitted(self, event: ev.Refitted) -> None:
        if event.engine not in self._modes or self._refits.get(event.engine) != event.catch_up:
            return
        del self._refits[event.engine]
        self._tell(
            of.EngineRefitted(
                engine=event.engine,
                version=event.version,
                cause=event.cause,
                catch_up=event.catch_up,
            )
        )
        self._confirm(event.engine, "refitting", "paused")

    def _control_failed(self, event: ev.ControlFailed) -> None:
        if event.engine in self._modes:
            self._tell(
                of.ControlCallFailed(engine=event.engine, call=event.call, cause=event.cause)
            )

    def _engine_joined(self, event: ev.EngineJoined) -> None:
        name = event.info.name
        if name not in self._modes:
            self._modes[name] = "running"
            self._flushed.discard(name)
            self._tell(of.EngineJoined(info=event.info))

    def _lose_engine(self, command: do.LoseEngine) -> None:
        self._tell(
            of.EngineLost(
                engine=command.engine,
                cause=command.cause,
                standby=command.standby,
                last=command.last,
            )
        )
        for request_id, attempt in list(self._attempts.items()):
            if attempt.engine == command.engine:
                self._end(request_id, attempt.attempt, "engine_lost")
                self._take_back(attempt)
        if not command.standby:
            self._modes.pop(command.engine, None)
            self._refits.pop(command.engine, None)
