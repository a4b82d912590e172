"""Messages of a chat: those of a request in the form that templates take, and that of the answer.

transformers parses the answer by the model's response template, which names the regions of a
response: text, reasoning, tool calls. A region that cannot be parsed is given as the text that it
is, so nothing that was sampled is lost.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from aprilsched.errors import ConfigError

__all__ = ["Message", "for_template"]

_CONTENT, _REASONING = "content", "reasoning_content"
_REASONING_REGIONS = ("reasoning_content", "reasoning", "thinking")
"""Names of the region with reasoning in response templates."""


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` as templates of transformers take them: content is text, and the arguments of tool
    calls are objects.

    Raises:
        ConfigError: if a message has a part that is no text, or has not OpenAI's form.
    """
    return [_for_template(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _for_template(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise ConfigError(f"{where} has no role; give system, user, assistant or tool.")
    told = {name: value for name, value in message.items() if value is not None}
    told["content"] = _text(message.get("content"), where)
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise ConfigError(f"{where} has tool_calls that are no list; give a list.")
        told["tool_calls"] = [_call(each, where) for each in cast("list[Any]", calls)]
    return told


def _text(content: object, where: str) -> str:
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return " ".join(_part(part, where) for part in cast("list[Any]", content))
        case _:
            raise ConfigError(f"{where} has content that is neither text nor a list of parts.")


def _part(part: Any, where: str) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case _:
            raise ConfigError(f"{where} has a part that is no text; the gateway takes text alone.")


def _call(call: Any, where: str) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name), "arguments": arguments, **more}}:
            pass
        case _:
            raise ConfigError(f"{where} has a tool call without function.name and arguments.")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments.strip() or "{}")
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"{where} has a tool call whose arguments are no JSON.") from error
    return {**call, "function": {**more, "name": name, "arguments": arguments}}


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
        """White space that is given only if more text of its field follows."""
        self._raw = ""
        self._given = 0
        """Where in the raw text that begins which is not in the message yet."""
        self._body = ""
        """The text of the tool calls that are open."""

    def push(self, text: str) -> list[dict[str, Any]]:
        """The changes of the message by `text`, in the form of ``delta``."""
        self._raw += text
        if self._parser is None:
            return self._added(_CONTENT, text)
        try:
            return self._taken(self._parser.feed(text))
        except Exception:  # The parsers of regions raise what their input leads them to.
            return self._as_it_is()

    def finish(self) -> list[dict[str, Any]]:
        """The changes that are left when no more text comes."""
        if self._parser is None:
            return []
        try:
            _, events = self._parser.finalize()
            return self._taken(events)
        except Exception:
            return self._as_it_is()

    def told(self) -> dict[str, Any]:
        """The field ``message`` of a whole answer."""
        content, reasoning = self._texts[_CONTENT], self._texts[_REASONING]
        calls = [{k: v for k, v in call.items() if k != "index"} for call in self.calls]
        return {
            "role": "assistant",
            "content": content or (None if calls or reasoning else ""),
            "reasoning_content": reasoning or None,
            "tool_calls": calls or None,
        }

    def _taken(self, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        changes: list[dict[str, Any]] = []
        for event in events:
            match event:
                case {"type": "region_chunk", "field": "tool_calls", "text": str(text)}:
                    self._body += text
                case {"type": "region_chunk", "field": name, "text": str(text)}:
                    self._pass(text)
                    target = _REASONING if name in _REASONING_REGIONS else _CONTENT
                    changes += self._added(target, text)
                case {"type": "region_close", "field": "tool_calls", "value": value}:
                    body, self._body = self._body, ""
                    self._pass(body)
                    changes += self._called(value, body)
                case _:
                    pass
        return changes

    def _called(self, value: Any, body: str) -> list[dict[str, Any]]:
        several: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
        changes: list[dict[str, Any]] = []
        for each in several:
            match each:
                case {"function": {"name": str(name), **more}}:
                    arguments = more.get("arguments", {})
                case _:
                    return [*changes, *self._added(_CONTENT, body)]
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            call = {
                "index": len(self.calls),
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            self.calls.append(call)
            changes.append({"tool_calls": [call]})
        return changes

    def _pass(self, text: str) -> None:
        at = self._raw.find(text, self._given)
        # The text of a region that the prompt has opened is not in the response.
        if at >= 0:
            self._given = at + len(text)

    def _added(self, target: str, text: str) -> list[dict[str, Any]]:
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
        """Give what has not been given as content, and take what follows so, too."""
        self._parser = None
        return self._added(_CONTENT, self._raw[self._given :])
