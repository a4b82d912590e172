"""Tests requests that ask for a part of their response (``dispatch.slice_tokens``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aprilsched.config import Dispatch, SchedulerConfig
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.values.capabilities import Reservation
from aprilsched.types import Media, SamplingParams
from tests.support.driver import Driver, prompts, span
from tests.support.facts import ABLE
from tests.support.table import each_row


def sliced(driver_settings: dict[str, Any] | None = None, **sampling: Any) -> Driver:
    """A run of one group of two, whose requests ask for 20 of 60 tokens at once."""
    config = SchedulerConfig(
        batch_groups=1,
        group_size=2,
        over_provision=1.0,
        sampling=replace(SamplingParams(max_new_tokens=60), **sampling),
        dispatch=Dispatch(slice_tokens=20),
    )
    driver = Driver(config, **(driver_settings or {}))
    driver.request_batch()
    return driver


def test_a_response_continues_to_its_limit_on_its_engine():
    driver = sliced()
    key = driver.attempts()[0]
    engine = driver.sends[key].engine
    asked = []
    for attempt, size in ((1, 20), (2, 20), (3, 20)):
        key = (key[0], attempt)
        send = driver.sends[key]
        asked.append((send.engine, len(send.input_ids), send.sampling.max_new_tokens))
        driver.finish(key, size, reason="length", spans=(span(0, size),))
    assert asked == [(engine, 2, 20), (engine, 22, 20), (engine, 42, 20)]
    driver.finish(driver.attempts()[0], 7)
    whole, short = driver.batches[0].rollouts
    assert (len(whole), whole.finish_reason) == (60, "length")
    assert (len(short), short.finish_reason) == (7, "stop")
    assert whole.versions.tolist() == [0] * 60
    assert driver.state.in_flight.counters.retries == 0


def test_a_slice_that_ends_by_a_stop_ends_the_response():
    driver = sliced()
    for key in driver.attempts():
        driver.finish(key, 20)
    assert [len(r) for r in driver.batches[0].rollouts] == [20, 20]


def test_a_length_below_the_slice_is_the_engines_own_limit():
    driver = sliced()
    for key in driver.attempts():
        driver.finish(key, 12, reason="length")
    assert [len(r) for r in driver.batches[0].rollouts] == [12, 12]


def test_the_least_length_holds_over_all_slices():
    driver = sliced(min_new_tokens=30)
    request = driver.attempts()[0][0]
    assert driver.sends[request, 1].sampling.min_new_tokens == 20
    driver.finish((request, 1), 20, reason="length")
    assert driver.sends[request, 2].sampling.min_new_tokens == 10


@each_row(
    ("limit", "sampling", "able"),
    [
        (60, {"extra": {"stop": ["end"]}}, {}),  # a stop string may lie in two slices
        (60, {}, {"stops_first": False}),  # a stop token that ends a slice would be overlooked
        (60, {}, {"context_tokens": 61}),  # the engine would refuse the whole
        (60, {}, {"context_tokens": None}),
        (35, {}, {}),  # less than 16 tokens would be left
    ],
)
def test_a_request_is_whole_if_slices_could_differ(
    limit: int, sampling: dict[str, Any], able: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tests.support.driver.ABLE", replace(ABLE, **able))
    driver = sliced(max_new_tokens=limit, **sampling)
    assert {send.sampling.max_new_tokens for send in driver.sends.values()} == {limit}


def test_a_request_with_media_is_whole():
    driver = sliced({"auto_prompts": False})
    pictured = replace(prompts(1)[0], media=(Media("image", "a.png"),))
    driver.feed(ev.PromptsArrived(prompts=(pictured,)))
    assert {send.sampling.max_new_tokens for send in driver.sends.values()} == {60}


def test_slices_are_refused_if_a_response_must_keep_its_version():
    with pytest.raises(ConfigError, match=r"dispatch\.slice_tokens must be None"):
        SchedulerConfig(straggler="run", dispatch=Dispatch(slice_tokens=64))


@each_row(
    ("pool", "first", "size"),
    [(200_000, 625, 200), (300_000, 5_000, 5_000)],  # a sixteenth of the limit is first expected
)
def test_automatic_slices_are_twice_the_length_if_the_pool_may_be_full(
    pool: int, first: int, size: int, monkeypatch: pytest.MonkeyPatch
):
    config = SchedulerConfig(
        batch_groups=1,
        group_size=2,
        over_provision=1.0,
        sampling=SamplingParams(max_new_tokens=5_000),
        dispatch=Dispatch(slice_tokens="auto"),
    )
    able = replace(ABLE, reservation=Reservation())
    monkeypatch.setattr("tests.support.driver.ABLE", able)
    driver = Driver(config, kv_tokens=pool)
    driver.request_batch()
    assert {s.sampling.max_new_tokens for s in driver.sends.values()} == {first}
    for key in driver.attempts():
        driver.finish(key, 100)
    driver.request_batch()
    assert {s.sampling.max_new_tokens for s in driver.sends.values()} == {size}


def test_slices_continue_together_or_with_another_request():
    driver = Driver(
        SchedulerConfig(
            batch_groups=3,
            group_size=15,
            over_provision=1.0,
            sampling=SamplingParams(max_new_tokens=60),
            dispatch=Dispatch(slice_tokens=20),
        )
    )
    driver.request_batch()
    first, second, *_ = driver.attempts()
    driver.finish(first, 20, reason="length")
    assert len(driver.sends) == 44, "two of 43 open requests share a pass"
    driver.finish(second, 20, reason="length")
    assert {key for key in driver.sends if key[1] == 2} == {(first[0], 2), (second[0], 2)}
    driver.finish((first[0], 2), 20, reason="length")
    assert (first[0], 3) not in driver.sends
    driver.interrupt((second[0], 2))
    assert {(first[0], 3), (second[0], 3)} <= driver.sends.keys()
