"""POST /v1/chat/completions: messages by the model's chat template, and the message behind them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aiohttp import web

from aprilsched.errors import ConfigError
from aprilsched.gateway.generate import GROUP_HEADER
from aprilsched.gateway.openai.bodies import ChatBody
from aprilsched.gateway.openai.choices import (
    Choice,
    Event,
    begun,
    parts_until_failure,
    room,
    streamed,
    told_at_end,
    usage,
)
from aprilsched.gateway.openai.errors import in_openai_form
from aprilsched.gateway.openai.messages import Message, for_template
from aprilsched.gateway.reading import Part
from aprilsched.gateway.service import SERVICE, Service
from aprilsched.gateway.tokenizer import ModelTokenizer
from aprilsched.serving.bodies import BODIES, decode
from aprilsched.serving.refusals import as_json

__all__ = ["chat_completions"]


@in_openai_form
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer the messages of the body `n` times."""
    service = request.app[SERVICE]
    async with request.app[BODIES].read(request) as content:
        body, size = decode(content, ChatBody), len(content)
    body.check()
    tokenizer = service.texts.tokenizer
    if body.used_tools:
        _check_tools(tokenizer)
    messages = for_template(body.messages)
    text = await service.texts.prepared(lambda: _rendered(tokenizer, body, messages), size=size)
    # The template has written the special tokens around the messages.
    (prompt,) = await service.texts.encoded([text], service.context_tokens, special=False)
    answer = _Answer(service, tokenizer, body, text)
    # The delimiters of regions may be special tokens.
    skip_special = body.skip_special_tokens and not tokenizer.parses
    with begun(
        service,
        body,
        [prompt],
        new_tokens=_new_tokens(room(service, prompt), body),
        skip_special=skip_special,
        group=request.headers.get(GROUP_HEADER),
    ) as (name, choices):
        answer.name = name
        if body.stream:
            return await streamed(
                request,
                choices,
                answer.events,
                first=answer.first(choices),
                last=lambda: answer.last(choices),
            )
        return as_json(await answer.whole(choices))


def _check_tools(tokenizer: ModelTokenizer) -> None:
    if not tokenizer.knows_tools:
        raise ConfigError("The model's chat template has no place for tools; leave tools out.")
    if not tokenizer.parses:
        raise ConfigError(
            "How the model writes tool calls is not known; start the gateway with "
            "--response-template, or leave tools out."
        )


def _rendered(
    tokenizer: ModelTokenizer, body: ChatBody, messages: Sequence[Mapping[str, Any]]
) -> str:
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    return tokenizer.rendered(
        messages, body.used_tools, go_on=body.continue_final_message, options=options
    )


def _new_tokens(free: int | None, body: ChatBody) -> int:
    asked = body.max_completion_tokens
    asked = body.max_tokens if asked is None else asked
    if asked is None:
        if free is None:
            raise ConfigError(
                "The length of the model's context is not known; give max_completion_tokens."
            )
        return free
    if free is not None and asked > free:
        raise ConfigError(
            f"max_completion_tokens is {asked}, and {free} tokens fit behind the messages; give "
            "fewer."
        )
    return asked


class _Answer:
    """Makes the answer, whole or event by event."""

    def __init__(
        self, service: Service, tokenizer: ModelTokenizer, body: ChatBody, prompt: str
    ) -> None:
        self._service = service
        self._tokenizer = tokenizer
        self._body = body
        self._prompt = prompt
        self._created = int(time.time())
        self._logprobs = body.wants_logprobs
        self._messages: dict[int, Message] = {}
        self.name = ""

    async def whole(self, choices: Sequence[Choice]) -> Event:
        """The answer with all choices at their end.

        Raises:
            Failed: if one of them fails.
        """
        async for choice, part in parts_until_failure(choices):
            self._changes(choice, part)
        told = [self._whole(choice) for choice in choices]
        return {
            **self._frame("chat.completion", told),
            "usage": usage(choices, self._body.choices),
        }

    def _whole(self, choice: Choice) -> Event:
        reading = choice.reading
        told: Event = {
            "index": choice.index,
            "message": self._message(choice).told(),
            "logprobs": self._told_logprobs(reading.token_ids, reading.logprobs),
            **self._at_end(choice),
        }
        if self._body.return_token_ids:
            told |= {"token_ids": reading.token_ids, "prompt_token_ids": choice.prompt}
        return told

    def first(self, choices: Sequence[Choice]) -> list[Event]:
        """The events that begin the choices."""
        return [self._event(choice, {"role": "assistant", "content": ""}) for choice in choices]

    def events(self, choice: Choice, part: Part) -> Iterator[Event]:
        """The events of a part: one for each change of the message, of which the last has the
        tokens."""
        *changes, last = self._changes(choice, part) or [{}]
        for change in changes:
            yield self._event(choice, change)
        more: Event = {"logprobs": self._told_logprobs(part.token_ids, part.logprobs)}
        if self._body.return_token_ids:
            more["token_ids"] = part.token_ids
            if part.start == 0:
                more["prompt_token_ids"] = choice.prompt
        if part.over:
            more |= self._at_end(choice)
        # Tokens whose text is held back say nothing to a client that wants text alone.
        if last or part.over or self._logprobs or self._body.return_token_ids:
            yield self._event(choice, last, more)

    def last(self, choices: Sequence[Choice]) -> Event | None:
        """The event behind all choices."""
        if not self._body.usage:
            return None
        return {
            **self._frame("chat.completion.chunk", []),
            "usage": usage(choices, self._body.choices),
        }

    def _changes(self, choice: Choice, part: Part) -> list[dict[str, Any]]:
        message = self._message(choice)
        changes = message.push(part.text)
        return changes + message.finish() if part.over else changes

    def _message(self, choice: Choice) -> Message:
        if choice.index not in self._messages:
            parser = self._tokenizer.parser(self._prompt, self._body.used_tools)
            self._messages[choice.index] = Message(parser)
        return self._messages[choice.index]

    def _at_end(self, choice: Choice) -> Event:
        told = told_at_end(self._service, choice)
        if self._message(choice).calls and told["finish_reason"] == "stop":
            told["finish_reason"] = "tool_calls"
        return told

    def _frame(self, kind: str, choices: Sequence[Event]) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": kind,
            "created": self._created,
            "model": self._body.model or self._service.model_path,
            "choices": choices,
            "usage": None,
            "metadata": {"weight_version": self._service.label},
        }

    def _event(
        self, choice: Choice, delta: Mapping[str, Any], more: Mapping[str, Any] | None = None
    ) -> Event:
        told = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._frame("chat.completion.chunk", [{**told, **(more or {})}])

    def _told_logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[float]
    ) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        told: list[dict[str, Any]] = []
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            token = self._tokenizer.decode([token_id], skip_special=False)
            told.append(
                {
                    "token": token,
                    "bytes": list(token.encode()),
                    "logprob": logprob,
                    "top_logprobs": [],
                }
            )
        return {"content": told, "refusal": None}
