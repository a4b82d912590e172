"""Tests that what was sampled keeps its tokens, whatever a chat template and a harness do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched.chat.tokenizer import ModelTokenizer, load_tokenizer
from aprilsched.errors import ConfigError
from aprilsched.sessions.history import History, Question
from tests.support.tiny_tokenizer import CALL, ODD_CALLS, THOUGHT, bytes_tokenizer

END = "<|im_end|>"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
FORGETFUL = (
    "{% set at = namespace(user=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set at.user = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.index0 > at.user %}"
    "<think>{{ m['reasoning_content'] or '' }}</think>{% endif %}"
    "{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Drops the reasoning of answers before the last question of a user, as those of Qwen3 do."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = bytes_tokenizer(tmp_path_factory.mktemp("bytes"), parses=True)
    (made / "generation_config.json").write_text('{"eos_token_id": [0, 4]}')
    return made


@pytest.fixture
def tokenizer(folder: Path) -> ModelTokenizer:
    return load_tokenizer(folder)


def with_template(folder: Path, template: str) -> ModelTokenizer:
    made = load_tokenizer(folder)
    made._tokenizer.chat_template = template  # pyright: ignore[reportPrivateUsage]
    return made


def history(tokenizer: ModelTokenizer) -> History:
    return History(tokenizer, most_branches=8)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def sample(tokenizer: ModelTokenizer, text: str) -> Any:
    return np.array(tokenizer.encode(text, special=False), dtype=np.int32)


def answer(made: History, tokenizer: ModelTokenizer, question: Question, text: str) -> Any:
    made.begin(question)
    return made.answered(question, sample(tokenizer, text))


def text_of(tokenizer: ModelTokenizer, question: Question) -> str:
    return tokenizer.decode(question.ids.tolist(), skip_special=False)


@pytest.mark.parametrize(
    ("said", "then"),
    [
        (f"fine{END}", f"fine{END}\n"),
        ("cut off", f"cut off{END}\n"),
        ("fine<eos>", "fine<eos>\n"),
        (f"  spaced {END}", f"  spaced {END}\n"),
        (f"{THOUGHT}fine{END}", f"{THOUGHT}fine{END}\n"),
        (f"{CALL}{END}", f"{CALL}{END}\n"),
        (f"see {CALL}{CALL}{END}", f"see {CALL}{CALL}{END}\n"),
        ("", f"{END}\n"),
    ],
)
@pytest.mark.parametrize("template", [None, FORGETFUL], ids=["plain", "forgetful"])
def test_what_follows_an_answer_is_added_once(
    folder: Path, template: str | None, said: str, then: str
):
    tokenizer = load_tokenizer(folder) if template is None else with_template(folder, template)
    tools = TOOLS if "tool_call" in said else None
    made = history(tokenizer)
    first = made.ask([user("hello")], tools)
    told = answer(made, tokenizer, first, said)
    more = {"role": "tool", "content": "rain"} if told["tool_calls"] else user("and now?")
    second = made.ask([user("hello"), told, more], tools)
    known = [*first.ids.tolist(), *sample(tokenizer, said).tolist()]
    assert second.ids.tolist()[: len(known)] == known
    begins = f"{then}<|im_start|>{more['role']}\n{more['content']}{END}\n"
    added = text_of(tokenizer, second).removeprefix(text_of(tokenizer, first))
    assert added.startswith(begins)
    assert added.endswith("<|im_start|>assistant\n")
    assert second.text == text_of(tokenizer, second)
    assert second.after is not None
    if told["tool_calls"]:
        assert told["tool_calls"][0]["function"]["name"] == "look"


@pytest.mark.parametrize(
    "change",
    [
        {"reasoning_content": None},
        {"content": " s\u200dee\n"},
        {"extra": 1, "refusal": None, "name": None},
        {"tool_calls": "swapped"},
    ],
)
def test_what_makes_no_difference_to_a_message(tokenizer: ModelTokenizer, change: dict[str, Any]):
    made = history(tokenizer)
    other = CALL.replace("3", "4")
    told = answer(made, tokenizer, made.ask([user("a")], TOOLS), f"{THOUGHT}see {CALL}{other}{END}")
    again = {**told, **change}
    if change == {"tool_calls": "swapped"}:
        arguments = '{"days": %s, "where": "Z\\u00fcrich"}'
        again["tool_calls"] = [
            {"id": f"x{n}", "function": {"name": "look", "arguments": arguments % n}}
            for n in (4, 3)
        ]
    assert made.ask([user("a"), again, user("b")], TOOLS).after is not None
    assert made.ask([user("a"), {**again, "content": "other"}, user("b")], TOOLS).after is None
    assert made.ask([user("a"), again, user("b")]).after is None, "with other tools"


def test_numbers_that_a_client_writes_anew_are_the_same(tokenizer: ModelTokenizer):
    made = history(tokenizer)
    call = '{"name": "look", "arguments": {"a": 1.0, "b": [1e3, -0.0, 1180591620717411303424]}}'
    said = f"<tool_call>{call}</tool_call>{END}"
    told = answer(made, tokenizer, made.ask([user("a")], TOOLS), said)

    def after(arguments: str) -> Any:
        function = {"name": "look", "arguments": arguments}
        again = {"role": "assistant", "tool_calls": [{"function": function}]}
        return made.ask([user("a"), again, user("b")], TOOLS).after

    assert after(told["tool_calls"][0]["function"]["arguments"]) is not None
    assert after('{"a":1,"b":[1000,0,1.1805916207174113e21]}') is not None
    assert after('{"a":1,"b":[1000,1,1.1805916207174113e21]}') is None


@pytest.mark.parametrize("call", ODD_CALLS, ids=range(len(ODD_CALLS)))
def test_an_odd_call_keeps_its_tokens_in_the_next_turn(tokenizer: ModelTokenizer, call: str):
    made = history(tokenizer)
    first = made.ask([user("a")], TOOLS)
    told = answer(made, tokenizer, first, f"see {CALL} and {call}{END}")
    parts = {**told, "content": [{"type": "text", "text": told["content"]}]}
    for again in (told, parts, json.loads(json.dumps(told))):
        second = made.ask([user("a"), again, user("b")], TOOLS)
        known = [*first.ids.tolist(), *sample(tokenizer, f"see {CALL} and {call}{END}").tolist()]
        assert second.after is not None
        assert second.ids.tolist()[: len(known)] == known


def test_a_template_that_drops_reasoning_is_found_and_said(folder: Path):
    tokenizer = with_template(folder, FORGETFUL)
    made = history(tokenizer)
    told = answer(made, tokenizer, made.ask([user("a")]), f"{THOUGHT}fine{END}")
    second = made.ask([user("a"), told, user("b")])
    assert THOUGHT in text_of(tokenizer, second)
    assert made.drift == len(sample(tokenizer, THOUGHT))


def test_tokens_that_the_tokenizer_does_not_make_are_kept_and_counted(tokenizer: ModelTokenizer):
    made = history(tokenizer)
    first = made.ask([user("a")])
    made.begin(first)
    # A special token that is written byte by byte.
    odd = [5 + byte for byte in b"x<eos>y"]
    told = made.answered(first, np.array(odd, dtype=np.int32))
    second = made.ask([user("a"), told, user("b")])
    assert second.ids.tolist()[len(first.ids) :][: len(odd)] == odd
    assert made.drift == 5


def test_a_template_that_shows_no_answers_begins_a_branch_and_says_so(folder: Path):
    hides = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    tokenizer = with_template(folder, hides)
    made = history(tokenizer)
    first = made.ask([user("abc")])
    told = answer(made, tokenizer, first, "fine")
    second = made.ask([user("abc"), told, user("d")])
    assert second.after is None
    assert text_of(tokenizer, second) == "abcd"
    assert made.drift == len("abcfine")


def test_completions_go_on_from_what_was_sampled(tokenizer: ModelTokenizer):
    made = history(tokenizer)
    first = made.continue_text("once ")
    told = answer(made, tokenizer, first, f"upon{END}")
    assert told["content"] == "upon"
    second = made.continue_text("once upon a time")
    assert text_of(tokenizer, second) == f"once upon{END} a time"
    assert second.after is not None
    assert made.continue_text([7, 8]).ids.tolist() == [7, 8]
    with pytest.raises(ConfigError, match="empty"):
        made.continue_text([])


def test_images_travel_in_the_order_of_their_places(tokenizer: ModelTokenizer):
    shown = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    question = history(tokenizer).ask([{"role": "user", "content": shown}])
    assert [each.source for each in question.media] == ["data:image/png;base64,AA=="]
    shown = [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]
    with pytest.raises(ConfigError, match="URL"):
        history(tokenizer).ask([{"role": "user", "content": shown}])


def test_an_answer_that_says_the_same_with_other_tokens_changes_no_earlier_one(
    tokenizer: ModelTokenizer,
):
    made = history(tokenizer)
    asked = made.ask([user("a")])
    as_bytes = [5 + byte for byte in b"x<eos>y"]
    told = answer(made, tokenizer, asked, "x<eos>y")
    first = made.ask([user("a"), told, user("b")])
    then = answer(made, tokenizer, first, "on")
    made.begin(asked)
    made.answered(asked, np.array(as_bytes, dtype=np.int32))
    again = made.ask([user("a"), told, user("b"), then, user("c")])
    assert again.ids.tolist()[: len(first.ids)] == first.ids.tolist()
    other = made.ask([user("a"), told, user("other")])
    assert other.ids.tolist()[len(asked.ids) :][: len(as_bytes)] == as_bytes


@pytest.mark.parametrize("change", ["text", "url"])
def test_a_message_that_its_harness_has_changed_is_another_one(
    tokenizer: ModelTokenizer, change: str
):
    made = history(tokenizer)
    shown: dict[str, Any] = {"url": "data:image/png;base64,AA=="}
    said: dict[str, Any] = user("a")
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": shown}]}
    told = answer(made, tokenizer, made.ask([said, picture]), "fine")
    assert made.ask([said, picture, told, user("b")]).after is not None
    if change == "text":
        said["content"] = "c"
    else:
        shown["url"] = "data:image/png;base64,BB=="
    question = made.ask([said, picture, told, user("b")])
    assert question.after is None
    assert [each.source for each in question.media] == [shown["url"]]
