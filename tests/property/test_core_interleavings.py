"""Tests the core under random orders of all events, with its invariants after each event.

The state machine knows only what a shell knows: the open attempts, control calls and callbacks. At
the end all rollouts finish, and the conservation law must hold exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from aprilsched.config import (
    Dispatch,
    Health,
    RefillRule,
    Retries,
    Samples,
    SchedulerConfig,
    Staleness,
    Stop,
    StopUnit,
    Tokens,
)
from aprilsched.kernel.core.config import MemberRule, PaceRule, RewardScope
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.policies.length_buckets import LengthBuckets
from aprilsched.kernel.core.policies.placement import Placement
from aprilsched.kernel.core.policies.pool import Pool
from aprilsched.kernel.core.policies.refill import Refill
from aprilsched.kernel.core.policies.schedule import Pace, Schedule
from aprilsched.kernel.core.policies.staleness import StalenessRule
from aprilsched.kernel.core.policies.stop import SingleSamples
from aprilsched.kernel.core.policies.straggler import BEHAVIOURS, Behaviour, StragglerRule
from aprilsched.kernel.core.policies.wave import Wave
from aprilsched.kernel.core.state.admission import MAX_RETRY_AFTER_S
from aprilsched.kernel.core.state.records import GENERATING
from aprilsched.kernel.store import MemoryStore
from aprilsched.types import (
    NO_VERSION,
    Batch,
    EpisodeWait,
    Group,
    Rollout,
    Sample,
    SamplingParams,
    Score,
    VersionSpan,
)
from tests.property.conftest import RecordSteps
from tests.support.driver import Driver, Key, prompts

pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")


SAMPLED = 1_000_000
"""The first sampled token; those of prompts and environments are smaller."""
OPENED_AT = 0.001
"""By the driver's clock."""


OWN_BEHAVIOURS = (
    Behaviour(
        name="abort and keep", kv=("keep",), waits_inside=False, called_back="always",
        deferrable=True,
    ),
    Behaviour(name="wait for sleep", kv=("apart", "recompute"), waits_inside=False),
    Behaviour(name="never back", kv=("keep",), waits_inside=True, called_back="never"),
)  # fmt: skip
"""Straggler rules that the package does not have."""


class Interleavings(RuleBasedStateMachine):
    driver: Driver
    saves = False
    streamed = False
    """Whether a batch was asked for group by group."""
    sized = 0
    """Number of batches whose size is checked."""

    @initialize(
        straggler=st.sampled_from([*BEHAVIOURS, *OWN_BEHAVIOURS]),
        pace=st.sampled_from(["synchronous", "asynchronous", "auto"]),
        refill=st.sampled_from(
            [
                "wave",
                Pool(together=2),
                LengthBuckets(store=2.5),
                LengthBuckets(store=2.5, probe_after=0.5),
                "tail",
            ]
        ),
        placement=st.sampled_from(["prefix", "spread"]),
        rule_=st.sampled_from(["mask", "evict", "finish", "restart"]),
        bound=st.sampled_from([None, 0, 1, 3]),
        ratio=st.sampled_from([1.0, 1.5, 2.5]),
        scope=st.sampled_from(["none", "rollout", "group"]),
        accepts=st.booleans(),
        supply=st.sampled_from([3, 17, 10_000]),
        holds=st.booleans(),
        keeps=st.booleans(),
        stores=st.booleans(),
        adapters=st.booleans(),
        episodes=st.booleans(),
        automatic=st.booleans(),
        takes=st.booleans(),
        bad=st.booleans(),
        dries=st.booleans(),
        sizes=st.sampled_from([(None,), (None,), (1, None, 3), (5, 1)]),
        stop=st.sampled_from(["groups", Samples(5), Tokens(3), Tokens(15)]),
        keys=st.sampled_from([(None,), (1, "a", None)]),
        pool=st.sampled_from([None, 12, 40]),
        rolling=st.sampled_from([False, False, True]),
        member=st.sampled_from(["again", "again", "shrink", "drop_group"]),
        siblings=st.sampled_from([None, None, 1, 2]),
    )
    def open_run(
        self,
        straggler: StragglerRule | Behaviour,
        pace: PaceRule,
        refill: RefillRule | Refill,
        placement: Placement,
        rule_: StalenessRule,
        bound: int | None,
        ratio: float,
        scope: RewardScope,
        accepts: bool,
        supply: int,
        holds: bool,
        keeps: bool,
        stores: bool,
        adapters: bool,
        episodes: bool,
        automatic: bool,
        takes: bool,
        bad: bool,
        dries: bool,
        sizes: tuple[int | None, ...],
        stop: StopUnit | Stop,
        keys: tuple[str | int | None, ...],
        pool: int | None,
        rolling: bool,
        member: MemberRule,
        siblings: int | None,
    ) -> None:
        if siblings is not None:
            scope = "rollout" if scope == "group" else scope
            refill = refill if isinstance(refill, Pool) else "wave"
        if rolling:
            pace, straggler, adapters, automatic = "asynchronous", "run", False, False
        if pace == "asynchronous" or straggler not in ("retract", "abort"):
            refill = refill if refill in ("wave", Pool(together=2)) else Pool(together=2)
        behaviour = straggler if isinstance(straggler, Behaviour) else BEHAVIOURS[straggler]
        runs_out = behaviour.called_back == "never"
        tail = refill == "tail"
        if rule_ == "restart" and (automatic or not tail):
            # The rule "restart" is only accepted with settings like these.
            automatic, ratio = False, 1.0
            pace = "synchronous" if pace == "auto" else pace
            if isinstance(refill, Pool) or pace == "asynchronous":
                rule_ = "mask"
        config = SchedulerConfig(
            batch_groups=2,
            group_size=2 if siblings is None else 3,
            delivery="groups" if siblings is None else "samples",
            siblings=siblings,
            stop=stop,
            over_provision="auto" if automatic or pace == "auto" else ratio,
            straggler=straggler,
            pace=pace,
            refit="rolling" if rolling else "together",
            refill=refill,
            dispatch=Dispatch(placement=placement, migrate=pool is not None and not runs_out),
            max_staleness=Staleness(bound, rule="mask" if bound is None else rule_),
            # Being given up is an end of its own, tested elsewhere.
            retries=Retries(
                attempts=2,
                interruptions=4,
                failed_groups=10**9,
                member=member,
                smallest_group=1,
            ),
            health=Health(stall_s=20, fleet_wait_s=60),
            sampling=SamplingParams(max_new_tokens=1_000_000),
        )
        self.driver = Driver(
            config,
            reward_scope=scope,
            accepts=accepts,
            episodes=episodes,
            supply=supply,
            bad=bad,
            sizes=sizes,
            keys=keys,
            kv_tokens=pool,
            caches_contexts=pool is not None,
            # What is dry then is not dry at the same place after a restart.
            dries=dries and not self.saves,
            engines=("a", "b", "c"),
            holds_stragglers=holds,
            keeps_weights=keeps,
            stores_kv=stores,
            store=MemoryStore() if self.saves else None,
            takes=takes,
        )
        self.driver.auto_verify = False
        self.driver.unique = SAMPLED
        self.adapters = adapters
        self.evaluations = 0

    # --- the trainer ---------------------------------------------------------------------------

    @rule(streamed=st.booleans())
    def request_batch(self, streamed: bool) -> None:
        delivery = self.driver.state.delivery
        if not delivery.takes_parts or delivery.by_group:
            self.streamed = self.streamed or streamed
            self.driver.feed(ev.BatchRequested(streamed=streamed))

    @rule()
    def withdraw(self) -> None:
        self.driver.feed(ev.BatchWithdrawn())

    @precondition(lambda self: self.driver.state.delivery.offer is not None)
    @rule()
    def take(self) -> None:
        self.driver.take()

    @precondition(lambda self: not self.driver.state.evaluations.running)
    @rule(count=st.integers(1, 3))
    def evaluate(self, count: int) -> None:
        if self.driver.state.fleet.sleep is None:
            self.evaluations += 1
            self.driver.feed(
                ev.EvaluationRequested(
                    evaluation_id=self.evaluations,
                    prompts=prompts(count, sizes=self.driver.sizes),
                    group_size=2,
                )
            )

    @precondition(lambda self: self.driver.state.evaluations.running)
    @rule()
    def withdraw_evaluation(self) -> None:
        number = next(iter(self.driver.state.evaluations.running))
        self.driver.feed(ev.EvaluationWithdrawn(evaluation_id=number))

    @rule(republishable=st.booleans(), whole=st.booleans())
    def update(self, republishable: bool, whole: bool) -> None:
        sleep = self.driver.state.fleet.sleep
        if self.driver.state.weights.update is None and (sleep is None or sleep.asleep):
            version = self.driver.state.weights.versions.trainer + 1
            self.driver.feed(
                ev.UpdateRequested(
                    version=version,
                    # No adapter is loaded while the memory of the weights is released.
                    adapter=self.adapters and sleep is None and not whole,
                    republishable=republishable,
                )
            )

    @rule()
    def withdraw_update(self) -> None:
        update = self.driver.state.weights.update
        if update is not None:
            self.driver.feed(ev.UpdateWithdrawn(version=update.version))

    @rule(tags=st.sampled_from([("kv_cache",), ("weights",), ("kv_cache", "weights")]))
    def sleep(self, tags: tuple[str, ...]) -> None:
        state = self.driver.state
        if state.fleet.sleep is None and state.weights.update is None and not self.adapters:
            self.driver.feed(ev.SleepRequested(tags=tags))

    @rule()
    def wake(self) -> None:
        sleep = self.driver.state.fleet.sleep
        if sleep is not None and not sleep.waking:
            self.driver.feed(ev.WakeRequested())

    @rule(ends=st.booleans())
    def hold(self, ends: bool) -> None:
        self.driver.feed(ev.HoldChanged(held=not ends))

    @precondition(lambda self: self.driver.state.in_flight.groups)
    @rule(choice=st.integers(0, 99))
    def withdraw_group(self, choice: int) -> None:
        """Also a group that is complete, offered, or of an evaluation."""
        groups = list(self.driver.state.in_flight.groups)
        group_id = groups[choice % len(groups)]
        self.driver.feed(ev.GroupWithdrawn(group_id=group_id, cause="the client has left"))

    @precondition(lambda self: self.driver.config.automatic)
    @rule(choice=st.integers(0, 99), pace=st.sampled_from([None, "synchronous", "asynchronous"]))
    def planned(self, choice: int, pace: Pace | None) -> None:
        """At any time, and also a schedule that is not possible, which changes nothing."""
        self.driver.plans.clear()
        before = self.driver.state.plan.schedule
        refills: list[Refill | None] = [None, Wave(), Pool(together=1)]
        if self.driver.config.may_defer:
            refills += [LengthBuckets(store=2.5), LengthBuckets(store=2.5, probe_after=0.5)] * 2
        refill = refills[choice % len(refills)]
        ratio = 1.0 + choice % 3 / 2
        if refill is None:
            self.driver.feed(ev.Planned(schedule=None))
            return
        schedule = Schedule(over_provision=ratio, refill=refill, pace=pace)
        self.driver.feed(ev.Planned(schedule=schedule))
        config, state = self.driver.config, self.driver.state
        chosen = pace or (before.pace if config.pace == "auto" else config.pace)
        possible = config.pace in ("auto", chosen) and not (
            chosen == "asynchronous" and (refill.defers or state.fleet.memory_lent_to_trainer)
        )
        if state.staleness.rule == "restart":
            possible = possible and chosen == "synchronous" and config.settles(schedule)
        expected = schedule if config.pace != "auto" else replace(schedule, pace=chosen)
        assert state.plan.schedule == (expected if possible else before)
        assert state.asynchronous == ((state.plan.schedule.pace or config.pace) == "asynchronous")

    @precondition(lambda self: self.driver.pending_prompts)
    @rule(count=st.integers(0, 9))
    def prompts_come(self, count: int) -> None:
        self.driver.give_pending_prompts(count)

    # --- episodes ------------------------------------------------------------------------------

    @precondition(lambda self: self.driver.dialogues.thinking)
    @rule(choice=st.integers(0, 99))
    def ask(self, choice: int) -> None:
        thinking = list(self.driver.dialogues.thinking)
        rollout_id = thinking[choice % len(thinking)]
        self.driver.feed(self.driver.dialogues.ask(rollout_id))

    @precondition(lambda self: self.driver.dialogues.thinking)
    @rule(
        choice=st.integers(0, 99),
        turns=st.lists(
            st.tuples(
                st.integers(0, 99),
                st.sampled_from([None, None, 0, 1, 2, 3]),
                st.sampled_from(["ends", "ends", "ends", "grows", "gives up", "keeps"]),
                st.integers(0, 4),
            ),
            min_size=1,
            max_size=9,
        ),
    )
    def talk(self, choice: int, turns: list[tuple[int, int | None, str, int]]) -> None:
        """Let an episode take several turns while engines generate: it extends its context,
        returns to a branch, or starts one."""
        driver, dialogues = self.driver, self.driver.dialogues
        rollout_id = list(dialogues.thinking)[choice % len(dialogues.thinking)]
        for place, cut, outcome, count in turns:
            if rollout_id not in dialogues.thinking:
                return
            if cut is not None and dialogues.wholes.get(rollout_id):
                dialogues.leave(rollout_id, place, cut)
            driver.feed(dialogues.ask(rollout_id))
            keys = [key for key, send in driver.sends.items() if send.rollout_id == rollout_id]
            if not keys or rollout_id not in dialogues.asking:
                continue
            (key,) = keys
            if outcome == "ends":
                driver.finish(key, count)
                continue
            driver.progress(key, count)
            if outcome == "grows" or rollout_id not in dialogues.asking:
                return
            driver.feed(dialogues.withdraw(rollout_id))
            if key in driver.aborts:
                driver.interrupt(key)
            if outcome == "keeps" and rollout_id in dialogues.partial:
                driver.feed(dialogues.keep(rollout_id))

    @precondition(lambda self: self.driver.dialogues.asking or self.driver.dialogues.answered)
    @rule(choice=st.integers(0, 99))
    def withdraw_turn(self, choice: int) -> None:
        """An episode's timeout, while the request waits or runs, or just as its answer arrives."""
        dialogues = self.driver.dialogues
        turns = [*dialogues.asking, *dialogues.answered]
        self.driver.feed(dialogues.withdraw(turns[choice % len(turns)]))

    @precondition(lambda self: self.driver.dialogues.partial)
    @rule(choice=st.integers(0, 99))
    def keep_turn(self, choice: int) -> None:
        dialogues = self.driver.dialogues
        partial = list(dialogues.partial)
        self.driver.feed(dialogues.keep(partial[choice % len(partial)]))

    @precondition(lambda self: self.driver.dialogues.thinking or self.driver.dialogues.asking)
    @rule(choice=st.integers(0, 99), what=st.sampled_from(["tools", "agent", "score"]))
    def say_what_an_episode_waits_for(self, choice: int, what: EpisodeWait) -> None:
        """Also of one that has just asked for a turn."""
        episodes = [*self.driver.dialogues.thinking, *self.driver.dialogues.asking]
        self.driver.feed(ev.EpisodeWaits(rollout_id=episodes[choice % len(episodes)], what=what))

    @precondition(lambda self: self.driver.dialogues.thinking)
    @rule(
        choice=st.integers(0, 99),
        raises=st.sampled_from([False, False, False, True]),
        lost=st.booleans(),
    )
    def episode_ends(self, choice: int, raises: bool, lost: bool) -> None:
        dialogues = self.driver.dialogues
        thinking = list(dialogues.thinking)
        rollout_id = thinking[choice % len(thinking)]
        if raises:
            self.driver.feed(dialogues.fail(rollout_id, lost=lost))
        elif dialogues.turns[rollout_id]:
            self.driver.feed(dialogues.end(rollout_id))

    # --- requests ------------------------------------------------------------------------------

    def _pick(self, choice: int) -> Key:
        keys = self.driver.attempts()
        return keys[choice % len(keys)]

    def _version_on(self, key: Key) -> int:
        """The version of the full model that the engine of an open attempt has."""
        return self.driver.state.fleet.control.engines[self.driver.sends[key].engine].base

    @precondition(lambda self: self.driver.sends)
    @rule(choice=st.integers(0, 99), count=st.integers(0, 4))
    def progress(self, choice: int, count: int) -> None:
        self.driver.progress(self._pick(choice), count)

    @precondition(lambda self: self.driver.sends)
    @rule(choice=st.integers(0, 99), count=st.integers(0, 4), received=st.booleans())
    def finish(self, choice: int, count: int, received: bool) -> None:
        key = self._pick(choice)
        version = self._version_on(key)
        spans = (VersionSpan(version=version, start=0, end=count),) if received else None
        self.driver.finish(key, count, spans=spans)

    @precondition(lambda self: self.driver.sends)
    @rule(
        choice=st.integers(0, 99),
        count=st.integers(1, 4),
        off=st.sampled_from([-1, 1]),
        ends=st.booleans(),
    )
    def other_weights(self, choice: int, count: int, off: int, ends: bool) -> None:
        """Show by the tokens that the engine was restarted, or that another client has loaded
        weights."""
        driver, key = self.driver, self._pick(choice)
        version = self._version_on(key) + off
        if ends:
            spans = (VersionSpan(version=max(0, version), start=0, end=count),)
            driver.finish(key, count, spans=spans)
        else:
            driver.progress(key, count, label=max(0, version))

    @precondition(lambda self: self.driver.aborts)
    @rule(choice=st.integers(0, 99))
    def abort_answered(self, choice: int) -> None:
        keys = list(self.driver.aborts)
        self.driver.interrupt(keys[choice % len(keys)])

    @precondition(lambda self: self.driver.sends)
    @rule(choice=st.integers(0, 99), final=st.booleans(), answered=st.booleans())
    def fail(self, choice: int, final: bool, answered: bool) -> None:
        self.driver.fail(self._pick(choice), final=final, answered=answered)

    @precondition(lambda self: self.driver.sends)
    @rule(choice=st.integers(0, 99), wait_s=st.sampled_from([None, 0.0, 7.0, 1e9]))
    def busy(self, choice: int, wait_s: float | None) -> None:
        self.driver.interrupt(self._pick(choice), busy="full", retry_after_s=wait_s)

    # --- engines -------------------------------------------------------------------------------

    @precondition(lambda self: self.driver.controls)
    @rule()
    def control_answered(self) -> None:
        self.driver.answer_control()

    @precondition(lambda self: self.driver.refits)
    @rule(outcome=st.sampled_from(["good", "old", "inconsistent", "all old", "all inconsistent"]))
    def refit_answered(self, outcome: str) -> None:
        inconsistent = "inconsistent" in outcome and not self.driver.refits[0].adapter
        has = None if inconsistent else self.driver.state.weights.versions.trainer
        engines = self.driver.refits[0].engines
        failing = {"good": (), "old": engines[:1], "inconsistent": engines[:1]}.get(
            outcome, engines
        )
        self.driver.answer_refit(**dict.fromkeys(failing, (has, "broken")))

    @precondition(lambda self: self.driver.verifications)
    @rule(behind=st.sampled_from([0, 0, 0, 1, -1, None]))
    def verified(self, behind: int | None) -> None:
        self.driver.verify(None if behind is None else self.driver.state.weights.base - behind)

    @precondition(lambda self: any(self.driver.state.fleet.control.all()))
    @rule(choice=st.integers(0, 99))
    def lose(self, choice: int) -> None:
        """Any engine may be lost: in use or on standby, and also the last one."""
        engines = [control.name for control in self.driver.state.fleet.control.all()]
        self.driver.feed(ev.EngineLost(engine=engines[choice % len(engines)], cause="gone"))

    @rule(seconds=st.sampled_from([1, 5, 25]), speaking=st.sets(st.sampled_from("abc")))
    def time_passes(self, seconds: int, speaking: set[str]) -> None:
        """Time in which only some engines give tokens."""
        for _ in range(seconds):
            self.driver.now += 1.0
            for key, send in list(self.driver.sends.items()):
                if send.engine in speaking and key in self.driver.sends:
                    self.driver.progress(key, 1)
            self.driver.feed(ev.Tick())

    @rule(engine=st.sampled_from("abc"), used=st.integers(0, 60), queued=st.integers(0, 2))
    def load_seen(self, engine: str, used: int, queued: int) -> None:
        """Report a load, also from an engine that is not in use or never reported its pool
        size."""
        self.driver.feed(ev.LoadSeen(engine=engine, used=used, queued=queued))

    @precondition(lambda self: self.driver.gone)
    @rule(behind=st.sampled_from([0, 1, None]))
    def come_back(self, behind: int | None) -> None:
        version = None if behind is None else self.driver.state.weights.versions.trainer - behind
        self.driver.come_back(self.driver.gone[0], version)

    # --- callbacks -----------------------------------------------------------------------------

    @precondition(lambda self: self.driver.scores)
    @rule(fails=st.booleans(), lost=st.booleans())
    def scored(self, fails: bool, lost: bool) -> None:
        rollout = self.driver.scores.pop(0).rollout
        if fails:
            event = ev.RewardFailed(
                group_id=rollout.group_id, cause="bad", rollout_id=rollout.rollout_id, lost=lost
            )
            self.driver.feed(event)
        else:
            score = Score(reward=1.0, parts={"answer": float(rollout.rollout_id)})
            self.driver.feed(ev.Rewarded(rollout_id=rollout.rollout_id, score=score))

    @precondition(lambda self: self.driver.group_scores)
    @rule()
    def group_scored(self) -> None:
        group = self.driver.group_scores.pop(0).group
        scores = tuple(Score(reward=0.0, info={"index": r.index}) for r in group.rollouts)
        self.driver.feed(ev.GroupRewarded(group_id=group.group_id, scores=scores))

    @precondition(lambda self: self.driver.verdicts)
    @rule(accepted=st.booleans())
    def judged(self, accepted: bool) -> None:
        unit = self.driver.verdicts.pop(0).unit
        self.driver.feed(ev.Filtered(group_id=unit.unit_id, accepted=accepted))

    # --- the end -------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        driver.supply = driver.given
        if driver.state.fleet.sleep is not None and not driver.state.fleet.sleep.waking:
            driver.feed(ev.WakeRequested())
        driver.feed(ev.HoldChanged(held=False))
        self._recover()
        driver.takes = True
        if driver.state.delivery.offer is not None:
            driver.take()
        for _ in range(1_000):
            if driver.ended and not driver.state.evaluations.running:
                break
            self._recover_rolling()
            self._serve_one()
        self._recover_rolling()
        assert driver.state.fleet.control.engines, "no engine is in use after the recovery"
        assert driver.ended, "the run does not finish: something waits forever"
        assert not driver.state.evaluations.running
        self._check_conservation()

    def _recover_rolling(self) -> None:
        """Bring engines back with rolling refits: no version can be published again after a
        restart, and an engine of an older version is on standby once its rollouts have ended."""
        if self.driver.state.rolling and not self.driver.state.fleet.control.engines:
            self._recover()

    def _recover(self) -> None:
        """Bring engines back and let the trainer follow requests, until an engine is in use."""
        driver = self.driver
        for _ in range(200):
            control = driver.state.fleet.control
            if driver.controls or driver.refits or driver.aborts or driver.verifications:
                driver.settle()
            elif (
                driver.state.weights.update is None
                and driver.state.fleet.sleep is None
                and control.engines
            ):
                return
            elif (
                driver.sends
                or driver.scores
                or driver.group_scores
                or driver.verdicts
                or driver.dialogues.thinking
            ):
                self._serve_one()
            elif any(control.all()):
                self._update_as_told()
            else:
                self._wait_for_the_fleet()
        pytest.fail("an update or a sleep does not end, or no engine comes into use")

    def _wait_for_the_fleet(self) -> None:
        driver = self.driver
        self.time_passes(65, set())
        assert driver.fleets_given_up, "the loss of the fleet was not reported"
        # The version at the start of the run: an adapter finds the model that it belongs to.
        version = (
            driver.state.weights.base if self.adapters else driver.state.weights.versions.trainer
        )
        driver.come_back(driver.gone[0], version)

    def _update_as_told(self) -> None:
        """Update when the scheduler requires it because no engine is in use. Calls that wait for
        tokens receive this request, and everything else continues."""
        driver = self.driver
        if (
            driver.state.weights.update is None
            and driver.state.fleet.sleep is None
            and not driver.state.delivery.takes_parts
        ):
            driver.feed(ev.BatchRequested())
        received = len(driver.updates_wanted)
        self.time_passes(12, set())
        state = driver.state
        if (
            state.fleet.control.engines
            or state.weights.update is not None
            or state.fleet.sleep is not None
        ):
            return
        if driver.controls or driver.refits:
            return
        # After the request, or with an offered batch, the trainer does not wait for tokens.
        waits = state.delivery.takes_parts and state.delivery.collecting
        assert len(driver.updates_wanted) > received or not waits, (
            f"the trainer waits forever: {state.fleet.control.standby}, {driver.verifications}"
        )
        # No adapter brings an engine back that has lost the model which they belong to.
        has_base = any(
            control.base == state.weights.base and not control.inconsistent
            for control in state.fleet.control.all()
        )
        driver.update(adapter=state.weights.adapter is not None and has_base)

    def _serve_one(self) -> None:
        driver = self.driver
        if driver.controls:
            driver.answer_control()
        elif driver.verifications:
            driver.verify()
        elif driver.refits:
            driver.answer_refit()
        elif driver.aborts:
            driver.interrupt(next(iter(driver.aborts)))
        elif driver.sends:
            driver.finish(driver.attempts()[0], 1)
        elif driver.dialogues.thinking:
            rollout_id = next(iter(driver.dialogues.thinking))
            known = driver.dialogues.turns[rollout_id]
            driver.feed((driver.dialogues.end if known else driver.dialogues.ask)(rollout_id))
        elif driver.scores:
            rollout = driver.scores.pop(0).rollout
            driver.feed(ev.Rewarded(rollout_id=rollout.rollout_id, score=Score(reward=0.0)))
        elif driver.group_scores:
            self.group_scored()
        elif driver.verdicts:
            unit = driver.verdicts.pop(0).unit
            driver.feed(ev.Filtered(group_id=unit.unit_id, accepted=True))
        elif not driver.state.delivery.takes_parts and not driver.ended:
            driver.feed(ev.BatchRequested())
        elif driver.state.in_flight.queue and driver.state.fleet.admissions:
            driver.now += MAX_RETRY_AFTER_S
            driver.feed(ev.Tick())
        else:
            driver.feed(ev.PromptsArrived(prompts=(), last=True))

    def _check_conservation(self) -> None:
        in_flight = self.driver.state.in_flight
        # What was only offered before a restart is delivered when it is taken after it.
        taken = {b.index: b for b in (*self.driver.redelivered, *self.driver.batches)}
        batches = [*taken.values(), *self.driver.evaluations.values()]
        delivered = [r.rollout_id for b in batches for r in b.rollouts]
        dropped = [entry.rollout_id for entry in in_flight.ledger.entries]
        assert len(set(delivered)) == len(delivered), "delivered twice"
        assert not set(delivered) & set(dropped)
        assert in_flight.counters.launched == len(delivered) + len(dropped)
        assert not in_flight.rollouts
        counters = in_flight.counters
        if not self.saves:
            dropped_tokens = sum(in_flight.ledger.tokens.values())
            assert counters.tokens_discarded == dropped_tokens
            assert counters.tokens_generated == counters.tokens_delivered + dropped_tokens
        if self.driver.config.policies.siblings is not None:
            self._check_siblings([sample for batch in taken.values() for sample in batch.samples])
        for batch in self.driver.batches:
            self._check_units(batch)
            for rollout in batch.rollouts:
                self._check_sequences(rollout)
                if self.driver.config.refit == "rolling":
                    own = set(rollout.versions.tolist()) - {-1}  # tokens of the environment
                    assert len(own) <= 1, "a rollout of two versions"
                lengths = {
                    len(rollout.token_ids),
                    len(rollout.logprobs),
                    len(rollout.versions),
                    len(rollout.loss_mask),
                }
                assert len(lengths) == 1

    def _check_siblings(self, samples: Sequence[Sample]) -> None:
        """Each member is delivered once, and the siblings of one group are in one order."""
        members = [(sample.group_id, sample.rollout.index) for sample in samples]
        assert len(set(members)) == len(members), "a member is delivered twice"
        dropped = {entry.rollout_id for entry in self.driver.state.in_flight.ledger.entries}
        for one, other in combinations(samples, 2):
            ids = [[each.rollout_id for each in sample.siblings] for sample in (one, other)]
            # A member that was lost has left the order of its group.
            if one.group_id == other.group_id and not dropped & {*ids[0], *ids[1]}:
                first = [each for each in ids[0] if each != other.unit_id]
                second = [each for each in ids[1] if each != one.unit_id]
                least = min(len(first), len(second))
                assert first[:least] == second[:least], "siblings of two orders"

    def _check_units(self, batch: Batch) -> None:
        siblings = self.driver.config.policies.siblings
        for unit in batch.units:
            size = unit.prompt.group_size or self.driver.config.group_size
            if isinstance(unit, Group):
                shrinks = self.driver.config.retries.member == "shrink"
                least = 1 if shrinks else size
                assert least <= len(unit.rollouts) <= size, "an incomplete group"
            else:
                assert siblings is not None
                ids = {each.rollout_id for each in unit.siblings}
                assert len(ids) == len(unit.siblings) <= siblings
                assert unit.few == (len(ids) < siblings)
                assert unit.unit_id not in ids

    def _check_sequences(self, rollout: Rollout) -> None:
        """Each branch is what the episode has seen, and each sampled token is trained once. Other
        machines give tokens that say something else than which one it is."""
        if self.driver.unique is None:
            return
        seen = [
            whole.tolist() for whole in self.driver.dialogues.wholes.get(rollout.rollout_id, ())
        ]
        trained: list[int] = []
        for each in (rollout, *rollout.branches):
            whole = [*each.prompt_ids.tolist(), *each.token_ids.tolist()]
            assert not self.driver.episodes or whole in seen
            trained += each.token_ids[each.loss_mask].tolist()
            others = each.token_ids[each.versions == NO_VERSION]
            # After a restart an episode may know tokens that were not saved.
            assert self.driver.restarts or not (others >= SAMPLED).any(), "known as sampled before"
        assert len(set(trained)) == len(trained), "a token is trained twice"
        assert min(trained, default=SAMPLED) >= SAMPLED

    # --- the count -----------------------------------------------------------------------------

    @invariant()
    def facts_agree(self) -> None:
        """The state built from the facts equals the state of the core, and all time has a part."""
        driver, state = self.driver, self.driver.state
        in_flight, run = state.in_flight, self.driver.run
        assert set(run.rollouts) == set(in_flight.rollouts)
        for rollout_id, rollout in run.rollouts.items():
            record = in_flight.rollouts[rollout_id]
            assert rollout.sampled + rollout.environment == record.log.size
            assert rollout.sampled == record.log.sampled_tokens
            assert rollout.finished == (record.state not in GENERATING)
        assert len(run.attempts) == in_flight.open_attempts
        offered = state.delivery.offered_groups
        assert run.units_ready == sum(bool(group.accepted) for group in in_flight.ready) + offered
        if not driver.restarts:
            # What an ended process had under way, the core has only as far as it was saved.
            assert run.counters == in_flight.counters
            assert run.ledger.rollouts == in_flight.ledger.rollouts
            assert run.ledger.tokens == in_flight.ledger.tokens
        run.advance(driver.now)
        for name, engine in run.engines.items():
            if engine.state != "lost":
                assert engine.in_flight == in_flight.open[name]
            assert min(engine.seconds) >= -1e-9
        walls = [engine.wall for engine in run.engines.values()]
        assert walls == pytest.approx([driver.now - OPENED_AT] * len(walls))
        contexts = dict.fromkeys(run.engines, 0)
        for attempt in run.attempts.values():
            contexts[attempt.engine.name] += attempt.context
        assert contexts == {n: e.context_tokens for n, e in run.engines.items()}

    @invariant()
    def clocks_agree(self) -> None:
        """The parts of each rollout's time add up to the time since its launch, and the present one
        is what it is at."""
        driver, run = self.driver, self.driver.run
        assert set(driver.clocks.rollouts) == set(run.rollouts)
        sent = {each.rollout_id: each.engine for each in run.attempts.values()}
        for rollout_id, clock in driver.clocks.rollouts.items():
            clock.enter(clock.part, driver.now)
            assert min(clock.seconds.values()) >= 0.0
            lived = driver.now - driver.launched[rollout_id]
            assert sum(clock.seconds.values()) == pytest.approx(lived)
            rollout = run.rollouts[rollout_id]
            expected = {"queue"}
            if rollout.finished:
                accepted = run.groups[rollout.group_id].accepted
                expected = {"batch"} if accepted else {"batch", "score"}
            elif rollout_id in run.outside:
                expected = {run.outside[rollout_id]}
            elif rollout_id in sent:
                expected = {"engine" if sent[rollout_id].state == "generating" else "paused"}
            assert clock.part in expected

    @invariant()
    def sizes_agree(self) -> None:
        """Each batch of samples that is taken at once has the right size."""
        stop, state = self.driver.config.policies.stop, self.driver.state
        of_samples = isinstance(stop, SingleSamples) and not self.streamed
        if of_samples and state.staleness.rule != "finish" and not state.prompts.exhausted:
            new = self.driver.batches[self.sized :]
            assert {len(batch.samples) for batch in new} <= {stop.amount}
        self.sized = len(self.driver.batches)

    @invariant()
    def count(self) -> None:
        """Hypothesis calls this after each step, when the driver has checked the core's
        invariants."""
        STEPS[type(self).__name__] += 1


STEPS: Counter[str] = Counter()
EXAMPLES = 100
LENGTHS = [1_000, pytest.param(100_000, marks=pytest.mark.long)]
"""Steps that a machine makes at least."""


def steps_of(machine: type[Interleavings], least: int) -> int:
    """Run a machine until it has made this number of steps; returns the number that it made."""
    STEPS[machine.__name__] = 0
    while STEPS[machine.__name__] < least:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=60,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            ),
        )
    return STEPS[machine.__name__]


@pytest.mark.parametrize("least", LENGTHS)
def test_random_interleavings_of_every_event(record_steps: RecordSteps, least: int):
    record_steps("interleavings", steps_of(Interleavings, least))
