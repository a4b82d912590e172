"""Reads prompts from a JSONL file and checks every line before anything is launched.

A line is an object with ``input_ids``, or with ``prompt`` or ``text``, which are text and need a
tokenizer. It may also have ``key``, ``group_size``, and ``sampling`` with the names that
:func:`aprilsched.sampling.sampling_params` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from aprilsched.checks import nearest
from aprilsched.errors import ConfigError
from aprilsched.extras import extra
from aprilsched.sampling import sampling_params
from aprilsched.types import Prompt

__all__ = ["read_prompts"]

_CONTENT = ("input_ids", "prompt", "text")
"""The keys of a prompt's content. The data sets of most trainers have it as `prompt`."""
_KEYS = (*_CONTENT, "key", "sampling", "group_size")


class _Encoding(Protocol):
    @property
    def ids(self) -> Sequence[int]: ...


class _FastTokenizer(Protocol):
    """The part of tokenizers.Tokenizer that is used."""

    def encode(self, sequence: str, *, add_special_tokens: bool = ...) -> _Encoding: ...


class _Tokenizer:
    """Gives a tokenizers.Tokenizer the interface that :mod:`aprilsched.sampling` needs."""

    def __init__(self, inner: _FastTokenizer) -> None:
        self._inner = inner

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        return self._inner.encode(text, add_special_tokens=add_special_tokens).ids


def read_prompts(path: Path, *, tokenizer: Path | None = None) -> list[Prompt]:
    """The prompts of the file at `path`; empty lines are skipped.

    Raises:
        ConfigError: if the file cannot be read, or if a line cannot be used; it names the line.
    """
    known = None if tokenizer is None else _load(tokenizer)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"The prompts file {path} cannot be read: {error.strerror}.") from error
    prompts = [
        _prompt(line, known, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"The prompts file {path} has no prompts; give at least one line.")
    return prompts


def _prompt(line: bytes, tokenizer: _Tokenizer | None, where: str) -> Prompt:
    try:
        content = msgspec.json.decode(line)
        if not isinstance(content, dict):
            raise ConfigError('this is no object; write {"input_ids": [...]}.')
        fields = cast("dict[str, Any]", content)
        _check_keys(fields)
        sampling = fields.get("sampling")
        return Prompt(
            input_ids=_input_ids(fields, tokenizer),
            key=_key(fields.get("key")),
            group_size=fields.get("group_size"),
            sampling=None if sampling is None else sampling_params(sampling, tokenizer=tokenizer),
        )
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: this is no JSON ({error}).") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_keys(content: Mapping[str, Any]) -> None:
    for key in content:
        if key not in _KEYS:
            raise ConfigError(
                f"{key} is no key of a prompt; the nearest known one is {nearest(key, _KEYS)}."
            )
    if sum(key in content for key in _CONTENT) != 1:
        raise ConfigError(f"give one of {', '.join(_CONTENT)}.")


def _input_ids(content: Mapping[str, Any], tokenizer: _Tokenizer | None) -> Any:
    if "input_ids" in content:
        ids = content["input_ids"]
        if not isinstance(ids, list) or not all(type(i) is int for i in cast("list[Any]", ids)):
            raise ConfigError("input_ids is no list of whole numbers; give token ids.")
        return cast("list[int]", ids)
    name = "prompt" if "prompt" in content else "text"
    text = content[name]
    if not isinstance(text, str):
        raise ConfigError(f"{name} is no string; give text, after the chat template if it has one.")
    if tokenizer is None:
        raise ConfigError("the prompt is text; name the model's tokenizer folder (--tokenizer).")
    return tokenizer.encode(text)


def _key(key: Any) -> str | int | None:
    if key is None or (isinstance(key, str | int) and not isinstance(key, bool)):
        return key
    raise ConfigError("key is neither a string nor a whole number; give one of them.")


def _load(folder: Path) -> _Tokenizer:
    with extra("tokenizers"):
        from tokenizers import Tokenizer
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"There is no {file}; name the folder with the model's tokenizer.json.")
    try:
        # The package has no type annotations.
        load = cast("Callable[[str], _FastTokenizer]", cast("Any", Tokenizer).from_file)
        return _Tokenizer(load(str(file)))
    except Exception as error:
        # The package raises Exception itself for any file that it cannot read.
        raise ConfigError(f"{file} is no tokenizer: {error}.") from error
