"""Tests prompts from files, in the forms of the data sets of trainers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from aprilsched import Prompt
from aprilsched.cli.runs.prompts_file import read_prompts
from aprilsched.errors import ConfigError
from tests.support.table import each_row
from tests.support.tiny_tokenizer import SPECIAL, bytes_tokenizer

pytest.importorskip("transformers")

USER = [{"role": "user", "content": "2+2?"}]
RENDERED = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
PLAIN = {"input_ids": [1, 2]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bytes_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that adds BOS, cuts a text after 4 tokens and fills it up to 64."""
    folder = bytes_tokenizer(tmp_path_factory.mktemp("bos"))
    saved = json.loads((folder / "tokenizer.json").read_text())
    bos = {"id": "<bos>", "ids": [1], "tokens": ["<bos>"]}
    single = [
        {"SpecialToken": {"id": "<bos>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    saved["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<bos>": bos},
    }
    saved["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    saved["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 2,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    return folder


def ids(text: str) -> list[int]:
    for number, name in enumerate(SPECIAL):
        text = text.replace(name, chr(0xE000 + number))
    found: list[int] = []
    for letter in text:
        special = 0xE000 <= ord(letter) < 0xE100
        found += [ord(letter) - 0xE000] if special else [5 + b for b in letter.encode()]
    return found


def read(folder: Path, content: Any, **options: Any) -> list[Prompt]:
    file = folder / "prompts.jsonl"
    rows = content if isinstance(content, bytes) else json.dumps(content).encode()
    file.write_bytes(rows)
    return read_prompts(file, **options)


@each_row(
    ("row", "options", "text"),
    [
        ({"prompt": "2+2?", "solution": "4"}, {}, "2+2?"),
        ({"prompt": USER, "label": "4"}, {}, RENDERED),
        ({"messages": USER, "metadata": {"answer": "4"}}, {}, RENDERED),
        ({"data_source": "gsm", "prompt": USER, "reward_model": {"style": "rule"}}, {}, RENDERED),
        ({"input": "2+2?", "answer": "4"}, {"input_key": "input"}, "2+2?"),
        ({"problem": "2+2?"}, {"input_key": "problem", "apply_chat_template": True}, RENDERED),
        ({"prompt": "2+2?", "messages": USER}, {"input_key": "messages"}, RENDERED),
        ({"text": RENDERED}, {}, RENDERED),
        ({"question": "2+2?", "input_ids": [1]}, {"input_key": "question"}, "2+2?"),
        (
            {"prompt": [{"role": "user", "content": "a\u2028b"}]},
            {},
            RENDERED.replace("2+2?", "a\u2028b"),
        ),
    ],
)
def test_rows_of_trainers(tmp_path: Path, tokenizer: Path, row: Any, options: Any, text: str):
    (prompt,) = read(tmp_path, row, tokenizer=tokenizer, **options)
    assert prompt.input_ids.tolist() == ids(text)
    content = options.get("input_key") or next(
        k for k in ("prompt", "messages", "text") if k in row
    )
    assert prompt.metadata == {key: value for key, value in row.items() if key != content}


def test_tools_and_template_variables_of_a_row_are_rendered(tmp_path: Path, tokenizer: Path):
    tools = [{"type": "function", "function": {"name": "look"}}]
    row = {"messages": USER, "tools": tools, "chat_template_kwargs": {"thinks": True}}
    (prompt,) = read(tmp_path, row, tokenizer=tokenizer)
    assert prompt.metadata == {}
    text = bytes(each - 5 for each in prompt.input_ids.tolist() if each >= 5).decode()
    assert '"look"' in text
    assert text.endswith("<think>")


@each_row(
    "content",
    [
        b'\xef\xbb\xbf{"input_ids": [1, 2]}\n',
        b'{"input_ids": [1, 2]}\r\n\r\n',
        b'[{"input_ids": [1, 2]}]',
        json.dumps([PLAIN], indent=1).encode(),
    ],
)
def test_forms_of_files(tmp_path: Path, content: bytes):
    (prompt,) = read(tmp_path, content)
    assert prompt.input_ids.tolist() == [1, 2]


@each_row(
    ("content", "part"),
    [
        (b"PAR1\x15\x04", "must be JSON lines in UTF-8, got Parquet"),
        (b"\x1f\x8b\x08\x00", "got gzip"),
        ('{"prompt": "a"}'.encode("utf-16"), "got UTF-16"),
        (b'{"a": 1', "line 1: this is no JSON"),
        (b"[[1, 2]]", "row 1: this is no object"),
        ({"input": "a", "answer": "b"}, "got the keys input, answer; name the key of the prompt"),
        ({**PLAIN, "samplng": {}}, "'samplng' is no key of a prompt; write sampling, or rename it"),
        ({**PLAIN, "images": ["a.png"]}, "images must be empty"),
        ({**PLAIN, "group_size": 10**20}, "group_size must be"),
        ({"input_ids": [10**20]}, "input_ids holds"),
        ({**PLAIN, "key": 10**20}, "key must be"),
        ({**PLAIN, "sampling": {"max_tokens": 10**20}}, "max_tokens must be"),
        ({"prompt": 10**20}, "prompt must be text, token ids, or messages"),
        ({"prompt": {"role": "user"}}, "prompt must be text, token ids, or messages"),
        (
            {"messages": [*USER, {"role": "assistant", "content": "4"}]},
            "do not end with the assist",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "got other parts"),
        ({"messages": USER, "tools": "[]"}, "tools must be a list"),
        ({"messages": [{"role": "judge", "content": ""}]}, "there is no role judge"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path: Path, tokenizer: Path, content: Any, part: str):
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, content, tokenizer=tokenizer)
    assert part in str(raised.value)


@each_row("key", ["prompt", "text"])
def test_a_rendered_text_has_one_bos_and_its_full_length(tmp_path: Path, with_bos: Path, key: str):
    rows = [{key: "<bos>" + RENDERED}, {key: RENDERED}, {key: "<bos>"}]
    first, second, third = read(tmp_path, rows, tokenizer=with_bos)
    assert first.input_ids.tolist() == second.input_ids.tolist() == [1, *ids(RENDERED)]
    assert third.input_ids.tolist() == [1]


def test_columns_that_are_not_used_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        read(tmp_path, [{**PLAIN, "label": 1}, {**PLAIN, "label": 2, "source": "a"}])
    (record,) = caplog.records
    assert record.getMessage().endswith("does not use the columns label, source")
    with pytest.raises(ConfigError, match=r"got the keys a\\nb, \\x1b\[31m, 2,"):
        read(tmp_path, dict.fromkeys(["a\nb", "\x1b[31m", *map(str, range(2, 99))]))
