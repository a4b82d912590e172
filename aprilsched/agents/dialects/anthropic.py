"""Anthropic's messages. Fields for sampling, caching and billing are ignored."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import msgspec

from aprilsched.agents.dialects.values import (
    Asked,
    Chat,
    Dialect,
    End,
    Part,
    Question,
    TextOptions,
)
from aprilsched.agents.serving.streams import Event, frame_item
from aprilsched.errors import ConfigError

_NO_THREAD = "thread is set, and only messages that are sent are answered; send all of them."
_DETAILS: dict[str, Event] = {
    # Without this error, Anthropic's tool runner sends only the new messages.
    _NO_THREAD: {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Text(msgspec.Struct, frozen=True, tag="text"):
    text: str

    def in_openai_form(self) -> Event:
        return {"type": "text", "text": self.text}


class _Url(msgspec.Struct, frozen=True, tag="url"):
    url: str


class _Base64(msgspec.Struct, frozen=True, tag="base64"):
    media_type: str
    data: str

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class _Image(msgspec.Struct, frozen=True, tag="image"):
    source: _Url | _Base64

    def in_openai_form(self) -> Event:
        return {"type": "image_url", "image_url": {"url": self.source.url}}


_Parts = str | list[_Text | _Image] | None


class _ToolUse(msgspec.Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: Any


class _ToolResult(msgspec.Struct, frozen=True, tag="tool_result"):
    tool_use_id: str
    content: _Parts = None


class _Thinking(msgspec.Struct, frozen=True, tag="thinking"):
    """Reasoning; the session already has the sampled original."""


class _HiddenThinking(msgspec.Struct, frozen=True, tag="redacted_thinking"):
    pass


class _Message(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Text | _Image | _ToolUse | _ToolResult | _Thinking | _HiddenThinking]


class _Tool(msgspec.Struct, frozen=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    type: str = "auto"


class MessagesBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/messages."""

    messages: list[_Message]
    max_tokens: int
    model: str = ""
    system: _Parts = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    thread: Any = None


def _ask(body: MessagesBody) -> Asked:
    if not body.messages or body.messages[-1].role == "assistant":
        raise ConfigError("`messages` must end with a message of the user, which is answered.")
    if body.thread:
        raise ConfigError(_NO_THREAD)
    choice = "auto" if body.tool_choice is None else body.tool_choice.type
    if choice not in ("auto", "none"):
        raise ConfigError(
            "tool_choice must be auto or none, because nothing makes the policy call."
        )
    messages: list[Event] = []
    if body.system:
        messages.append({"role": "system", "content": _joined(body.system)})
    for message in body.messages:
        messages += _in_openai_form(message)
    tools = [_tool(each) for each in body.tools or ()] if choice == "auto" else []
    question = Question(
        prompt=Chat(messages=messages, tools=tools or None),
        params={},
        text=TextOptions(stop=body.stop_sequences),
        max_tokens=body.max_tokens,
    )
    return Asked(questions=[question], model=body.model, stream=body.stream)


def _tool(tool: _Tool) -> Event:
    function: Event = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _in_openai_form(message: _Message) -> list[Event]:
    """Return a message in OpenAI's form, in which each tool result is a separate message."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[Event] = []
    parts: list[_Text | _Image] = []
    calls: list[Event] = []
    for block in message.content:
        match block:
            case _Text() | _Image():
                parts.append(block)
            case _ToolUse():
                arguments = json.dumps(block.input, ensure_ascii=False)
                function = {"name": block.name, "arguments": arguments}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _ToolResult():
                content = _joined(block.content)
                name = block.tool_use_id
                results.append({"role": "tool", "tool_call_id": name, "content": content})
            case _:
                pass
    if results and not parts and not calls:
        return results
    # An answer without text has no blocks, or only reasoning blocks.
    whole: Event = {"role": message.role, "content": _joined(parts)}
    return [*results, whole | ({"tool_calls": calls} if calls else {})]


def _joined(content: str | Sequence[_Text | _Image] | None) -> str | list[Event]:
    """Join content: a string stays, text parts become one string, other parts stay parts."""
    if isinstance(content, str):
        return content
    parts = content or ()
    texts = [part.text for part in parts if isinstance(part, _Text)]
    return [p.in_openai_form() for p in parts] if len(texts) < len(parts) else "\n".join(texts)


def _frame(event: Event) -> bytes:
    """Return a frame with the name of its event."""
    return f"event: {event['type']}\n".encode() + frame_item(event)


def _error(message: str, status: int) -> Event:
    kind = _TYPES.get(status, "api_error")
    details = {"details": _DETAILS[message]} if message in _DETAILS else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


class Messages(Dialect):
    """POST /v1/messages."""

    body = MessagesBody
    parse = staticmethod(_ask)
    done = b""
    ping = _frame({"type": "ping"})
    frame = staticmethod(_frame)
    error = staticmethod(_error)
    stream_error = staticmethod(_error)

    def whole(self, wholes: Sequence[Part]) -> Event:
        (part,) = wholes
        end = cast("End", part.end)
        return {
            "id": self._names.answer,
            "type": "message",
            "role": "assistant",
            "model": self._names.model,
            "content": _blocks(end.message),
            "stop_reason": _STOPS[end.reason_of_message],
            "stop_sequence": None,
            "usage": {
                "input_tokens": len(part.prompt_ids),
                "output_tokens": len(part.token_ids),
            },
        }

    def events(self, part: Part) -> Iterable[Event]:
        """Return the events of a message, which has a single part."""
        whole = self.whole([part])
        start: Event = whole | {"content": [], "stop_reason": None}
        start["usage"] = {**whole["usage"], "output_tokens": 0}
        yield {"type": "message_start", "message": start}
        for place, block in enumerate(whole["content"]):
            match block["type"]:
                case "text":
                    empty: Event = {"type": "text", "text": ""}
                    delta: Event = {"type": "text_delta", "text": block["text"]}
                case "thinking":
                    empty = {"type": "thinking", "thinking": "", "signature": ""}
                    delta = {"type": "thinking_delta", "thinking": block["thinking"]}
                case _:
                    empty = block | {"input": {}}
                    arguments = bytes(block["input"]).decode()
                    delta = {"type": "input_json_delta", "partial_json": arguments}
            yield {"type": "content_block_start", "index": place, "content_block": empty}
            yield {"type": "content_block_delta", "index": place, "delta": delta}
            yield {"type": "content_block_stop", "index": place}
        ends = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        yield {"type": "message_delta", "delta": ends, "usage": whole["usage"]}
        yield {"type": "message_stop"}


def _blocks(message: Event) -> list[Event]:
    blocks: list[Event] = []
    if thought := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if text := message.get("content"):
        blocks.append({"type": "text", "text": text})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = msgspec.Raw(function["arguments"].encode())
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}
        )
    return blocks
