"""Tests the body of a generation request to SGLang, besides its tokens."""

from __future__ import annotations

import numpy as np

from aprilsched.core.messages import events as ev
from aprilsched.engines.base import GenerationRequest
from aprilsched.engines.sglang.wire import generate_body
from aprilsched.types import SamplingParams
from tests.support.driver import Driver, config


def request(
    *, affinity: int = 0, adapter: str | None = None, cache_key: str | None = None
) -> GenerationRequest:
    return GenerationRequest(
        request_id="r-1",
        input_ids=np.arange(3, dtype=np.int32),
        sampling=SamplingParams(max_new_tokens=4),
        affinity=affinity,
        adapter=adapter,
        cache_key=cache_key,
    )


def test_the_rollouts_of_a_group_have_one_routing_key():
    driver = Driver(config())
    keys: dict[int, set[str]] = {}
    for send in driver.sends.values():
        body = generate_body(request(affinity=send.group_id), stream_interval=None)
        keys.setdefault(send.group_id, set()).add(body["routing_key"])
    assert {len(of_group) for of_group in keys.values()} == {1}
    assert len({key for of_group in keys.values() for key in of_group}) == len(keys)


def test_adapter_and_cache_key_are_sent_only_where_there_is_one():
    bare = generate_body(request(), stream_interval=16)
    assert not {"lora_path", "extra_key"} & bare.keys()
    assert bare["sampling_params"]["stream_interval"] == 16
    full = generate_body(request(adapter="policy-v7", cache_key="run-7"), stream_interval=None)
    assert (full["lora_path"], full["extra_key"]) == ("policy-v7", "run-7")


def test_apart_gives_every_version_a_cache_of_its_own_and_flushes_nothing():
    driver = Driver(config(straggler="abort", kv_after_refit="apart"), engines=("a",))
    assert {send.cache_version for send in driver.sends.values()} == {0}
    driver.feed(ev.UpdateRequested(version=1))
    for key in driver.attempts():
        driver.interrupt(key)
    assert [type(driver.answer_control()).__name__] == ["Pause"]
    assert driver.refits, "no flush in between"
    driver.settle()
    assert {send.cache_version for send in driver.sends.values()} == {1}
