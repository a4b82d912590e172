"""Tests the staleness bound: the admission gate, and the rules mask, evict and finish."""

from __future__ import annotations

from aprilsched.config import LengthBuckets, Pool, Samples, SchedulerConfig, Staleness, Tokens
from aprilsched.kernel.core.messages.events import Filtered
from aprilsched.kernel.core.policies.schedule import Schedule
from aprilsched.kernel.core.policies.wave import Wave
from aprilsched.planning import Planner
from aprilsched.planning.trial import try_out
from tests.support.driver import Driver
from tests.support.table import each_row


def config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "batch_groups": 2,
        "group_size": 1,
        "over_provision": 4.0,
        "max_staleness": 1,
    }
    return SchedulerConfig(**{**values, **changes})  # type: ignore[arg-type]


def step(driver: Driver, *, keep: int | None = None) -> None:
    """One batch and one update; `keep` is the group that never finishes by itself."""
    before = len(driver.batches)
    driver.request_batch()
    driver.progress_each(driver.attempts(), 2)
    for group_id in driver.group_ids():
        if len(driver.batches) > before:
            break
        if group_id != keep:
            driver.finish_group(group_id)
    driver.settle()
    driver.update()


@each_row(("bound", "launched"), [(0, 2), (1, 4), (2, 6), (None, 8)])
def test_the_gate_admits_what_can_be_consumed_in_time(bound: int | None, launched: int):
    driver = Driver(config(max_staleness=bound))
    driver.request_batch()
    assert len(driver.sends) == launched


def test_the_gate_lets_a_trainer_take_several_batches_under_one_version():
    driver = Driver(config(max_staleness=0))
    for _ in range(5):
        driver.request_batch()
        driver.finish_groups(driver.group_ids())
    assert len(driver.batches) == 5


def test_mask_delivers_old_tokens_with_loss_mask_0():
    driver = Driver(config())
    driver.request_batch()
    slow = driver.group_ids()[0]
    for _ in range(3):
        step(driver, keep=slow)
    driver.request_batch()
    driver.finish_group(slow)
    driver.finish_groups(driver.group_ids())
    (rollout,) = (r for b in driver.batches for r in b.rollouts if r.group_id == slow)
    consumed = next(b.version for b in driver.batches for g in b.groups if g.group_id == slow)
    assert rollout.loss_mask.tolist() == (rollout.versions >= consumed - 1).tolist()
    assert not rollout.loss_mask.all()
    assert driver.state.in_flight.counters.tokens_masked == (~rollout.loss_mask).sum()


def test_evict_names_the_group_in_the_ledger_at_the_update_that_makes_it_too_old():
    driver = Driver(config(max_staleness=Staleness(1, rule="evict")))
    driver.request_batch()
    slow = driver.group_ids()[0]
    step(driver, keep=slow)
    assert slow in driver.state.in_flight.groups
    step(driver, keep=slow)
    assert slow not in driver.state.in_flight.groups
    assert driver.state.in_flight.ledger.rollouts == {"stale": 1}
    assert driver.state.in_flight.counters.tokens_discarded > 0


def test_finish_holds_the_batch_for_what_would_be_too_old_afterwards():
    driver = Driver(config(max_staleness=Staleness(1, rule="finish")))
    driver.request_batch()
    slow = driver.group_ids()[0]
    step(driver, keep=slow)
    driver.request_batch()
    for group_id in driver.group_ids():
        if group_id != slow:
            driver.finish_group(group_id)
    assert len(driver.batches) == 1, "the batch waits for the group that is due"
    driver.finish_group(slow)
    assert slow in [group.group_id for group in driver.batches[1].groups]


def test_finish_keeps_the_bound_over_many_steps():
    driver = Driver(
        config(max_staleness=Staleness(1, rule="finish"), batch_groups=3, over_provision=3.0)
    )
    for turn in range(30):
        before = len(driver.batches)
        driver.request_batch()
        driver.progress_each(driver.attempts(), 1)
        while len(driver.batches) == before:
            ids = driver.group_ids()
            driver.finish_group(ids[(turn * 7) % len(ids)], count=1)
        driver.settle()
        driver.update()
    worst = max(r.staleness(b.version) for b in driver.batches for r in b.rollouts)
    assert worst == 1
    assert driver.state.in_flight.counters.tokens_masked == 0


# --- batches that are full by samples or tokens ----------------------------------------------


def lengths_differ(driver: Driver, group_id: int) -> None:
    """Give some groups many tokens and others few."""
    driver.finish_group(group_id, count=1 if (group_id // 3) % 3 else 40)


def until_batch(driver: Driver, *, most: int = 2_000) -> None:
    """Request a batch, and finish open requests, oldest first, until it is delivered."""
    before = len(driver.batches)
    driver.request_batch()
    for _ in range(most):
        driver.settle()
        if len(driver.batches) > before:
            return
        lengths_differ(driver, driver.group_ids()[0])
    raise AssertionError("no batch is delivered")


STOPS = [
    {"stop": Samples(20)},
    {"stop": Samples(3)},
    {"stop": Tokens(150)},
    {"stop": Tokens(7)},
]
REFILLS = [
    {"refill": "wave"},
    {"refill": Pool(together=3)},
    {"refill": Pool(together=3, until=0.5)},
    {"refill": LengthBuckets(store=2.0)},
    {"over_provision": "auto"},
    {"over_provision": 1.0},
]
BOUNDS = [
    {},
    {"max_staleness": 0},
    {"max_staleness": Staleness(1, rule="evict")},
    {"max_staleness": Staleness(1, rule="finish")},
]


@each_row(
    ("stop", "refill", "bound"),
    [(STOPS[i % 4], refill, BOUNDS[(i + i // 4) % 4]) for i, refill in enumerate(REFILLS)],
)
def test_no_gate_makes_a_batch_impossible(
    stop: dict[str, object], refill: dict[str, object], bound: dict[str, object]
):
    """When all launched requests have finished, there is a batch. Each value is in a row; the
    interleavings have the other combinations."""
    for pace in ("synchronous", "asynchronous"):
        if pace == "asynchronous" and isinstance(refill.get("refill"), LengthBuckets):
            continue
        settings = {"pace": pace, "over_provision": 1.5, "max_staleness": None}
        driver = Driver(config(**{**settings, **bound, **refill, **stop}))
        for _ in range(3):
            until_batch(driver)
            driver.settle()
            driver.update()
        if bound.get("max_staleness") == Staleness(1, rule="finish"):
            worst = max(r.staleness(b.version) for b in driver.batches for r in b.rollouts)
            assert worst <= 1
            assert driver.state.in_flight.counters.tokens_masked == 0


@each_row(
    ("stop", "pace", "straggler"),
    [
        (STOPS[0], "synchronous", "retract"),
        (STOPS[1], "asynchronous", "abort"),
        (STOPS[2], "asynchronous", "retract"),
        (STOPS[3], "synchronous", "abort"),
    ],
)
def test_no_gate_waits_for_what_is_refused(stop: dict[str, object], pace: str, straggler: str):
    """The user's filter takes two of three groups."""
    settings = config(pace=pace, straggler=straggler, over_provision=1.5, **stop)
    driver = Driver(settings, accepts=True)
    for _ in range(3):
        before = len(driver.batches)
        driver.request_batch()
        for _ in range(1_000):
            if len(driver.batches) > before:
                break
            driver.settle()
            while driver.verdicts:
                group_id = driver.verdicts.pop(0).group.group_id
                driver.feed(Filtered(group_id=group_id, accepted=(group_id // 3) % 4 == 0))
            if driver.group_ids():
                lengths_differ(driver, driver.group_ids()[0])
        assert len(driver.batches) > before
        driver.settle()
        driver.update()


@each_row("pace", ["synchronous", "asynchronous"])
def test_a_batch_by_samples_is_planned_as_the_groups_that_it_takes(pace: str):
    """batch_groups is not used if a batch is full by samples."""
    driver = Driver(config(stop=Samples(21), group_size=4, pace=pace))
    driver.request_batch()
    assert driver.state.batch_groups == 6
    assert driver.state.plan.target_groups == 24
    assert len(driver.group_ids()) == 12, "twice six: the bound is 1"


def test_a_batch_by_tokens_follows_the_observed_lengths():
    settings = config(stop=Tokens(600), max_staleness=None, over_provision=1.5, group_size=2)
    driver = Driver(settings)
    driver.request_batch()
    assert len(driver.group_ids()) == 3, "batch_groups is what is known at first"
    driver.finish_groups(driver.group_ids()[:2], count=5)
    assert driver.state.batch_groups == 60
    assert len(driver.group_ids()) == 87, "1.5 times the 58 groups that are missing"
    while not driver.batches:
        driver.finish_group(driver.group_ids()[0], count=5)
    assert len(driver.batches[0].groups) == 60
    assert driver.state.plan.target_groups == 90


def test_ready_batches_are_counted_as_they_are_delivered():
    """The trainer is slow: two batches by samples are held for it, and no more."""
    settings = config(stop=Samples(10), pace="asynchronous", max_staleness=None, group_size=2)
    driver = Driver(settings)
    driver.request_batch()
    for _ in range(200):
        if driver.group_ids():
            driver.finish_group(driver.group_ids()[0])
        driver.settle()
    assert len(driver.batches) == 1
    assert driver.state.in_flight.ready.samples >= 20
    assert driver.state.in_flight.training * 2 <= 60, "and launching has stopped"


@each_row("stop", [*STOPS, {"stop": "groups"}], ids=str)
def test_a_schedule_is_planned_for_the_batch_that_stops(stop: dict[str, object]):
    driver = Driver(config(over_provision="auto", max_staleness=None, group_size=4, **stop))
    until_batch(driver)
    (plan,) = driver.plans
    assert plan.batch_groups == driver.state.batch_groups
    setting = Planner().setting(plan, driver.config)
    assert setting.full_at == driver.config.policies.stop
    assert try_out(Schedule(over_provision=1.5, refill=Wave()), setting)
