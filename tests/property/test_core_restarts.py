"""Tests the core under random events and restarts: the saved run continues, with nothing twice.

Only the snapshot before a batch is offered must be taken. Others are taken at random. What came
after the last snapshot is lost with the process, as after kill -9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from aprilsched.config import Health, Retries, SchedulerConfig
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.policies.straggler import StragglerRule
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.records import GENERATING, RolloutRecord
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.core.steps.batch import handed_over
from aprilsched.kernel.core.steps.snapshot import full_snapshot
from aprilsched.kernel.store import MemoryStore
from aprilsched.types import Batch, SamplingParams
from tests.property.conftest import RecordSteps
from tests.property.test_core_interleavings import LENGTHS, SAMPLED, Interleavings, steps_of
from tests.support.driver import Driver

pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")


def received(rollout: RolloutRecord) -> tuple[Any, ...]:
    """Everything that must be the same after a restart."""
    log = rollout.log
    generating = rollout.state in GENERATING
    # What the open attempt has sampled under an unconfirmed version is saved as inexact.
    unsure = rollout.request is not None and rollout.request.unsure
    return (
        rollout.index,
        "generating" if generating else rollout.state,
        rollout.prompt_ids.tolist(),
        log.token_ids.tolist(),
        log.logprobs().tolist(),
        log.runs,
        log.exact and not unsure,
        (rollout.reward, rollout.reward_parts, rollout.info),
        rollout.eligible,
        None if generating else rollout.finish_reason,
        list(rollout.answered),
        [(b.prompt_ids.tolist(), b.path) for b in rollout.all_branches()],
        None if generating else rollout.turns,
    )


def offered_batch(state: SchedulerState) -> Batch | None:
    """The batch that is offered; None for a part of a streamed one, whose groups stay in flight."""
    offer = state.delivery.offer
    return None if offer is None or offer.record is None else offer.batch


def picture(state: SchedulerState) -> dict[str, Any]:
    """The scheduler's state, without what belongs only to its process."""
    in_flight = state.in_flight
    batch = offered_batch(state)
    offer = () if batch is None else (batch.index,)
    return {
        "groups": {
            group.group_id: (
                group.prompt.input_ids.tolist(),
                group.accepted,
                group.opened,
                group.again,
                group.first_run,
                [received(member) for member in group.members],
            )
            for group in in_flight.training_groups()
            if not group.offered
        },
        "ready": [group.group_id for group in in_flight.ready],
        # An offered batch counts as taken: after a restart this cannot be known.
        "counters": replace(full_snapshot(state).run.counters),
        "dropped": (+in_flight.ledger.rollouts, +in_flight.ledger.tokens),
        "entries": list(in_flight.ledger.entries),
        "cursor": state.prompts.cursor,
        "versions": (state.weights.versions.trainer, state.weights.base, state.weights.adapter),
        "unacknowledged": sorted({*state.delivery.unacknowledged, *offer}),
        "target": state.plan.target_groups,
        "lengths": [
            (g.launched, g.tokens.tolist(), g.finished.tolist())
            for g in state.expectations.observed.cohort()
        ],
    }


def content(batch: Batch) -> list[tuple[Any, ...]]:
    """Everything in a batch."""
    return [
        (
            r.rollout_id,
            r.token_ids.tolist(),
            np.asarray(r.logprobs).tolist(),
            r.versions.tolist(),
            r.loss_mask.tolist(),
            (r.reward, r.reward_parts, r.info),
            r.finish_reason,
            r.shared,
        )
        for rollout in batch.rollouts
        for r in (rollout, *rollout.branches)
    ]


LAUNCHING = ("counters", "cursor", "target", "lengths")
"""The parts of a picture that launching changes, in addition to the groups."""


class Restarts(Interleavings):
    saves = True

    def _unsaved(self) -> bool:
        journal = self.driver.state.in_flight.journal
        return bool(len(journal.arrived) or journal.changed or journal.launched)

    @rule()
    def save(self) -> None:
        self.driver.save()

    @precondition(lambda self: self.driver.state.delivery.unacknowledged)
    @rule(choice=st.integers(0, 99))
    def acknowledge(self, choice: int) -> None:
        batches = handed_over(self.driver.state.in_flight, self.driver.state.delivery)
        if batches:
            chosen = batches[choice % len(batches)]
            self.driver.feed(ev.BatchesAcknowledged(batches=(chosen, chosen)))

    @precondition(lambda self: self.driver.state.delivery.unacknowledged)
    @rule(has=st.integers(0, 9))
    def another_trainer(self, has: int) -> None:
        """It has the first batches only, and gets the others again, as they were."""
        delivery = self.driver.state.delivery
        had = {batch.index: batch for batch in self.driver.batches}
        had |= {batch.index: batch for batch in delivery.batches_again}
        # What was only offered before a restart, no trainer has.
        given = {batch.index for batch in (*self.driver.batches, *self.driver.redelivered)}
        kept = list(takewhile(given.__contains__, delivery.unacknowledged))[:has]
        missing = list(delivery.unacknowledged)[len(kept) :]
        self.driver.feed(ev.TrainerReturned(batches=tuple(kept)))
        assert [batch.index for batch in self.driver.state.delivery.batches_again] == missing
        for again in self.driver.state.delivery.batches_again:
            assert again.redelivered
            assert content(again) == content(had[again.index])

    @precondition(lambda self: self.driver.state.delivery.fresh.taken)
    @rule(count=st.integers(0, 3))
    def trainer_with_some_groups(self, count: int) -> None:
        """Of the batch that is taken group by group it has these, and gets the others again."""
        delivery = self.driver.state.delivery
        batches = tuple(
            i
            for i in handed_over(self.driver.state.in_flight, self.driver.state.delivery)
            if i in delivery.unacknowledged
        )
        groups = {
            group_id: delivery.fresh.taken[group_id] for group_id in [*delivery.fresh.taken][:count]
        }
        self.driver.feed(ev.TrainerReturned(batches=batches, groups=tuple(groups)))
        # A trainer that waits may have taken others again at once.
        assert groups.items() <= delivery.fresh.taken.items()
        assert delivery.takes_parts or delivery.fresh.taken == groups

    @rule(
        saved=st.booleans(),
        behind=st.lists(st.sampled_from([0, 0, 1, -1, None]), min_size=3, max_size=3),
    )
    def restart(self, saved: bool, behind: list[int | None]) -> None:
        driver = self.driver
        if saved:
            driver.save()
        elif self._unsaved():
            event("something unsaved was lost")
        before = picture(driver.state)
        stood = not driver.state.fleet.control.engines
        evaluating = full_snapshot(driver.state).run.evaluating
        whole = MemoryStore()
        whole.save(full_snapshot(driver.state), durable=True)
        waiting = {
            b.index: b for b in driver.batches if b.index in driver.state.delivery.unacknowledged
        }
        for again in driver.state.delivery.batches_again:
            waiting[again.index] = again
        if (offered := offered_batch(driver.state)) is not None:
            waiting[offered.index] = offered
        version, lost = driver.state.weights.versions.trainer, self._lost()
        size = driver.state.prompts.usual_size
        driver.restart([None if b is None else max(0, version - b) for b in behind])
        self.driver.core.check_invariants()
        if not saved:
            return
        # With rolling refits a rollout restarts if no engine has its version after the restart.
        if driver.state.weights.versions.trainer == version and self._lost() == lost:
            after = picture(driver.state)
            # A pool has room for more groups if those that are there are smaller than the others
            # were.
            other_size = driver.state.prompts.usual_size != size
            launches = stood or driver.state.stop.learns or other_size
            self._without_new_entries(before, after, evaluating, launches=launches)
            if launches:
                # Due groups are launched as soon as engines are back; and how many groups reach
                # a given length is estimated again, from all observed lengths.
                after["groups"] = {
                    i: g for i, g in after["groups"].items() if i in before["groups"]
                }
                before = {part: was for part, was in before.items() if part not in LAUNCHING}
            for part, was in before.items():
                assert after[part] == was, part
        for again in driver.state.delivery.batches_again:
            assert again.redelivered
            assert content(again) == content(waiting[again.index])
        assert {b.index for b in driver.state.delivery.batches_again} == set(waiting)

    def _lost(self) -> tuple[int, int]:
        ledger = self.driver.state.in_flight.ledger
        return ledger.tokens[Reason.VERSION_LOST], ledger.rollouts[Reason.VERSION_LOST]

    @staticmethod
    def _without_new_entries(
        before: dict[str, Any],
        after: dict[str, Any],
        evaluating: Sequence[tuple[int, int, int]],
        *,
        launches: bool,
    ) -> None:
        """The ledger without its new entries. Rollouts of open evaluations are in the ledger after
        a restart, and so are bad prompts that are met while launching; nothing else is new
        there."""
        rollouts, tokens = after["dropped"]
        new = after["entries"][len(before["entries"]) :]
        abandoned, refused = new[: len(evaluating)], new[len(evaluating) :]
        assert [(e.rollout_id, e.group_id, e.tokens) for e in abandoned] == list(evaluating)
        assert {e.reason for e in abandoned} <= {Reason.RESTARTED}
        assert {e.reason for e in refused} <= {Reason.BAD_PROMPT}
        assert launches or not refused
        for entry in new:
            rollouts[entry.reason] -= 1
            tokens[entry.reason] -= entry.tokens
        counters = after["counters"]
        lost = sum(entry.tokens for entry in new)
        after["counters"] = replace(counters, tokens_discarded=counters.tokens_discarded - lost)
        after["entries"] = after["entries"][: len(before["entries"])]
        after["dropped"] = (+rollouts, +tokens)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "driver"):
            offers = [(batch.index, content(batch)) for batch in self.driver.offers]
            known = {batch.index: content(batch) for batch in self.driver.batches}
            for batch in self.driver.redelivered:
                assert (batch.index, content(batch)) in offers
                assert content(batch) == known.get(batch.index, content(batch))


class Branches(Restarts):
    """Mostly episodes that talk, and restarts in between."""

    open_run = sleep = wake = hold = planned = None  # pyright: ignore[reportAssignmentType]
    evaluate = withdraw_evaluation = load_seen = None  # pyright: ignore[reportAssignmentType]
    withdraw_group = withdraw_update = None  # pyright: ignore[reportAssignmentType]
    lose = fail = other_weights = None  # pyright: ignore[reportAssignmentType]
    another_trainer = acknowledge = None  # pyright: ignore[reportAssignmentType]
    trainer_with_some_groups = None  # pyright: ignore[reportAssignmentType]

    @initialize(straggler=st.sampled_from(["retract", "in_place", "abort"]), rolling=st.booleans())
    def begin_with_episodes(self, straggler: StragglerRule, rolling: bool) -> None:
        config = SchedulerConfig(
            batch_groups=2,
            group_size=2,
            pace="asynchronous",
            straggler="run" if rolling else straggler,
            refit="rolling" if rolling else "together",
            retries=Retries(failed_groups=10**9),
            health=Health(stall_s=20, fleet_wait_s=60),
            sampling=SamplingParams(max_new_tokens=1_000_000),
        )
        self.driver = Driver(
            config,
            episodes=True,
            supply=17,
            engines=("a", "b", "c"),
            store=MemoryStore(),
            kv_tokens=40,
            caches_contexts=True,
        )
        self.driver.auto_verify = False
        self.driver.unique = SAMPLED
        self.adapters, self.evaluations = False, 0


@pytest.mark.parametrize("least", LENGTHS)
def test_episodes_that_leave_their_context(record_steps: RecordSteps, least: int):
    record_steps("branches with restarts", steps_of(Branches, least // 2))


@pytest.mark.parametrize("least", LENGTHS)
def test_random_interleavings_with_restarts(record_steps: RecordSteps, least: int):
    record_steps("interleavings with restarts", steps_of(Restarts, least))
