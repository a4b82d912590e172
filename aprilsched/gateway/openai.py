"""OpenAI's API in front of a fleet: /v1/completions and /v1/chat/completions.

Text becomes tokens, and tokens become text, by the model's own tokenizer files. Everything else is
as with ``/generate``: each choice is a rollout, and says which version sampled each of its tokens.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from aprilsched.chat.openai_bodies import (
    ChatBody,
    CompletionBody,
    ForcedCalls,
    Message,
    for_template,
    sampling_of,
)
from aprilsched.chat.tokenizer import ModelTokenizer
from aprilsched.errors import ConfigError
from aprilsched.gateway.generate import (
    GROUP_HEADER,
    check_likely,
    check_media,
    open_responses,
    prompt_of,
    prompts_of,
    rids_of,
    streamed,
    take_fields,
    text_rules,
)
from aprilsched.gateway.reading import Failed, Part, Reading, parts_until_failure
from aprilsched.gateway.responses import Asked
from aprilsched.gateway.service import SERVICE, Service
from aprilsched.gateway.settings import TOP_FIELD
from aprilsched.serving.bodies import BODIES, decode
from aprilsched.serving.refusals import as_json, error_content
from aprilsched.serving.streams import DONE, Event, Item


def _room(service: Service, prompt: Sequence[int]) -> int | None:
    """Number of tokens that fit behind `prompt`; None if nobody tells the model's context.

    Raises:
        ConfigError: if the prompt itself does not fit.
    """
    context = service.context_tokens
    if context is None:
        return None
    if len(prompt) >= context:
        raise ConfigError(
            f"The prompt has {len(prompt)} tokens, and the model's context is {context} tokens; "
            "shorten it."
        )
    return context - len(prompt)


class _Answer:
    """Begins the responses to a request, and makes the answer, whole or event by event.

    Args:
        service: tells the label of the weights, and the model.
        tokenizer: writes the tokens of the logprobs.
        body: what was asked.
        kinds: the field ``object`` of the whole answer, and that of an event.
        fields: the further fields of the request.
    """

    def __init__(
        self,
        service: Service,
        tokenizer: ModelTokenizer,
        body: CompletionBody | ChatBody,
        kinds: tuple[str, str],
        fields: Mapping[str, Any],
    ) -> None:
        name, self._likely = body.likely
        check_likely(service, self._likely, name)
        self._fields = {**fields, TOP_FIELD: self._likely} if self._likely else fields
        self._name = uuid.uuid4().hex if body.rid is None else body.rid
        self._service = service
        self._tokenizer = tokenizer
        self._asked = body
        self._whole_kind, self._event_kind = kinds
        self._created = int(time.time())
        self._logprobs = body.wants_logprobs

    async def respond(
        self,
        request: web.Request,
        prompts: Sequence[Sequence[int]],
        *,
        new_tokens: int,
        skip_special: bool | None = None,
    ) -> web.StreamResponse:
        """Answer each of the prompts as often as the body asks for.

        Raises:
            ConfigError: if a parameter cannot be used.
            Refused: if an engine would refuse a prompt.
            Unavailable: if the gateway takes no more requests.
            Failed: if one of the responses fails, because clients know no error of one choice.
        """
        body, given = self._asked, request.headers.get(GROUP_HEADER)
        check_media(self._fields, len(prompts))
        count = len(prompts) * body.choices
        rids = rids_of(body.rid, count, several=count > 1)
        rules = text_rules(self._service, body, skip_special=skip_special)
        near = given or (self._name if count > 1 else None)
        asked: list[Asked] = []
        for prompt in prompts:
            for number in range(body.choices):
                params = {**sampling_of(body), "max_new_tokens": new_tokens}
                if body.seed is not None:
                    # One seed for all would make every choice the same.
                    params["seed"] = body.seed + number
                made = prompt_of(
                    self._service, prompt, rules.given(params), near, fields=self._fields
                )
                # The group has the name that the answer tells, so an abort by it finds them.
                asked.append(Asked(rid=next(rids), prompt=made, group=given or self._name))
        with open_responses(self._service, asked, [rules] * count) as readings:
            if body.stream:
                return await streamed(request, self._items(readings))
            async with aclosing(parts_until_failure(readings)) as parts:
                async for reading, part in parts:
                    self._changes(reading, part)
            told = [self._whole(reading) for reading in readings]
            return as_json(self._frame(told, self._whole_kind, self._usage(readings)))

    async def _items(self, readings: Sequence[Reading]) -> AsyncGenerator[Item]:
        for event in self._first(readings):
            yield event
        try:
            async with aclosing(parts_until_failure(readings)) as parts:
                async for reading, part in parts:
                    for event in self._events(reading, part):
                        yield event
            if self._asked.usage:
                yield self._frame([], self._event_kind, self._usage(readings))
        except Failed as failed:
            self._service.refused(failed.status)
            yield error_content(str(failed), failed.status)
        yield DONE

    def _first(self, readings: Sequence[Reading]) -> Iterable[Event]:
        """The events that begin a stream."""
        return ()

    def _events(self, reading: Reading, part: Part) -> Iterable[Event]:
        """The events of a part."""
        raise NotImplementedError

    def _changes(self, reading: Reading, part: Part) -> Sequence[Event]:
        """The changes of the message by a part; a text has none."""
        return ()

    def _whole(self, reading: Reading) -> Event:
        """The choice at its end."""
        raise NotImplementedError

    def _frame(self, choices: Sequence[Event], kind: str, usage: Event | None = None) -> Event:
        return {
            "id": self._name,
            "object": kind,
            "created": self._created,
            "model": self._asked.model or self._service.model_name,
            "choices": choices,
            "usage": usage,
            "metadata": {"weight_version": self._service.label},
        }

    def _usage(self, readings: Sequence[Reading]) -> Event:
        """The field ``usage``; a prompt counts once for all of its responses."""
        asked = sum(each.response.prompt_tokens for each in readings[:: self._asked.choices])
        given = sum(len(each.token_ids) for each in readings)
        return {
            "prompt_tokens": asked,
            "completion_tokens": given,
            "total_tokens": asked + given,
            "prompt_tokens_details": None,
        }

    def _ids(self, reading: Reading, part: Part) -> Event:
        """The token ids of a part and, with the first, those of the prompt, if they are wanted."""
        if not self._asked.return_token_ids:
            return {}
        prompt = reading.response.prompt.input_ids
        first = {"prompt_token_ids": prompt.tolist()} if part.start == 0 else {}
        return {"token_ids": part.token_ids, **first}

    def _likely_of(self, reading: Reading, part: Part) -> list[list[tuple[str, float]]]:
        """The likeliest tokens in the place of each token of a part, with their logprobs. OpenAI's
        least logprob stands for the log of 0."""
        rows = reading.likely(part, self._likely) if self._likely else [()] * len(part.token_ids)
        return [[(self._token(i), max(p, _LEAST)) for p, i, _ in row] for row in rows]

    def _token(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special=False)

    def _at_end(self, reading: Reading) -> Event:
        """What is known at the end: why it ended, and which weights sampled which tokens."""
        ids = reading.token_ids
        stopped = reading.finish == "stop"
        matched = reading.matched if reading.matched is not None else ids[-1] if ids else None
        return {
            "finish_reason": reading.finish,
            "matched_stop": matched if stopped else None,
            "weight_versions": reading.labelled(self._service.label_of),
            "weight_versions_exact": reading.response.versions_exact,
        }


# --- completions ---------------------------------------------------------------------------------

# POST /v1/completions: a text or token ids, and the text behind them.

_LEAST = -9999.0
"""OpenAI's logprob of a token that is never sampled."""
_NEW_TOKENS = 16
"""OpenAI's default of max_tokens."""


async def completions(request: web.Request) -> web.StreamResponse:
    """Answer every prompt of the body `n` times."""
    service = request.app[SERVICE]
    async with request.app[BODIES].read(request) as content:
        content, fields = take_fields(service, content)
        body = decode(content, CompletionBody)
    service.check_model(body.model)
    body.check()
    answer = _CompletionAnswer(service, body, fields)
    prompts, _ = await prompts_of(service, body.prompt, "prompt", body.choices)
    new = _NEW_TOKENS if body.max_tokens is None else body.max_tokens
    for prompt in prompts:
        free = _room(service, prompt)
        if free is not None and new > free:
            raise ConfigError(
                f"max_tokens is {new}, and {free} tokens fit behind the prompt of {len(prompt)}; "
                "give fewer."
            )
    return await answer.respond(request, prompts, new_tokens=new)


class _CompletionAnswer(_Answer):
    """Makes the answer, whole or event by event."""

    def __init__(self, service: Service, body: CompletionBody, fields: Mapping[str, Any]) -> None:
        kinds = ("text_completion", "text_completion")
        super().__init__(service, service.texts.tokenizer, body, kinds, fields)
        self._offsets: dict[int, int] = {}
        """Characters of the tokens that each choice has told."""

    def _events(self, reading: Reading, part: Part) -> list[Event]:
        return [self._frame([self._choice(reading, part)], self._event_kind)]

    def _whole(self, reading: Reading) -> Event:
        return self._choice(reading, reading.whole)

    def _choice(self, reading: Reading, part: Part) -> Event:
        told: Event = {
            "index": reading.index,
            "text": part.text,
            "logprobs": self._logprobs_of(reading, part) if self._logprobs else None,
            "finish_reason": None,
            **self._ids(reading, part),
        }
        return told | self._at_end(reading) if part.over else told

    def _logprobs_of(self, reading: Reading, part: Part) -> Event:
        tokens = [self._token(i) for i in part.token_ids]
        offset = self._offsets.get(reading.index, 0)
        offsets: list[int] = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[reading.index] = offset
        likely = zip(tokens, part.logprobs, self._likely_of(reading, part), strict=True)
        return {
            "tokens": tokens,
            "token_logprobs": part.logprobs,
            # The sampled token is among them, however unlikely it is. Of tokens with one text, such
            # as U+FFFD, it has the value, or else the likeliest.
            "top_logprobs": [
                {**dict(row), **dict(reversed(row)), token: p} for token, p, row in likely
            ]
            if self._likely
            else None,
            "text_offset": offsets,
        }


# --- chat ----------------------------------------------------------------------------------------

# POST /v1/chat/completions: messages by the model's chat template, and the message behind them.


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer the messages of the body `n` times."""
    service = request.app[SERVICE]
    async with request.app[BODIES].read(request) as content:
        content, fields = take_fields(service, content)
        body, size = decode(content, ChatBody), len(content)
    service.check_model(body.model)
    body.check()
    tokenizer = service.texts.tokenizer
    if body.used_tools:
        _check_tools(tokenizer, forced=body.forced is not None)
    messages, images = for_template(body.messages)
    if images and "image_data" not in service.settings.client_fields:
        raise ConfigError("This gateway takes no images; start it with --client-fields image_data.")
    if images and "image_data" in fields:
        raise ConfigError(
            "The body has image_data beside the images of its messages; give all in the messages."
        )
    if images:
        fields["image_data"] = images
    text = await tokenizer.work_out(lambda: _render(tokenizer, body, messages), size=size)
    # The template has written the special tokens around the messages.
    (prompt,) = await service.texts.encode_texts([text], service.context_tokens, special=False)
    if not prompt:
        raise ConfigError("The prompt has no tokens; give some text.")
    new = _new_tokens(_room(service, prompt), body)
    # The delimiters of regions may be special tokens.
    skip_special = body.skip_special_tokens and not tokenizer.parses
    answer = _ChatAnswer(service, body, text, fields)
    return await answer.respond(request, [prompt], new_tokens=new, skip_special=skip_special)


def _check_tools(tokenizer: ModelTokenizer, *, forced: bool) -> None:
    if not tokenizer.knows_tools:
        raise ConfigError("The model's chat template has no place for tools; leave tools out.")
    if not (tokenizer.parses or forced):
        raise ConfigError(
            "How the model writes tool calls is not known; start the gateway with "
            "--response-template, or leave tools out."
        )


def _render(
    tokenizer: ModelTokenizer, body: ChatBody, messages: Sequence[Mapping[str, Any]]
) -> str:
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    return tokenizer.render(
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


class _ChatAnswer(_Answer):
    """Makes the answer, whole or event by event."""

    def __init__(
        self, service: Service, body: ChatBody, prompt: str, fields: Mapping[str, Any]
    ) -> None:
        kinds = ("chat.completion", "chat.completion.chunk")
        super().__init__(service, service.texts.tokenizer, body, kinds, fields)
        self._tools = body.used_tools
        self._forced = body.forced is not None
        self._prompt = prompt
        self._messages: dict[int, Message] = {}

    def _first(self, readings: Sequence[Reading]) -> list[Event]:
        return [self._event(reading, {"role": "assistant", "content": ""}) for reading in readings]

    def _events(self, reading: Reading, part: Part) -> Iterable[Event]:
        """One for each change of the message, of which the last has the tokens."""
        *changes, last = self._changes(reading, part) or [{}]
        for change in changes:
            yield self._event(reading, change)
        more = {"logprobs": self._logprobs_of(reading, part), **self._ids(reading, part)}
        if part.over:
            more |= self._at_end(reading)
        # Tokens whose text is held back say nothing to a client that wants text alone.
        if last or part.over or self._logprobs or self._asked.return_token_ids:
            yield self._event(reading, last, more)

    def _whole(self, reading: Reading) -> Event:
        whole = reading.whole
        return {
            "index": reading.index,
            "message": self._message(reading).told(),
            "logprobs": self._logprobs_of(reading, whole),
            **self._at_end(reading),
            **self._ids(reading, whole),
        }

    def _changes(self, reading: Reading, part: Part) -> list[Event]:
        message = self._message(reading)
        changes = message.push(part.text)
        return changes + message.finish(self._end(reading)) if part.over else changes

    def _end(self, reading: Reading) -> str:
        """The text of the token that has ended a response, if the response is without it."""
        last = reading.token_ids[-1:]
        ended = last and reading.matched is None and reading.rules.trims(last[0])
        return self._token(last[0]) if ended else ""

    def _message(self, reading: Reading) -> Message:
        if reading.index not in self._messages:
            plain = None if self._forced else self._tokenizer.parser(self._prompt, self._tools)
            self._messages[reading.index] = Message(ForcedCalls() if self._forced else plain)
        return self._messages[reading.index]

    def _at_end(self, reading: Reading) -> Event:
        told = super()._at_end(reading)
        if self._message(reading).calls and told["finish_reason"] == "stop":
            told["finish_reason"] = "tool_calls"
        return told

    def _event(
        self, reading: Reading, delta: Mapping[str, Any], more: Mapping[str, Any] | None = None
    ) -> Event:
        told = {"index": reading.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._frame([{**told, **(more or {})}], self._event_kind)

    def _logprobs_of(self, reading: Reading, part: Part) -> Event | None:
        if not self._logprobs:
            return None
        of = zip(part.token_ids, part.logprobs, self._likely_of(reading, part), strict=True)
        told = [
            {**_entry(self._token(token_id), p), "top_logprobs": [_entry(*each) for each in likely]}
            for token_id, p, likely in of
        ]
        return {"content": told, "refusal": None}


def _entry(token: str, logprob: float) -> Event:
    return {"token": token, "bytes": list(token.encode()), "logprob": logprob}
