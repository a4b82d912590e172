"""Bodies of OpenAI's API as typed structs, and the sampling parameters in them.

A field that is not known is refused: one that is ignored shows only in what the model says. Fields
that say who asks, or that the answer does not depend on, are known and not used.
"""

from __future__ import annotations

from typing import Any

import msgspec

from aprilsched.errors import ConfigError

__all__ = ["ChatBody", "CompletionBody", "StreamOptions", "sampling_of"]

_MOST_CHOICES = 128

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "ignore_eos",
    "stop_token_ids",
    "regex",
    "ebnf",
    "json_schema",
    "stop_regex",
    "custom_params",
)
"""Fields that are sampling parameters under the same name, or under one that is known."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a stream is told."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of requests have."""

    model: str = ""
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None

    # SGLang's and vLLM's.
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool = False
    ignore_eos: bool | None = None
    skip_special_tokens: bool = True
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | None = None
    custom_params: dict[str, Any] | None = None
    rid: str | None = None
    return_token_ids: bool = False

    # Known, and not used.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    extra_key: Any = None
    cache_salt: Any = None

    @property
    def choices(self) -> int:
        """Number of responses to each prompt.

        Raises:
            ConfigError: if there are too few or too many.
        """
        n = 1 if self.n is None else self.n
        if not 1 <= n <= _MOST_CHOICES:
            raise ConfigError(f"n is {n}; give a number from 1 to {_MOST_CHOICES}.")
        return n

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(_Body, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has logprobs.

        Raises:
            ConfigError: if it would have to have more than the gateway knows.
        """
        if self.logprobs is not None and self.logprobs not in (0, 1):
            raise ConfigError(
                f"logprobs is {self.logprobs}, and only the logprob of the sampled token is known; "
                "give 0 or 1."
            )
        return self.logprobs is not None

    def check(self) -> None:
        """Refuse what a scheduler of rollouts has no answer to.

        Raises:
            ConfigError: with what to change.
        """
        if self.echo:
            raise ConfigError("echo repeats the prompt; leave it out and put the prompt in front.")
        if self.suffix:
            raise ConfigError("suffix is for models that fill in the middle; leave it out.")
        if self.best_of is not None and self.best_of != self.choices:
            raise ConfigError("best_of is not n; leave it out and choose among n responses.")


class ChatBody(_Body, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None

    # SGLang's and vLLM's.
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has logprobs.

        Raises:
            ConfigError: if it would have to have more than the gateway knows.
        """
        if self.top_logprobs:
            raise ConfigError(
                f"top_logprobs is {self.top_logprobs}, and only the logprob of the sampled token "
                "is known; leave it out."
            )
        return bool(self.logprobs)

    @property
    def used_tools(self) -> list[dict[str, Any]] | None:
        """The definitions that the model is given.

        Raises:
            ConfigError: if the model would have to be made to call one.
        """
        choice = self.tool_choice
        if choice not in (None, "auto", "none"):
            raise ConfigError(
                "tool_choice must be auto or none, because the gateway cannot make the model call "
                "a tool."
            )
        if self.parallel_tool_calls is False:
            raise ConfigError(
                "parallel_tool_calls is false, and the gateway cannot keep the model from several "
                "calls; leave it out."
            )
        return None if choice == "none" else self.tools or None

    def check(self) -> None:
        """Refuse what a scheduler of rollouts has no answer to.

        Raises:
            ConfigError: with what to change.
        """
        if self.modalities not in (None, ["text"]):
            raise ConfigError("modalities must be text alone; leave it out.")
        if not self.messages:
            raise ConfigError("messages is empty; give at least one message.")


def sampling_of(body: CompletionBody | ChatBody) -> dict[str, Any]:
    """The sampling parameters in `body`, without the length and the stop strings.

    Raises:
        ConfigError: if it asks for a form of answer that is not known.
    """
    found = {name: getattr(body, name) for name in _SAMPLING}
    asked = body.response_format or {"type": "text"}
    match asked.get("type"):
        case "text":
            pass
        case "json_object":
            found["json_schema"] = '{"type": "object"}'
        case "json_schema":
            schema: Any = asked.get("json_schema")
            if not isinstance(schema, dict) or "schema" not in schema:
                raise ConfigError("response_format has no json_schema.schema; give the schema.")
            found["json_schema"] = msgspec.json.encode(schema["schema"]).decode()
        case other:
            raise ConfigError(
                f"response_format is {other!r}; give text, json_object or json_schema."
            )
    return {name: value for name, value in found.items() if value is not None}
