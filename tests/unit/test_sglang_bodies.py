"""Tests the body of a generation request to SGLang, besides its tokens."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from aprilsched.errors import EngineRejected
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.policies.placement import rank_of
from aprilsched.kernel.engines.base import GenerationRequest
from aprilsched.kernel.engines.sglang import probe
from aprilsched.kernel.engines.sglang.http_engine import SGLangEngine
from aprilsched.kernel.engines.sglang.wire import ModelInfo, OpenApi, ServerInfo, generate_body
from aprilsched.kernel.values.capabilities import Capabilities
from aprilsched.types import Media, SamplingParams
from tests.support.driver import Driver, config
from tests.support.table import each_row


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
    assert {send.cache_key for send in driver.sends.values()} == {"0-1"}
    driver.feed(ev.UpdateRequested(version=1))
    for key in driver.attempts():
        driver.interrupt(key)
    assert [type(driver.answer_control()).__name__] == ["Pause"]
    assert driver.refits, "no flush in between"
    driver.settle()
    assert {send.cache_key for send in driver.sends.values()} == {"1-2"}


def test_fields_media_and_priority_are_at_the_top_of_the_body():
    media = (Media("image", b"\x89PNG"), Media("image", "http://a/b.png"), Media("audio", "c.wav"))
    asked = replace(
        request(),
        sampling=SamplingParams(request={"custom_logit_processor": "code"}, keep=("a",)),
        media=media,
        rank=2,
    )
    body = generate_body(asked, stream_interval=None, priority=-1)
    assert body["image_data"] == ["data:image/png;base64,iVBORw==", "http://a/b.png"]
    assert body["audio_data"] == ["c.wav"]
    assert body["input_ids"] == [0, 1, 2], "only the engine expands the placeholders"
    assert (body["priority"], body["custom_logit_processor"]) == (-2, "code")
    assert generate_body(asked, stream_interval=None, priority=1)["priority"] == 2
    assert "priority" not in generate_body(asked, stream_interval=None)
    own = replace(asked, sampling=SamplingParams(request={"priority": 9}))
    assert generate_body(own, stream_interval=None, priority=1)["priority"] == 9
    assert generate_body(request(), stream_interval=None).keys() == {
        *("rid", "input_ids", "sampling_params", "stream", "return_logprob", "routing_key")
    }


def test_what_a_server_would_ignore_is_refused():
    facts = SimpleNamespace(
        vocab_size=None,
        request_fields=frozenset({"priority"}),
        capabilities=Capabilities(
            version_spans=True, flush_while_paused=True, media=frozenset({"image"})
        ),
    )
    engine = SGLangEngine("http://127.0.0.1:9")
    engine._facts = facts  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    check = engine._check_request  # pyright: ignore[reportPrivateUsage]
    check(replace(request(), sampling=SamplingParams(request={"priority": 1})))
    check(replace(request(), media=(Media("image", "a.png"),)))
    with pytest.raises(
        EngineRejected, match="has prioritty, which the server does not know; correct request"
    ):
        check(replace(request(), sampling=SamplingParams(request={"prioritty": 1})))
    with pytest.raises(
        EngineRejected, match="has audio, which the model does not understand; leave media out"
    ):
        check(replace(request(), media=(Media("audio", "a.wav"),)))


@each_row(
    ("received", "sign"),
    [
        ({}, 0),
        ({"schedule_low_priority_values_first": True}, 0),
        ({"enable_priority_scheduling": True}, -1),
        ({"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, 1),
    ],
)
def test_the_direction_of_priorities_is_the_servers(received: dict[str, bool], sign: int):
    server = msgspec.convert({"version": "0.5.21", **received}, ServerInfo)
    model = ModelInfo(
        model_path="m",
        weight_version="0",
        has_image_understanding=True,
        has_audio_understanding=False,
    )
    can = probe._capabilities(model, server, OpenApi())  # pyright: ignore[reportPrivateUsage]
    assert can.priority == sign
    assert can.media == {"image", "video"}


@each_row(
    "received",
    [
        {"dp_size": 2, "attn_dp_size": 1},
        {"dp_size": 1, "attn_dp_size": 2},
        # Before 0.5.22 one size had both meanings.
        {"dp_size": 2},
    ],
)
def test_the_room_is_that_of_all_ranks(received: dict[str, int]):
    states = [{"effective_max_running_requests_per_dp": 8}] * 2
    info = {"version": "0.5.23", "max_total_num_tokens": 100, "internal_states": states, **received}
    server = msgspec.convert(info, ServerInfo)
    can = probe._capabilities(ModelInfo(model_path="m", weight_version="0"), server, OpenApi())  # pyright: ignore[reportPrivateUsage]
    assert (can.max_running_requests, can.kv_tokens) == (16, 200)


def test_carried_requests_go_before_new_ones_inside_an_engine_too():
    driver = Driver(config(straggler="abort"), engines=("a",))
    assert {send.rank for send in driver.sends.values()} == {2}
    driver.feed(ev.UpdateRequested(version=1))
    for key in driver.attempts():
        driver.interrupt(key)
    driver.settle()
    assert {send.rank for send in driver.sends.values()} == {1}
    assert rank_of(training=False, carried=False) == 0
