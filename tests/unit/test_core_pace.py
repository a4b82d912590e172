"""Tests the pace that is chosen during the run, and how long the trainer and its weights take."""

from __future__ import annotations

import pytest

from aprilsched.config import LengthBuckets, Pool, SchedulerConfig
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages.facts import Fact, RunOpened, ScheduleChanged, ScheduleRefused
from aprilsched.kernel.core.policies.refill import Refill
from aprilsched.kernel.core.policies.schedule import Pace, Schedule
from aprilsched.kernel.core.policies.wave import Wave
from aprilsched.kernel.core.state.durations import Durations
from aprilsched.kernel.store import MemoryStore
from aprilsched.kernel.store.codec import schedule_from, schedule_record
from aprilsched.planning.presets import PRESETS
from tests.support.driver import Driver


def config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "batch_groups": 2,
        "group_size": 2,
        "over_provision": "auto",
        "pace": "auto",
        "straggler": "in_place",
    }
    return SchedulerConfig(**{**values, **changes})  # type: ignore[arg-type]


def schedule(
    pace: Pace | None, *, ratio: float = 2.0, refill: Refill | None = None, why: str = "given"
) -> Schedule:
    return Schedule(over_provision=ratio, refill=refill or Wave(), pace=pace, why=why)


class Received:
    """A driver, with the facts since its last schedule."""

    def __init__(self, **changes: object) -> None:
        self.facts: list[Fact] = []
        store = changes.pop("store", None)
        self.driver = Driver(
            config(**changes),
            store=store,  # pyright: ignore[reportArgumentType]
            hears=self.facts.extend,
        )

    def plan(self, planned: Schedule) -> None:
        self.facts.clear()
        self.driver.feed(ev.Planned(schedule=planned))

    def leave_plans(self) -> None:
        """Answer every plan with no other schedule."""
        for _ in self.driver.plans:
            self.driver.feed(ev.Planned(schedule=None))
        self.driver.plans.clear()

    def step(self, *, training: float = 0.0, refit: float = 0.0, tokens: int = 10) -> None:
        """One batch that takes no time but for the training, and an update."""
        driver = self.driver
        before = len(driver.batches)
        driver.request_batch()
        while len(driver.batches) == before:
            driver.finish(driver.attempts()[0], tokens)
        driver.settle()
        driver.now += training
        driver.feed(ev.UpdateRequested(version=driver.state.weights.versions.trainer + 1))
        while not driver.refits:
            driver.answer_control()
        driver.now += refit
        driver.settle()


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"over_provision": 1.5}, 'refused with over_provision=1.5; set over_provision="auto"'),
        ({"follow_weights": True}, 'pace="auto" continues engines at each batch'),
        ({"refit": "rolling", "straggler": "run"}, 'which pace="auto" with straggler="run" does n'),
    ],
    ids=str,
)
def test_settings_with_which_no_pace_can_be_chosen_are_refused(
    changes: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        config(**changes)


@pytest.mark.parametrize(
    ("settings", "planned", "why"),
    [
        ({"pace": "synchronous"}, schedule("asynchronous"), "the configured one is synchronous"),
        ({"pace": "asynchronous"}, schedule("synchronous"), "the configured one is asynchronous"),
        (
            {"straggler": "retract"},
            schedule("asynchronous", refill=LengthBuckets()),
            'pace="asynchronous" with straggler="retract"',
        ),
        (
            {"straggler": "in_place"},
            schedule("synchronous", refill=LengthBuckets()),
            'pace="synchronous" with straggler="in_place"',
        ),
    ],
    ids=str,
)
def test_an_impossible_schedule_is_reported_and_not_applied(
    settings: dict[str, object], planned: Schedule, why: str
) -> None:
    received = Received(**settings)
    received.driver.request_batch()
    before = received.driver.state.plan.schedule, received.driver.state.plan.target_groups
    received.plan(planned)
    assert (received.driver.state.plan.schedule, received.driver.state.plan.target_groups) == before
    (refused,) = [fact for fact in received.facts if isinstance(fact, ScheduleRefused)]
    assert refused.schedule == "given"
    assert why in refused.cause
    assert not any(isinstance(fact, ScheduleChanged) for fact in received.facts)


def test_the_preset_keeps_the_pace_of_followed_weights() -> None:
    assert PRESETS["auto"](SchedulerConfig(pace="asynchronous")).pace == "auto"
    follows = SchedulerConfig(pace="asynchronous", follow_weights=True)
    assert PRESETS["auto"](follows).pace == "asynchronous"


# --- a change of the pace ------------------------------------------------------------------------


def test_a_run_starts_synchronous_as_its_schedule_states() -> None:
    state = Received().driver.state
    assert state.plan.schedule.pace == "synchronous"
    assert not state.asynchronous


def test_engines_that_wait_for_the_trainer_go_on_as_soon_as_the_pace_is_asynchronous() -> None:
    received = Received()
    driver = received.driver
    driver.request_batch()
    driver.finish_batch(10)
    driver.settle()
    held = {send.engine for send in driver.sends.values()}
    assert held
    assert not any(driver.state.fleet.control.runs(name) for name in held)
    received.plan(schedule("asynchronous"))
    assert ScheduleChanged(schedule="given", refill="wave", pace="asynchronous") in received.facts
    assert driver.state.asynchronous
    assert [(type(c).__name__, c.engine) for c in driver.controls] == [
        ("Continue", engine) for engine in held
    ]
    driver.settle()
    assert len(driver.state.in_flight.groups) == 4, "a wave starts without a request"
    assert all(driver.state.fleet.control.runs(name) for name in driver.engines)


def test_engines_that_generate_ahead_are_paused_as_soon_as_the_pace_is_synchronous() -> None:
    received = Received()
    driver = received.driver
    received.plan(schedule("asynchronous"))
    assert driver.attempts(), "no batch has been requested"
    received.plan(schedule("synchronous"))
    assert [type(control).__name__ for control in driver.controls] == ["Pause"] * 2
    driver.settle()
    driver.request_batch()
    driver.settle()
    driver.finish_batch(10)
    assert len(driver.batches[0].groups) == 2


def test_within_a_batch_no_second_wave_starts() -> None:
    received = Received()
    driver = received.driver
    received.plan(schedule("synchronous", ratio=1.0))
    driver.request_batch()
    assert driver.state.in_flight.training == 2
    driver.finish(driver.attempts()[0], 10)
    received.plan(schedule("asynchronous", ratio=2.0))
    assert driver.state.in_flight.training == 2
    driver.finish_batch(10)
    assert driver.state.in_flight.training == 4, "the next batch has started"


def test_a_planner_that_knows_no_paces_leaves_the_pace_as_it_is() -> None:
    received = Received()
    received.plan(schedule("asynchronous"))
    received.plan(schedule(None, ratio=1.0))
    assert received.driver.state.plan.schedule == schedule("asynchronous", ratio=1.0)


def test_a_trainer_that_borrows_the_engines_memory_keeps_the_pace_synchronous() -> None:
    received = Received()
    driver = received.driver
    received.plan(schedule("asynchronous", refill=Pool()))
    driver.feed(ev.SleepRequested(tags=("kv_cache",)))
    assert not driver.state.asynchronous
    assert driver.state.plan.schedule.refill == Pool()
    driver.settle()
    driver.feed(ev.WakeRequested())
    driver.settle()
    received.plan(schedule("asynchronous"))
    assert [type(fact) for fact in received.facts] == [ScheduleRefused]
    assert not driver.state.asynchronous
    received.step()
    assert driver.plans[-1].paces == ("synchronous",)


def test_the_paces_are_said_to_the_planner_only_where_they_may_be_chosen() -> None:
    received, fixed = Received(), Received(pace="asynchronous")
    received.step()
    assert received.driver.plans[0].paces == ("asynchronous",)
    fixed.step()
    assert fixed.driver.plans[0].paces == ()


# --- after a restart -----------------------------------------------------------------------------


def test_the_pace_is_saved_with_the_schedule() -> None:
    for pace in (None, "synchronous", "asynchronous"):
        assert schedule_from(schedule_record(schedule(pace))) == schedule(pace)


def test_a_resumed_run_keeps_its_pace() -> None:
    received = Received(store=MemoryStore())
    received.step()
    received.plan(schedule("asynchronous"))
    received.driver.save()
    received.facts.clear()
    received.driver.restart()
    assert received.driver.state.asynchronous
    assert [type(fact) for fact in received.facts][:2] == [RunOpened, ScheduleChanged]
    assert received.facts[1] == ScheduleChanged(
        schedule="given", refill="wave", kept=True, pace="asynchronous"
    )
    received.driver.request_batch()
    assert len(received.driver.redelivered) == 1
    received.step()
    assert len(received.driver.batches) == 2


def test_a_resumed_run_with_another_configured_pace_keeps_only_the_ratio() -> None:
    received = Received(store=MemoryStore())
    received.step()
    received.plan(schedule("asynchronous", ratio=3.0))
    received.driver.save()
    received.driver.config = config(pace="synchronous")
    received.driver.restart()
    assert not received.driver.state.asynchronous
    assert received.driver.state.plan.schedule == schedule(None, ratio=3.0)
    received.driver.request_batch()
    received.step()


# --- the times -----------------------------------------------------------------------------------


def test_the_first_duration_and_those_far_above_the_others_are_left_out() -> None:
    durations = Durations()
    assert durations.mean is None
    assert durations.spread == 0.0
    durations.add(100.0)
    assert durations.mean is None
    for seconds in (4.0, 6.0, 50.0):
        durations.add(seconds)
    assert durations.mean == 5.0
    assert durations.spread == 1.0
    for _ in range(8):
        durations.add(7.0)
    assert durations.mean == 7.0
    assert durations.spread == 0.0


@pytest.mark.parametrize("pace", ["synchronous", "asynchronous", "auto"])
def test_the_planner_receives_the_trainers_and_refits_times(pace: str) -> None:
    received = Received(pace=pace)
    received.step(training=300.0, refit=70.0)
    (first,) = received.driver.plans
    assert (first.train_seconds, first.refit_seconds) == (None, None)
    received.driver.feed(ev.Planned(schedule=None))
    received.step(training=20.0, refit=2.0)
    received.step(training=20.0, refit=2.0)
    plan = received.driver.plans[-1]
    assert plan.train_seconds == pytest.approx(20.0, abs=0.1)
    assert plan.train_spread == pytest.approx(0.0, abs=0.1)
    assert plan.refit_seconds == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({}, ("asynchronous",)),
        ({"max_staleness": 1}, ("asynchronous",)),
        ({"max_staleness": 0}, ("synchronous", "asynchronous")),
    ],
    ids=str,
)
def test_a_trainer_of_which_nothing_is_known_is_not_waited_for(
    changes: dict[str, object], first: tuple[Pace, ...]
) -> None:
    received = Received(**changes)
    asked: list[tuple[Pace, ...]] = []
    for _ in range(3):
        received.step(training=20.0)
        asked += [plan.paces for plan in received.driver.plans]
        received.leave_plans()
    assert asked == [first, ("synchronous", "asynchronous")]


def test_waits_for_a_batch_and_for_an_evaluation_are_no_training() -> None:
    received = Received()
    driver, times = received.driver, received.driver.state.times
    received.step(training=5.0)
    driver.request_batch()
    driver.now += 1_000.0
    while len(driver.batches) < 2:
        driver.finish(driver.attempts()[0], 10)
    driver.now += 5.0
    driver.evaluate()
    driver.now += 500.0
    driver.settle()
    while driver.state.evaluations.running:
        driver.finish(driver.attempts()[-1], 10)
    driver.now += 5.0
    driver.request_batch()
    assert times.training.mean == pytest.approx(10.0, abs=0.1)


def test_a_trainer_that_has_become_slower_is_planned_for_again() -> None:
    received = Received()
    driver = received.driver
    asked: list[int] = []

    def step(training: float) -> None:
        received.step(training=training)
        asked.extend(len(driver.batches) for _ in driver.plans)
        received.leave_plans()

    for _ in range(9):
        step(10.0)
    assert asked == [1, 3, 9]
    for _ in range(12):
        step(30.0)
    assert asked == [1, 3, 9, 17]
    assert driver.state.plan.planned_training == pytest.approx(30.0, rel=0.2)


def test_a_small_part_of_a_step_triggers_no_plan() -> None:
    received = Received()
    driver = received.driver
    asked: list[int] = []
    for step in range(20):
        driver.now += 100.0
        received.step(training=0.1 if step < 9 else 0.3)
        asked.extend(len(driver.batches) for _ in driver.plans)
        received.leave_plans()
    assert asked == [1, 3, 9]


# --- groups of a batch one by one ----------------------------------------------------------------


def stream(received: Received, *, each: float, after: float = 0.0, waits: float = 0.0) -> None:
    """One batch that the trainer takes group by group: `waits` seconds for every group, `each` on
    every group but the last, and `after` on the last one and on what follows it."""
    driver = received.driver
    before = len(driver.batches)
    while len(driver.batches) == before:
        take_group(driver, waits=waits)
        driver.now += each if len(driver.batches) == before else after
    driver.update()


def take_group(driver: Driver, *, waits: float = 0.0) -> None:
    driver.takes = False
    driver.feed(ev.BatchRequested(streamed=True))
    driver.settle()
    driver.now += waits
    while driver.state.delivery.offer is None:
        driver.finish(driver.attempts()[0], 10)
        driver.settle()
    driver.take()
    driver.takes = True


@pytest.mark.parametrize("pace", ["synchronous", "asynchronous", "auto"])
def test_a_trainer_that_takes_group_by_group_is_measured_without_its_waits(pace: str) -> None:
    received = Received(pace=pace, batch_groups=3)
    driver = received.driver
    stream(received, each=300.0)
    (first,) = driver.plans
    assert first.train_seconds is None
    driver.feed(ev.Planned(schedule=None))
    for _ in range(3):
        stream(received, each=4.0, after=12.0, waits=50.0)
    assert driver.plans[-1].train_seconds == pytest.approx(20.0, abs=0.3)


def test_training_on_a_batch_that_an_update_ends_counts_whole() -> None:
    driver = Received(batch_groups=3).driver
    for early in (90.0, 6.0):
        for seconds in (early, 14.0):
            take_group(driver)
            driver.now += seconds
        driver.update()
        assert driver.batches[-1].groups
    take_group(driver)
    assert driver.state.times.training.mean == pytest.approx(20.0, abs=0.3)
