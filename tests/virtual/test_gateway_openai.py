"""Tests OpenAI's API of the gateway with the official client, in front of the embedded engine.

The tests run in scaled wall time, because real sockets and a virtual clock do not fit together.
"""

# pyright: basic
# The client's types do not know the fields that are added to OpenAI's.
from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from aprilsched.agents.chat.tokenizer import load_tokenizer
from aprilsched.agents.dialects.sglang import likely_triples
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.values.companions import top_logprobs
from aprilsched.testing.contract import until
from tests.support import gateway as gateways
from tests.support.gateway import LONG
from tests.support.sim_http import INTERVAL, Raw, asked
from tests.support.tiny_tokenizer import bytes_tokenizer, calling_tokenizer

MODEL = "any-name"
TEXTS: Any = [{"role": "user", "content": "How are you, Zoë? 😀"}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}
WITH_IMAGE: Any = [
    {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
    }
]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}


class Front(gateways.Front):
    """A gateway, its server, and clients."""

    client: Any


@asynccontextmanager
async def front(tokenizer: Path | None, **settings: Any) -> AsyncGenerator[Front]:
    async with gateways.front(tokenizer=tokenizer, **settings) as opened:
        one = Front(opened.gateway, opened.servers, opened.raw)
        url = f"{opened.gateway.url}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as one.client:
            yield one


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes."""
    return bytes_tokenizer(tmp_path_factory.mktemp("bytes"), parses=True)


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose random tokens contain tool calls."""
    return calling_tokenizer(tmp_path_factory.mktemp("calling"))


@pytest.fixture
async def one(plain: Path) -> AsyncIterator[Front]:
    async with front(plain) as opened:
        yield opened


# --- completions -------------------------------------------------------------------------------


async def test_a_completion_is_the_text_of_the_engines_tokens(one: Front, plain: Path):
    tokenizer = load_tokenizer(plain)
    prompt = "Grüße 😀"
    ids = tokenizer.encode(prompt)
    body = {**asked(40), "input_ids": ids}
    likely = {"return_logprob": True, "top_logprobs_num": 2}
    expected = await one.raw.done("/generate", {**body, **likely})
    answer = await one.client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=40,
        logprobs=2,
        temperature=0.0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    (choice,) = answer.choices
    assert choice.token_ids == expected["output_ids"]
    assert choice.prompt_token_ids == ids
    assert choice.text == tokenizer.decode(expected["output_ids"])
    assert choice.finish_reason == "length"
    assert choice.weight_versions == expected["meta_info"]["weight_versions"]
    assert choice.weight_versions_exact is True
    assert answer.model == MODEL
    assert answer.usage.prompt_tokens == len(ids)
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (40, len(ids) + 40)
    found = [logprob for logprob, *_ in expected["meta_info"]["output_token_logprobs"]]
    assert choice.logprobs.token_logprobs == found
    rows = [[(p, i) for p, i, _ in row] for row in expected["meta_info"]["output_top_logprobs"]]
    assert [row[0] for row in rows] == list(zip(found, choice.token_ids, strict=True))
    received = [
        {tokenizer.decode([i], skip_special=False): p for p, i in reversed(row)} for row in rows
    ]
    assert choice.logprobs.top_logprobs == received
    assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == 40


def test_a_token_without_top_logprobs_has_an_empty_list():
    assert likely_triples(top_logprobs(2).blank(3), 2) == [[], [], []]


async def test_top_logprobs_are_refused_if_the_gateway_has_none(plain: Path):
    asks = [
        (TEXT, {"prompt": "x", "logprobs": 1}),
        (CHAT, {**SHORT, "logprobs": True, "top_logprobs": 1}),
        (OURS, {**asked(9), "top_logprobs_num": 1}),
    ]
    async with front(plain, top_logprobs=0) as one:
        for path, body in asks:
            assert "larger --top-logprobs" in await one.raw.refused(path, body)
        none = asked(9, top_logprobs_num=0, return_logprob=True)
        answer = await one.raw.done(OURS, none)
        assert "output_top_logprobs" not in answer["meta_info"]


async def test_a_stream_equals_the_whole_response(one: Front):
    options: dict[str, Any] = {
        "model": MODEL,
        "prompt": "count",
        "max_tokens": 100,
        "logprobs": 3,
        "temperature": 0.0,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }
    whole = (await one.client.completions.create(**options)).choices[0]
    stream = await one.client.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    events = [event async for event in stream]
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == 100
    parts = [event.choices[0] for event in events[:-1]]
    assert len(parts) > 3, "the text comes as it is sampled"
    assert "".join(part.text for part in parts) == whole.text
    assert [i for part in parts for i in part.token_ids] == whole.token_ids
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        received = [each for part in parts for each in getattr(part.logprobs, name)]
        assert received == getattr(whole.logprobs, name)
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert parts[-1].weight_versions == [{"version": "default", "start": 0, "end": 100}]


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_and_several_responses_to_each(one: Front, stream: bool):
    options: dict[str, Any] = {
        "model": MODEL,
        "prompt": ["one", "another one"],
        "n": 3,
        "seed": 7,
        "max_tokens": 30,
        "extra_body": {"ignore_eos": True},
    }
    texts = [""] * 6
    usage: Any = None
    if stream:
        events = await one.client.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
        async for event in events:
            usage = event.usage
            for choice in event.choices:
                texts[choice.index] += choice.text
    else:
        answer = await one.client.completions.create(**options)
        usage = answer.usage
        for choice in answer.choices:
            texts[choice.index] = choice.text
    assert (usage.prompt_tokens, usage.completion_tokens) == (len("oneanother one"), 180)
    assert len(set(texts)) == 6, "each response has a seed of its own"
    again = await one.client.completions.create(**options)
    assert [choice.text for choice in again.choices] == texts
    await one.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_chunks_is_not_in_the_response(one: Front, stream: bool):
    options: dict[str, Any] = {"model": MODEL, "prompt": "x", "temperature": 0.0}
    more = {"ignore_eos": True, "return_token_ids": True}
    free = await one.client.completions.create(**options, max_tokens=400, extra_body=more)
    text, ids = free.choices[0].text, free.choices[0].token_ids
    # The stop string starts in one chunk and ends in the next.
    tokenizer = one.gateway.service.texts.tokenizer
    start = len(tokenizer.decode(ids[: 3 * INTERVAL - 3]))
    stop = text[start : start + 6]
    first = text.index(stop)
    asked_so = {**options, "max_tokens": 3000, "stop": ["never to be found", stop]}
    if stream:
        events = await one.client.completions.create(**asked_so, extra_body=more, stream=True)
        parts = [event.choices[0] async for event in events]
        received = "".join(part.text for part in parts)
        found = [i for part in parts for i in part.token_ids]
        last = parts[-1]
    else:
        last = (await one.client.completions.create(**asked_so, extra_body=more)).choices[0]
        received, found = last.text, last.token_ids
    assert received == text[:first]
    assert (last.finish_reason, last.matched_stop) == ("stop", stop)
    assert found == ids[: len(found)]
    assert stop in tokenizer.decode(found)
    assert stop not in tokenizer.decode(found[:-1])
    assert last.weight_versions[-1]["end"] == len(found)
    kept = await one.client.completions.create(
        **asked_so, extra_body={**more, "no_stop_trim": True}
    )
    assert kept.choices[0].text == text[: first + len(stop)]
    await one.idle()
    reasons = {entry.cause for entry in one.state.in_flight.ledger.entries}
    assert reasons == {"a stop string has ended it"}
    assert set(one.state.in_flight.ledger.rollouts) == {Reason.WITHDRAWN}


async def test_a_token_that_ends_the_response_has_no_text(one: Front):
    options: dict[str, Any] = {"model": MODEL, "prompt": "x", "temperature": 0.0}
    more: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
    ids = (
        (await one.client.completions.create(**options, max_tokens=50, extra_body=more))
        .choices[0]
        .token_ids
    )
    end = next(i for at, i in enumerate(ids) if i in range(6, 200) and i not in ids[:at] and at > 9)
    at = ids.index(end)
    tokenizer = one.gateway.service.texts.tokenizer
    more = {"stop_token_ids": [end], "return_token_ids": True}
    received = await one.client.completions.create(**options, max_tokens=50, extra_body=more)
    choice = received.choices[0]
    assert choice.token_ids == ids[: at + 1]
    assert choice.text == tokenizer.decode(ids[:at])
    assert (choice.finish_reason, choice.matched_stop) == ("stop", end)


# --- chats -------------------------------------------------------------------------------------


async def test_a_chat_goes_through_the_models_template(one: Front):
    tokenizer = one.gateway.service.texts.tokenizer
    messages = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "short."}],
        },
        *TEXTS,
    ]
    answer = await one.client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_completion_tokens=30,
        logprobs=True,
        top_logprobs=2,
        temperature=0.0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    (choice,) = answer.choices
    prompt = tokenizer.decode(choice.prompt_token_ids, skip_special=False)
    assert prompt == (
        "<|im_start|>system\nBe short.<|im_end|>\n"
        "<|im_start|>user\nHow are you, Zoë? 😀<|im_end|>\n<|im_start|>assistant\n"
    )
    expected = await one.raw.done("/generate", {**asked(30), "input_ids": choice.prompt_token_ids})
    assert choice.token_ids == expected["output_ids"]
    assert choice.message.content == tokenizer.decode(choice.token_ids, skip_special=False).strip()
    assert len(choice.logprobs.content) == 30
    for each in choice.logprobs.content:
        own, other = each.top_logprobs
        assert (own.token, own.logprob, own.bytes) == (each.token, each.logprob, each.bytes)
        assert other.logprob == pytest.approx(each.logprob - 1)
    assert choice.finish_reason == "length"


async def test_every_engine_that_answers_a_chat_gets_its_image(plain: Path):
    options: dict[str, Any] = {"model": MODEL, "messages": WITH_IMAGE, "max_tokens": LONG, **GREEDY}
    options["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    async with front(plain, engines=2, client_fields=("image_data",)) as two:
        stream = await two.client.chat.completions.create(**options, stream=True)
        parts = [(await anext(stream)).choices[0] for _ in range(2)]
        (busy,) = [each for each in two.servers if each.engine.batcher.running]
        await busy.crash()
        parts += [event.choices[0] async for event in stream]
        (other,) = [each for each in two.servers if each is not busy]
        shown: dict[str, Any] = {"image_data": WITH_IMAGE[0]["content"][0]["image_url"]["url"]}
        received = [part for part in parts if hasattr(part, "token_ids")]
        body = {**asked(LONG), "input_ids": received[0].prompt_token_ids}
        async with Raw(other.url) as engine:
            seeing = await engine.done("/generate", {**body, **shown})
            blind = await engine.done("/generate", body)
        ids = [i for part in received for i in part.token_ids]
        assert ids == seeing["output_ids"] != blind["output_ids"]
        options["extra_body"] |= shown
        with pytest.raises(
            openai.BadRequestError, match="in addition to the images of its messages"
        ):
            await two.client.chat.completions.create(**options)


async def test_a_streamed_chat_is_the_whole_one(one: Front):
    options: dict[str, Any] = {"model": MODEL, "messages": TEXTS, "max_tokens": 90, **GREEDY}
    whole = await one.client.chat.completions.create(**options)
    stream = await one.client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    events = [event async for event in stream]
    assert events[0].choices[0].delta.role == "assistant"
    received = [event.choices[0] for event in events if event.choices]
    assert (
        "".join(part.delta.content or "" for part in received) == whole.choices[0].message.content
    )
    assert [part.finish_reason for part in received if part.finish_reason] == ["length"]
    assert events[-1].usage == whole.usage


async def test_tools_are_called(calling: Path):
    async with front(calling) as one:
        options: dict[str, Any] = {"model": MODEL, "messages": TEXTS, "max_tokens": 60}
        options |= {"tools": [TOOL], "temperature": 0.0}
        received = {"ignore_eos": True, "return_token_ids": True}
        free = await one.client.chat.completions.create(**options, extra_body=received)
        ids = free.choices[0].token_ids
        calls = [at for at, i in enumerate(ids) if i % 5 == 0]
        end = next(i for i in ids[calls[1] :] if i % 5 and i not in ids[: calls[1]])
        # A stop token ends it, but the reported finish reason is the tool calls.
        options["extra_body"] = {"stop_token_ids": [end]}
        whole = await one.client.chat.completions.create(**options)
        message = whole.choices[0].message
        assert whole.choices[0].finish_reason == "tool_calls"
        assert len(message.tool_calls) == sum(at < ids.index(end) for at in calls)
        for call, at in zip(message.tool_calls, calls, strict=False):
            assert (call.type, call.function.name) == ("function", "look")
            assert json.loads(call.function.arguments) == {"where": "Zürich", "days": ids[at]}
        assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
        assert "<tool_call>" not in (message.content or "")
        # The client's own accumulation of a stream gives the same message.
        async with one.client.chat.completions.stream(**options) as stream:
            async for _ in stream:
                pass
            final = (await stream.get_final_completion()).choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.content == message.content
        assert [call.function.arguments for call in final.message.tool_calls] == [
            call.function.arguments for call in message.tool_calls
        ]
        # Calls and results of tools go back through the template.
        history = [
            *TEXTS,
            {"role": "assistant", "content": None, "tool_calls": [message.tool_calls[0].to_dict()]},
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"},
        ]
        again = await one.client.chat.completions.create(**{**options, "messages": history})
        assert again.usage.prompt_tokens > whole.usage.prompt_tokens


# --- what goes wrong ---------------------------------------------------------------------------

CHAT, TEXT, OURS = "/v1/chat/completions", "/v1/completions", "/generate"
SHORT: dict[str, Any] = {"messages": TEXTS, "max_tokens": 5}


def with_call(arguments: str) -> list[dict[str, Any]]:
    """Return messages with a tool call."""
    call = {"function": {"name": "x", "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [call]}]


def sampled(**params: Any) -> dict[str, Any]:
    return {"input_ids": [1], "sampling_params": params}


PROMPTS: list[tuple[Any, str]] = [
    ([], "cannot be empty"),
    ("", "cannot be empty"),
    ([[1], []], "cannot be empty"),
    ([1, [2]], "give one kind"),
    ([[1], 2], "give one kind"),
    ([1, 10**6], "input_ids must be in [0, 511], got 1000000"),
    ([-1], "input_ids must be in [0, 511], got -1"),
    ([[3]] * 4097, "asks for 4097 responses"),
]
"""Prompts that every path refuses, and a part of the error message."""
BAD: list[tuple[str, dict[str, Any], str]] = [
    *((OURS, {"text" if prompt == "" else "input_ids": prompt}, s) for prompt, s in PROMPTS),
    *((TEXT, {"prompt": prompt}, printed) for prompt, printed in PROMPTS),
    (OURS, {}, "should be provided"),
    (OURS, {"text": "x", "input_ids": [1]}, "give either"),
    (OURS, {"text": []}, "text cannot be empty"),
    (OURS, {"input_ids": [[1], [2]], "rid": ["a"]}, "2 responses and 1 rids"),
    (OURS, {"input_ids": [[1], [2]], "rid": ["a", "a"]}, "Duplicate request ID"),
    (OURS, {"input_ids": [[1], [2]], "sampling_params": [{}]}, "2 prompts and 1 sampling_params"),
    (OURS, {"input_ids": [[1], [2]], "sampling_params": [{"n": 2}, {}]}, "n differs"),
    (OURS, {"input_ids": [[3]] * 33, "sampling_params": {"n": 128}}, "asks for 4224 responses"),
    (OURS, {"input_ids": [1], "rid": ""}, "1 to 256 characters, got 0"),
    (OURS, {"input_ids": [1], "lora_path": "x"}, "lora_path must be left out"),
    (OURS, sampled(n=10**12), "asks for 1000000000000 responses"),
    (OURS, sampled(n=0), "Expected `int` >= 1 - at `$.n`"),
    (OURS, sampled(n=[1]), "got `array` - at `$.n`"),
    (OURS, sampled(n=True), "got `bool` - at `$.n`"),
    (OURS, sampled(stop=5), "got `int` - at `$.stop`"),
    (OURS, sampled(stop=[1]), "got `int` - at `$.stop[0]`"),
    (OURS, sampled(stop_token_ids=5), "at `$.stop_token_ids`"),
    (OURS, sampled(extra={"logit_bias": 5}), "extra passes parameters on unchecked"),
    (OURS, sampled(temprature=1), "did you mean temperature"),
    (OURS, sampled(max_new_tokens=0), "at least 1 token"),
    (OURS, sampled(logit_bias={"999": 1}), "got 999"),
    (TEXT, {"prompt": ["x", 1]}, "give one kind"),
    (TEXT, {}, "missing required field `prompt`"),
    (TEXT, {"prompt": [[3]] * 33, "n": 128}, "asks for 4224 responses"),
    (TEXT, {"prompt": "x", "n": 0}, "`int` >= 1 - at `$.n`"),
    (TEXT, {"prompt": "x", "n": 1000}, "`int` <= 128 - at `$.n`"),
    (TEXT, {"prompt": "x", "logprobs": 6}, "logprobs is 6; give a number from 0 to 5"),
    (TEXT, {"prompt": "x", "logprobs": -1}, "logprobs is -1"),
    (OURS, {**asked(9), "top_logprobs_num": "all"}, "top_logprobs_num is 'all'"),
    (TEXT, {"prompt": "x", "echo": True}, "echo repeats the prompt"),
    (TEXT, {"prompt": "x", "best_of": 4}, "best_of is not n"),
    (TEXT, {"prompt": "x", "stop": [""]}, "`stop` must have no empty string"),
    (TEXT, {"prompt": "x", "stop": ["x"] * 65}, "at most 64"),
    (TEXT, {"prompt": "x", "stop_token_ids": [600]}, "stop_token_ids must be in"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, "`int` >= 1 - at `$.max_tokens`"),
    (CHAT, {"messages": TEXTS, "max_tokens": 0}, "`int` >= 1 - at `$.max_tokens`"),
    (CHAT, {"messages": TEXTS, "max_completion_tokens": -1}, "`$.max_completion_tokens`"),
    (TEXT, {"prompt": "x", "temperature": -1}, "temperature is -1"),
    (TEXT, {"prompt": "x", "temprature": 1}, "unknown field `temprature`"),
    (TEXT, {"prompt": "x", "response_format": {"type": "poem"}}, "poem"),
    (CHAT, {"messages": []}, "at least one message, got none"),
    (CHAT, {"messages": [{"content": "x"}]}, "has no role"),
    (CHAT, {"messages": [{"role": "pirate", "content": "x"}]}, "there is no role pirate"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "is neither text"),
    (CHAT, {**SHORT, "priority": 3}, "unknown field"),
    (CHAT, {**SHORT, "messages": WITH_IMAGE}, "takes no images; start it with --client-fields"),
    (CHAT, {"messages": with_call("{")}, "arguments are no JSON"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls that are no list"),
    (CHAT, {"messages": TEXTS}, "give max_completion_tokens"),
    (CHAT, {**SHORT, "top_logprobs": 3}, "top_logprobs needs logprobs"),
    (CHAT, {**SHORT, "logprobs": True, "top_logprobs": 20}, "a larger --top-logprobs"),
    (CHAT, {**SHORT, "tool_choice": "required"}, "not among tools"),
    (CHAT, {**SHORT, "tool_choice": "any"}, "'any' - at `$.tool_choice`"),
    (
        CHAT,
        {**SHORT, "tools": [TOOL], "parallel_tool_calls": False},
        "nothing keeps the model from",
    ),
    (
        CHAT,
        {**SHORT, "chat_template_kwargs": {"chat_template": "x"}},
        "must not have chat_template",
    ),
    ("/tokenize", {"prompt": 5}, "Expected `str | array`"),
    ("/detokenize", {"tokens": [1, [2]]}, "give either"),
    ("/detokenize", {"tokens": [-1]}, "tokens must be in"),
    ("/detokenize", {"tokens": [2**40]}, "tokens must be in"),
]
"""Bodies that are refused, and a part of the error message."""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_request_is_refused_before_anything_is_launched(one: Front, stream: bool):
    for path, body, words in BAD:
        status, answer = await one.raw.post(path, {**body, "stream": stream})
        printed = answer.get("message") or answer["error"]["message"]
        assert status == 400, (path, body, printed)
        assert words in printed, (path, body, printed)
        if path in (TEXT, CHAT):
            error = answer["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", 400)
    assert one.state.in_flight.counters.launched == 0
    assert len(one.gateway.service.responses) == 0


async def test_the_client_raises_its_own_errors(one: Front):
    with pytest.raises(openai.BadRequestError, match="prompt cannot be empty") as refused:
        await one.client.completions.create(model=MODEL, prompt="")
    assert refused.value.type == "invalid_request_error"
    async with front(None) as without:
        with pytest.raises(openai.BadRequestError, match="--tokenizer"):
            await without.client.completions.create(model=MODEL, prompt="x")
        with pytest.raises(openai.BadRequestError, match="--tokenizer"):
            await without.client.chat.completions.create(model=MODEL, messages=TEXTS)


async def test_every_error_below_v1_has_openai_s_form(plain: Path):
    printed: Any = {"messages": TEXTS, "max_tokens": 5}
    async with front(plain, api_key="key", served_model_name="policy") as one:
        client = one.client.with_options(api_key="key")
        (model,) = (await client.models.list()).data
        assert model.id == "policy"
        assert (await client.chat.completions.create(model="policy", **printed)).model == "policy"
        with pytest.raises(openai.NotFoundError, match="another is not served") as refused:
            await client.chat.completions.create(model="another", **printed)
        errors: list[Any] = [refused.value]
        with pytest.raises(openai.AuthenticationError, match="API key is missing") as refused:
            await one.client.chat.completions.create(model="policy", **printed)
        errors.append(refused.value)
        with pytest.raises(openai.NotFoundError) as refused:
            await client.embeddings.create(model="policy", input="x")
        errors.append(refused.value)
        with pytest.raises(openai.APIStatusError) as refused:
            await client.completions.create(model="policy", prompt="x" * 2**26)
        errors.append(refused.value)
        one.gateway.service.texts.encode_texts = None  # type: ignore[assignment]  # A mistake of its own.
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(model="policy", **printed)
        errors.append(refused.value)
        for error, status in zip(errors, (404, 401, 404, 413, 500), strict=True):
            kind = "server_error" if status == 500 else "invalid_request_error"
            assert (error.status_code, error.code, error.type) == (status, str(status), kind)


async def test_a_response_that_fails_is_an_error_in_a_stream_too(one: Front):
    options: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 10**9}
    with pytest.raises(openai.BadRequestError, match="refused at attempt"):
        await one.client.completions.create(**options)
    stream = await one.client.completions.create(**options, n=2, stream=True)
    with pytest.raises(openai.APIError, match="refused at attempt"):
        async for _ in stream:
            pass
    await one.idle()


def several(path: str, n: int, tokens: int, **body: Any) -> dict[str, Any]:
    """The body of a request for `n` responses, as a stream."""
    if path == OURS:
        body |= asked(tokens)
        body["sampling_params"]["n"] = n
    else:
        given = {"messages": TEXTS} if path == CHAT else {"prompt": "x"}
        body |= {**given, "n": n, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    return {**body, "stream": True}


paths = pytest.mark.parametrize("path", [OURS, TEXT, CHAT])


@paths
async def test_a_body_starts_all_of_its_responses_or_none(plain: Path, path: str):
    async with front(plain, max_requests=4) as one:
        assert (await one.raw.post(path, several(path, 5, 3)))[0] == 400
        async with one.raw.session.post(path, json=several(path, 2, 3000)) as answer:
            await answer.content.readline()
            assert "4 open responses" in await one.raw.refused(path, several(path, 3, 3), 503)
            assert len(one.gateway.service.responses) == 2
            await one.raw.done(path, several(path, 2, 3))
        await one.idle()
        await one.raw.done(path, several(path, 4, 3))


@pytest.mark.parametrize("stream", [True, False])
@paths
async def test_a_client_that_leaves_takes_all_its_responses_along(
    one: Front, path: str, stream: bool
):
    body = {**several(path, 4, 3000), "stream": stream}
    task = asyncio.create_task(one.raw.post(path, body))
    await until(lambda: one.state.in_flight.open_attempts == 4)
    task.cancel()
    await one.idle()
    assert one.state.in_flight.ledger.rollouts == {Reason.WITHDRAWN: 4}


@paths
async def test_an_abort_by_the_name_of_a_body_ends_every_response(one: Front, path: str):
    body = several(path, 2, 3000, rid="mine")
    task = asyncio.create_task(one.raw.post(path, body))
    await until(lambda: one.state.in_flight.open_attempts == 2)
    await one.raw.post("/abort_request", {"rid": "mine"})
    status, received = await task
    assert status == 200
    assert received.count('"finish_reason":"abort"') + received.count('"type":"abort"') == 2
    await one.idle()


async def posted(one: Front, body: dict[str, Any]) -> tuple[int, Any]:
    """The answer to a large body."""
    data = io.BytesIO(json.dumps(body).encode())
    async with one.raw.session.post(CHAT, data=data) as answer:
        return answer.status, await answer.json()


async def test_megabytes_of_tools_do_not_hold_up_the_others(tmp_path: Path):
    async with front(calling_tokenizer(tmp_path, model_max_length=4096)) as one:

        def described(words: int) -> dict[str, Any]:
            function = {"name": "look", "description": "long " * words}
            return {"messages": TEXTS, "tools": [{"type": "function", "function": function}]}

        async with asyncio.TaskGroup() as group:
            tokenized = group.create_task(posted(one, described(100_000)))
            refused = group.create_task(posted(one, described(1_000_000)))
            small = group.create_task(one.raw.post(CHAT, {"messages": TEXTS, "max_tokens": 5}))
        assert small.result()[0] == 200
        for task, words in ((tokenized, "model's context is 4096 tokens"), (refused, "cannot fit")):
            status, answer = task.result()
            assert status == 400
            assert words in answer["error"]["message"]
        await one.idle()


async def test_a_chat_may_take_the_rest_of_the_context(tmp_path: Path):
    async with front(bytes_tokenizer(tmp_path, model_max_length=200)) as one:
        answer = await one.client.chat.completions.create(model=MODEL, messages=TEXTS, **GREEDY)
        assert answer.usage.total_tokens == 200
        with pytest.raises(openai.BadRequestError, match="at most 158, got 200"):
            await one.client.chat.completions.create(model=MODEL, messages=TEXTS, max_tokens=200)


# --- text in SGLang's own calls ----------------------------------------------------------------


async def test_generate_takes_text_and_gives_text(one: Front):
    tokenizer = one.gateway.service.texts.tokenizer
    ids = tokenizer.encode("Grüße 😀")
    expected = await one.raw.done("/generate", {**asked(40), "input_ids": ids})
    body = {"text": "Grüße 😀", "sampling_params": asked(40)["sampling_params"]}
    whole = await one.raw.done("/generate", body)
    assert whole["output_ids"] == expected["output_ids"]
    assert whole["text"] == expected["text"] == tokenizer.decode(whole["output_ids"])
    # A stream for a text prompt repeats the text; one for token ids does not.
    repeating = await one.raw.events(body)
    assert len(repeating) > 2
    for before, after in pairwise(repeating):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert (repeating[-1]["text"], repeating[-1]["output_ids"]) == (
        whole["text"],
        whole["output_ids"],
    )
    new = await one.raw.events({**asked(40), "input_ids": ids})
    assert "".join(event["text"] for event in new) == whole["text"]
    assert [i for event in new for i in event["output_ids"]] == whole["output_ids"]
    # Several texts, and several responses to each.
    several = {"text": ["a", "b"], "sampling_params": {**body["sampling_params"], "n": 2}}
    answers = await one.raw.done("/generate", several)
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert answers[0]["text"] == answers[1]["text"] != answers[2]["text"]


async def test_texts_become_tokens_and_tokens_texts(one: Front):
    status, received = await one.raw.post("/tokenize", {"prompt": "é"})
    assert (status, received) == (200, {"tokens": [200, 174], "count": 2, "max_model_len": -1})
    received = await one.raw.done("/v1/tokenize", {"prompt": ["a", "bc"]})
    assert received["count"] == [1, 2]
    assert await one.raw.post("/detokenize", {"tokens": received["tokens"]}) == (
        200,
        {"text": ["a", "bc"]},
    )
    assert (await one.raw.post("/v1/detokenize", {"tokens": [0, 102, 600]}))[1] == {"text": "a"}


async def test_a_body_that_is_nested_too_deep_is_refused(one: Front):
    body = b'{"messages": [' + b"[" * 100_000
    async with one.raw.session.post(CHAT, data=io.BytesIO(body)) as answer:
        assert answer.status == 400


async def test_a_router_client_sees_the_gateway_as_one_worker(one: Front):
    _, received = await one.raw.get("/workers")
    assert [worker["url"] for worker in received["workers"]] == [one.gateway.url]


async def test_without_a_tokenizer_only_stop_strings_are_refused(plain: Path):
    async with front(None) as one:
        body = asked(5)
        body["sampling_params"]["stop"] = "x"
        assert "no tokenizer" in await one.raw.refused("/generate", body)
        status, answer = await one.raw.post("/generate", asked(5))
        assert (status, "text" in answer) == (200, False)


# --- with other parts of the gateway -----------------------------------------------------------


async def test_a_client_that_reads_late_blocks_no_other(one: Front):
    body = {**asked(3000), "input_ids": [5, 6], "stream": True}
    async with one.raw.session.post("/generate", json=body) as answer:
        # The client reads the stream only long after its rollout has ended.
        await until(lambda: one.state.in_flight.counters.delivered == 1)
        received = await one.client.completions.create(
            model=MODEL, prompt="x", max_tokens=5, **GREEDY
        )
        assert received.choices[0].finish_reason == "length"
        lines = (await answer.read()).split(b"\n\n")
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-2]]
    assert sum(len(event["output_ids"]) for event in events) == 3000
    await one.idle()
