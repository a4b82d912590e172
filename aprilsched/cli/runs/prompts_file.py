"""Reads prompts from a file, and checks every row before anything is launched.

A row is a JSON object: one on each line, or in one array. Its prompt is under ``input_ids``,
``prompt``, ``text`` or ``messages``, or under the key that the user names: token ids, text that
went through the chat template, or messages, which the model's chat template renders with the
row's ``tools`` and ``chat_template_kwargs``. ``key``, ``group_size`` and ``sampling`` (with the
names of :func:`aprilsched.kernel.values.sampling.sampling_params`) set these fields of the prompt.
Other columns, such as a label, become its metadata.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, cast

import msgspec

from aprilsched.agents.chat.tokenizer import ModelTokenizer, load_tokenizer
from aprilsched.errors import ConfigError
from aprilsched.kernel.values.files import read_regular
from aprilsched.kernel.values.sampling import sampling_params
from aprilsched.types import Prompt

log = logging.getLogger("aprilsched")

_CONTENT = ("input_ids", "prompt", "text", "messages")
"""The keys of a prompt's content that need no name."""
_SETTINGS = ("key", "sampling", "group_size")
_CHAT = ("tools", "chat_template_kwargs")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_MARK = b"\xef\xbb\xbf"
"""The byte order mark that Windows tools write before UTF-8."""
_OTHER_FORMATS: Mapping[bytes, str] = {
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
"""How files of other formats start."""
_SHOWN = 32
"""Largest number of columns in a message, and of characters of each."""
_ALMOST = 0.85
"""Similarity to a setting at which a column counts as a misspelling of it, 0 to 1."""


def read_prompts(
    path: Path,
    *,
    tokenizer: Path | None = None,
    input_key: str | None = None,
    apply_chat_template: bool = False,
) -> list[Prompt]:
    """Return the prompts of the file at `path`; empty lines are skipped.

    Args:
        path: the file.
        tokenizer: the folder of the model's tokenizer, for prompts that are text or messages.
        input_key: the key of a row's prompt; None selects the standard key that the row contains.
        apply_chat_template: whether a text is a user message, which the template renders.

    Raises:
        ConfigError: if the file cannot be read, or if a row cannot be used; it names the row.
        MissingExtra: if a package that the tokenizer needs is not installed.
    """
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    prompts: list[Prompt] = []
    columns: dict[str, None] = {}
    for where, row in _rows(path):
        try:
            prompt = _prompt(row, loaded, input_key, apply_chat_template)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        columns |= dict.fromkeys(prompt.metadata)
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"The prompts file {path} has no prompts; give at least one line.")
    if columns:
        log.warning("%s: the run does not use the columns %s", path.name, _listed(columns))
    return prompts


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row with the place that errors name."""
    try:
        content = read_regular(path)
    except OSError as error:
        raise ConfigError(f"The prompts file {path} cannot be read: {error.strerror}.") from error
    for start, name in _OTHER_FORMATS.items():
        if content.startswith(start):
            raise ConfigError(f"{path} must be JSON lines in UTF-8, got {name}; convert it first.")
    content = content.removeprefix(_MARK)
    if content.lstrip().startswith(b"["):
        several = _decoded(content, str(path))
        for number, row in enumerate(cast("list[Any]", several), start=1):
            yield _object(row, f"{path}, row {number}")
        return
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield _object(_decoded(line, where), where)


def _decoded(content: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{where}: this is no JSON ({error}); write one object on each line, or one array."
        ) from error


def _object(row: Any, where: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(row, dict):
        raise ConfigError(f'{where}: this is no object; write {{"input_ids": [...]}}.')
    return where, cast("dict[str, Any]", row)


def _prompt(
    row: Mapping[str, Any],
    tokenizer: ModelTokenizer | None,
    input_key: str | None,
    templated: bool,
) -> Prompt:
    content = _content_key(row, input_key)
    for column in _MEDIA:
        if row.get(column):
            raise ConfigError(f"{column} must be empty, because prompts of a file have no media.")
    ids, used = _input_ids(content, row, tokenizer, templated)
    used = {content, *used, *_SETTINGS}
    metadata = {column: value for column, value in row.items() if column not in used}
    for column in metadata.keys() - {*_CONTENT}:
        # A misspelled setting would silently have no effect; a misspelled prompt raises an error.
        if near := get_close_matches(column, ("input_ids", *_SETTINGS[1:]), n=1, cutoff=_ALMOST):
            raise ConfigError(f"{column!r} is no key of a prompt; write {near[0]}, or rename it.")
    sampling, of_model = row.get("sampling"), None if tokenizer is None else tokenizer.wrapped
    return Prompt(
        input_ids=ids,
        key=_key(row.get("key")),
        group_size=row.get("group_size"),
        sampling=None if sampling is None else sampling_params(sampling, tokenizer=of_model),
        metadata=metadata,
    )


def _content_key(row: Mapping[str, Any], input_key: str | None) -> str:
    keys = _listed(row)
    if input_key is not None:
        if input_key not in row:
            raise ConfigError(f"there must be {input_key} (input_key), got the keys {keys}.")
        return input_key
    found = [key for key in _CONTENT if key in row]
    if len(found) != 1:
        raise ConfigError(
            f"there must be one of {', '.join(_CONTENT)}, got the keys {keys}; name the key of the "
            "prompt (--input-key)."
        )
    return found[0]


def _input_ids(
    name: str, row: Mapping[str, Any], tokenizer: ModelTokenizer | None, templated: bool
) -> tuple[Any, Sequence[str]]:
    """Return the token ids of the content under `name`, and the other columns that they need."""
    content = row[name]
    several = cast("list[Any]", content if isinstance(content, list) else [])
    if name == "input_ids" or (several and all(type(i) is int for i in several)):
        if not isinstance(content, list) or not all(type(i) is int for i in several):
            raise ConfigError("input_ids is no list of whole numbers; give token ids.")
        return several, ()
    if isinstance(content, str) and templated:
        several = [{"role": "user", "content": content}]
    elif isinstance(content, str):
        if tokenizer is None:
            raise ConfigError("the prompt is text; name the model's tokenizer folder (--tokenizer)")
        return _encoded(tokenizer, content), ()
    _check_messages(name, several)
    if tokenizer is None:
        raise ConfigError(
            "the prompt has messages; name the model's tokenizer folder (--tokenizer)"
        )
    tools: Any = row.get("tools")
    options: Any = row.get("chat_template_kwargs")
    if not isinstance(tools, list | None) or not isinstance(options, dict | None):
        raise ConfigError(
            "tools must be a list of definitions, and chat_template_kwargs an object."
        )
    # The template writes BOS itself.
    text = tokenizer.render(
        several, cast("Any", tools), go_on=False, options=cast("Any", options) or {}
    )
    return tokenizer.encode(text, special=False), _CHAT


def _encoded(tokenizer: ModelTokenizer, text: str) -> Sequence[int]:
    """Return the ids of a text, with one BOS even if a chat template already wrote it."""
    plain, whole = tokenizer.encode(text, special=False), tokenizer.encode(text)
    for before in range(1, len(whole) - len(plain) + 1):
        added = whole[:before]
        if plain[:before] == added and whole[before : before + len(plain)] == plain:
            return plain
    return whole


def _check_messages(name: str, messages: Sequence[Any]) -> None:
    """Require a list of text messages that the model can answer.

    Raises:
        ConfigError: if `messages` is anything else.
    """
    for message in messages:
        if not isinstance(message, dict):
            break
        fields = cast("dict[str, Any]", message)
        if not isinstance(fields.get("role"), str):
            break
        content: Any = fields.get("content")
        for part in cast("list[Any]", content) if isinstance(content, list) else ():
            if not isinstance(part, dict) or cast("dict[str, Any]", part).get("type") != "text":
                raise ConfigError(f"{name} must have messages of text, got other parts.")
    else:
        if messages and messages[-1]["role"] != "assistant":
            return
    raise ConfigError(
        f"{name} must be text, token ids, or messages with a role that do not end with the "
        "assistant's; correct it, or name another key (--input-key)."
    )


def _listed(columns: Collection[str]) -> str:
    """Return column names as one line that is safe to print on a terminal."""
    shown = [repr(each)[1:-1][:_SHOWN] for each in islice(columns, _SHOWN)]
    return ", ".join(shown) + (", …" if len(columns) > _SHOWN else "")


def _key(key: Any) -> str | int | None:
    if key is None or (isinstance(key, str | int) and not isinstance(key, bool)):
        return key
    raise ConfigError("key is neither a string nor a whole number; give one of them.")
