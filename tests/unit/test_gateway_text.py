"""Tests how the gateway makes text of tokens, and a message of text, piece by piece."""

# pyright: basic
# transformers has no complete types.
from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprilsched.agents.chat.openai_bodies import ForcedCalls, Message, for_template
from aprilsched.agents.chat.streamed_text import Texts
from aprilsched.agents.chat.tokenizer import ModelTokenizer, load_tokenizer
from aprilsched.agents.dialects.openai import Chats
from aprilsched.agents.gateway.reading import Reading, Stops, TextRules
from aprilsched.agents.gateway.responses import Response, Responses
from aprilsched.agents.serving.refusals import Unavailable
from aprilsched.agents.sessions.history import History
from aprilsched.errors import ConfigError, MissingExtra
from aprilsched.types import Prompt
from tests.support.tiny_tokenizer import (
    CALL,
    ODD_CALLS,
    RESPONSE,
    SPECIAL,
    THOUGHT,
    bytes_tokenizer,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return load_tokenizer(bytes_tokenizer(tmp_path_factory.mktemp("bytes"), parses=True))


def pieces(tokenizer: ModelTokenizer, ids: list[int], before: list[int] | None = None) -> list[str]:
    """The text token by token, and what is left at the end."""
    stream = tokenizer.detokenizer(before or [], skip_special=True)
    return [*(stream.push(i) for i in ids), stream.rest()]


# --- text from tokens --------------------------------------------------------------------------


@given(
    tokens=st.lists(
        st.one_of(
            st.text(max_size=4).map(str.encode),
            st.binary(max_size=4),
            st.sampled_from([0, 3, 300, 600, 2**31 - 1]),
        ),
        max_size=30,
    ),
    before=st.binary(max_size=8),
)
def test_the_pieces_of_any_tokens_are_their_text_and_nothing_is_held_for_long(
    tokenizer: ModelTokenizer, tokens: list[bytes | int], before: bytes
):
    ids = [i for t in tokens for i in ([t] if isinstance(t, int) else [5 + byte for byte in t])]
    received = pieces(tokenizer, ids, [5 + byte for byte in before])
    raw = b"".join(t for t in tokens if isinstance(t, bytes))
    # Invalid UTF-8 may be replaced by more than one sign.
    signs = "\ufffd"
    assert "".join(received).replace(signs, "") == raw.decode(errors="replace").replace(signs, "")
    for at in range(len(received) - 12):
        assert any(received[at : at + 12]) or not any(5 <= i < 261 for i in ids[at : at + 8])


def test_the_text_of_a_prompt_that_ends_within_a_character_is_not_told_again(
    tokenizer: ModelTokenizer,
):
    ids = tokenizer.encode("é😀 x")
    received = pieces(tokenizer, ids[4:], ids[:4])
    assert received[-2:] == ["x", ""]
    assert "é" not in "".join(received)


def test_a_thousand_tokens_without_text_are_not_held(tokenizer: ModelTokenizer):
    stream = tokenizer.detokenizer([], skip_special=True)
    for _ in range(1000):
        stream.push(0)
    assert len(stream._held) < 10


# --- tokens from text --------------------------------------------------------------------------


class Noting:
    """A backend that notes each call, with the name of its thread."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.calls: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            self.calls.append((name, threading.current_thread().name))
            return getattr(self.backend, name)(*args, **more)

        return call


@pytest.fixture
def noting(tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch) -> Noting:
    backend = Noting(tokenizer._backend)
    monkeypatch.setattr(tokenizer, "_backend", backend)
    return backend


async def test_long_texts_are_converted_in_threads_by_calls_that_release_the_gil(
    tokenizer: ModelTokenizer, noting: Noting
):
    text = "some é words " * 1000
    ids = noting.backend.encode(text).ids
    encode, decode = (lambda: tokenizer.encode(text)), (lambda: tokenizer.decode(ids))
    assert await tokenizer.work_out(encode, size=len(text)) == ids
    assert await tokenizer.work_out(decode, size=len(ids)) == text
    assert [name for name, _ in noting.calls] == ["encode_batch_fast", "decode_batch"]
    assert all(thread.startswith("aprilsched-text") for _, thread in noting.calls)


async def test_texts_that_are_too_long_are_refused_before_they_are_converted(
    tokenizer: ModelTokenizer, noting: Noting
):
    texts = Texts()
    texts._tokenizer = tokenizer
    history = History(tokenizer, most_branches=1)
    long = "x" * (2**23 + 1)
    for text in ([long], [long[: 2**22]] * 3):
        with pytest.raises(ConfigError, match="at most 8388608 characters"):
            await texts.encode_texts(text, None)
    with pytest.raises(ConfigError, match="cannot fit the model's context of 100 tokens"):
        await texts.encode_texts(["x" * 12801], 100)
    with pytest.raises(ConfigError, match="at most 8388608 characters"):
        history.ask([{"role": "user", "content": long}])
    with pytest.raises(ConfigError, match="at most 8388608 characters"):
        history.continue_text(long)
    assert noting.calls == []


async def test_a_cancellation_waits_for_the_end_of_its_thread(tokenizer: ModelTokenizer):
    started, go_on = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        assert go_on.wait(60)

    task = asyncio.create_task(tokenizer.work_out(work, size=10**6))
    await asyncio.to_thread(started.wait)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tokenizer._at_work == 0


async def test_work_that_has_not_begun_is_cancelled_at_once(tokenizer: ModelTokenizer):
    go_on = threading.Event()
    open_work = [
        asyncio.create_task(tokenizer.work_out(lambda: go_on.wait(60), size=10**6))
        for _ in range(3)
    ]
    await asyncio.sleep(0)
    open_work[2].cancel()
    with pytest.raises(asyncio.CancelledError):
        await open_work[2]
    with pytest.raises(Unavailable):
        await tokenizer.work_out(lambda: None, size=2**28)
    done: list[int] = []
    required = asyncio.create_task(
        tokenizer.work_out(lambda: done.append(1), size=2**28, is_required=True)
    )
    await asyncio.sleep(0)
    required.cancel()
    go_on.set()
    assert await asyncio.gather(*open_work[:2]) == [True, True]
    with pytest.raises(asyncio.CancelledError):
        await required
    assert done == [1]


# --- stop strings ------------------------------------------------------------------------------


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    keep=st.booleans(),
)
def test_stop_strings_are_found_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], keep: bool
):
    # Character by character is how tokens come; a piece of several may have several stop strings.
    finder = Stops(stops, keep=keep)
    borders = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    received = ""
    for a, b in pairwise(borders):
        received += finder.push(text[a:b])
        if finder.matched is not None:
            break
    else:
        received += finder.rest()
    found = [(text.find(stop), len(stop)) for stop in stops if stop in text]
    if not found:
        assert (received, finder.matched) == (text, None)
        return
    assert finder.matched is not None
    at = len(received) - len(finder.matched) * keep
    assert text[at:].startswith(finder.matched)
    assert not any(stop in received[:at] for stop in stops)


@pytest.mark.parametrize("stops", [["x" * 4097], ["x" * 2049] * 2, [""], ["x"] * 65])
def test_stop_strings_are_bounded(stops: list[str]):
    with pytest.raises(ConfigError, match="stop"):
        TextRules(stops=stops)


async def test_a_stop_string_in_tokens_that_have_arrived_together_cuts_them(
    tokenizer: ModelTokenizer,
):
    withdrawn: list[tuple[int, str]] = []
    state: Any = None
    waited: list[float] = []
    responses = Responses(
        withdraw=lambda *received: withdrawn.append(received),
        state=lambda: state,
        first_token=waited.append,
    )
    response = Response("mine", "mine#0", Prompt(input_ids=np.array([5], np.int32)))
    response.group_id = 3
    ids = tokenizer.encode("one STOP two")
    response.arrive(ids, [-1.0] * len(ids))
    detokenizer = tokenizer.detokenizer([], skip_special=True)
    reading = Reading(
        responses=responses,
        response=response,
        detokenizer=detokenizer,
        rules=TextRules(stops=["STOP", "P two"]),
    )
    part = await reading.more()
    assert (part.text, part.end is not None, reading.finish) == ("one ", True, "stop")
    assert reading.token_ids == ids[:8] == part.token_ids
    assert withdrawn == [(3, "a stop string has ended it")]


# --- messages ----------------------------------------------------------------------------------


def received(
    message: Message, text: str, seed: int, end: str = ""
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The changes of a message by `text` in random pieces, and the message."""
    rng, changes = random.Random(seed), []
    while text:
        size = rng.randint(1, 9)
        changes += message.push(text[:size])
        text = text[size:]
    return changes + message.finish(end), message.as_message()


@pytest.mark.parametrize("seed", range(5))
def test_text_thoughts_and_calls_are_distinguished(tokenizer: ModelTokenizer, seed: int):
    text = f"{THOUGHT}\n\nLet me see. {CALL}\n{CALL.replace('3', '4')}\nDone.<|im_end|>"
    message = Message(tokenizer.parser("", None))
    changes, whole = received(message, text, seed)
    assert whole["reasoning_content"] == "it rains"
    assert whole["content"].split() == ["Let", "me", "see.", "Done."]
    days = [json.loads(c["function"]["arguments"])["days"] for c in whole["tool_calls"]]
    assert days == [3, 4]
    for name in ("content", "reasoning_content"):
        assert "".join(change.get(name, "") for change in changes) == whole[name]
    indices = [call["index"] for change in changes for call in change.get("tool_calls", ())]
    assert indices == [0, 1]


@pytest.mark.parametrize("call", ODD_CALLS, ids=range(len(ODD_CALLS)))
def test_a_call_that_no_client_can_obey_is_content_however_cut(
    tokenizer: ModelTokenizer, call: str
):
    text = f"{THOUGHT}Look: {CALL} and {call}"
    for seed in range(3):
        message = Message(tokenizer.parser("", None))
        changes, whole = received(message, text, seed)
        assert whole["content"] == f"Look: and {call}"
        assert whole["reasoning_content"] == "it rains"
        assert len(whole["tool_calls"]) == 1
        assert "".join(change.get("content", "") for change in changes) == whole["content"]
    message = Message(tokenizer.parser("", None))
    message.push(text)
    message.finish()
    whole["tool_calls"][0]["id"] = message.calls[0]["id"]
    assert message.as_message() == whole, "in one piece"


def test_what_follows_an_odd_call_is_read(tokenizer: ModelTokenizer):
    odd = '<tool_call>{"name": "look", "arguments": NaN}</tool_call>'
    _, whole = received(Message(tokenizer.parser("", None)), f"{CALL}{odd}{THOUGHT}{CALL}", 1)
    assert (whole["content"], whole["reasoning_content"]) == (odd, "it rains")
    assert len(whole["tool_calls"]) == 2


def test_a_region_that_the_prompt_has_opened_is_not_told_again_as_text(tokenizer: ModelTokenizer):
    parser = tokenizer.parser("<|im_start|>assistant\n<tool_call>", None)
    _, whole = received(Message(parser), "look(</tool_call>", 1)
    assert (whole["content"], whole["tool_calls"]) == ("look(</tool_call>", None)
    parser = tokenizer.parser("<|im_start|>assistant\n<tool_call>look(</tool_call>", None)
    assert received(Message(parser), "fine", 1)[1]["content"] == "fine"


@pytest.mark.parametrize(
    ("sampled", "arguments"),
    [
        ("null", "{}"),
        ('""', "{}"),
        ('"{\\"x\\": 1}"', '{"x": 1}'),
        ('{"x": 1, "x": 2}', '{"x": 2}'),
        ('{"x": 123456789012345678901234567890}', '{"x": 123456789012345678901234567890}'),
        ('{"x": "\\ud83d\\ude00\\u0000"}', '{"x": "\U0001f600\\u0000"}'),
    ],
)
def test_calls_that_can_be_obeyed_have_an_object_as_arguments(
    tokenizer: ModelTokenizer, sampled: str, arguments: str
):
    text = f'<tool_call>{{"name": "rm", "arguments": {sampled}}}</tool_call>'
    _, whole = received(Message(tokenizer.parser("", None)), text, 1)
    assert whole["content"] is None
    assert whole["tool_calls"][0]["function"] == {"name": "rm", "arguments": arguments}


@pytest.mark.parametrize("seed", range(3))
def test_a_call_that_is_asked_for_has_a_schema_and_is_read_by_it(seed: int):
    tools = [
        {"type": "function", "function": {"name": n, "parameters": {"type": "object"}}}
        for n in "ab"
    ]
    chat: Any = {"messages": [{"role": "user", "content": "x"}], "tools": tools}

    def schema(choice: Any, **more: Any) -> Any:
        body = msgspec.convert({"tool_choice": choice, **chat, **more}, Chats.body)
        (question,) = Chats.parse(body).questions
        return json.loads(question.params.get("json_schema", "null"))

    named = {"type": "function", "function": {"name": "b"}}
    assert schema("auto") is None
    for found, names in ((schema("required"), ["a", "b"]), (schema(named), ["b"])):
        own = [each["properties"] for each in found["items"]["anyOf"]]
        assert [(each["name"]["const"], each["arguments"]) for each in own] == [
            (name, {"type": "object"}) for name in names
        ]
    assert "maxItems" not in schema("required")
    assert (
        schema(named)["maxItems"] == schema("required", parallel_tool_calls=False)["maxItems"] == 1
    )
    with pytest.raises(ConfigError, match="give one"):
        schema("required", response_format={"type": "json_object"})
    text = '[{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]'
    changes, whole = received(Message(ForcedCalls()), text, seed)
    assert whole["content"] is None
    found = [
        (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in whole["tool_calls"]
    ]
    assert found == [("a", {"x": 1}), ("b", {})]
    assert [each.keys() for each in changes] == [{"tool_calls"}] * 2
    text = text.replace('"b", "arguments": {}', '"b", "arguments": 3')
    _, odd = received(Message(ForcedCalls()), text, seed)
    assert (odd["content"], odd["tool_calls"]) == (text, None), "none of them is called"
    assert received(Message(ForcedCalls()), "[]", seed)[1]["content"] == "[]"
    _, cut = received(Message(ForcedCalls()), text[:30], seed)
    assert (cut["content"], cut["tool_calls"]) == (text[:30], None)


def test_what_the_prompt_has_opened_is_not_told_again(tokenizer: ModelTokenizer):
    prompt = tokenizer.render(
        [{"role": "user", "content": "hi"}], None, go_on=False, options={"thinks": True}
    )
    message = Message(tokenizer.parser(prompt, None))
    _, whole = received(message, "deep</think>\n\nshallow", 1)
    assert (whole["reasoning_content"], whole["content"]) == ("deep", "shallow")


def test_without_a_response_template_all_text_is_content():
    message = Message(None)
    _, whole = received(message, f" a {CALL} ", 1)
    assert whole == {
        "role": "assistant",
        "content": f" a {CALL} ",
        "reasoning_content": None,
        "tool_calls": None,
    }


def test_images_are_parts_for_the_template_and_urls_for_the_engine():
    text = {"type": "text", "text": "What is this?"}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    messages = [
        {"role": "user", "content": [image, text]},
        {"role": "user", "content": [text, text]},
    ]
    received, images = for_template(messages)
    assert images == ["data:image/png;base64,AA=="]
    assert received[0]["content"] == [{"type": "image"}, text], (
        "the template writes the placeholder"
    )
    assert received[1]["content"] == "What is this? What is this?"


def test_messages_are_given_to_templates_in_their_form():
    (message,), images = for_template(
        [
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "tool_calls": [{"id": "x", "function": {"name": "look", "arguments": '{"a": 1}'}}],
            }
        ]
    )
    assert images == []
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "x", "function": {"name": "look", "arguments": {"a": 1}}}],
    }


# --- the tokenizer's files ---------------------------------------------------------------------


def test_the_ends_of_a_model_are_those_of_its_files(tmp_path: Path):
    folder = bytes_tokenizer(tmp_path, parses=True)
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 3]}')
    assert load_tokenizer(folder).ends == {SPECIAL.index("<eos>"), 3, 4}
    for damaged in ("", "[]", '{"eos_token_id": null}', '{"eos_token_id": "x"}'):
        (folder / "generation_config.json").write_text(damaged)
        assert load_tokenizer(folder).ends == {0}


def test_a_response_template_of_a_file_is_used(tmp_path: Path):
    folder = bytes_tokenizer(tmp_path / "model")
    file = tmp_path / "template.json"
    file.write_text(json.dumps(RESPONSE))
    assert load_tokenizer(folder, file).parses
    for content, words in (
        ("{", "cannot be read"),
        ('{"fields": {}}', "cannot be used"),
        ('{"start_anchor": "x", "fields": {"a": {"open_pattern": "("}}}', "cannot be used"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=words):
            load_tokenizer(folder, file)


def test_no_code_of_a_folder_is_run(tmp_path: Path):
    folder = bytes_tokenizer(tmp_path, parses=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["mine.Mine", None]}
    config["tokenizer_class"] = "Mine"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').write('')\nclass Mine: pass"
    )
    with suppress(ConfigError):
        load_tokenizer(folder)
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = bytes_tokenizer(tmp_path, parses=True)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[gateway\]'"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("sampled", "given"),
    [
        ('{"id": "functions.look:0", "name": "look", "arguments": {}}', ["functions.look:0", None]),
        ('{"name": "look", "arguments": {}}', [None, None]),
        ('{"id": "", "name": "look", "arguments": {}}', [None, None]),
        ('{"id": 7, "name": "look", "arguments": {}}', [None, None]),
        ('{"id": "\\ud83d", "name": "look", "arguments": {}}', [None, None]),
    ],
)
def test_a_sampled_id_is_kept_and_others_have_nine_letters(
    tokenizer: ModelTokenizer, sampled: str, given: list[str | None]
):
    call = f"<tool_call>{sampled}</tool_call>"
    _, whole = received(Message(tokenizer.parser("", None)), call * 2, 0)
    ids = [each["id"] for each in whole["tool_calls"]]
    assert len({*ids}) == 2
    for each, wanted in zip(ids, given, strict=True):
        assert each == wanted if wanted else len(each) == 9 and each.isalnum()


LLAMA = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
            "close_pattern": r"\}<\|im_end\|>\s*",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*"},
    },
}
"""The end of a response closes a call, as in Llama 3.1."""


@pytest.mark.parametrize("seed", range(5))
def test_the_end_of_a_response_closes_its_call(tmp_path: Path, seed: int):
    tokenizer = load_tokenizer(bytes_tokenizer(tmp_path, response_template=LLAMA))
    call = '{"name": "look", "parameters": {"city": "Bern"}}'

    def read(text: str, end: str) -> dict[str, Any]:
        return received(Message(tokenizer.parser("", None)), text, seed, end)[1]

    (found,) = read(call, "<|im_end|>")["tool_calls"]
    assert json.loads(found["function"]["arguments"]) == {"city": "Bern"}
    assert read(call, "")["tool_calls"] is None
    for text in ("it rains", call[:-9], "fine {"):
        whole = read(text, "<|im_end|>")
        assert (whole["content"], whole["tool_calls"]) == (text, None)


@pytest.mark.parametrize("text", ["<think>it rains", CALL.removesuffix("</tool_call>"), "fine"])
def test_the_end_of_a_response_is_in_none_of_its_regions(tokenizer: ModelTokenizer, text: str):
    changes = received(Message(tokenizer.parser("", None)), text, 0)[1]
    ended = received(Message(tokenizer.parser("", None)), text, 0, "<eos>")[1]
    for message in (changes, ended):
        for call in message["tool_calls"] or []:
            call["id"] = ""
    assert ended == changes
