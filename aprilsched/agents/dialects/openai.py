"""OpenAI's chats and completions.

Unknown fields are refused: an ignored one would show only in the model's answers. Fields that name
the user, or that do not affect the answer, are accepted and ignored.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from aprilsched.agents.dialects.values import (
    Asked,
    Chat,
    Dialect,
    End,
    Likely,
    Names,
    Part,
    Question,
    TextOptions,
    prompts_of,
)
from aprilsched.agents.serving.streams import Event
from aprilsched.errors import ConfigError

_Count = Annotated[int, Meta(ge=1)]
_MOST_CHOICES = 128
_LEAST_LOGPROB = -9999.0
"""OpenAI's logprob of a token with probability 0."""


class _StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _PlainText(msgspec.Struct, frozen=True, tag="text"):
    pass


class _JsonObject(msgspec.Struct, frozen=True, tag="json_object"):
    pass


class _Schema(msgspec.Struct, frozen=True):
    schema: Any


class _JsonSchema(msgspec.Struct, frozen=True, tag="json_schema"):
    json_schema: _Schema


class _Function(msgspec.Struct, frozen=True):
    name: str


class _ToolChoice(msgspec.Struct, frozen=True):
    function: _Function
    type: Literal["function"]


class _Sampling(TextOptions, frozen=True, kw_only=True):
    """The fields that map to sampling parameters, under the same name or another known one."""

    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    # SGLang's and vLLM's.
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_regex: str | list[str] | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | None = None
    custom_params: dict[str, Any] | None = None


class _Body(_Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of both kinds of requests."""

    model: str = ""
    n: Annotated[int, Meta(ge=1, le=_MOST_CHOICES)] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: _Count | None = None
    response_format: _PlainText | _JsonObject | _JsonSchema | None = None
    rid: str | None = None
    return_token_ids: bool = False

    # Accepted and ignored.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    extra_key: Any = None
    cache_salt: Any = None


class CompletionBody(_Body, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.echo:
            raise ConfigError("echo repeats the prompt; leave it out and put the prompt in front.")
        if self.suffix:
            raise ConfigError("suffix is for models that fill in the middle; leave it out.")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ConfigError("best_of is not n; leave it out and choose among n responses.")


class ChatBody(_Body, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[Literal["text"]] | None = None

    # SGLang's and vLLM's.
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        # Not a constraint of the field, which would also refuse an earlier value of a repeated one.
        if not self.messages:
            raise ConfigError("`messages` must have at least one message, got none.")
        if self.top_logprobs and not self.logprobs:
            raise ConfigError("top_logprobs needs logprobs; set it to true.")

    @property
    def forced(self) -> str | None:
        """Return the JSON schema of a list of calls if a tool call is required, else None.

        Raises:
            ConfigError: if the tool is unknown, or if another response format is requested as well.
        """
        if self.tool_choice in (None, "auto", "none"):
            return None
        choice = self.tool_choice
        wanted = choice.function.name if isinstance(choice, _ToolChoice) else None
        calls: list[Event] = []
        for tool in self.tools or ():
            match tool:
                case {"function": {"name": str(name), **more}} if wanted in (None, name):
                    own = {"name": {"const": name}, "arguments": more.get("parameters", {})}
                    calls.append(
                        {"type": "object", "properties": own, "required": ["name", "arguments"]}
                    )
                case _:
                    pass
        if not calls:
            raise ConfigError("tool_choice asks for a tool that is not among tools; give it there.")
        if self.response_format or self.json_schema or self.regex or self.ebnf:
            raise ConfigError("tool_choice asks for a call and another field for text; give one.")
        one = wanted is not None or self.parallel_tool_calls is False
        schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
        return msgspec.json.encode({**schema, "maxItems": 1} if one else schema).decode()


def _ask_chat(body: ChatBody) -> Asked:
    forced = body.forced
    if body.parallel_tool_calls is False and forced is None:
        raise ConfigError(
            "parallel_tool_calls is false, and nothing keeps the model from several calls; leave "
            "it out."
        )
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    chat = Chat(
        messages=body.messages,
        tools=None if body.tool_choice == "none" else body.tools or None,
        options=options,
        goes_on=body.continue_final_message,
        forced=forced is not None,
    )
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    likely = "top_logprobs", body.top_logprobs or 0
    return _ask(body, [chat], most, bool(body.logprobs), likely, forced)


def _ask_completion(body: CompletionBody) -> Asked:
    prompts = prompts_of(body.prompt, "prompt")
    likely = "logprobs", body.logprobs or 0
    return _ask(body, prompts, body.max_tokens, body.logprobs is not None, likely, None)


def _ask(
    body: CompletionBody | ChatBody,
    prompts: Sequence[str | list[int] | Chat],
    max_tokens: int | None,
    logprobs: bool,
    likely: tuple[str, int],
    forced: str | None,
) -> Asked:
    params = {name: getattr(body, name) for name in _Sampling.__struct_fields__}
    match body.response_format:
        case _JsonObject():
            params["json_schema"] = '{"type": "object"}'
        case _JsonSchema(json_schema=_Schema(schema=schema)):
            params["json_schema"] = msgspec.json.encode(schema).decode()
        case _:
            params["json_schema"] = forced or body.json_schema
    params = {name: value for name, value in params.items() if value is not None}
    options = body.stream_options
    return Asked(
        questions=[
            Question(prompt=each, params=params, text=body, max_tokens=max_tokens)
            for each in prompts
        ],
        n=body.n or 1,
        name=body.rid,
        model=body.model,
        stream=bool(body.stream),
        logprobs=logprobs,
        likely=likely,
        token_ids=body.return_token_ids,
        usage=options is not None and options.include_usage,
        seed=body.seed,
        is_constrained=isinstance(body.response_format, _JsonObject | _JsonSchema),
    )


class Completions(Dialect):
    """POST /v1/completions."""

    body = CompletionBody
    parse = staticmethod(_ask_completion)
    default_tokens = 16  # OpenAI's default of max_tokens.
    kinds: ClassVar[tuple[str, str]] = ("text_completion", "text_completion")
    """The field ``object`` of a whole answer and of an event."""

    def __init__(self, asked: Asked, names: Names) -> None:
        super().__init__(asked, names)
        self._created = int(time.time())
        self._offsets: dict[int, int] = {}
        """Characters of the tokens of each choice so far."""

    def events(self, part: Part) -> Iterable[Event]:
        yield self._frame([self._choice(part, {"text": part.text})], self.kinds[1])

    def last(self, wholes: Sequence[Part]) -> Iterable[Event]:
        if self._asked.usage:
            yield self._frame([], self.kinds[1], self._usage(wholes))

    def whole(self, wholes: Sequence[Part]) -> Event:
        choices = [self._choice(part, self._content(part)) for part in wholes]
        return self._frame(choices, self.kinds[0], self._usage(wholes))

    def _content(self, part: Part) -> Event:
        return {"text": part.text}

    def _frame(self, choices: Sequence[Event], kind: str, usage: Event | None = None) -> Event:
        return {
            "id": self._names.answer,
            "object": kind,
            "created": self._created,
            "model": self._names.model,
            "choices": choices,
            "usage": usage,
            "metadata": {"weight_version": self._names.label()},
        }

    def _usage(self, wholes: Sequence[Part]) -> Event:
        """Return the field ``usage``; a prompt counts once for all of its responses."""
        asked = sum(len(each.prompt_ids) for each in wholes[:: self._asked.n])
        sampled = sum(len(each.token_ids) for each in wholes)
        return {
            "prompt_tokens": asked,
            "completion_tokens": sampled,
            "total_tokens": asked + sampled,
            "prompt_tokens_details": None,
        }

    def _choice(self, part: Part, content: Event) -> Event:
        choice: Event = {
            "index": part.index,
            **content,
            "logprobs": self._logprobs(part) if self._asked.logprobs else None,
            "finish_reason": None,
        }
        if self._asked.token_ids:
            choice["token_ids"] = part.token_ids
            choice |= {"prompt_token_ids": part.prompt_ids.tolist()} if part.start == 0 else {}
        if part.end is not None:
            choice |= part.end.versions
            choice["finish_reason"] = self._reason(part.end)
            choice["matched_stop"] = part.end.matched
        return choice

    def _reason(self, end: End) -> str:
        return end.reason

    def _likely(self, part: Part) -> list[list[tuple[str, float]]]:
        rows: Sequence[Likely] = part.likely or [[] for _ in part.token_ids]
        return [[(self._names.token(i), max(p, _LEAST_LOGPROB)) for p, i, _ in row] for row in rows]

    def _logprobs(self, part: Part) -> Event:
        tokens = [self._names.token(i) for i in part.token_ids]
        offset = self._offsets.get(part.index, 0)
        offsets: list[int] = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[part.index] = offset
        likely = zip(tokens, part.logprobs, self._likely(part), strict=True)
        return {
            "tokens": tokens,
            "token_logprobs": part.logprobs,
            # The sampled token is always included. If several tokens have the same text, such as
            # U+FFFD, the text has the logprob of the sampled token, or else of the likeliest.
            "top_logprobs": [
                {**dict(row), **dict(reversed(row)), token: p} for token, p, row in likely
            ]
            if self._asked.likely and self._asked.likely[1]
            else None,
            "text_offset": offsets,
        }


class Chats(Completions):
    """POST /v1/chat/completions."""

    body = ChatBody
    parse = staticmethod(_ask_chat)
    default_tokens = None
    kinds: ClassVar[tuple[str, str]] = ("chat.completion", "chat.completion.chunk")

    def first(self) -> Iterable[Event]:
        delta = {"role": "assistant", "content": ""}
        for index in range(self._asked.count):
            yield self._delta(index, delta)

    def events(self, part: Part) -> Iterable[Event]:
        """One event for each change of the message, of which the last has the tokens."""
        *changes, last = part.changes or [{}]
        for change in changes:
            yield self._delta(part.index, change)
        # Tokens whose text is still buffered have nothing for a client that reads only text.
        if last or part.end is not None or self._asked.logprobs or self._asked.token_ids:
            yield self._frame([self._choice(part, {"delta": last})], self.kinds[1])

    def _delta(self, index: int, delta: Mapping[str, Any]) -> Event:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._frame([choice], self.kinds[1])

    def _content(self, part: Part) -> Event:
        return {"message": {} if part.end is None else part.end.message}

    def _reason(self, end: End) -> str:
        return end.reason_of_message

    def _logprobs(self, part: Part) -> Event:
        of = zip(part.token_ids, part.logprobs, self._likely(part), strict=True)
        content = [
            {
                **_entry(self._names.token(token_id), p),
                "top_logprobs": [_entry(*each) for each in likely],
            }
            for token_id, p, likely in of
        ]
        return {"content": content, "refusal": None}


def _entry(token: str, logprob: float) -> Event:
    return {"token": token, "bytes": list(token.encode()), "logprob": logprob}
