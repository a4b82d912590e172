"""POST /v1/completions: a text or token ids, and the text behind them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from aprilsched.errors import ConfigError
from aprilsched.gateway.generate import GROUP_HEADER, check_amount
from aprilsched.gateway.openai.bodies import CompletionBody
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
from aprilsched.gateway.reading import Part
from aprilsched.gateway.service import SERVICE, Service
from aprilsched.gateway.tokenizer import ModelTokenizer
from aprilsched.serving.bodies import body_of
from aprilsched.serving.refusals import as_json

__all__ = ["completions"]

_NEW_TOKENS = 16
"""OpenAI's default of max_tokens."""


@in_openai_form
async def completions(request: web.Request) -> web.StreamResponse:
    """Answer every prompt of the body `n` times."""
    service = request.app[SERVICE]
    body = await body_of(request, CompletionBody)
    body.check()
    tokenizer = service.texts.tokenizer
    prompts = await _prompts(service, body)
    new = _NEW_TOKENS if body.max_tokens is None else body.max_tokens
    for prompt in prompts:
        free = room(service, prompt)
        if free is not None and new > free:
            raise ConfigError(
                f"max_tokens is {new}, and {free} tokens fit behind the prompt of {len(prompt)}; "
                "give fewer."
            )
    answer = _Answer(service, tokenizer, body)
    with begun(
        service,
        body,
        prompts,
        new_tokens=new,
        skip_special=body.skip_special_tokens,
        group=request.headers.get(GROUP_HEADER),
    ) as (name, choices):
        answer.name = name
        if body.stream:
            return await streamed(
                request, choices, answer.events, last=lambda: answer.last(choices)
            )
        return as_json(await answer.whole(choices))


async def _prompts(service: Service, body: CompletionBody) -> Sequence[Sequence[int]]:
    """The token ids of each prompt.

    Raises:
        ConfigError: if there is none, or if texts and token ids are mixed.
    """
    asked: Any = body.prompt
    if isinstance(asked, str) or (asked and all(isinstance(each, int) for each in asked)):
        asked = [asked]
    given: list[Any] = asked
    if not given or "" in given:
        raise ConfigError("prompt is empty; give a text or token ids.")
    check_amount(service, len(given), body.choices)
    texts = [each for each in given if isinstance(each, str)]
    if any(isinstance(each, int) for each in given) or len(texts) not in (0, len(given)):
        raise ConfigError("prompt has texts and token ids; give either.")
    if texts:
        return await service.texts.encoded(texts, service.context_tokens)
    return given


class _Answer:
    """Makes the answer, whole or event by event."""

    def __init__(self, service: Service, tokenizer: ModelTokenizer, body: CompletionBody) -> None:
        self._service = service
        self._tokenizer = tokenizer
        self._body = body
        self._created = int(time.time())
        self._logprobs = body.wants_logprobs
        self._offsets: dict[int, int] = {}
        """Characters of the tokens that each choice has told."""
        self.name = ""

    async def whole(self, choices: Sequence[Choice]) -> Event:
        """The answer with all choices at their end.

        Raises:
            Failed: if one of them fails.
        """
        texts = [""] * len(choices)
        async for choice, part in parts_until_failure(choices):
            texts[choice.index] += part.text
        told = [self._whole(choice, texts[choice.index]) for choice in choices]
        return {**self._frame(told), "usage": usage(choices, self._body.choices)}

    def _whole(self, choice: Choice, text: str) -> Event:
        ids, logprobs = choice.reading.token_ids, choice.reading.logprobs
        part = Part(start=0, token_ids=ids, logprobs=logprobs, text=text, over=True)
        return self._choice(choice, part)

    def events(self, choice: Choice, part: Part) -> list[Event]:
        """The event of a part."""
        return [self._frame([self._choice(choice, part)])]

    def last(self, choices: Sequence[Choice]) -> Event | None:
        """The event behind all choices."""
        if not self._body.usage:
            return None
        return {**self._frame([]), "usage": usage(choices, self._body.choices)}

    def _frame(self, choices: Sequence[Event]) -> Event:
        return {
            "id": self.name,
            "object": "text_completion",
            "created": self._created,
            "model": self._body.model or self._service.model_path,
            "choices": choices,
            "usage": None,
            "metadata": {"weight_version": self._service.label},
        }

    def _choice(self, choice: Choice, part: Part) -> Event:
        told: Event = {
            "index": choice.index,
            "text": part.text,
            "logprobs": self._told_logprobs(choice, part) if self._logprobs else None,
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            told["token_ids"] = part.token_ids
            if part.start == 0:
                told["prompt_token_ids"] = choice.prompt
        if part.over:
            told |= told_at_end(self._service, choice)
        return told

    def _told_logprobs(self, choice: Choice, part: Part) -> Event:
        tokens = [self._tokenizer.decode([i], skip_special=False) for i in part.token_ids]
        offset = self._offsets.get(choice.index, 0)
        offsets: list[int] = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[choice.index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": part.logprobs,
            "top_logprobs": None,
            "text_offset": offsets,
        }
