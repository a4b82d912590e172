"""Tests that every message is in a rendered chat, or that the chat is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aprilsched.agents.chat.openai_bodies import for_template
from aprilsched.agents.chat.tokenizer import ModelTokenizer, load_tokenizer
from aprilsched.errors import ConfigError
from tests.support.tiny_tokenizer import bytes_tokenizer

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "description": "d", "parameters": {}}}
]
ASK = {"role": "user", "content": "go"}
LOOK: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "call_1", "function": {"name": "look", "arguments": '{"city": "CALLED"}'}}
]}  # fmt: skip
RAIN = {"role": "tool", "tool_call_id": "call_1", "content": "RAIN"}
KNOWN_ROLES = (
    "{% for m in messages %}{% if m['role'] in ['system', 'user', 'assistant'] %}"
    "<{{ m['role'] }}>{{ m['content'] }}{% endif %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}<{{ m['role'] }}>{% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] }}{% else %}<image>{% endif %}{% endfor %}"
    "{% endfor %}"
)
CALLS = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}CALL{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bytes_tokenizer(tmp_path_factory.mktemp("bytes"), parses=True)


def with_template(folder: Path, template: str) -> ModelTokenizer:
    made = load_tokenizer(folder)
    made.wrapped.chat_template = template
    return made


def render(tokenizer: ModelTokenizer, messages: list[Any], **more: Any) -> str:
    received, _ = for_template(messages)
    return tokenizer.render(received, TOOLS, go_on=False, options={}, **more)


def test_a_message_of_an_unknown_role_is_refused_with_its_index(folder: Path):
    tokenizer = with_template(folder, KNOWN_ROLES)
    with pytest.raises(ConfigError, match=r"messages\[1\] .* the role 'function'"):
        render(tokenizer, [ASK, {"role": "function", "content": "RESULT"}])
    with pytest.raises(ConfigError, match=r"messages\[1\] .* the role 'tool'"):
        render(tokenizer, [ASK, {"role": "tool", "content": ""}])
    assert render(tokenizer, [{"role": "system", "content": ""}, ASK]) == "<system><user>go"
    # Its content, "o", also occurs in the text of another message.
    with pytest.raises(ConfigError, match=r"messages\[0\]"):
        render(tokenizer, [{"role": "critic", "content": "o"}, ASK])


def test_a_developer_is_given_as_the_system_that_is_known(folder: Path):
    tokenizer = with_template(folder, KNOWN_ROLES)
    assert render(tokenizer, [{"role": "developer", "content": "RULE"}, ASK]) == (
        "<system>RULE<user>go"
    )


def test_a_template_of_parts_is_given_parts(folder: Path):
    tokenizer = with_template(folder, PARTS)
    shown = {"type": "image_url", "image_url": {"url": "data:,"}}
    picture = {"role": "user", "content": [{"type": "text", "text": "see"}, shown]}
    assert render(tokenizer, [ASK, picture]) == "<user>go<user>see<image>"
    with pytest.raises(ConfigError, match=r"messages\[1\] .* the text"):
        render(with_template(folder, KNOWN_ROLES), [ASK, picture])
    blind = PARTS.replace("<image>", "")
    with pytest.raises(ConfigError, match=r"messages\[1\] .* an image"):
        render(with_template(folder, blind), [ASK, picture])


@pytest.mark.parametrize(
    "call",
    [
        "{{ '<call>' + c['function']['arguments'] }}",
        "{{ '<call>' ~ c['function']['arguments'] }}",
        "<call>{{ c['function']['arguments'] | tojson }}",
    ],
)
def test_arguments_are_written_as_json_in_every_template(folder: Path, call: str):
    tokenizer = with_template(folder, CALLS.replace("CALL", call))
    assert '<call>{"city": "CALLED"}<tool>RAIN' in render(tokenizer, [ASK, LOOK, RAIN])


def test_calls_that_a_template_leaves_out_are_refused(folder: Path):
    with pytest.raises(ConfigError, match=r"messages\[1\] .* the tool call 0"):
        render(with_template(folder, KNOWN_ROLES), [ASK, LOOK])
    only_first = CALLS.replace("CALL", "{% if loop.first %}{{ c | tojson }}{% endif %}")
    tokenizer = with_template(folder, only_first)
    assert "CALLED" in render(tokenizer, [ASK, LOOK])
    with pytest.raises(ConfigError, match=r"messages\[1\] .* the tool call 1"):
        render(tokenizer, [ASK, {**LOOK, "tool_calls": LOOK["tool_calls"] * 2}])


def test_ids_are_written_in_nine_letters_if_others_are_refused(folder: Path):
    wants = (
        "{% if m.tool_call_id and m.tool_call_id | length != 9 %}{{ raise_exception('id') }}"
        "{% endif %}{{ m.tool_call_id }}{{ m['content'] }}"
    )
    template = CALLS.replace("{{ m['content'] }}", wants).replace("CALL", "{{ c | tojson }}")
    text = render(with_template(folder, template), [ASK, LOOK, RAIN])
    short = text.partition("<tool>")[2].removesuffix("RAIN")
    assert len(short) == 9
    assert text.count(short) == 2, "the call has the same id"
    short_already = {**RAIN, "tool_call_id": "abcDEF012"}
    assert "<tool>abcDEF012RAIN" in render(with_template(folder, template), [ASK, short_already])


def test_a_message_that_is_written_before_others_is_refused(folder: Path):
    first = (
        "{% for m in messages if m['role'] == 'system' %}{{ m['content'] }}{% endfor %}"
        "{% for m in messages if m['role'] != 'system' %}<{{ m['role'] }}>{{ m['content'] }}"
        "{% endfor %}"
    )
    tokenizer = with_template(folder, first)
    chat = [ASK, {"role": "assistant", "content": "fine"}, {"role": "system", "content": "LATE"}]
    assert render(tokenizer, chat) == "LATE<user>go<assistant>fine"
    with pytest.raises(ConfigError, match=r"messages\[2\] must stand behind"):
        render(tokenizer, chat, shown_from=2)


def test_fields_that_no_template_writes_are_refused():
    for name in ("refusal", "function_call"):
        with pytest.raises(ConfigError, match=rf"messages\[1\]\.{name} must be empty"):
            for_template([ASK, {"role": "assistant", "content": None, name: "no"}])


def test_real_templates_show_every_message_or_refuse_it(folder: Path):
    trl = pytest.importorskip("trl")
    templates = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    assert len(templates) > 40
    system, shown = {"role": "system", "content": "RULE"}, {"role": "assistant", "content": "TEXT"}
    chats: list[list[dict[str, Any]]] = [
        [{"role": role, "content": "RULE"}, ASK] for role in ("system", "developer", "tool")
    ]
    chats += [
        [system, ASK, shown, ASK],
        [system, system | {"content": "MORE"}, ASK],
        [ASK, shown, system, ASK],
        [ASK, LOOK, RAIN],
        [ASK, {**LOOK, "content": "TEXT"}, RAIN],
        [ASK, {**LOOK, "tool_calls": [*LOOK["tool_calls"], *LOOK["tool_calls"]]}, RAIN, RAIN],
        [{"role": "user", "content": [{"type": "text", "text": "TEXT"}]}],
    ]
    shows = 0
    for template in templates:
        tokenizer = with_template(folder, template.read_text(encoding="utf-8"))
        for chat in chats:
            wanted = [each["content"] for each in chat if isinstance(each["content"], str)]
            wanted += ["CALLED" for each in chat for _ in each.get("tool_calls", ())]
            try:
                text = render(tokenizer, chat)
            except ConfigError:
                continue
            shows += 1
            for each in {*wanted}:
                assert text.count(each) >= wanted.count(each), (template.name, chat)
    assert shows > 400
