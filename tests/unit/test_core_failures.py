"""Tests failures in the core: bounded retries, the ledger, lost engines."""

from __future__ import annotations

from dataclasses import replace

from aprilsched.config import Dispatch, Retries, SchedulerConfig
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.state.ledger import Reason
from tests.support.driver import Driver, prompts
from tests.support.table import each_row


def config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {"batch_groups": 2, "group_size": 2, "over_provision": 1.0}
    return SchedulerConfig(**{**values, **changes})  # type: ignore[arg-type]


def test_a_failed_attempt_is_sent_again_elsewhere_with_its_tokens():
    driver = Driver(config())
    driver.request_batch()
    key = driver.attempts()[0]
    engine = driver.sends[key].engine
    driver.progress(key, 5)
    driver.fail(key)
    again = driver.sends[key[0], 2]
    assert again.engine != engine
    assert len(again.input_ids) == 7


def test_after_the_last_attempt_the_whole_group_is_in_the_ledger_and_replaced():
    driver = Driver(config(retries=Retries(attempts=2, member="drop_group")))
    driver.request_batch()
    key = driver.attempts()[0]
    group_id = driver.sends[key].group_id
    driver.fail(key)
    driver.fail((key[0], 2), cause="HTTP 500")
    ledger = driver.state.in_flight.ledger
    assert ledger.rollouts == {"failed": 1, "sibling_failed": 1}
    cause = "2 attempts in a row failed without a new token, the last: HTTP 500"
    assert {entry.cause for entry in ledger.entries} == {cause}
    driver.settle()
    assert group_id not in driver.group_ids()
    assert len(driver.group_ids()) == 2


def test_a_failed_request_goes_to_an_engine_on_which_it_has_not_failed():
    driver = Driver(config(retries=Retries(attempts=9)), engines=("a", "b", "c"))
    driver.request_batch()
    request = driver.attempts()[0][0]

    def fail() -> str:
        key = next(key for key in driver.sends if key[0] == request)
        engine = driver.sends[key].engine
        driver.fail(key)
        return engine

    assert {fail() for _ in range(3)} == {"a", "b", "c"}
    for _ in range(3):
        fail()
    assert driver.state.in_flight.ledger.total == 0
    key = next(key for key in driver.sends if key[0] == request)
    driver.progress(key, 1)
    assert driver.state.in_flight.requests[request].avoid, "one that breaks off again is as bad"
    driver.interrupt(key)
    assert not driver.state.in_flight.requests[request].avoid


def test_a_request_that_the_only_engine_refuses_is_not_tried_again():
    driver = Driver(config(), engines=("a",))
    driver.request_batch()
    driver.fail(driver.attempts()[0], cause="too long", final=True)
    assert driver.state.in_flight.ledger.rollouts[Reason.FAILED] == 1
    assert driver.state.in_flight.ledger.entries[0].cause == "refused at attempt 1: too long"
    assert driver.state.in_flight.counters.retries == 0


def test_a_request_that_two_engines_refuse_is_not_tried_again():
    driver = Driver(config(), engines=("a", "b", "c"))
    driver.request_batch()
    key = driver.attempts()[0]
    driver.fail(key, cause="too long", final=True)
    assert driver.state.in_flight.ledger.total == 0
    driver.fail((key[0], 2), cause="too long", final=True)
    assert driver.state.in_flight.ledger.rollouts[Reason.FAILED] == 1
    assert driver.state.in_flight.ledger.entries[0].cause == "refused at attempt 2: too long"
    assert not driver.lost, "requests that every engine refuses are not an engine's fault"


@each_row("final", [True, False])
def test_an_engine_that_fails_what_others_take_is_lost_although_it_serves_some(final: bool):
    driver = Driver(config(batch_groups=12, group_size=1))
    driver.request_batch()
    served = driver.on("a")[0]
    if not final:
        driver.progress(served, 1)
    for loss in range(3):
        assert not driver.lost, loss
        key = driver.on("a")[1]
        driver.fail(key, cause="HTTP 401", final=final, answered=not final)
        again = (key[0], key[1] + 1)
        assert driver.sends[again].engine == "b"
        driver.progress(again, 1)
        driver.finish(again)
        # Requests that were sent before the failure count as part of it.
        for each in driver.on("a"):
            if each != served:
                driver.interrupt(each)
    (lost,) = driver.lost
    assert lost.engine == "a"
    assert lost.cause == "it failed 3 times in a row: it refused what b takes: HTTP 401"
    assert driver.state.in_flight.ledger.total == 0


def test_an_attempt_that_brought_a_token_counts_apart_from_those_in_a_row_that_did_not():
    driver = Driver(
        config(batch_groups=4, retries=Retries(attempts=2, interruptions=4)),
        engines=tuple("abcdefgh"),
    )
    driver.request_batch()
    request = driver.attempts()[0][0]

    def latest() -> tuple[int, int]:
        return max(key for key in driver.sends if key[0] == request)

    for _ in range(3):
        driver.fail(latest())
        driver.progress(latest(), 1)
        driver.fail(latest(), cause="the stream broke")
        assert driver.state.in_flight.ledger.total == 0
    driver.progress(latest(), 1)
    driver.fail(latest(), cause="HTTP 502")
    causes = {entry.cause for entry in driver.state.in_flight.ledger.entries}
    assert causes == {"4 attempts broke off, the last: HTTP 502"}


def test_a_request_that_never_reached_its_engine_has_not_failed():
    driver = Driver(config(retries=Retries(attempts=1)))
    driver.request_batch()
    key = driver.attempts()[0]
    driver.feed(
        ev.Failed(request_id=key[0], attempt=key[1], cause="connection refused", unsent=True)
    )
    assert driver.state.in_flight.ledger.total == 0
    assert (key[0], 2) in driver.sends


def test_a_request_that_ends_every_engine_it_meets_is_dropped_in_the_end():
    driver = Driver(config(retries=Retries(interruptions=3)), engines=("a", "b", "c", "d"))
    driver.request_batch()
    request = driver.attempts()[0][0]
    for _ in range(3):
        engine = next(s.engine for k, s in driver.sends.items() if k[0] == request)
        driver.feed(ev.EngineLost(engine=engine, cause="crashed"))
    dropped = {entry.cause for entry in driver.state.in_flight.ledger.entries}
    assert len(dropped) == 1
    assert dropped.pop().startswith("3 attempts broke off, the last: ")
    driver.settle()
    assert driver.sends, "a new group takes its place on the engine that is left"


def test_late_tokens_of_a_dropped_rollout_are_counted_as_discarded():
    driver = Driver(config(), engines=("a",))
    driver.request_batch()
    key, sibling = driver.attempts(driver.group_ids()[0])
    driver.fail(key, final=True)
    driver.progress(sibling, 4)
    assert driver.state.in_flight.counters.tokens_discarded == 4
    driver.interrupt(sibling)
    assert driver.state.in_flight.open_attempts == len(driver.sends) == 4, "a new group replaces it"


def test_an_engine_that_fails_again_and_again_is_lost_and_draws_no_more_requests():
    driver = Driver(config(batch_groups=4, retries=Retries(attempts=9)))
    driver.request_batch()
    request = next(k[0] for k, send in driver.sends.items() if send.engine == "a")
    for _ in range(5):
        driver.fail(next(key for key in driver.sends if key[0] == request))
    assert [loss.engine for loss in driver.lost] == ["a"]
    assert {send.engine for send in driver.sends.values()} == {"b"}
    assert len(driver.sends) == 8


def fail_everywhere(driver: Driver) -> None:
    """The request that was sent last is answered with HTTP 500 wherever it goes."""
    request = driver.sent[-1].request_id
    while key := next((key for key in driver.sends if key[0] == request), None):
        driver.fail(key, cause="HTTP 500", answered=True)


def test_requests_that_fail_everywhere_cost_no_engine_that_serves_others():
    whole = Retries(member="drop_group")
    driver = Driver(config(batch_groups=8, group_size=1, retries=whole))
    driver.request_batch()
    for engine in "ab":
        driver.progress(driver.on(engine)[0], 1)
    for _ in range(12):
        fail_everywhere(driver)
        driver.settle()
    assert not driver.lost
    assert not any(control.suspect for control in driver.state.fleet.control.all())
    assert driver.state.in_flight.ledger.rollouts == {Reason.FAILED: 12}
    cause = "3 attempts in a row failed without a new token, the last: HTTP 500"
    assert {entry.cause for entry in driver.state.in_flight.ledger.entries} == {cause}


def failing(engine_fails: bool) -> Driver:
    """Fail the only engine, which has no other request, three times, and answer its check."""
    driver = Driver(config(batch_groups=1, group_size=1), engines=("a",), auto_verify=False)
    driver.request_batch()
    for _ in range(3):
        while driver.verifications:
            assert not driver.verifications[0].generates
            driver.verify()
        driver.fail(driver.attempts()[0], cause="HTTP 500", answered=True)
    (command,) = driver.verifications
    assert command.generates
    if engine_fails:
        driver.feed(ev.ControlFailed(engine="a", call="verify", cause="HTTP 500"))
    else:
        driver.verify()
    return driver


def test_an_engine_that_generates_nothing_is_lost():
    driver = failing(engine_fails=True)
    assert [loss.cause for loss in driver.lost] == ["HTTP 500; then verify failed: HTTP 500"]


def test_three_failures_are_the_requests_fault_if_the_engine_generates_then():
    driver = failing(engine_fails=False)
    assert not driver.lost
    assert len(driver.sends) == 1, "the next prompt"
    assert driver.state.fleet.control.engines["a"].consecutive_failures == 0


def test_an_answer_to_a_later_request_ends_a_row_of_failures():
    driver = Driver(config(batch_groups=1, group_size=1), engines=("a",))
    for _ in range(6):
        driver.request_batch()
        for _ in range(2):
            driver.fail(driver.attempts()[0], cause="the connection broke")
        driver.progress(driver.attempts()[0], 1)
        driver.interrupt(driver.attempts()[0])
        driver.fail(driver.attempts()[0], cause="the connection broke")
        driver.progress(driver.attempts()[0], 1)
        driver.finish(driver.attempts()[0])
        driver.settle()
    assert not driver.lost


def test_what_breaks_off_together_is_one_failure_of_its_engine():
    driver = Driver(config(batch_groups=4, retries=Retries(attempts=9)))
    driver.request_batch()
    for key in driver.attempts():
        driver.fail(key)
    assert not driver.lost
    assert len(driver.sends) == 8


def test_late_news_of_a_lost_engine_are_void():
    driver = Driver(config())
    driver.request_batch()
    key = driver.on("a")[0]
    driver.feed(ev.EngineLost(engine="a", cause="gone"))
    before = driver.state.in_flight.counters.tokens_generated
    driver.progress(key, 10)
    driver.feed(ev.Finished(request_id=key[0], attempt=key[1], reason="stop"))
    assert driver.state.in_flight.counters.tokens_generated == before


def test_the_last_engine_lost_is_reported_as_the_last():
    driver = Driver(config())
    driver.feed(ev.EngineLost(engine="a", cause="gone"))
    driver.feed(ev.EngineLost(engine="b", cause="gone"))
    assert [loss.last for loss in driver.lost] == [False, True]


def test_max_in_flight_bounds_what_is_with_the_engines():
    driver = Driver(config(batch_groups=2, over_provision=4.0, dispatch=Dispatch(max_in_flight=4)))
    driver.request_batch()
    assert len(driver.sends) == 4
    driver.finish(driver.attempts()[0])
    assert len(driver.sends) == 4


def test_a_group_keeps_its_prefix_on_one_engine_where_that_does_not_unbalance():
    driver = Driver(config(batch_groups=8, group_size=4))
    driver.request_batch()
    loads = {name: sum(s.engine == name for s in driver.sends.values()) for name in "ab"}
    assert loads == {"a": 16, "b": 16}
    spread = [
        len({s.engine for s in driver.sends.values() if s.group_id == group_id})
        for group_id in driver.group_ids()
    ]
    assert sum(count == 1 for count in spread) >= 6


def test_prompts_of_one_affinity_go_to_one_engine_until_it_has_over_eight_more_than_another():
    settings = config(batch_groups=24, group_size=1, over_provision=1.0)
    driver = Driver(settings, auto_prompts=False)
    driver.request_batch()
    given = tuple(replace(prompt, affinity="chat") for prompt in prompts(24))
    driver.feed(ev.PromptsArrived(prompts=given))
    engines = [send.engine for send in driver.sent]
    assert len(set(engines[:9])) == 1
    assert engines[9] != engines[0]


def test_the_number_of_affinities_is_limited():
    driver = Driver(config(batch_groups=5000, group_size=1, over_provision=1.0), auto_prompts=False)
    driver.request_batch()
    given = tuple(replace(prompt, affinity=str(at)) for at, prompt in enumerate(prompts(5000)))
    driver.feed(ev.PromptsArrived(prompts=given))
    engines = driver.state.in_flight.affinity_engines
    assert list(engines) == [str(at) for at in range(5000 - len(engines), 5000)]
    assert len(engines) == 4096


def test_carried_rollouts_are_sent_first():
    driver = Driver(config(straggler="abort", over_provision=2.0))
    driver.request_batch()
    ids = driver.group_ids()
    driver.finish_groups(ids[:2])
    driver.settle()
    driver.sent.clear()
    driver.request_batch()
    order = [send.group_id for send in driver.sent]
    assert order[:4] == [ids[2], ids[2], ids[3], ids[3]]
    assert all(group_id not in ids for group_id in order[4:])


def test_a_run_in_which_group_after_group_fails_is_given_up_and_launches_nothing_more():
    driver = Driver(config(retries=Retries(failed_groups=3)), engines=("a",))
    driver.request_batch()
    for _ in range(3):
        assert not driver.given_up
        driver.fail(driver.attempts()[0], cause="HTTP 400", final=True)
        driver.settle()
    (given_up,) = driver.given_up
    assert "3 groups in a row" in str(given_up.error)
    assert "the last because refused at attempt 1: HTTP 400;" in str(given_up.error)
    launched = driver.state.in_flight.counters.launched
    driver.fail(driver.attempts()[0], final=True)
    assert driver.state.in_flight.counters.launched == launched


def test_an_accepted_group_ends_a_row_of_failures():
    driver = Driver(config(retries=Retries(failed_groups=2), over_provision=2.0), engines=("a",))
    driver.request_batch()
    for _ in range(3):
        driver.fail(driver.attempts()[0], final=True)
        driver.settle()
        driver.finish_group(driver.group_ids()[0])
        driver.settle()
        driver.request_batch()
    assert not driver.given_up
