"""The model's chat template, with a check that it leaves out no message.

Templates differ in what they take: text as a string or as a list of parts, the arguments of calls
as an object or as JSON, the role ``developer`` or not. Some silently leave out what they do not
know, which shows only in the model's answers. To detect that, each shape of chat is rendered once
with marks as its texts, in one form after another until all marks appear.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import string
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

from aprilsched.errors import ConfigError

_BEGIN = "AprilschedText{}Part"
_MARK = _BEGIN + "{}End"
_KEY = "AprilschedArgument"
"""Placeholder for the name of an argument, as `_MARK` is for texts."""
_MAX_SHAPES = 4096
"""Shapes of chats that are cached, at some hundred bytes each."""
_ID_LENGTH = 9
"""Length of an alphanumeric id that every template accepts; Mistral's accept no other length."""
_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """How messages are passed to a template.

    Attributes:
        parts: the roles whose text is passed as a list of parts.
        has_text_arguments: whether the arguments of calls are passed as JSON.
        has_system: whether the role ``developer`` is passed as ``system``.
    """

    parts: frozenset[str] = frozenset()
    has_text_arguments: bool = False
    has_system: bool = False

    def of(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages in this form."""
        return [self._one(message) for message in messages]

    def _one(self, message: Mapping[str, Any]) -> dict[str, Any]:
        given = dict(message)
        if message["role"] in self.parts and isinstance(message["content"], str):
            given["content"] = [{"type": "text", "text": message["content"]}]
        if self.has_text_arguments and message.get("tool_calls"):
            given["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
        if self.has_system and message["role"] == "developer":
            given["role"] = "system"
        return given


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fit:
    """The best form for messages of one shape.

    Attributes:
        missing: what this form still leaves out: (index of a message, which part of it).
        spans: start and end offset of each message in the text; empty if unknown.
    """

    form: _Form = _Form()
    missing: tuple[tuple[int, str], ...] = ()
    spans: tuple[tuple[int, int], ...] = ()


class ChatTemplate:
    """Renders chats; threads may share it.

    Args:
        tokenizer: the tokenizer of transformers that has the template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
        self._fits: dict[bytes, _Fit] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        go_on: bool,
        options: Mapping[str, Any],
        generation_prompt: bool = True,
        shown_from: int = 0,
    ) -> str:
        """Render a chat with the model's template.

        Args:
            messages: the messages, in the form that transformers passes to templates.
            tools: definitions of tools.
            go_on: whether the response continues the last message instead of adding a new one.
            options: variables of the template.
            begins: whether to append the generation prompt; ignored with `go_on`.
            shown_from: index of the first message that must appear in the text.

        Raises:
            ConfigError: if the model has no template, or if the template rejects its input or
                leaves out a message; the error names the index of that message.
        """
        if self._tokenizer.chat_template is None:
            raise ConfigError("The model's tokenizer has no chat template; use /v1/completions.")
        if wrong := self._reserved & options.keys():
            raise ConfigError(f"chat_template_kwargs must not have {min(wrong)}; leave it out.")
        settings: dict[str, Any] = {
            **options,
            "tools": tools,
            "add_generation_prompt": generation_prompt and not go_on,
            "continue_final_message": go_on,
        }
        fit = self._fit(messages, settings)
        for place, what in fit.missing:
            if place >= shown_from:
                role = messages[place]["role"]
                raise ConfigError(
                    f"messages[{place}] must be what the model's chat template writes, got {what} "
                    f"of the role {role!r}, which it leaves out there; send it in another message."
                )
        known = max([end for _, end in fit.spans[:shown_from]], default=0)
        for place, (start, _) in enumerate(fit.spans[shown_from:], shown_from):
            if start < known:
                raise ConfigError(
                    f"messages[{place}] must stand behind the messages before it, got the role "
                    f"{messages[place]['role']!r}, which the model's chat template writes before "
                    "them; send it in another role."
                )
        given = fit.form.of(messages)
        try:
            return self._render(given, settings)
        except Exception as error:  # A template is a program, and may raise anything.
            short = _with_short_ids(given)
            if short != given:
                with suppress(Exception):
                    return self._render(short, settings)
            raise ConfigError(f"The chat template refuses the messages: {error}") from error

    def _render(self, messages: list[dict[str, Any]], settings: Mapping[str, Any]) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, **settings)

    def _fit(self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> _Fit:
        sample = _sample(messages)
        shape = repr((sample, {**settings, "tools": bool(settings["tools"])}))
        key = hashlib.blake2b(shape.encode(errors="replace"), digest_size=16).digest()
        fit = self._fits.get(key)
        if fit is None:
            if len(self._fits) >= _MAX_SHAPES:
                self._fits.clear()
            fit = self._fits[key] = self._best(sample, settings)
        return fit

    def _best(self, sample: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> _Fit:
        """Return the form that leaves out the least.

        If the template rejects every form, the default form is returned, so that rendering the real
        messages raises the template's own error.
        """
        roles = frozenset([each["role"] for each in sample])
        several = (False, True)
        has_calls = any(each.get("tool_calls") for each in sample)
        best: _Fit | None = None
        for has_text_arguments, has_system in product(
            several[: 1 + has_calls], several[: 1 + ("developer" in roles)]
        ):
            parts: frozenset[str] = frozenset()
            for _ in several:
                form = _Form(
                    parts=parts, has_text_arguments=has_text_arguments, has_system=has_system
                )
                try:
                    text = self._render(form.of(sample), settings)
                except Exception:
                    parts = roles
                    continue
                missing = self._missing(form.of(sample), text, settings)
                if best is None or len(missing) < len(best.missing):
                    spans = tuple([_span(place, text) for place in range(len(sample))])
                    best = _Fit(form=form, missing=missing, spans=spans)
                if not missing:
                    return best
                parts = frozenset([sample[place]["role"] for place, _ in missing])
        return best or _Fit()

    def _missing(
        self, sample: list[dict[str, Any]], text: str, settings: Mapping[str, Any]
    ) -> tuple[tuple[int, str], ...]:
        """Return the parts of a sample that its text lacks, or shows only as a Python literal."""
        missing: list[tuple[int, str]] = []
        for place, message in enumerate(sample):
            content: Any = message["content"]
            parts = [content] if isinstance(content, str) else [p.get("text") for p in content]
            images = [] if isinstance(content, str) else [p for p in content if "text" not in p]
            if any(part not in text or f"'text': '{part}'" in text for part in parts if part):
                missing.append((place, "the text"))
            elif images and ("{'type': " in text or text == self._without(sample, place, settings)):
                missing.append((place, "an image"))
            for number in range(len(message.get("tool_calls") or ())):
                if _MARK.format(place, f"Call{number}") not in text or f"{{'{_KEY}" in text:
                    missing.append((place, f"the tool call {number}"))
                    break
        return tuple(missing)

    def _without(
        self, sample: Sequence[dict[str, Any]], place: int, settings: Mapping[str, Any]
    ) -> str | None:
        """Render a sample without the images of a message; None if the template rejects it."""
        texts = [part for part in sample[place]["content"] if "text" in part]
        plain = {**sample[place], "content": texts}
        try:
            return self._render([*sample[:place], plain, *sample[place + 1 :]], settings)
        except Exception:
            return None


def _sample(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of the same shape whose texts are marks."""
    ids: dict[str, str] = {}

    def named(given: str) -> str:
        return ids.setdefault(given, f"a{len(ids):0{_ID_LENGTH - 1}}")

    sample: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        shown: dict[str, Any] = {"role": message["role"]}
        for name, value in message.items():
            if isinstance(value, str) and name not in ("role", "content"):
                shown[name] = named(value) if name == "tool_call_id" else value and "text"
        content: Any = message["content"]
        if isinstance(content, list):
            parts = cast("list[dict[str, str]]", content)
            shown["content"] = [
                {**part, "text": _MARK.format(place, number)} if part.get("text") else part
                for number, part in enumerate(parts)
            ]
        else:
            # An empty tool result or question still counts as a message.
            is_shown = content or message["role"] not in ("assistant", "developer", "system")
            shown["content"] = _MARK.format(place, 0) if is_shown else ""
        if calls := message.get("tool_calls"):
            shown["tool_calls"] = [
                {
                    **({"id": named(call["id"])} if isinstance(call.get("id"), str) else {}),
                    "type": "function",
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": {_KEY: _MARK.format(place, f"Call{number}")},
                    },
                }
                for number, call in enumerate(calls)
            ]
        sample.append(shown)
    return sample


def _span(place: int, text: str) -> tuple[int, int]:
    """Return the start and end of a message's marks; (len(text), 0) if it has none."""
    opening = _BEGIN.format(place)
    start = text.find(opening)
    return (start, text.rfind(opening)) if start >= 0 else (len(text), 0)


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _with_short_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with ids of nine letters and digits, the same for the same id."""
    made: list[dict[str, Any]] = []
    for message in messages:
        given = dict(message)
        if isinstance(message.get("tool_call_id"), str):
            given["tool_call_id"] = _short_id(message["tool_call_id"])
        if calls := message.get("tool_calls"):
            given["tool_calls"] = [
                {**call, "id": _short_id(str(call.get("id", number)))}
                for number, call in enumerate(calls)
            ]
        made.append(given)
    return made


def _short_id(given: str) -> str:
    if len(given) == _ID_LENGTH and given.isascii() and given.isalnum():
        return given
    rest = int.from_bytes(hashlib.blake2b(given.encode(errors="replace"), digest_size=8).digest())
    letters = ""
    for _ in range(_ID_LENGTH):
        rest, letter = divmod(rest, len(_ALPHABET))
        letters += _ALPHABET[letter]
    return letters
