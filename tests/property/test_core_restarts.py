"""Random interleavings with restarts at any moment: what was saved goes on, and nothing twice.

The cut before a batch is handed over is the only one that must be taken; others are taken at
random, and what came after the last one is gone with the process, as after kill -9.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from aprilsched.core import events as ev
from aprilsched.core.batches import handed_over
from aprilsched.core.lifecycle import GENERATING
from aprilsched.core.records import RolloutRecord
from aprilsched.core.saving.cut import take_everything
from aprilsched.core.state import SchedulerState
from aprilsched.store import MemoryStore
from aprilsched.types import Batch
from tests.property.test_core_interleavings import Interleavings

pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")


def told(rollout: RolloutRecord) -> tuple[Any, ...]:
    """What must be the same after a restart."""
    log = rollout.log
    generating = rollout.state in GENERATING
    return (
        rollout.index,
        "generating" if generating else rollout.state,
        rollout.prompt_ids.tolist(),
        log.token_ids.tolist(),
        log.logprobs().tolist(),
        log.runs,
        log.exact,
        rollout.reward,
        rollout.due,
        None if generating else rollout.finish_reason,
        rollout.turns,
    )


def picture(state: SchedulerState) -> dict[str, Any]:
    """The scheduler, without what only its process has."""
    book = state.book
    return {
        "groups": {
            group.group_id: (
                group.prompt.input_ids.tolist(),
                group.accepted,
                group.opened,
                group.first_run,
                [told(member) for member in group.members],
            )
            for group in book.training_groups()
        },
        "ready": [group.group_id for group in book.ready],
        "counters": book.counters,
        "dropped": (dict(book.ledger.rollouts), dict(book.ledger.tokens)),
        "entries": list(book.ledger.entries),
        "cursor": state.cursor,
        "versions": (state.tracker.trainer, state.base, state.adapter),
        "unacknowledged": sorted(state.unacknowledged),
        "target": state.target_groups,
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
            r.reward,
            r.finish_reason,
        )
        for r in batch.rollouts
    ]


class Restarts(Interleavings):
    saves = True

    def _unsaved(self) -> bool:
        journal = self.driver.state.book.journal
        return bool(journal.arrived or journal.changed or journal.launched)

    @rule()
    def save(self) -> None:
        self.driver.save()

    @precondition(lambda self: self.driver.state.unacknowledged)
    @rule(choice=st.integers(0, 99))
    def acknowledge(self, choice: int) -> None:
        batches = handed_over(self.driver.state)
        if batches:
            chosen = batches[choice % len(batches)]
            self.driver.feed(ev.BatchesAcknowledged(batches=(chosen, chosen)))

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
        whole = MemoryStore()
        whole.save(take_everything(driver.state), durable=True)
        waiting = {b.index: b for b in driver.batches if b.index in driver.state.unacknowledged}
        version = driver.state.tracker.trainer
        driver.restart([None if b is None else max(0, version - b) for b in behind])
        self.driver.core.check_invariants()
        if not saved:
            return
        if driver.state.tracker.trainer == version:
            after = picture(driver.state)
            assert after == before
        for again in driver.state.redelivery:
            assert again.redelivered
            assert content(again) == content(waiting[again.index])
        assert {b.index for b in driver.state.redelivery} == set(waiting)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "driver"):
            known = {batch.index: content(batch) for batch in self.driver.batches}
            for batch in self.driver.redelivered:
                assert content(batch) == known[batch.index]


TestRestarts = Restarts.TestCase
TestRestarts.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
