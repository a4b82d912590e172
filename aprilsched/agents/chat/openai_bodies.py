"""Chat messages: a request's in the form that templates take, and the message of the answer.

transformers parses the answer by the model's response template, which names the regions of a
response: text, reasoning, tool calls. A region that cannot be parsed becomes plain text, so no
sampled text is lost.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from aprilsched.errors import ConfigError

log = logging.getLogger("aprilsched")

_CONTENT, _REASONING = "content", "reasoning_content"
_REASONING_REGIONS = ("reasoning_content", "reasoning", "thinking")
"""Names of the region with reasoning in response templates."""
_MAX_LEVELS = 50
"""Nesting depth of objects and lists in the arguments of a sampled call. Parsers in .NET accept 64
levels in an answer, and in Rust 128."""
_MAX_ID = 128
"""Characters of a sampled call id that a client receives; longer ids are replaced."""


def for_template(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return `messages` in the form of transformers' templates, and the URLs of their images.

    Content is text, or parts if there are images; the arguments of tool calls are objects.

    Raises:
        ConfigError: if a message has a part that is neither text nor an image, or is not in
            OpenAI's form.
    """
    images: list[str] = []
    rendered = [one_for_template(each, f"messages[{i}]", images) for i, each in enumerate(messages)]
    return rendered, images


def one_for_template(message: Mapping[str, Any], where: str, images: list[str]) -> dict[str, Any]:
    """Convert one message, which errors call `where`; append its image URLs to `images`."""
    if not isinstance(message.get("role"), str):
        raise ConfigError(f"{where} has no role; give system, user, assistant or tool.")
    for name in ("function_call", "refusal", "audio"):
        if message.get(name):
            raise ConfigError(
                f"{where}.{name} must be empty, because no chat template writes it; use content or "
                "tool_calls."
            )
    rendered = {name: value for name, value in message.items() if value is not None}
    rendered["content"] = _content(message.get("content"), where, images)
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise ConfigError(f"{where} has tool_calls that are no list; give a list.")
        rendered["tool_calls"] = [_call(each, where) for each in cast("list[Any]", calls)]
    return rendered


def _content(content: object, where: str, images: list[str]) -> str | list[dict[str, str]]:
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            before = len(images)
            parts = [_part(part, where, images) for part in cast("list[Any]", content)]
            # Templates of models without image input accept only a plain string.
            seen = len(images) > before
            return parts if seen else " ".join(part["text"] for part in parts)
        case _:
            raise ConfigError(f"{where} has content that is neither text nor a list of parts.")


def _part(part: Any, where: str, images: list[str]) -> dict[str, str]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            images.append(url)
            return {"type": "image"}
        case _:
            raise ConfigError(
                f"{where} has a part that is neither text nor an image_url; the gateway takes no "
                "other."
            )


def _call(call: Any, where: str) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name), "arguments": arguments, **more}}:
            pass
        case _:
            raise ConfigError(f"{where} has a tool call without function.name and arguments.")
    try:
        if isinstance(arguments, str):
            arguments = msgspec.json.decode(arguments.strip() or "{}")
        else:
            # The caller may change its own copy, and later messages are compared with this one.
            arguments = copy.deepcopy(arguments)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} has a tool call whose arguments are no JSON.") from error
    return {**call, "function": {**more, "name": name, "arguments": arguments}}


def _sampled_function(function: Mapping[str, Any]) -> dict[str, str]:
    """Return the name and the JSON arguments of a sampled call.

    Raises:
        Exception: if a client's strict parser would reject them, or a template cannot write them.
    """
    name: Any = function["name"]
    arguments: Any = function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments.strip() or "{}")
    arguments = {} if arguments is None else arguments
    if not (name and isinstance(name, str) and type(arguments) is dict):
        raise ValueError("a call needs a name, and an object as its arguments")
    name.encode()
    _check_plain(arguments, _MAX_LEVELS)
    return {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}


def _check_plain(value: Any, levels: int) -> None:
    """Raise ValueError if a strict JSON parser would reject `value`, or if it nests too deep.

    Strict parsers reject NaN and a lone surrogate; `value` may have at most `levels` levels.
    """
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, int | float):
        if not abs(value) <= sys.float_info.max:
            raise ValueError("a number is not finite")
    elif value is not None:
        if not levels:
            raise ValueError(f"there are more than {_MAX_LEVELS} levels")
        parts: Any = [*value, *value.values()] if type(value) is dict else value
        for part in parts:
            _check_plain(part, levels - 1)


class ForcedCalls:
    """Parses a response that a schema constrains to a list of calls (``tool_choice``).

    It has the interface of transformers' parsers.
    """

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Buffer text; returns no events until :meth:`finalize`."""
        self._text += text
        return []

    def finalize(self) -> tuple[None, list[dict[str, Any]]]:
        """Return the calls.

        Raises:
            DecodeError, TypeError: if the text is not a list, as in a truncated response.
        """
        region = {"field": "tool_calls", "text": self._text}
        calls = [{"function": each} for each in msgspec.json.decode(self._text)]
        close = {"type": "region_close", "field": "tool_calls", "value": calls}
        return None, [{"type": "region_chunk", **region}, close]


class Message:
    """The message of one response, which grows with its text.

    Args:
        parser: transformers' parser of the response; None takes all of it as content.
    """

    def __init__(self, parser: Any) -> None:
        self.calls: list[dict[str, Any]] = []
        """The tool calls so far, in the form of ``delta``."""
        self._parser = parser
        self._texts = {_CONTENT: "", _REASONING: ""}
        self._blank = {_CONTENT: "", _REASONING: ""}
        """White space that is emitted only if more text of its field follows."""
        self._raw = ""
        self._given = 0
        """Offset of the first character of the raw text that the message does not contain yet."""
        self._body = ""
        """The text of the tool calls that are open."""

    def push(self, text: str) -> list[dict[str, Any]]:
        """Return the changes of the message by `text`, in the form of ``delta``."""
        self._raw += text
        if self._parser is None:
            return self._add(_CONTENT, text)
        try:
            return self._take(self._parser.feed(text))
        except Exception:  # The parsers of regions may raise anything.
            return self._as_it_is()

    def finish(self, end: str = "") -> list[dict[str, Any]]:
        """Return the remaining changes at the end of the response.

        `end` is the text of the token that ended it: in some templates it closes a call.
        """
        for last in dict.fromkeys((end, "")):
            parser = copy.copy(self._parser)
            try:
                events = [*parser.feed(last), *parser.finalize()[1]] if parser else []
            except Exception as error:
                log.debug("the end of a response cannot be parsed: %r", error)
                continue
            if not last or not any(last in event.get("text", "") for event in events):
                return self._take(events)
        return self._as_it_is()

    def as_message(self) -> dict[str, Any]:
        """Return the field ``message`` of a whole answer."""
        content, reasoning = self._texts[_CONTENT], self._texts[_REASONING]
        calls = [{k: v for k, v in call.items() if k != "index"} for call in self.calls]
        return {
            "role": "assistant",
            "content": content or (None if calls or reasoning else ""),
            "reasoning_content": reasoning or None,
            "tool_calls": calls or None,
        }

    def _take(self, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        changes: list[dict[str, Any]] = []
        for event in events:
            match event:
                case {"type": "region_chunk", "field": "tool_calls", "text": str(text)}:
                    self._body += text
                case {"type": "region_chunk", "field": name, "text": str(text)}:
                    self._pass(text)
                    target = _REASONING if name in _REASONING_REGIONS else _CONTENT
                    changes += self._add(target, text)
                case {"type": "region_close", "field": "tool_calls", "value": value}:
                    body, self._body = self._body, ""
                    self._pass(body)
                    changes += self._take_calls(value, event.get("raw", body))
                case _:
                    pass
        return changes

    def _take_calls(self, value: Any, region: str) -> list[dict[str, Any]]:
        """Return the calls in the parsed `value` of a `region`, or content if one is invalid."""
        several: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
        try:
            functions = [_sampled_function(each["function"]) for each in several]
        except Exception as error:  # The policy writes calls of any form.
            log.debug("a sampled call cannot be used and stays text: %r", error)
            functions = []
        if not functions:
            return self._add(_CONTENT, region)
        changes: list[dict[str, Any]] = []
        for each, function in zip(several, functions, strict=True):
            call = {
                "index": len(self.calls),
                "id": self._id(each),
                "type": "function",
                "function": function,
            }
            self.calls.append(call)
            changes.append({"tool_calls": [call]})
        return changes

    def _id(self, call: Mapping[str, Any]) -> str:
        """Return the id that was sampled, which templates may write again, or a new one."""
        known = [each["id"] for each in self.calls]
        for given in (call.get("id"), call["function"].get("id")):
            if not isinstance(given, str) or given in known:
                continue
            if 0 < len(given) <= _MAX_ID and given.isascii() and given.isprintable():
                return given
        # Templates of Mistral take ids of nine letters and digits.
        return uuid.uuid4().hex[:9]

    def _pass(self, text: str) -> None:
        at = self._raw.find(text, self._given)
        # A region that the prompt has opened: its opening text is not in the response.
        if at >= 0:
            self._given = at + len(text)

    def _add(self, target: str, text: str) -> list[dict[str, Any]]:
        text = self._blank[target] + text
        if self._parser is not None:
            # White space around a region separates it from its delimiters.
            text = text if self._texts[target] else text.lstrip()
            whole, text = text, text.rstrip()
            self._blank[target] = whole[len(text) :]
        else:
            self._blank[target] = ""
        self._texts[target] += text
        return [{target: text}] if text else []

    def _as_it_is(self) -> list[dict[str, Any]]:
        """Emit the rest of the text as content, and treat all further text as content."""
        self._parser = None
        return self._add(_CONTENT, self._raw[self._given :])
