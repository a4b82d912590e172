"""The task and the tokens of examples/agent; tests/sglang/test_grpo.py runs the whole trainer."""

# pyright: basic
# The type checker cannot resolve the example's module.
from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec(module) is None, reason=f"could not import '{module}'"
    )
    for module in ("torch", "transformers")
]
EXAMPLE = Path(__file__).parents[2] / "examples" / "agent"


@pytest.fixture
def example() -> Iterator[Any]:
    """The module of the policy; what it imports is forgotten afterwards."""
    before = set(sys.modules)
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield importlib.import_module("policy")
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in ({"agent", "policy"} & set(sys.modules)) - before:
            del sys.modules[name]


def test_a_careful_agent_finds_the_code(example: Any):
    draw = random.Random(0)
    for _ in range(20):
        given = example.task(draw)
        *calls, answer = example.trace(draw, given, 0.0)[1::2]
        assert answer["content"] == given.code
        paths = [call["tool_calls"][0]["function"]["arguments"]["path"] for call in calls]
        assert len(paths) == 3
        assert paths[0] == given.first
        # Every other code is wrong.
        codes = [text for text in given.notes.values() if text.startswith("the code is ")]
        assert len(codes) == len(set(codes)) == 6


def test_only_the_agent_s_own_tokens_are_learned(example: Any):
    tokenizer = example.make_tokenizer()
    tokens, own = example.rows(random.Random(1), tokenizer, 8, 0.5)
    for ids, counts in zip(tokens, own, strict=True):
        learned = tokenizer.decode(ids[counts])
        *calls, answer, rest = learned.split("<|im_end|>")
        assert rest == ""
        assert answer in example.CODES
        for call in calls:
            received = call.removeprefix("<tool_call>").removesuffix("</tool_call>")
            assert json.loads(received)["arguments"]["path"] in example.NAMES


def test_a_tool_reads_no_file_outside_of_its_folder(example: Any, tmp_path: Path):
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "fern").write_text("look in iris")
    (tmp_path / "secret").write_text("secret")
    read = sys.modules["agent"].read
    assert read(folder, '{"path": "fern"}') == "look in iris"
    for wrong in ('{"path": "../secret"}', f'{{"path": "{tmp_path}/secret"}}', "[]", "fern", "{}"):
        assert read(folder, wrong) == "no such note"
    assert read(folder, '{"path": ["fern"]}') == "no such note"
