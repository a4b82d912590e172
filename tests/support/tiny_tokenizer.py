"""Tokenizers of a few hundred tokens, with a chat template and tools, for models of the tests."""

# pyright: basic
# The packages have no complete types.
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

SPECIAL = ["<eos>", "<bos>", "<pad>", "<|im_start|>", "<|im_end|>"]
"""Ids 0 to 4, as the tests' models have them."""
WORDS = 512

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('there is no role ' + message['role']) }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ part['text'] or '<image>' }}{% endfor %}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if thinks %}<think>{% endif %}{% endif %}"
)
TEMPLATE_TOOLS_FIRST = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    + TEMPLATE.replace("{% if tools %}", "{% if false %}")
)
"""Has the definitions of tools where the templates of most models have them."""
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*"},
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*"},
    },
}
CALL = '<tool_call>{"name": "look", "arguments": {"where": "Zürich", "days": 3}}</tool_call>'
ODD_CALLS = [
    f"<tool_call>{call}</tool_call>"
    for call in [
        "",
        "look(",
        "null",
        "[]",
        '["look"]',
        '{"arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "look", "arguments": {"x": "</tool_call>"}}',
        *(
            f'{{"name": "look", "arguments": {arguments}}}'
            for arguments in [
                '{"x": ',
                '"Zürich"',
                '"{\\"x\\": "',
                '"{\\"x\\": \\"\\\\ud83d\\"}"',
                '"{\\"x\\": NaN}"',
                "3",
                "true",
                "[1, 2]",
                '{"x": NaN}',
                '{"x": -Infinity}',
                '{"x": 1e999}',
                '{"x": "\\ud83d"}',
                '{"\\udfff": 1}',
                f'{{"x": {"9" * 400}}}',
                f'{{"x": {"9" * 5000}}}',
                f'{{"x": {"[" * 60}{"]" * 60}}}',
                f'{{"x": {"[" * 900}{"]" * 900}}}',
                f'{{"x": {"[" * 5000}{"]" * 5000}}}',
            ]
        ),
    ]
] + ['<tool_call>{"name": "look", "argu']
"""Calls that no client can obey, as a policy in training writes them."""
THOUGHT = "<think>it rains</think>"


def _saved(folder: Path, tokenizer: Any, **more: Any) -> Path:
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>"
    )
    made.chat_template = TEMPLATE
    for name, value in more.items():
        setattr(made, name, value)
    made.save_pretrained(folder)
    return folder


def byte_letter(byte: int) -> str:
    """The letter for a byte in vocabularies of bytes: itself if it can be printed."""
    if 33 <= byte < 127 or 161 <= byte < 173 or byte >= 174:
        return chr(byte)
    others = [b for b in range(174) if not (33 <= b < 127 or 161 <= b < 173)]
    return chr(256 + others.index(byte))


def bytes_tokenizer(
    folder: Path, *, parses: bool = False, words: Sequence[str] = (), **more: Any
) -> Path:
    """Write a tokenizer in which byte b is the id 5 + b, and `words` have the next ids. Further ids
    have no text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = [byte_letter(byte) for byte in range(256)]
    assert sorted(letters) == sorted(pre_tokenizers.ByteLevel.alphabet())
    known = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.BPE(known, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in words])
    if parses:
        more["response_template"] = RESPONSE
    return _saved(folder, tokenizer, **more)


def calling_tokenizer(folder: Path, *, every: int = 5, **more: Any) -> Path:
    """Write a tokenizer whose tokens are words, thoughts, and whole calls of a tool, so that a
    model of random tokens calls tools."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    def token(index: int) -> str:
        if index % every == 0:
            return CALL.replace("3", str(index))
        return f" w{index}"

    words = [*SPECIAL, *(token(index) for index in range(len(SPECIAL), WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return _saved(folder, tokenizer, response_template=RESPONSE, **more)
