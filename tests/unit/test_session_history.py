"""Tests that what was sampled keeps its tokens, whatever a chat template and a harness do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched.agents.chat.tokenizer import ModelTokenizer, load_tokenizer
from aprilsched.agents.sessions.history import History, Question
from aprilsched.errors import ConfigError
from tests.support.tiny_tokenizer import (
    CALL,
    ODD_CALLS,
    TEMPLATE_TOOLS_FIRST,
    THOUGHT,
    bytes_tokenizer,
)

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
    made.wrapped.chat_template = template
    return made


def history(tokenizer: ModelTokenizer) -> History:
    return History(tokenizer, most_branches=8)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def sample(tokenizer: ModelTokenizer, text: str) -> Any:
    return np.array(tokenizer.encode(text, special=False), dtype=np.int32)


def answer(made: History, tokenizer: ModelTokenizer, question: Question, text: str) -> Any:
    made.start(question)
    return made.answered(question, sample(tokenizer, text))


def text_of(tokenizer: ModelTokenizer, question: Question) -> str:
    return tokenizer.decode(question.ids.tolist(), skip_special=False)


@pytest.mark.parametrize(
    ("printed", "then"),
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
    folder: Path, template: str | None, printed: str, then: str
):
    tokenizer = load_tokenizer(folder) if template is None else with_template(folder, template)
    tools = TOOLS if "tool_call" in printed else None
    made = history(tokenizer)
    first = made.ask([user("hello")], tools)
    received = answer(made, tokenizer, first, printed)
    more = {"role": "tool", "content": "rain"} if received["tool_calls"] else user("and now?")
    second = made.ask([user("hello"), received, more], tools)
    known = [*first.ids.tolist(), *sample(tokenizer, printed).tolist()]
    assert second.ids.tolist()[: len(known)] == known
    starts = f"{then}<|im_start|>{more['role']}\n{more['content']}{END}\n"
    added = text_of(tokenizer, second).removeprefix(text_of(tokenizer, first))
    assert added.startswith(starts)
    assert added.endswith("<|im_start|>assistant\n")
    assert second.text == text_of(tokenizer, second)
    assert second.after is not None
    if received["tool_calls"]:
        assert received["tool_calls"][0]["function"]["name"] == "look"


@pytest.mark.parametrize(
    "change",
    [
        {"reasoning_content": None},
        {"content": " s\u200dee\n"},
        {"content": [{"type": "text", "text": "see"}]},
        {"extra": 1, "refusal": None, "name": None},
        {"tool_calls": "swapped"},
    ],
)
def test_what_makes_no_difference_to_a_message(tokenizer: ModelTokenizer, change: dict[str, Any]):
    made = history(tokenizer)
    other = CALL.replace("3", "4")
    received = answer(
        made, tokenizer, made.ask([user("a")], TOOLS), f"{THOUGHT}see {CALL}{other}{END}"
    )
    again = {**received, **change}
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
    printed = f"<tool_call>{call}</tool_call>{END}"
    received = answer(made, tokenizer, made.ask([user("a")], TOOLS), printed)

    def after(arguments: str) -> Any:
        function = {"name": "look", "arguments": arguments}
        again = {"role": "assistant", "tool_calls": [{"function": function}]}
        return made.ask([user("a"), again, user("b")], TOOLS).after

    assert after(received["tool_calls"][0]["function"]["arguments"]) is not None
    assert after('{"a":1,"b":[1000,0,1.1805916207174113e21]}') is not None
    assert after('{"a":1,"b":[1000,1,1.1805916207174113e21]}') is None


@pytest.mark.parametrize("call", ODD_CALLS, ids=range(len(ODD_CALLS)))
def test_an_odd_call_keeps_its_tokens_in_the_next_turn(tokenizer: ModelTokenizer, call: str):
    made = history(tokenizer)
    first = made.ask([user("a")], TOOLS)
    received = answer(made, tokenizer, first, f"see {CALL} and {call}{END}")
    parts = {**received, "content": [{"type": "text", "text": received["content"]}]}
    for again in (received, parts, json.loads(json.dumps(received))):
        second = made.ask([user("a"), again, user("b")], TOOLS)
        known = [*first.ids.tolist(), *sample(tokenizer, f"see {CALL} and {call}{END}").tolist()]
        assert second.after is not None
        assert second.ids.tolist()[: len(known)] == known


def test_a_template_that_drops_reasoning_is_reported(folder: Path):
    tokenizer = with_template(folder, FORGETFUL)
    made = history(tokenizer)
    received = answer(made, tokenizer, made.ask([user("a")]), f"{THOUGHT}fine{END}")
    second = made.ask([user("a"), received, user("b")])
    assert THOUGHT in text_of(tokenizer, second)
    assert made.drift == len(sample(tokenizer, THOUGHT))


def test_tokens_that_the_tokenizer_does_not_make_are_kept_and_counted(tokenizer: ModelTokenizer):
    made = history(tokenizer)
    first = made.ask([user("a")])
    made.start(first)
    # A special token that is written byte by byte.
    odd = [5 + byte for byte in b"x<eos>y"]
    received = made.answered(first, np.array(odd, dtype=np.int32))
    second = made.ask([user("a"), received, user("b")])
    assert second.ids.tolist()[len(first.ids) :][: len(odd)] == odd
    assert made.drift == 5


def test_a_template_that_shows_no_answers_keeps_what_was_sampled(folder: Path):
    hides = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    tokenizer = with_template(folder, hides)
    made = history(tokenizer)
    received = answer(made, tokenizer, made.ask([user("abc")]), "fine")
    second = made.ask([user("abc"), received, user("d")])
    assert second.after is not None
    assert text_of(tokenizer, second) == "abcfined"
    with pytest.raises(ConfigError, match=r"messages\[1\] .* the role 'assistant'"):
        made.ask([user("abc"), {**received, "content": "not sampled"}, user("d")])


LAST_END = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>"
    "{% endfor %}{% if loop.last and m['role'] == 'assistant' %}<eos>{% else %}<|im_end|>"
    "{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Ends an answer that is last with another token, as those of gpt-oss do."""
EOS_BEHIND = TEMPLATE_TOOLS_FIRST + "{% if not add_generation_prompt %}<eos>{% endif %}"
"""Has another token behind all of it, as those of Phi-3 do."""
ONE_CALL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['tool_calls'] %}"
    "{% if m['tool_calls'] | length > 1 %}{{ raise_exception('only one call') }}{% endif %}"
    "{{ m['tool_calls'][0]['function'] | tojson }}{% else %}{{ m['content'] }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Takes one call, and omits the text of a message with a call, as Llama 3.1's templates do."""
RESULT_INSIDE = (
    "{% for m in messages %}{% if m['role'] != 'tool' %}<|im_start|>{{ m['role'] }}\n"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>"
    "{% if loop.last %}{% for r in messages if r['role'] == 'tool' %}<r>{{ r['content'] }}</r>"
    "{% endfor %}{% endif %}{% endfor %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes results of tools before the text of the answer, as those of Gemma 4 do."""


@pytest.mark.parametrize(
    ("template", "printed", "then"),
    [
        (LAST_END, "fine<eos>", "\n<|im_start|>user\nbravo<|im_end|>\n"),
        (LAST_END, f"fine{END}", "\n<|im_start|>user\nbravo<|im_end|>\n"),
        (LAST_END, "cut", "<|im_end|>\n<|im_start|>user\nbravo<|im_end|>\n"),
        (LAST_END, f"{CALL}<eos>", "\n<|im_start|>tool\nbravo<|im_end|>\n"),
        (LAST_END, "<eos>", "\n<|im_start|>user\nbravo<|im_end|>\n"),
        (LAST_END, f"{THOUGHT}<eos>", "\n<|im_start|>user\nbravo<|im_end|>\n"),
        (EOS_BEHIND, f"fine{END}", "\n<|im_start|>user\nbravo<|im_end|>\n"),
        (EOS_BEHIND, f"{CALL} {END}", "\n<|im_start|>tool\nbravo<|im_end|>\n"),
        (EOS_BEHIND, "fine<eos>", "\n<|im_start|>user\nbravo<|im_end|>\n"),
        (ONE_CALL, f"see {CALL} {CALL}{END}", "\n<|im_start|>tool\nbravo<|im_end|>\n"),
        (ONE_CALL, f"{CALL}", "<|im_end|>\n<|im_start|>tool\nbravo<|im_end|>\n"),
        (RESULT_INSIDE, f"see {CALL}{END}", "<r>bravo</r>"),
    ],
)
def test_what_a_template_ends_otherwise_keeps_its_tokens(
    folder: Path, template: str, printed: str, then: str
):
    tokenizer = with_template(folder, template)
    made = history(tokenizer)
    tools = TOOLS if CALL in printed else None
    first = made.ask([user("a")], tools)
    received = answer(made, tokenizer, first, printed)
    more = {"role": "tool" if tools else "user", "content": "bravo"}
    second = made.ask([user("a"), received, more], tools)
    text = text_of(tokenizer, second)
    assert text.startswith(text_of(tokenizer, first) + printed + then)
    assert text.count("bravo") == 1
    last = answer(made, tokenizer, second, f"done{END}")
    third = made.ask([user("a"), received, more, last, user("c")], tools)
    assert third.ids.tolist()[: len(second.ids)] == second.ids.tolist()
    assert text_of(tokenizer, third).count("c<|im_end|>") == 1
    assert made.branches_started == 1


def test_a_request_for_more_of_an_answer_keeps_its_tokens(tokenizer: ModelTokenizer):
    made = history(tokenizer)
    first = made.ask([user("a")])
    received = answer(made, tokenizer, first, "not all")
    second = made.ask([user("a"), received])
    then = f"not all{END}\n<|im_start|>assistant\n"
    assert text_of(tokenizer, second) == text_of(tokenizer, first) + then
    assert second.after is not None


@pytest.mark.parametrize("printed", [END, f"{THOUGHT}{END}", f" \n{END}"])
@pytest.mark.parametrize("sent", ["as it came", "as parts", "without reasoning", "left out"])
def test_an_answer_without_text_starts_no_branch(
    tokenizer: ModelTokenizer, printed: str, sent: str
):
    made = history(tokenizer)
    first = made.ask([user("a")])
    received = answer(made, tokenizer, first, printed)
    plain: dict[str, Any] = {"role": "assistant", "content": ""}
    forms: dict[str, list[dict[str, Any]]] = {
        "as it came": [received],
        "as parts": [{**received, "content": []}],
        "without reasoning": [plain],
        "left out": [],
    }
    chat = [user("a"), *forms[sent], user("b")]
    assert made.ask(chat).after is not None
    second = made.ask(chat)
    assert text_of(tokenizer, second).startswith(text_of(tokenizer, first) + printed)
    last = answer(made, tokenizer, second, f"c{END}")
    third = made.ask([*chat, last, user("d")])
    assert third.ids.tolist()[: len(second.ids)] == second.ids.tolist()
    assert made.branches_started == 1


def test_real_templates_keep_what_was_sampled(folder: Path):
    trl = pytest.importorskip("trl")
    templates = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    for template in templates:
        tokenizer = with_template(folder, template.read_text(encoding="utf-8"))
        for printed in (f"it is{END}", "it is", f"  it is \n{END}", END, "it is<eos>"):
            made = history(tokenizer)
            chat: list[Any] = [user("QUESTION")]
            known: list[int] = []
            for turn in range(3):
                question = made.ask(chat)
                assert question.ids.tolist()[: len(known)] == known, (template.name, printed)
                text = text_of(tokenizer, question)
                assert text.count("QUESTION") == turn + 1, (template.name, printed)
                received = answer(made, tokenizer, question, printed)
                known = [*question.ids.tolist(), *sample(tokenizer, printed).tolist()]
                chat = [*chat, received, user("QUESTION")]
            assert made.branches_started == 1, (template.name, printed)


def test_completions_continue_from_the_sampled_tokens(tokenizer: ModelTokenizer):
    made = history(tokenizer)
    first = made.continue_text("once ")
    received = answer(made, tokenizer, first, f"upon{END}")
    assert received["content"] == "upon"
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


def test_equal_text_of_other_tokens_changes_no_earlier_answer(
    tokenizer: ModelTokenizer,
):
    made = history(tokenizer)
    asked = made.ask([user("a")])
    as_bytes = [5 + byte for byte in b"x<eos>y"]
    received = answer(made, tokenizer, asked, "x<eos>y")
    first = made.ask([user("a"), received, user("b")])
    then = answer(made, tokenizer, first, "on")
    made.start(asked)
    made.answered(asked, np.array(as_bytes, dtype=np.int32))
    again = made.ask([user("a"), received, user("b"), then, user("c")])
    assert again.ids.tolist()[: len(first.ids)] == first.ids.tolist()
    other = made.ask([user("a"), received, user("other")])
    assert other.ids.tolist()[len(asked.ids) :][: len(as_bytes)] == as_bytes


@pytest.mark.parametrize("change", ["text", "url"])
def test_a_message_that_its_harness_has_changed_is_another_one(
    tokenizer: ModelTokenizer, change: str
):
    made = history(tokenizer)
    shown: dict[str, Any] = {"url": "data:image/png;base64,AA=="}
    printed: dict[str, Any] = user("a")
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": shown}]}
    received = answer(made, tokenizer, made.ask([printed, picture]), "fine")
    assert made.ask([printed, picture, received, user("b")]).after is not None
    if change == "text":
        printed["content"] = "c"
    else:
        shown["url"] = "data:image/png;base64,BB=="
    question = made.ask([printed, picture, received, user("b")])
    assert question.after is None
    assert [each.source for each in question.media] == [shown["url"]]
