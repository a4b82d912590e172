"""The dialects that harnesses speak: OpenAI's chats and completions, Anthropic's messages, and
SGLang's ``/generate``.

A dialect turns a body into a request of a session, and its reply into an answer, whole or as the
events of a stream. How a session samples is said by the trainer: of a body only the length of the
answer and what ends it are used.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

from aprilsched.chat.openai_bodies import ChatBody, CompletionBody, TextOptions
from aprilsched.dialects.sglang import GenerateBody, finish_reason, token_logprobs
from aprilsched.errors import ConfigError
from aprilsched.serving.refusals import error_content
from aprilsched.serving.streams import DONE, Event, frame_item

if TYPE_CHECKING:
    from aprilsched.sessions.harness import Reply, Session

B = TypeVar("B")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a body asks for: `ask` gives it to a session, and the answer is perhaps a `stream`."""

    ask: Callable[[Session], Awaitable[Reply]]
    stream: bool


@dataclass(frozen=True, kw_only=True)
class Dialect(Generic[B]):
    """One way of asking and answering.

    Attributes:
        body: the form of a body.
        asked: what a body asks for; ConfigError if it asks for what a session does not give.
        whole: the answer as a whole.
        events: the answer as the frames of a stream.
        error: the content of an error with its status.
        failure: the frame of an error in a stream that has begun.
        ping: the frame that keeps a stream open.
    """

    body: type[B]
    asked: Callable[[B], Asked]
    whole: Callable[[B, Reply], Event]
    events: Callable[[B, Reply], Sequence[bytes]]
    error: Callable[[str, int], Event]
    failure: Callable[[str, int], bytes]
    ping: bytes


# --- OpenAI --------------------------------------------------------------------------------------


def _check(body: ChatBody | CompletionBody) -> None:
    body.check()
    if body.choices != 1:
        raise ConfigError(f"n is {body.n}, and a session gives one answer at a time; leave it out.")
    if body.wants_logprobs:
        raise ConfigError("logprobs are for the trainer, which has them; leave logprobs out.")
    if (body.response_format or {}).get("type", "text") != "text":
        raise ConfigError("response_format must be text, because nothing constrains the policy.")


def _ask_chat(body: ChatBody) -> Asked:
    _check(body)
    if body.continue_final_message:
        raise ConfigError("continue_final_message has no place in a session; leave it out.")
    if body.forced is not None:
        raise ConfigError(
            "tool_choice must be auto or none, because nothing makes the policy call."
        )
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    tools = body.used_tools
    return Asked(
        ask=lambda session: session.chat(
            body.messages, tools=tools, max_tokens=most, stop=body.stops, options=options
        ),
        stream=bool(body.stream),
    )


def _ask_completion(body: CompletionBody) -> Asked:
    _check(body)
    prompt: str | list[Any] = body.prompt
    if len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt):
        raise ConfigError("prompt has several texts, and a session answers one; send one.")
    return Asked(
        ask=lambda session: session.complete(prompt, max_tokens=body.max_tokens, stop=body.stops),
        stream=bool(body.stream),
    )


def _usage(reply: Reply) -> Event:
    asked, given = len(reply.question.ids), len(reply.output.token_ids)
    return {"prompt_tokens": asked, "completion_tokens": given, "total_tokens": asked + given}


def _frame(name: str, kind: str, body: ChatBody | CompletionBody, choices: list[Event]) -> Event:
    return {
        "id": name,
        "object": kind,
        "created": int(time.time()),
        "model": body.model,
        "choices": choices,
    }


def _choice(body: ChatBody | CompletionBody, reply: Reply, **said: Any) -> Event:
    told = {"index": 0, "logprobs": None, "finish_reason": reply.finish_reason, **said}
    if body.return_token_ids:
        told["token_ids"] = reply.output.token_ids.tolist()
        told["prompt_token_ids"] = reply.question.ids.tolist()
        told["versions"] = reply.output.versions.tolist()
    return told


def _whole_chat(body: ChatBody, reply: Reply) -> Event:
    choice = _choice(body, reply, message=reply.message)
    name = f"chatcmpl-{uuid.uuid4().hex}"
    return _frame(name, "chat.completion", body, [choice]) | {"usage": _usage(reply)}


def _whole_completion(body: CompletionBody, reply: Reply) -> Event:
    choice = _choice(body, reply, text=reply.message["content"])
    name = f"cmpl-{uuid.uuid4().hex}"
    return _frame(name, "text_completion", body, [choice]) | {"usage": _usage(reply)}


def _openai_events(
    body: ChatBody | CompletionBody, reply: Reply, kind: str, parts: Sequence[Event]
) -> list[bytes]:
    """The frames of a stream with these parts of a choice, of which the last has its end."""
    name = f"{kind[:4]}-{uuid.uuid4().hex}"
    *before, last = parts
    choices = [{"index": 0, "logprobs": None, "finish_reason": None, **each} for each in before]
    choices.append(_choice(body, reply, **last))
    events = [_frame(name, kind, body, [choice]) for choice in choices]
    if body.usage:
        events.append(_frame(name, kind, body, []) | {"usage": _usage(reply)})
    return [*map(frame_item, events), DONE]


def _chat_events(body: ChatBody, reply: Reply) -> list[bytes]:
    said = reply.message
    deltas: list[Event] = [{"role": "assistant", "content": ""}]
    deltas += [{name: said[name]} for name in ("reasoning_content", "content") if said.get(name)]
    for place, call in enumerate(said.get("tool_calls") or ()):
        deltas.append({"tool_calls": [{"index": place, **call}]})
    parts = [{"delta": delta} for delta in (*deltas, {})]
    return _openai_events(body, reply, "chat.completion.chunk", parts)


def _completion_events(body: CompletionBody, reply: Reply) -> list[bytes]:
    return _openai_events(body, reply, "text_completion", [{"text": reply.message["content"]}])


def _openai_failure(message: str, status: int) -> bytes:
    return frame_item(error_content(message, status)) + DONE


CHAT: Dialect[ChatBody] = Dialect(
    body=ChatBody,
    asked=_ask_chat,
    whole=_whole_chat,
    events=_chat_events,
    error=error_content,
    failure=_openai_failure,
    ping=b": the policy is at work\n\n",
)
COMPLETIONS: Dialect[CompletionBody] = Dialect(
    body=CompletionBody,
    asked=_ask_completion,
    whole=_whole_completion,
    events=_completion_events,
    error=error_content,
    failure=_openai_failure,
    ping=CHAT.ping,
)


# --- Anthropic -----------------------------------------------------------------------------------


class MessagesBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/messages. Fields that say how to sample, cache or bill are not used."""

    messages: list[dict[str, Any]]
    max_tokens: int
    model: str = ""
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    thread: Any = None


_NO_THREAD = "thread is set, and only messages that are sent are answered; send all of them."
_DETAILS: dict[str, Event] = {
    # Anthropic's tool runner sends the new messages alone unless it is told this.
    _NO_THREAD: {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _ask_messages(body: MessagesBody) -> Asked:
    if not body.messages:
        raise ConfigError("messages is empty; give at least one message.")
    if body.messages[-1].get("role") == "assistant":
        raise ConfigError(
            "messages ends with one of the assistant, whose text a session does not continue; end "
            "with one of the user."
        )
    if body.thread:
        raise ConfigError(_NO_THREAD)
    choice = (body.tool_choice or {}).get("type", "auto")
    if choice not in ("auto", "none"):
        raise ConfigError(
            "tool_choice must be auto or none, because nothing makes the policy call."
        )
    messages: list[Event] = []
    if body.system:
        messages.append({"role": "system", "content": _shown(body.system, "system")})
    for place, message in enumerate(body.messages):
        messages += _in_openai_form(message, f"messages[{place}]")
    tools = None if choice == "none" else [_tool(each) for each in body.tools or ()] or None
    return Asked(
        ask=lambda session: session.chat(
            messages, tools=tools, max_tokens=body.max_tokens, stop=body.stop_sequences or ()
        ),
        stream=body.stream,
    )


def _tool(tool: Mapping[str, Any]) -> Event:
    match tool:
        case {"name": str(name), "input_schema": {}}:
            function: Event = {"name": name, "parameters": tool["input_schema"]}
        case _:
            raise ConfigError("a tool has no name or no input_schema; tools of the server are not.")
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _in_openai_form(message: Mapping[str, Any], where: str) -> list[Event]:
    """A message as OpenAI has it: each result of a tool is a message of its own there."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ConfigError(f"{where} has the role {role!r}; give user or assistant.")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise ConfigError(f"{where} has content that is neither text nor a list of blocks.")
    results: list[Event] = []
    parts: list[Event] = []
    calls: list[Event] = []
    for block in cast("list[Any]", content):
        if (part := _part(block)) is not None:
            parts.append(part)
            continue
        match block:
            case {"type": "tool_use", "id": str(name), "name": str(tool), "input": given}:
                function = {"name": tool, "arguments": json.dumps(given, ensure_ascii=False)}
                calls.append({"id": name, "type": "function", "function": function})
            case {"type": "tool_result", "tool_use_id": str(name)}:
                said = _shown(block.get("content") or "", where)
                results.append({"role": "tool", "tool_call_id": name, "content": said})
            case {"type": "thinking" | "redacted_thinking"}:
                pass  # It is known as it was sampled.
            case _:
                raise ConfigError(
                    f"{where} has a block of an unknown kind; give text, an image, "
                    "a tool_use or a tool_result."
                )
    if results and not parts and not calls:
        return results
    # An answer without text has no blocks, or those of its reasoning alone.
    told: Event = {"role": role, "content": _joined(parts)}
    return [*results, told | ({"tool_calls": calls} if calls else {})]


def _part(block: Any) -> Event | None:
    """A text or an image as OpenAI has it; None for a block of another kind."""
    match block:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            pass
        case {"type": "image", "source": {"media_type": str(kind), "data": str(data)}}:
            url = f"data:{kind};base64,{data}"
        case _:
            return None
    return {"type": "image_url", "image_url": {"url": url}}


def _joined(parts: Sequence[Event]) -> str | list[Event]:
    """Texts alone are the same as one string."""
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return list(parts) if len(texts) < len(parts) else "\n".join(texts)


def _shown(content: Any, where: str) -> str | list[Event]:
    """The text of a string, or what is in blocks of text and images."""
    if isinstance(content, str):
        return content
    blocks = cast("list[Any]", content if isinstance(content, list) else [content])
    parts = [part for part in map(_part, blocks) if part is not None]
    if len(parts) < len(blocks):
        raise ConfigError(f"{where} has a block that is neither text nor an image; give those.")
    return _joined(parts)


def _blocks(reply: Reply) -> list[Event]:
    said = reply.message
    blocks: list[Event] = []
    if said.get("reasoning_content"):
        thought = said["reasoning_content"]
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if said.get("content"):
        blocks.append({"type": "text", "text": said["content"]})
    for call in said.get("tool_calls") or ():
        function = call["function"]
        given = msgspec.Raw(function["arguments"].encode())
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}
        )
    return blocks


def _message(body: MessagesBody, reply: Reply, content: list[Event]) -> Event:
    return {
        "id": f"msg_{uuid.uuid4().hex[:24]}",
        "type": "message",
        "role": "assistant",
        "model": body.model,
        "content": content,
        "stop_reason": _STOPS[reply.finish_reason],
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(reply.question.ids),
            "output_tokens": len(reply.output.token_ids),
        },
    }


def _message_events(body: MessagesBody, reply: Reply) -> list[bytes]:
    whole = _message(body, reply, [])
    start = whole | {"stop_reason": None, "usage": {**whole["usage"], "output_tokens": 0}}
    events: list[Event] = [{"type": "message_start", "message": start}]
    for place, block in enumerate(_blocks(reply)):
        match block["type"]:
            case "text":
                empty: Event = {"type": "text", "text": ""}
                deltas: list[Event] = [{"type": "text_delta", "text": block["text"]}]
            case "thinking":
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
            case _:
                empty = block | {"input": {}}
                given = bytes(block["input"]).decode()
                deltas = [{"type": "input_json_delta", "partial_json": given}]
        events.append({"type": "content_block_start", "index": place, "content_block": empty})
        events += [{"type": "content_block_delta", "index": place, "delta": d} for d in deltas]
        events.append({"type": "content_block_stop", "index": place})
    ends = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    events.append({"type": "message_delta", "delta": ends, "usage": whole["usage"]})
    events.append({"type": "message_stop"})
    return [_named(event) for event in events]


def _named(event: Event) -> bytes:
    """A frame with the name of its event, as Anthropic has it."""
    return f"event: {event['type']}\n".encode() + frame_item(event)


def _anthropic_error(message: str, status: int) -> Event:
    kind = _TYPES.get(status, "api_error")
    details = {"details": _DETAILS[message]} if message in _DETAILS else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


ANTHROPIC: Dialect[MessagesBody] = Dialect(
    body=MessagesBody,
    asked=_ask_messages,
    whole=lambda body, reply: _message(body, reply, _blocks(reply)),
    events=_message_events,
    error=_anthropic_error,
    failure=lambda message, status: _named(_anthropic_error(message, status)),
    ping=_named({"type": "ping"}),
)


# --- SGLang --------------------------------------------------------------------------------------


class _Length(TextOptions, frozen=True, kw_only=True):
    """The sampling parameters of ``/generate`` that a session uses."""

    n: int | None = None
    max_new_tokens: int | None = None


def _ask_generate(body: GenerateBody) -> Asked:
    if (body.input_ids is None) == (body.text is None):
        raise ConfigError("a request has either text or input_ids; send one of them.")
    if body.media:
        raise ConfigError("a prompt of a session's /generate has no images; leave them out.")
    try:
        sampling = msgspec.convert(body.sampling_params or {}, _Length)
    except msgspec.ValidationError as error:
        raise ConfigError(f"sampling_params cannot be used: {error}") from error
    if sampling.n not in (None, 1):
        raise ConfigError("n is not 1, and a session gives one answer at a time; leave it out.")
    # SGLang leaves special tokens out, and what ended the response, unless it is told.
    raw = sampling.no_stop_trim and not sampling.skip_special_tokens
    prompt = body.text if body.text is not None else body.input_ids or []
    return Asked(
        ask=lambda session: session.complete(
            prompt, max_tokens=sampling.max_new_tokens, stop=sampling.stops, raw=raw
        ),
        stream=body.stream,
    )


def _generated(body: GenerateBody, reply: Reply) -> Event:
    output = reply.output
    ids: list[int] = output.token_ids.tolist()
    meta: Event = {
        "id": body.rid or uuid.uuid4().hex,
        "finish_reason": finish_reason(output.finish_reason, tokens=len(ids), last=ids[-1]),
        "prompt_tokens": len(reply.question.ids),
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "weight_version": str(output.versions[-1]),
    }
    if body.return_logprob:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = token_logprobs(ids, output.logprobs.tolist())
    return {"text": reply.message["content"], "output_ids": ids, "meta_info": meta}


GENERATE: Dialect[GenerateBody] = Dialect(
    body=GenerateBody,
    asked=_ask_generate,
    whole=_generated,
    events=lambda body, reply: [frame_item(_generated(body, reply)), DONE],
    error=error_content,
    failure=_openai_failure,
    ping=CHAT.ping,
)
