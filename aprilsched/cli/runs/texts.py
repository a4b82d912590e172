"""Texts and chats of a prompts file, turned into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from aprilsched.agents.chat.tokenizer import ModelTokenizer, load_tokenizer
from aprilsched.errors import ConfigError
from aprilsched.kernel.values.extras import extra


class Texts:
    """The tokenizer of a folder, as :mod:`aprilsched.kernel.values.sampling` needs one, and its
    chat template."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inner = _loaded(folder)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        return self._inner.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_prompt(self, text: str) -> Sequence[int]:
        """Return the ids of a prompt, with one BOS even if a chat template already wrote it."""
        plain, whole = self.encode(text, add_special_tokens=False), self.encode(text)
        for before in range(1, len(whole) - len(plain) + 1):
            added = whole[:before]
            if plain[:before] == added and whole[before : before + len(plain)] == plain:
                return plain
        return whole

    @cached_property
    def _chat(self) -> ModelTokenizer:
        return load_tokenizer(self._folder)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> Sequence[int]:
        """Return the ids of a chat by the model's template, which writes BOS itself."""
        text = self._chat.render(messages, tools, go_on=False, options=options)
        return self._chat.encode(text, special=False)


def _loaded(folder: Path) -> Any:
    with extra("tokenizers"):
        from tokenizers import Tokenizer
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"There is no {file}; name the folder with the model's tokenizer.json.")
    try:
        read: Any = Tokenizer  # The package has no type annotations.
        found = read.from_file(str(file))
    except Exception as error:
        # The package raises Exception itself for any file that it cannot read.
        raise ConfigError(f"{file} is no tokenizer: {error}.") from error
    # These settings of the file would truncate or pad a prompt.
    found.no_truncation()
    found.no_padding()
    return found
