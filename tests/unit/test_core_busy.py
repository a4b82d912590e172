"""Tests engines that have no room for a request now: it waits, and nothing fails."""

from __future__ import annotations

from functools import partial

import pytest

from aprilsched.config import Health
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.admission import MAX_PAUSE_S, MAX_RETRY_AFTER_S, Admission
from tests.support.driver import Driver, Key, config

FULL = "The request queue is full."


def driver_of(groups: int = 4, engines: tuple[str, ...] = ("a",), **changes: object) -> Driver:
    """A driver whose engines have `groups` groups of two together."""
    driver = Driver(config(batch_groups=groups, over_provision=1.0, **changes), engines=engines)
    driver.request_batch()
    assert len(driver.sends) == 2 * groups
    return driver


def refuse(driver: Driver, *keys: Key, retry_after_s: float | None = None) -> None:
    for key in keys:
        driver.interrupt(key, busy=FULL, retry_after_s=retry_after_s)


def pass_time(driver: Driver, seconds: float) -> None:
    driver.now += seconds
    driver.feed(ev.Tick())


def test_a_busy_engine_gets_no_more_than_it_took():
    driver = driver_of()
    first, *others = driver.attempts()
    refuse(driver, *others[3:])
    assert driver.on("a") == [first, *others[:3]]
    driver.finish(first)
    assert len(driver.on("a")) == 5, "one has ended, and its answer is evidence of room for two"
    refuse(driver, driver.attempts()[-1])
    assert len(driver.on("a")) == 4
    state = driver.state
    assert not state.in_flight.ledger.total
    assert not state.in_flight.counters.retries
    assert list(state.fleet.control.engines) == ["a"]


def test_a_busy_engine_is_reported_once_with_what_it_was_sent():
    reports: list[facts.EngineBusy] = []
    driver = Driver(
        config(batch_groups=4, over_provision=1.0),
        engines=("a",),
        hears=lambda part: reports.extend(f for f in part if isinstance(f, facts.EngineBusy)),
    )
    driver.request_batch()
    refuse(driver, *driver.attempts()[4:])
    pass_time(driver, 1.0)
    refuse(driver, driver.attempts()[0])
    assert reports == [facts.EngineBusy(engine="a", in_flight=8, cause=FULL)]


def test_other_engines_get_what_a_busy_one_refuses():
    driver = driver_of(engines=("a", "b"))
    refuse(driver, *driver.on("a")[1:])
    assert len(driver.on("a")) == 1
    assert len(driver.on("b")) == 7


def test_a_partial_response_waits_with_its_tokens():
    driver = driver_of()
    key = driver.attempts()[0]
    driver.progress(key, 5)
    driver.feed(
        ev.Progress(
            request_id=key[0],
            attempt=key[1],
            token_ids=driver.sends[key].input_ids,
            logprobs=driver.sends[key].input_ids.astype("float32") * 0 - 1,
        )
    )
    refuse(driver, key)
    driver.finish(driver.attempts()[0])
    again = driver.sends[key[0], 2]
    assert len(again.input_ids) == 2 + 5 + 2
    assert again.sampling.max_new_tokens == driver.config.sampling.max_new_tokens - 7


@pytest.mark.parametrize(
    ("asked", "waits"), [(7.5, 7.5), (1e9, MAX_RETRY_AFTER_S), (None, 1.0), (0.0, 1.0)]
)
def test_nothing_is_sent_before_the_engine_may_be_asked_again(asked: float | None, waits: float):
    driver = driver_of()
    refuse(driver, *driver.attempts(), retry_after_s=asked)
    pass_time(driver, waits - 0.1)
    assert not driver.sends
    pass_time(driver, 0.2)
    assert len(driver.sends) == 1


refuse_whole = partial(Admission.refuse, partial=False, wait_s=None)


def test_pauses_grow_while_an_engine_takes_nothing_and_start_again_with_an_answer():
    admission = Admission()

    def pauses(count: int) -> list[float]:
        seen: list[float] = []
        for sent in range(count):
            refuse_whole(admission, 0.0, sent=sent, attempts_sent=sent, others=0)
            seen.append(admission.closed_until)
        return seen

    assert pauses(7) == [1, 2, 4, 8, 16, MAX_PAUSE_S, MAX_PAUSE_S]
    admission.answer(1, sent=0, attempts_sent=0)
    admission.closed_until = 0.0
    assert pauses(1) == [1]


def serve(room: int, requests: int, *, total: bool) -> tuple[int, int]:
    """Send `requests` requests to an engine that holds at most `room`, in all if `total`, else in
    its queue. Return how many it refused, and how many it held at most."""
    admission, now, sent, refused, most = Admission(), 0.0, 0, 0, 0
    queue: list[int] = []
    running: list[int] = []
    while sent < requests:
        now += 1.0
        before = sent
        while not refused or not admission.is_full(now, len(queue) + len(running)):
            if sent - before >= 64:
                break
            sent += 1
            queue.append(sent)
        while len(queue) + (len(running) if total else 0) > room:
            number = queue.pop()
            refused += 1
            others = len(queue) + len(running)
            refuse_whole(admission, now, sent=number, attempts_sent=sent, others=others)
        most = max(most, len(queue) + len(running))
        for number in queue:
            admission.answer(len(queue) + len(running), sent=number, attempts_sent=sent)
            running.append(number)
        queue = []
        running = running[: len(running) * 7 // 8]
    return refused, most


def test_a_bound_on_all_requests_is_met_ever_more_rarely():
    few, _ = serve(8, 200, total=True)
    many, most = serve(8, 2000, total=True)
    assert most == 8
    assert many - few < 2000 / 32, "about one in eight rounds of eight"


def test_a_bound_on_the_queue_does_not_bound_what_runs():
    refused, most = serve(4, 2000, total=False)
    assert most >= 20, "of 4 new ones in each step, an eighth of all ends"
    assert refused < 120, "most of them in the first step"


def test_a_limit_that_is_gone_is_forgotten():
    admission, number = Admission(), 0
    for _ in range(20):  # Each time an answer has made room for another, it is refused.
        refuse_whole(admission, 0.0, sent=number, attempts_sent=number, others=3)
        number += 1
    answers = 0
    while admission.limit < 64:
        number += 1
        answers += 1
        admission.answer(admission.limit, sent=number, attempts_sent=number)
    assert answers < 128


def test_an_engine_that_is_busy_for_too_long_is_one_that_fails():
    driver = driver_of(groups=1, health=Health(fleet_wait_s=30.0), engines=("a",))
    while driver.now < 29.0:
        refuse(driver, *driver.attempts())
        pass_time(driver, 5.0)
    assert not driver.lost
    assert not driver.state.in_flight.counters.retries
    for _ in range(3):
        pass_time(driver, MAX_PAUSE_S)
        refuse(driver, *driver.attempts())
    assert driver.state.in_flight.counters.retries
    assert FULL in driver.state.in_flight.ledger.entries[0].cause


def test_time_in_which_an_engine_is_not_asked_does_not_count():
    driver = driver_of(groups=1, health=Health(fleet_wait_s=30.0))
    refuse(driver, *driver.attempts(), retry_after_s=5.0)
    pass_time(driver, 6.0)
    driver.now += 3600.0  # nothing happens: the trainer has held the loop
    refuse(driver, *driver.attempts())
    assert not driver.state.in_flight.counters.retries


def test_an_engine_with_other_requests_may_stay_busy():
    driver = driver_of(groups=1, health=Health(fleet_wait_s=30.0))
    kept = driver.attempts()[0]
    for _ in range(20):
        refuse(driver, *driver.attempts()[1:])
        driver.progress(kept, 1)
        pass_time(driver, MAX_PAUSE_S)
        state = driver.state.fleet
        state.admissions["a"].limit = 2  # as if the engine had answered some
        driver.feed(ev.HoldChanged(held=False))
    assert not driver.lost
    assert not driver.state.in_flight.counters.retries


def test_an_evaluation_waits_for_a_busy_engine_too():
    driver = Driver(config(), engines=("a",))
    driver.evaluate(2, group_size=2, evaluation_id=7)
    driver.settle()
    refuse(driver, *driver.attempts()[1:])
    while driver.sends:
        driver.finish(driver.attempts()[0])
    assert len(driver.evaluations[7].groups) == 2


def test_a_dropped_group_of_a_busy_engine_is_forgotten():
    driver = driver_of()
    key = driver.attempts()[0]
    group = driver.sends[key].group_id
    driver.feed(ev.GroupWithdrawn(group_id=group, cause="not wanted"))
    refuse(driver, *driver.attempts(group))
    assert group not in driver.group_ids()


def test_an_idle_engine_is_verified_while_another_is_busy():
    """A busy engine without requests does not count as idle."""
    driver = driver_of(groups=1, engines=("a", "b", "c"))
    driver.auto_verify = False
    (busy,) = {send.engine for send in driver.sends.values()}
    pass_time(driver, 5.0)
    refuse(driver, *driver.attempts(), retry_after_s=100.0)
    assert driver.verifications
    driver.settle()
    assert busy not in {send.engine for send in driver.sends.values()}
    assert len(driver.sends) == 2
