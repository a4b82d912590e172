"""Drives the core without a loop: keeps the open commands, and answers them on request of a test.

A test feeds events and looks at the commands. The driver remembers which commands are open, so that
an answer needs no ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from aprilsched.config import SchedulerConfig
from aprilsched.errors import RunEnded
from aprilsched.kernel.core.config import Caller, RewardScope
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.messages.facts import (
    BatchDelivered,
    Fact,
    GroupLaunched,
    MemberLaunched,
    by_delivery,
)
from aprilsched.kernel.core.scheduler import Scheduler
from aprilsched.kernel.core.state.engine_control import Mode
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.core.steps.snapshot import take_changes
from aprilsched.kernel.store import Store
from aprilsched.observe.figures.rollout_time import RolloutTime
from aprilsched.observe.figures.run_state import RunState
from aprilsched.types import Batch, Int32Array, Prompt, RefusedPrompt, SamplingParams, VersionSpan
from tests.support.dialogues import Dialogues
from tests.support.facts import ABLE

Key = tuple[int, int]
Control = do.Pause | do.Flush | do.Continue | do.Release | do.Wake


KEPT: dict[type, str] = {
    do.Send: "sent",
    do.Plan: "plans",
    do.ScoreRollout: "scores",
    do.ScoreGroup: "group_scores",
    do.Filter: "verdicts",
    do.StartEpisode: "episodes_started",
    do.ResolveTurn: "resolved",
    do.Verify: "verifications",
    do.GiveUp: "given_up",
    facts.RefitBegun: "refits",
    facts.PromptRefused: "refused",
    facts.PromptsRequested: "fetches",
    facts.UpdateFinished: "updates",
    facts.AdapterRetired: "retired",
    facts.EngineAdmitted: "admitted",
    facts.EngineLost: "lost",
    facts.FleetAwaited: "awaited",
    facts.FleetGivenUp: "fleets_given_up",
    facts.UpdateWanted: "updates_wanted",
    **dict.fromkeys((do.Pause, do.Flush, do.Continue, do.Release, do.Wake), "controls"),
    **dict.fromkeys((facts.SleepBegun, facts.SleepEnded), "sleeps"),
}
"""Where the driver keeps each command or fact."""


def prompts(
    count: int,
    *,
    start: int = 0,
    sizes: Sequence[int | None] = (None,),
    keys: Sequence[str | int | None] = (None,),
) -> tuple[Prompt, ...]:
    """Prompts that are all different, with the group sizes `sizes` and the keys `keys` in turn."""
    return tuple(
        Prompt(
            input_ids=np.array([i, 7], dtype=np.int32),
            group_size=sizes[i % len(sizes)],
            key=keys[i % len(keys)],
        )
        for i in range(start, start + count)
    )


def config(**changes: object) -> SchedulerConfig:
    """A configuration with small asynchronous batches and an over-provisioning of 2."""
    values: dict[str, object] = {
        "batch_groups": 2,
        "group_size": 2,
        "over_provision": 2.0,
        "pace": "asynchronous",
    }
    return SchedulerConfig(**{**values, **changes})  # type: ignore[arg-type]


def names(commands: Sequence[do.Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


def tokens(count: int, first: int = 100) -> Int32Array:
    return np.arange(first, first + count, dtype=np.int32)


def span(version: int, end: int, start: int = 0) -> VersionSpan:
    return VersionSpan(version=version, start=start, end=end)


@dataclass
class Driver:
    """A scheduler and its open commands."""

    config: SchedulerConfig
    reward_scope: RewardScope = "none"
    accepts: bool = False
    episodes: bool = False
    engines: tuple[str, ...] = ("a", "b")
    supply: int = 10_000
    version: int = 0
    holds_stragglers: bool = True
    keeps_weights: bool = False
    store: Store | None = None
    """A store that saves before each batch is offered, and at :meth:`save`; None for no store."""
    restarts: int = 0
    journal: bool = False
    """Whether the journal is active without a store, for tests that take snapshots."""
    now: float = 0.0
    sends: dict[Key, do.Send] = field(default_factory=dict[Key, do.Send])
    aborts: dict[Key, do.Abort] = field(default_factory=dict[Key, do.Abort])
    controls: list[Control] = field(default_factory=list[Control])
    plans: list[do.Plan] = field(default_factory=list[do.Plan])
    refits: list[facts.RefitBegun] = field(default_factory=list[facts.RefitBegun])
    scores: list[do.ScoreRollout] = field(default_factory=list[do.ScoreRollout])
    group_scores: list[do.ScoreGroup] = field(default_factory=list[do.ScoreGroup])
    verdicts: list[do.Filter] = field(default_factory=list[do.Filter])
    episodes_started: list[do.StartEpisode] = field(default_factory=list[do.StartEpisode])
    dialogues: Dialogues = field(default_factory=Dialogues)
    resolved: list[do.ResolveTurn] = field(default_factory=list[do.ResolveTurn])
    refused: list[facts.PromptRefused] = field(default_factory=list[facts.PromptRefused])
    fetches: list[facts.PromptsRequested] = field(default_factory=list[facts.PromptsRequested])
    takes: bool = True
    """Whether the trainer takes each batch as soon as it is offered."""
    offers: list[Batch] = field(default_factory=list[Batch])
    withdrawn: list[int] = field(default_factory=list[int])
    batches: list[Batch] = field(default_factory=list[Batch])
    redelivered: list[Batch] = field(default_factory=list[Batch])
    evaluations: dict[int, Batch] = field(default_factory=dict[int, Batch])
    kept_evaluations: dict[int, Batch] = field(default_factory=dict[int, Batch])
    """Evaluations that were delivered before the last save."""
    updates: list[facts.UpdateFinished] = field(default_factory=list[facts.UpdateFinished])
    retired: list[facts.AdapterRetired] = field(default_factory=list[facts.AdapterRetired])
    sleeps: list[facts.SleepBegun | facts.SleepEnded] = field(
        default_factory=list[facts.SleepBegun | facts.SleepEnded]
    )
    admitted: list[facts.EngineAdmitted] = field(default_factory=list[facts.EngineAdmitted])
    lost: list[facts.EngineLost] = field(default_factory=list[facts.EngineLost])
    gone: list[str] = field(default_factory=list[str])
    """Lost engines that have not come back."""
    awaited: list[facts.FleetAwaited] = field(default_factory=list[facts.FleetAwaited])
    fleets_given_up: list[facts.FleetGivenUp] = field(default_factory=list[facts.FleetGivenUp])
    updates_wanted: list[facts.UpdateWanted] = field(default_factory=list[facts.UpdateWanted])
    given_up: list[do.GiveUp] = field(default_factory=list[do.GiveUp])
    ended: bool = False
    end: RunEnded | None = None
    """The error of the end of the prompts."""
    auto_prompts: bool = True
    auto_verify: bool = True
    """Whether engines answer at once that they have the right version."""
    verifications: list[do.Verify] = field(default_factory=list[do.Verify])
    given: int = 0
    sizes: Sequence[int | None] = (None,)
    """Group sizes of the source's prompts, in turn."""
    keys: Sequence[str | int | None] = (None,)
    """Keys of the source's prompts, in turn."""
    kv_tokens: int | None = None
    """Size of each engine's KV pool."""
    caches_contexts: bool = False
    """Whether engines keep the KV of sessions at their tools."""
    stores_kv: bool = False
    """Whether cached KV may survive the engines' flush."""
    bad: bool = False
    """Whether some prompts of the source cannot be used."""
    dries: bool = False
    """Whether the source gives half of the requested prompts; give_pending_prompts() gives the
    rest."""
    pending_prompts: list[int] = field(default_factory=list[int])
    sent: list[do.Send] = field(default_factory=list[do.Send])
    run: RunState = field(default_factory=RunState)
    """State from the facts of the core."""
    clocks: RolloutTime = field(default_factory=RolloutTime)
    """The time of the rollouts in flight, from the same facts."""
    launched: dict[int, float] = field(default_factory=dict[int, float])
    """When each rollout was launched, or launched again after a restart."""
    unique: int | None = None
    """The next sampled token, where all are to be different; None where each chunk has the same."""
    hears: Callable[[Sequence[Fact]], object] | None = None
    """A function that is given the facts too."""

    def __post_init__(self) -> None:
        self.core = self._scheduler()
        self.state.in_flight.journal.active = self.journal or self.store is not None
        infos = tuple(self.info(name) for name in self.engines)
        self.feed(ev.Opened(engines=infos))

    def _scheduler(self) -> Scheduler:
        caller = Caller(
            reward_scope=self.reward_scope, accepts=self.accepts, episodes=self.episodes
        )
        return Scheduler(self.config, caller)

    def info(self, name: str, version: int | None = -1) -> ev.EngineInfo:
        """Description of an engine; by default it has the initial version of the driver."""
        return ev.EngineInfo(
            name=name,
            version=self.version if version == -1 else version,
            able=replace(
                ABLE,
                release_while_paused=self.holds_stragglers,
                keeps_released_weights=self.keeps_weights,
                kv_tokens=self.kv_tokens,
                caches_contexts=self.caches_contexts,
                kv_tier="keyed" if self.stores_kv else "none",
            ),
        )

    @property
    def state(self) -> SchedulerState:
        return self.core.state

    def feed(self, event: ev.Event) -> list[do.Command]:
        """Handle one event, check the invariants, and remember the commands."""
        self.now += 0.001
        offer = self.state.delivery.offer
        commands = self.core.handle(event, self.now)
        self.core.check_invariants()
        for part in by_delivery(self.core.facts):
            if offer is not None and any(isinstance(f, BatchDelivered) and f.again for f in part):
                self.redelivered.append(offer.batch)
            self.run.on_facts(part, self.now)
            self.clocks.on_facts(part, self.now)
            for fact in part:
                if isinstance(fact, GroupLaunched):
                    self.launched.update(dict.fromkeys(fact.rollout_ids, self.now))
                elif isinstance(fact, MemberLaunched):
                    self.launched[fact.rollout_id] = self.now
                elif isinstance(fact, BatchDelivered):
                    self.clocks.take(fact.rollouts, self.now)
            if self.hears is not None:
                self.hears(part)
        if any(isinstance(command, do.Offer) for command in commands):
            self.save()
        for command in commands:
            self._note(command)
        if self.takes and self.state.delivery.offer is not None:
            commands = [*commands, *self.take()]
        while self.auto_prompts and self.fetches:
            self.give_prompts()
        while self.auto_verify and self.verifications:
            self.verify()
        return commands

    def take(self) -> list[do.Command]:
        """The trainer takes the offered batch."""
        assert self.state.delivery.offer is not None
        return self.feed(ev.BatchTaken(index=self.state.delivery.offer.batch.index))

    def _note(self, command: do.Command) -> None:
        kept = KEPT.get(type(command))
        if kept is not None:
            getattr(self, kept).append(command)
        match command:
            case do.Send():
                key = (command.request_id, command.attempt)
                assert self.core.state.fleet.control.runs(command.engine)
                asked = self.dialogues.asking.get(command.rollout_id)
                if asked is not None:
                    np.testing.assert_array_equal(command.input_ids[: len(asked)], asked)
                self.sends[key] = command
            case do.Abort():
                self.aborts[command.request_id, command.attempt] = command
            case facts.RefitBegun():
                if not command.adapter and not command.external:
                    modes = {c.name: c.mode for c in self.core.state.fleet.control.all()}
                    assert all(modes[name] is Mode.REFITTING for name in command.engines)
            case do.StartEpisode():
                self.dialogues.start(command)
            case do.ResolveTurn():
                if command.withdrawn or command.rollout_id in self.dialogues.asking:
                    self.dialogues.answer(command)
            case facts.GroupDropped():
                self.dialogues.cancel(command)
            case do.Offer():
                self.offers.append(command.offered)
            case do.WithdrawOffer():
                self.withdrawn.append(command.index)
            case do.Deliver():
                self.batches.append(command.batch)
            case do.DeliverEvaluation():
                self.evaluations[command.evaluation_id] = command.batch
            case facts.EngineLost():
                self._lose(command)
            case do.EndOfPrompts():
                self.ended, self.end = True, command.error
            case facts.EngineSlow() | facts.EngineBusy():
                pass
            case _:
                assert kept is not None, f"the driver does not handle {command}"

    def _lose(self, loss: facts.EngineLost) -> None:
        """What was open on an engine that is lost needs no answer."""
        for key in [k for k, s in self.sends.items() if s.engine == loss.engine]:
            del self.sends[key]
            self.aborts.pop(key, None)
        if loss.standby:
            return
        self.gone.append(loss.engine)
        self.controls = [c for c in self.controls if c.engine != loss.engine]
        self.verifications = [v for v in self.verifications if v.engine != loss.engine]
        self.refits = [r for r in self.refits if not (r.catch_up and loss.engine in r.engines)]

    # --- durability ----------------------------------------------------------------------------

    def save(self) -> None:
        """Save a snapshot of the changes in the store, if there is one."""
        if self.store is not None:
            self.store.save(take_changes(self.state), durable=True)
            self.kept_evaluations = dict(self.evaluations)
            self.dialogues.unseen.clear()

    def restart(self, versions: Sequence[int | None] = ()) -> None:
        """The process dies, and a new one continues with the store's content.

        The engines then have `versions`; engines without one have the saved version.
        """
        assert self.store is not None
        self.restarts += 1
        saved = self.store.open()
        for open_things in (self.sends, self.aborts, self.controls, self.plans, self.refits):
            open_things.clear()
        self.verifications.clear()
        self.pending_prompts.clear()
        for open_things in (self.scores, self.group_scores, self.verdicts, self.fetches):
            open_things.clear()
        self.episodes_started.clear()
        self.resolved.clear()
        self.dialogues.clear()
        self.gone.clear()
        self.ended = False
        self.evaluations = dict(self.kept_evaluations)
        self.core = self._scheduler()
        self.state.in_flight.journal.active = True
        self.given = 0
        if saved is not None:
            self.core.restore(saved)
            self.given = saved.run.cursor
            self.version = saved.run.version
        has = [*versions, *[self.version] * len(self.engines)]
        infos = tuple(self.info(e, v) for e, v in zip(self.engines, has, strict=False))
        if saved is None:
            infos = tuple(self.info(name) for name in self.engines)
        self.feed(ev.Opened(engines=infos))

    # --- answers -------------------------------------------------------------------------------

    def give_prompts(self) -> None:
        count = self.fetches.pop(0).count
        if self.dries:
            self.pending_prompts.append(count)
            self.give_pending_prompts(count // 2)
        else:
            self._give(count, partial=False)

    def give_pending_prompts(self, count: int) -> None:
        """A source that ran dry gives `count` more of the requested prompts."""
        pending = self.pending_prompts.pop(0)
        if count < pending:
            self.pending_prompts.append(pending - count)
        self._give(min(count, pending), partial=count < pending)

    def _give(self, count: int, *, partial: bool) -> None:
        count = min(count, self.supply - self.given)
        given: list[Prompt | RefusedPrompt] = list(
            prompts(count, start=self.given, sizes=self.sizes, keys=self.keys)
        )
        if self.bad:
            for place in range(count):
                if (self.given + place) % 5 == 3:
                    given[place] = RefusedPrompt(cause="bad")
        self.given += count
        last = self.given >= self.supply
        if last:
            self.pending_prompts.clear()
        self.feed(ev.PromptsArrived(prompts=tuple(given), last=last, partial=partial and not last))

    def verify(self, version: int | None = -1) -> None:
        """The oldest open Verify is answered with `version`, by default the right one."""
        command = self.verifications.pop(0)
        control = self.state.fleet.control.of(command.engine)
        has = self.state.weights.base if control is None else control.base
        text = has if version == -1 else version
        self.feed(ev.Verified(engine=command.engine, version=text))

    def progress(self, key: Key, count: int, *, first: int = 100, label: int | None = None) -> None:
        if self.unique is not None:
            first, self.unique = self.unique, self.unique + count
        self.feed(
            ev.Progress(
                request_id=key[0],
                attempt=key[1],
                token_ids=tokens(count, first),
                logprobs=np.full(count, -1.0, dtype=np.float32),
                label=label,
            )
        )

    def finish(
        self, key: Key, count: int = 3, *, spans: tuple[VersionSpan, ...] | None = None
    ) -> None:
        """`count` tokens arrive and the attempt ends."""
        if count:
            self.progress(key, count)
        if key not in self.sends:
            return  # the tokens showed a wrong version, so the engine was lost
        del self.sends[key]
        self.aborts.pop(key, None)
        self.feed(ev.Finished(request_id=key[0], attempt=key[1], reason="stop", spans=spans))

    def interrupt(
        self,
        key: Key,
        *,
        spans: tuple[VersionSpan, ...] | None = None,
        busy: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        del self.sends[key]
        self.aborts.pop(key, None)
        self.feed(
            ev.Interrupted(
                request_id=key[0],
                attempt=key[1],
                spans=spans,
                busy=busy,
                retry_after_s=retry_after_s,
            )
        )

    def fail(
        self, key: Key, cause: str = "broken", *, final: bool = False, answered: bool = False
    ) -> None:
        del self.sends[key]
        self.aborts.pop(key, None)
        request, attempt = key
        self.feed(
            ev.Failed(
                request_id=request, attempt=attempt, cause=cause, final=final, answered=answered
            )
        )

    def answer_control(self) -> Control:
        """The oldest open control call succeeds."""
        command = self.controls.pop(0)
        match command:
            case do.Pause():
                self.feed(ev.Paused(engine=command.engine))
            case do.Flush():
                self.feed(ev.Flushed(engine=command.engine))
            case do.Continue():
                self.feed(ev.Continued(engine=command.engine))
            case do.Release():
                self.feed(ev.Released(engine=command.engine, tags=command.tags))
            case do.Wake():
                self.feed(ev.Woken(engine=command.engine, tags=command.tags))
        return command

    def answer_refit(self, **failures: tuple[int | None, str]) -> None:
        """Every engine of the oldest refit takes the version, except those in `failures`."""
        refit = self.refits.pop(0)
        for name in refit.engines:
            version, cause = failures.get(name, (refit.version, ""))
            self.feed(
                ev.Refitted(
                    engine=name,
                    version=version,
                    cause=cause,
                    catch_up=refit.catch_up,
                    followed=refit.followed,
                )
            )

    def settle(self) -> None:
        """Answer control calls, aborts and refits until there are none."""
        while self.controls or self.aborts or self.refits or self.verifications:
            if self.controls:
                self.answer_control()
            elif self.verifications:
                self.verify()
            elif self.aborts:
                self.interrupt(next(iter(self.aborts)))
            else:
                self.answer_refit()

    def come_back(self, engine: str, version: int | None = -1) -> None:
        """A lost engine is restarted and joins again."""
        self.gone.remove(engine)
        self.feed(ev.EngineJoined(info=self.info(engine, version)))

    def settle_controls(self) -> None:
        while self.controls:
            self.answer_control()

    def request_batch(self) -> None:
        self.feed(ev.BatchRequested())
        self.settle()

    def evaluate(
        self, count: int = 1, *, start: int = 0, group_size: int = 1, evaluation_id: int = 1
    ) -> None:
        """Request an evaluation of `count` prompts."""
        asked = prompts(count, start=start)
        self.feed(
            ev.EvaluationRequested(
                evaluation_id=evaluation_id, prompts=asked, group_size=group_size
            )
        )

    def update(self, *, adapter: bool = False, republishable: bool = False) -> None:
        version = self.state.weights.versions.trainer + 1
        self.feed(ev.UpdateRequested(version=version, adapter=adapter, republishable=republishable))
        self.settle()

    # --- looking -------------------------------------------------------------------------------

    def attempts(self, group_id: int | None = None) -> list[Key]:
        """Open attempts (of one group), oldest first."""
        return [key for key, send in self.sends.items() if group_id in (None, send.group_id)]

    def on(self, engine: str) -> list[Key]:
        """Open attempts on an engine, oldest first."""
        return [key for key, send in self.sends.items() if send.engine == engine]

    def group_ids(self) -> list[int]:
        """Groups with open attempts, oldest first."""
        return sorted({send.group_id for send in self.sends.values()})

    def finish_group(self, group_id: int, count: int = 3) -> None:
        self.finish_each(self.attempts(group_id), count)

    def finish_groups(self, group_ids: Iterable[int], count: int = 3) -> None:
        for group_id in group_ids:
            self.finish_group(group_id, count)

    def finish_each(
        self, keys: Iterable[Key], count: int = 3, *, spans: tuple[VersionSpan, ...] | None = None
    ) -> None:
        for key in keys:
            self.finish(key, count, spans=spans)

    def progress_each(self, keys: Iterable[Key], count: int, *, first: int = 100) -> None:
        for key in keys:
            self.progress(key, count, first=first)

    def finish_batch(self, count: int = 3) -> None:
        """Finish the oldest attempts until one more batch is delivered."""
        before = len(self.batches)
        while len(self.batches) == before:
            assert self.sends, "the trainer waits and nothing runs"
            self.finish(self.attempts()[0], count)


def sampling(max_new_tokens: int = 64) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens)
