"""Tests the simulated batcher on explicit time: scheduling, pauses, refits, SGLang's edge cases."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from aprilsched.planning.reserved_share import ReservedShare
from aprilsched.planning.step_times.model import H200_QWEN3_4B, StepTimeModel
from aprilsched.simulation.engine.sequence import version_spans
from aprilsched.simulation.engine.settings import Admission, SimConfig
from aprilsched.simulation.engine.toy_model import weights_key_of_version
from aprilsched.types import Int32Array, VersionSpan
from tests.support.sim_batcher import Driver, explained, request
from tests.support.table import each_row

T = H200_QWEN3_4B
SMALL_CHUNKS = StepTimeModel(
    t0=T.t0,
    t1=T.t1,
    t2=T.t2,
    prefill_pass=T.prefill_pass,
    prefill_rate=T.prefill_rate,
    prefill_chunk=100,
)


def alone(length: int, *, greedy: bool = False) -> Int32Array:
    """The tokens of request "a" when nothing disturbs it."""
    driver = Driver(SimConfig())
    driver.submit(request("a", length, greedy=greedy))
    driver.settle()
    return driver.outcomes["a"].ids


def test_one_request_takes_a_pass_and_one_step_for_each_further_token() -> None:
    driver = Driver(SimConfig(stream_interval=64))
    driver.submit(request("a", 300))
    driver.settle()
    outcome = driver.outcomes["a"]
    assert outcome.ended_at == pytest.approx(T.prefill_seconds(4) + T.decode_seconds(1, 5, 299))
    assert outcome.last.finish == "length"
    assert len(outcome.ids) == len(outcome.logprobs) == 300
    assert [len(c.token_ids) for c in outcome.chunks] == [65, 64, 64, 64, 43]
    assert outcome.spans == [(0, 0, 300)]
    counters = driver.batcher.counters
    assert (counters.generated, counters.prefilled, counters.reprefilled) == (300, 4, 0)
    assert (counters.steps, counters.prefill_passes) == (299, 1)
    assert driver.batcher.kv_in_use == 0


@each_row(("priority", "order"), [(False, "cabd"), (True, "bdca")])
def test_what_waits_runs_in_the_order_of_its_rank(priority: bool, order: str) -> None:
    """Those of one rank keep their order."""
    driver = Driver(SimConfig(max_running=1, priority=priority))
    for name, rank in (("c", 2), ("a", 2), ("b", 1), ("d", 1)):
        driver.submit(replace(request(name, 10), rank=rank))
    driver.settle()
    ended = {outcome.ended_at: name for name, outcome in driver.outcomes.items()}
    assert "".join(ended[at] for at in sorted(at for at in ended if at is not None)) == order


def test_requests_sent_together_share_a_pass_and_prefill_stalls_decoding() -> None:
    driver = Driver(SimConfig())
    driver.submit(request("a", 100))
    driver.submit(request("b", 100))
    driver.until(0.1)
    driver.submit(request("c", 5))
    driver.settle()
    counters = driver.batcher.counters
    assert counters.prefill_passes == 2
    assert counters.prefill_seconds == pytest.approx(T.prefill_seconds(8) + T.prefill_seconds(4))
    assert driver.now == pytest.approx(counters.prefill_seconds + counters.decode_seconds)
    assert counters.steps == 99


def test_first_come_first_served_up_to_max_running() -> None:
    driver = Driver(SimConfig(max_running=2))
    for name, length in (("a", 50), ("b", 10), ("c", 10), ("d", 10)):
        driver.submit(request(name, length))
    driver.settle()
    ended = {name: outcome.ended_at or 0.0 for name, outcome in driver.outcomes.items()}
    assert ended["b"] < ended["c"] < ended["d"] < ended["a"]
    assert driver.batcher.counters.prefill_passes == 3


def test_a_long_context_is_prefilled_in_chunks() -> None:
    driver = Driver(SimConfig(timing=SMALL_CHUNKS))
    driver.submit(request("a", 2, prompt=250))
    driver.submit(request("b", 2, prompt=30))
    driver.settle()
    assert driver.batcher.counters.prefill_passes == 3
    assert driver.batcher.counters.prefilled == 280
    assert explained(
        request("a", 2, prompt=250),
        driver.outcomes["a"],
        {0: weights_key_of_version(0)},
        driver.batcher.config.vocab_size,
    )


def test_an_overflowing_pool_sends_the_newest_back_and_changes_no_token() -> None:
    driver = Driver(SimConfig(kv_tokens=700, reserve_clip=20))
    for at, name in enumerate("abc"):
        driver.until(0.1 * at)
        driver.submit(request(name, 500, prompt=20))
    driver.settle()
    counters = driver.batcher.counters
    assert counters.preemptions > 0
    assert counters.reprefilled > 0
    for name in "abc":
        roomy = Driver(SimConfig())
        roomy.submit(request(name, 500, prompt=20))
        roomy.settle()
        assert np.array_equal(driver.outcomes[name].ids, roomy.outcomes[name].ids)
    assert driver.outcomes["a"].ended_at == min(o.ended_at or 0 for o in driver.outcomes.values())


def test_a_pass_has_room_for_all_that_its_requests_may_generate() -> None:
    """Behind it requests count with a share of that, but none is admitted before fewer run."""
    driver = Driver(SimConfig(kv_tokens=1000, admission="sglang-0.5.21"))
    for name in "abc":
        driver.submit(request(name, 400))
    driver.until(0.2)
    assert (driver.batcher.running, driver.batcher.waiting) == (2, 1)
    driver.settle()
    ended = {name: outcome.ended_at or 0.0 for name, outcome in driver.outcomes.items()}
    assert ended["c"] > ended["a"] + T.decode_seconds(1, 5, 390)


@each_row(
    ("admission", "ignore_eos", "running"),
    [
        ("sglang", True, 2),
        ("sglang", False, 3),
        ("sglang-0.5.21", True, 3),
        ("vllm", True, 3),
    ],
)
def test_running_requests_reserve_by_the_rule_of_the_version(
    admission: Admission, ignore_eos: bool, running: int
) -> None:
    driver = Driver(SimConfig(kv_tokens=1050, admission=admission))
    for at, name in enumerate("abc"):
        driver.until(0.1 * at)
        driver.submit(request(name, 400, ignore_eos=ignore_eos))
    driver.until(0.3)
    assert driver.batcher.running == running
    driver.settle()
    assert {len(outcome.ids) for outcome in driver.outcomes.values()} == {400}


def test_the_share_of_running_requests_falls_in_600_steps_until_an_engine_is_idle() -> None:
    share = ReservedShare()
    assert [share.at(step) for step in (0, 300, 600, 900)] == pytest.approx(
        [0.7, 0.399, 0.098, 0.098]
    )
    share.idle(900)
    assert share.at(900) == 0.7
    share.overflow(900, requests=2, generated=160, limits=999)
    assert share.at(900) == pytest.approx(0.2)
    assert ReservedShare(busy=True).at(0) == pytest.approx(0.098)
    careless = ReservedShare(conservativeness=0.14)
    assert [careless.at(step) for step in (0, 900)] == pytest.approx([0.098, 0.01372])
    assert ReservedShare(conservativeness=9.0).at(0) == 1.0
    for wait, runs_beside in ((0.1, 1), (H200_QWEN3_4B.decode_seconds(1, 0, 700), 2)):
        driver = Driver(SimConfig(kv_tokens=3050, admission="sglang-0.5.21"))
        driver.submit(request("a", 5))
        driver.settle()
        driver.submit(request("b", 3000))
        driver.until(driver.now + wait)
        driver.submit(request("c", 1200))
        driver.until(driver.now + 0.1)
        assert driver.batcher.running == runs_beside


def test_vllm_runs_a_preempted_request_before_those_that_wait() -> None:
    driver = Driver(SimConfig(kv_tokens=1000, max_running=3, admission="vllm"))
    for at, name in enumerate("abcd"):
        driver.until(0.01 * at)
        driver.submit(request(name, 500))
    driver.settle()
    assert driver.batcher.counters.preemptions
    ended = {name: outcome.ended_at or 0.0 for name, outcome in driver.outcomes.items()}
    assert ended["a"] < ended["b"] < ended["c"] < ended["d"]


def test_a_request_starts_earlier_with_less_conservativeness() -> None:
    running: list[int] = []
    for factor in (1.0, 0.14):
        config = SimConfig(kv_tokens=3050, admission="sglang-0.5.21", conservativeness=factor)
        driver = Driver(config)
        driver.submit(request("b", 3000))
        driver.until(0.1)
        driver.submit(request("c", 1200))
        driver.until(0.2)
        running.append(driver.batcher.running)
    assert running == [1, 2]


def test_a_request_reserves_at_most_the_clip_of_its_limit() -> None:
    clipped = Driver(SimConfig(kv_tokens=1000, reserve_clip=100))
    for name in "abc":
        clipped.submit(request(name, 400))
    clipped.until(0.2)
    assert (clipped.batcher.running, clipped.batcher.waiting) == (3, 0)


# -- stop tokens ----------------------------------------------------------------------------


def test_a_stop_token_ends_the_response_and_is_its_last_token() -> None:
    tokens = alone(300)
    stop = int(tokens[200])
    place = int(np.flatnonzero(tokens == stop)[0])
    driver = Driver(SimConfig())
    driver.submit(request("a", 300, stop=(stop,)))
    driver.settle()
    outcome = driver.outcomes["a"]
    assert outcome.last.finish == "stop"
    assert np.array_equal(outcome.ids, tokens[: place + 1])
    assert driver.batcher.counters.steps == place


def test_a_stop_token_before_min_new_tokens_does_not_count() -> None:
    tokens = alone(300)
    first, later = int(tokens[0]), int(tokens[150])
    driver = Driver(SimConfig())
    driver.submit(request("a", 300, stop=(first, later), min_new=100))
    driver.settle()
    assert len(driver.outcomes["a"].ids) == 1 + np.flatnonzero(tokens == later)[0]


@each_row("ignore_eos", [True, False])
def test_eos_is_a_stop_token_unless_ignored(ignore_eos: bool) -> None:
    eos = int(alone(300)[70])
    driver = Driver(SimConfig(eos_token_id=eos))
    driver.submit(request("a", 300, ignore_eos=ignore_eos))
    driver.settle()
    assert driver.outcomes["a"].last.finish == ("length" if ignore_eos else "stop")


@each_row("limits", [(400, 120), (120, 120)])
def test_without_stop_tokens_min_new_tokens_is_the_length(limits: tuple[int, int]) -> None:
    limit, length = limits
    driver = Driver(SimConfig())
    driver.submit(request("a", limit, min_new=length, ignore_eos=False))
    driver.settle()
    outcome = driver.outcomes["a"]
    assert np.array_equal(outcome.ids, alone(300)[:length])
    assert outcome.last.finish == ("stop" if length < limit else "length")


@each_row("mode", ["retract", "in_place"])
def test_a_length_stays_through_pauses_and_new_weights(mode: str) -> None:
    driver = Driver(SimConfig())
    driver.submit(request("a", 400, min_new=120, ignore_eos=False))
    driver.until(0.1)
    driver.pause(mode)
    driver.batcher.refit(1)
    driver.resume()
    driver.settle()
    assert (len(driver.outcomes["a"].ids), driver.outcomes["a"].last.finish) == (120, "stop")


def test_a_response_reserves_its_limit_and_not_its_length() -> None:
    driver = Driver(SimConfig(kv_tokens=1000))
    for name in "abc":
        driver.submit(request(name, 400, min_new=300, ignore_eos=False))
    driver.until(0.2)
    assert (driver.batcher.running, driver.batcher.waiting) == (2, 1)
    driver.settle()
    assert {len(outcome.ids) for outcome in driver.outcomes.values()} == {300}


@each_row(("length", "min_new"), [(30, 0), (150, 0), (30, 90)])
def test_a_given_length_ends_a_response_unless_a_stop_token_does(length: int, min_new: int) -> None:
    tokens = alone(300)
    driver = Driver(SimConfig())
    driver.submit(request("a", 300, stop=(int(tokens[100]),), min_new=min_new), length=length)
    driver.settle()
    first = int(np.flatnonzero(tokens == tokens[100])[0]) + 1
    assert len(driver.outcomes["a"].ids) == min(first, max(length, min_new))
    assert driver.outcomes["a"].last.finish == "stop"


def test_a_refit_moves_the_stop() -> None:
    driver = Driver(SimConfig(vocab_size=50))
    driver.submit(request("a", 400, stop=(3,), min_new=60))
    driver.until(0.1)
    driver.pause("retract")
    driver.batcher.flush()
    driver.batcher.refit(1)
    driver.resume()
    driver.settle()
    outcome = driver.outcomes["a"]
    assert outcome.last.finish == "stop"
    assert outcome.ids[-1] == 3
    assert not (outcome.ids[60:-1] == 3).any()


# -- pauses ---------------------------------------------------------------------------------


@each_row("mode", ["retract", "in_place"])
@each_row("flush", [True, False])
def test_a_pause_without_new_weights_changes_no_token(mode: str, flush: bool) -> None:
    driver = Driver(SimConfig())
    driver.submit(request("a", 200))
    driver.until(0.3)
    driver.pause(mode)
    before = driver.now
    sent = len(driver.outcomes["a"].ids)
    assert 0 < sent < 200
    assert driver.batcher.flush() is (flush and mode == "retract") or not flush
    driver.until(5.0)
    assert len(driver.outcomes["a"].ids) == sent
    driver.resume()
    driver.settle()
    assert np.array_equal(driver.outcomes["a"].ids, alone(200))
    counters = driver.batcher.counters
    assert counters.paused_seconds == pytest.approx(5.0 - before)
    assert driver.now == pytest.approx(
        counters.decode_seconds + counters.prefill_seconds + counters.paused_seconds
    )


def test_a_retract_costs_the_context_only_if_flushed() -> None:
    for flush in (True, False):
        driver = Driver(SimConfig())
        driver.submit(request("a", 200))
        driver.until(0.3)
        driver.pause("retract")
        sampled = len(driver.outcomes["a"].ids)
        if flush:
            assert driver.batcher.flush()
        driver.resume()
        driver.settle()
        # The last token never had KV: the pass that continues computes this token only.
        assert driver.batcher.counters.prefilled == 4 + (4 + sampled if flush else 1)
        assert driver.batcher.counters.reprefilled == (4 + sampled - 1 if flush else 0)


def test_a_pause_waits_for_the_step_in_progress() -> None:
    driver = Driver(SimConfig())
    driver.submit(request("a", 200))
    driver.until(0.1)
    asked = driver.now
    driver.pause("in_place")
    assert asked <= driver.now <= asked + T.decode_seconds(1, 30, 1)
    assert driver.batcher.paused == "in_place"
    driver.pause("in_place")
    driver.pause("retract")
    assert driver.batcher.paused == "retract"
    assert driver.batcher.running == 0


def test_stale_keys_differ_from_recompute_and_both_differ_from_the_old_weights() -> None:
    results: dict[str, Int32Array] = {}
    for mode in ("retract", "in_place"):
        driver = Driver(SimConfig())
        driver.submit(request("a", 200, greedy=True))
        driver.until(0.3)
        driver.pause(mode)
        changed_at = len(driver.outcomes["a"].ids)
        if mode == "retract":
            driver.batcher.flush()
        assert driver.batcher.refit(1)
        driver.resume()
        driver.settle()
        results[mode] = driver.outcomes["a"].ids
        assert driver.outcomes["a"].spans == [(0, 0, changed_at), (1, changed_at, 200)]
        assert np.array_equal(results[mode][:changed_at], alone(200, greedy=True)[:changed_at])
        assert (results[mode][changed_at:] == alone(200, greedy=True)[changed_at:]).sum() <= 1
    assert (results["retract"][changed_at:] == results["in_place"][changed_at:]).sum() <= 1


def test_equal_weights_under_a_new_version_change_no_token() -> None:
    driver = Driver(SimConfig())
    driver.submit(request("a", 200))
    driver.until(0.3)
    driver.pause("in_place")
    assert driver.batcher.refit(7, weights_key_of_version(0))
    driver.resume()
    driver.settle()
    assert np.array_equal(driver.outcomes["a"].ids, alone(200))
    assert [span[0] for span in driver.outcomes["a"].spans] == [0, 7]


# -- aborts and SGLang's edges --------------------------------------------------------------


def test_an_abort_ends_after_the_step_in_progress_with_everything() -> None:
    driver = Driver(SimConfig())
    driver.submit(request("a", 200))
    driver.until(0.2)
    asked = driver.now
    driver.batcher.abort("a", asked)
    driver.settle()
    outcome = driver.outcomes["a"]
    assert outcome.last.finish == "abort"
    assert np.array_equal(outcome.ids, alone(200)[: len(outcome.ids)])
    assert driver.now <= asked + T.decode_seconds(1, 100, 1)
    assert len(outcome.ids) == driver.batcher.counters.generated
    assert driver.batcher.kv_in_use == 0
    driver.batcher.abort("a", driver.now)
    driver.batcher.abort("unknown", driver.now)


def test_an_abort_in_the_queue_ends_at_once_without_tokens() -> None:
    driver = Driver(SimConfig(max_running=1))
    driver.submit(request("a", 200))
    driver.submit(request("b", 200))
    driver.until(0.2)
    driver.batcher.abort("b", driver.now)
    driver.collect(driver.now)
    assert driver.outcomes["b"].last.finish == "abort"
    assert driver.outcomes["b"].spans == [(0, 0, 0)]
    assert len(driver.outcomes["b"].ids) == 0


def test_an_abort_in_a_prefill_pass_ends_after_it() -> None:
    driver = Driver(SimConfig())
    driver.submit(request("a", 200))
    driver.until(0.01)
    driver.batcher.abort("a", driver.now)
    driver.settle()
    assert driver.outcomes["a"].last.finish == "abort"
    assert driver.now == pytest.approx(T.prefill_seconds(4))


@each_row("stream_at_pause", [True, False])
def test_an_abort_after_a_retract_gives_what_was_streamed(stream_at_pause: bool) -> None:
    driver = Driver(SimConfig(stream_at_pause=stream_at_pause))
    driver.submit(request("a", 500))
    driver.until(0.7)
    driver.pause("retract")
    generated = driver.batcher.counters.generated
    driver.batcher.abort("a", driver.now)
    driver.collect(driver.now)
    outcome = driver.outcomes["a"]
    assert outcome.last.finish == "abort"
    assert len(outcome.ids) == (generated if stream_at_pause else 129)
    assert generated > 129
    assert outcome.spans == [(0, 0, len(outcome.ids))]


def test_an_abort_in_place_takes_effect_after_it_with_one_token_of_the_new_version() -> None:
    driver = Driver(SimConfig())
    driver.submit(request("a", 500))
    driver.until(0.7)
    driver.pause("in_place")
    sampled = len(driver.outcomes["a"].ids)
    driver.batcher.abort("a", driver.now)
    driver.batcher.refit(1)
    driver.until(2.0)
    assert driver.outcomes["a"].ended_at is None
    driver.resume()
    driver.settle()
    assert driver.outcomes["a"].last.finish == "abort"
    assert driver.outcomes["a"].spans == [(0, 0, sampled), (1, sampled, sampled + 1)]


def test_a_request_sent_during_a_pause_is_held_and_its_abort_is_lost() -> None:
    driver = Driver(SimConfig())
    driver.pause("retract")
    driver.submit(request("a", 20))
    assert driver.batcher.is_held("a")
    driver.batcher.abort("a", driver.now)
    driver.until(1.0)
    assert driver.outcomes["a"].chunks == []
    driver.resume()
    driver.settle()
    assert driver.outcomes["a"].last.finish == "length"
    assert len(driver.outcomes["a"].ids) == 20


def test_kept_kv_gives_way_to_the_queue_s_head() -> None:
    driver = Driver(SimConfig(kv_tokens=1000, max_running=2))
    driver.submit(request("a", 300, prompt=100))
    driver.submit(request("b", 300, prompt=100))
    driver.submit(request("c", 100, prompt=700))
    driver.until(0.5)
    driver.pause("retract")
    driver.resume()
    driver.settle()
    assert all(o.last.finish == "length" for o in driver.outcomes.values())
    assert driver.batcher.counters.reprefilled > 0


# -- version spans --------------------------------------------------------------------------


def spans(*triples: tuple[int, int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in triples)


def test_spans_as_sglang_computes_them() -> None:
    assert version_spans([], 3, 0) == spans((3, 0, 0))
    assert version_spans([], 3, 5) == spans((3, 0, 5))
    assert version_spans([(1, 2), (2, 2), (3, 4)], 4, 4) == spans((1, 0, 2), (3, 2, 4))
    assert version_spans([(1, 2), (2, 4)], 1, 9) == spans((1, 0, 2), (2, 2, 4), (1, 4, 9))
    assert version_spans([(1, 2), (1, 4)], 1, 9) == spans((1, 0, 9))
    assert version_spans([(1, 6)], 2, 4) == spans((1, 0, 4))
