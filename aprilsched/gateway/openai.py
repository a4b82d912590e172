"""OpenAI's API in front of a fleet: /v1/completions and /v1/chat/completions.

Text becomes tokens, and tokens become text, by the model's own tokenizer files. Everything else is
as with ``/generate``: each choice is a rollout, and says which version sampled each of its tokens.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import (
    AsyncGenerator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from aprilsched.errors import ConfigError
from aprilsched.gateway.generate import GROUP_HEADER, begin, check_amount, sampled
from aprilsched.gateway.openai_bodies import (
    ChatBody,
    CompletionBody,
    Message,
    error_content,
    for_template,
    in_openai_form,
    sampling_of,
)
from aprilsched.gateway.reading import Part, Reading, TextRules, parts_of
from aprilsched.gateway.responses import Asked
from aprilsched.gateway.service import SERVICE, Service
from aprilsched.gateway.tokenizer import ModelTokenizer
from aprilsched.serving import (
    BODIES,
    DONE,
    Event,
    Item,
    Refusal,
    as_json,
    body_of,
    decode,
    streamed,
)
from aprilsched.types import Prompt

# --- choices -------------------------------------------------------------------------------------

# The choices of one request: they begin, are read and are left together.


class Failed(Refusal):
    """A response has failed, and with it the request."""

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading.failure)
        self.status = reading.response.status

    def answer(self) -> web.Response:
        return as_json(error_content(str(self), self.status), self.status)


@dataclass(frozen=True)
class Choice:
    """One response to one prompt.

    Attributes:
        index: its number in the answer.
        prompt: the token ids that it answers.
        reading: its tokens and text.
    """

    index: int
    prompt: Sequence[int]
    reading: Reading


def room(service: Service, prompt: Sequence[int]) -> int | None:
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


@contextmanager
def begun(
    service: Service,
    body: CompletionBody | ChatBody,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    skip_special: bool,
    group: str | None = None,
) -> Generator[tuple[str, list[Choice]]]:
    """The name of the request, and its choices: `body.n` for each of the prompts.

    Raises:
        ConfigError: if a parameter cannot be used.
        Refused: if an engine would refuse a prompt.
        Unavailable: if the gateway takes no more requests.
    """
    tokenizer = service.texts.tokenizer
    if not all(prompts):
        raise ConfigError("The prompt has no tokens; give some text.")
    size = service.vocab_size
    # The tokenizer may know tokens that the model does not have.
    ends = {each for each in tokenizer.ends if size is None or each < size}
    name = uuid.uuid4().hex if body.rid is None else body.rid
    several = len(prompts) * body.choices > 1
    near = group or (name if several else None)
    # The group has the name that the answer tells, so an abort by it finds the responses.
    group = group or name
    rules = TextRules(
        stops=body.stops,
        keep_stop=body.no_stop_trim,
        skip_special=skip_special,
        ends=frozenset([*ends, *(body.stop_token_ids or ())]),
        ignore_ends=bool(body.ignore_eos),
    )
    asked: list[Asked] = []
    for prompt in prompts:
        ids: Any = prompt
        for number in range(body.choices):
            params = {**sampling_of(body), "max_new_tokens": new_tokens}
            if body.seed is not None:
                # One seed for all would make every choice the same.
                params["seed"] = body.seed + number
            sampling = sampled(service, prompt, rules.given(params))
            rid = f"{body.rid}_{len(asked)}" if body.rid and several else body.rid
            made = Prompt(input_ids=ids, sampling=sampling, affinity=near)
            asked.append(Asked(rid=rid, prompt=made, group=group))
    responses = begin(service, asked)
    try:
        choices: list[Choice] = []
        for index, (response, prompt) in enumerate(
            zip(responses, (p for p in prompts for _ in range(body.choices)), strict=True)
        ):
            text = tokenizer.detokenizer(prompt, skip_special=rules.skip_special)
            reading = Reading(service.responses, response, text, rules)
            choices.append(Choice(index, prompt, reading))
        yield name, choices
    finally:
        for response in responses:
            service.responses.leave(response)


async def parts_until_failure(
    choices: Sequence[Choice],
) -> AsyncGenerator[tuple[Choice, Part], None]:
    """The parts of all choices as they come.

    Raises:
        Failed: if one of them fails, because clients know no error of one choice.
    """
    async with aclosing(parts_of([choice.reading for choice in choices])) as parts:
        async for at, part in parts:
            if choices[at].reading.failure:
                raise Failed(choices[at].reading)
            yield choices[at], part


async def items_of(
    choices: Sequence[Choice],
    events: Callable[[Choice, Part], Iterable[Event]],
    *,
    first: Iterable[Event] = (),
    last: Callable[[], Event | None],
) -> AsyncGenerator[Item]:
    """The items of a stream: the events `first`, the `events` of all parts, and that of `last`."""
    for event in first:
        yield event
    try:
        async with aclosing(parts_until_failure(choices)) as parts:
            async for choice, part in parts:
                for event in events(choice, part):
                    yield event
        final = last()
    except Failed as failed:
        final = error_content(str(failed), failed.status)
    if final is not None:
        yield final
    yield DONE


def told_at_end(service: Service, choice: Choice) -> dict[str, Any]:
    """The fields of a choice that are known at its end: why it ended, and which weights sampled
    which of its tokens."""
    reading = choice.reading
    ids = reading.token_ids
    stopped = reading.finish == "stop"
    matched = reading.matched if reading.matched is not None else ids[-1] if ids else None
    return {
        "finish_reason": reading.finish,
        "matched_stop": matched if stopped else None,
        "weight_versions": reading.labelled(service.label_of),
        "weight_versions_exact": reading.response.versions_exact,
    }


def usage(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """The field ``usage``; a prompt counts once for its `n` responses."""
    asked = sum(len(choice.prompt) for choice in choices if choice.index % n == 0)
    given = sum(len(choice.reading.token_ids) for choice in choices)
    return {
        "prompt_tokens": asked,
        "completion_tokens": given,
        "total_tokens": asked + given,
        "prompt_tokens_details": None,
    }


class _Answer:
    """What the answers of both calls have, whole or event by event.

    Args:
        service: tells the label of the weights, and the model.
        tokenizer: writes the tokens of the logprobs.
        body: what was asked.
        kind: the field ``object`` of an event.
    """

    def __init__(
        self,
        service: Service,
        tokenizer: ModelTokenizer,
        body: CompletionBody | ChatBody,
        kind: str,
    ) -> None:
        self.name = ""
        self._service = service
        self._tokenizer = tokenizer
        self._asked = body
        self._kind = kind
        self._created = int(time.time())
        self._logprobs = body.wants_logprobs

    def last(self, choices: Sequence[Choice]) -> Event | None:
        """The event behind all choices."""
        return (
            self._frame([], usage=usage(choices, self._asked.choices))
            if self._asked.usage
            else None
        )

    def _frame(
        self, choices: Sequence[Event], kind: str | None = None, usage: Event | None = None
    ) -> Event:
        return {
            "id": self.name,
            "object": kind or self._kind,
            "created": self._created,
            "model": self._asked.model or self._service.model_path,
            "choices": choices,
            "usage": usage,
            "metadata": {"weight_version": self._service.label},
        }

    def _ids(self, choice: Choice, part: Part) -> Event:
        """The token ids of a part and, with the first, those of the prompt, if they are wanted."""
        if not self._asked.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": choice.prompt} if part.start == 0 else {}
        return {"token_ids": part.token_ids, **prompt}


# --- completions ---------------------------------------------------------------------------------

# POST /v1/completions: a text or token ids, and the text behind them.

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
    answer = _CompletionAnswer(service, tokenizer, body)
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
            items = items_of(choices, answer.events, last=lambda: answer.last(choices))
            return await streamed(request, items)
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


class _CompletionAnswer(_Answer):
    """Makes the answer, whole or event by event."""

    def __init__(self, service: Service, tokenizer: ModelTokenizer, body: CompletionBody) -> None:
        super().__init__(service, tokenizer, body, "text_completion")
        self._offsets: dict[int, int] = {}
        """Characters of the tokens that each choice has told."""

    async def whole(self, choices: Sequence[Choice]) -> Event:
        """The answer with all choices at their end.

        Raises:
            Failed: if one of them fails.
        """
        texts = [""] * len(choices)
        async for choice, part in parts_until_failure(choices):
            texts[choice.index] += part.text
        told = [self._whole(choice, texts[choice.index]) for choice in choices]
        return self._frame(told, usage=usage(choices, self._asked.choices))

    def _whole(self, choice: Choice, text: str) -> Event:
        ids, logprobs = choice.reading.token_ids, choice.reading.logprobs
        part = Part(start=0, token_ids=ids, logprobs=logprobs, text=text, over=True)
        return self._choice(choice, part)

    def events(self, choice: Choice, part: Part) -> list[Event]:
        """The event of a part."""
        return [self._frame([self._choice(choice, part)])]

    def _choice(self, choice: Choice, part: Part) -> Event:
        told: Event = {
            "index": choice.index,
            "text": part.text,
            "logprobs": self._told_logprobs(choice, part) if self._logprobs else None,
            "finish_reason": None,
        }
        told |= self._ids(choice, part)
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


# --- chat ----------------------------------------------------------------------------------------

# POST /v1/chat/completions: messages by the model's chat template, and the message behind them.


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
    answer = _ChatAnswer(service, tokenizer, body, text)
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
            items = items_of(
                choices,
                answer.events,
                first=answer.first(choices),
                last=lambda: answer.last(choices),
            )
            return await streamed(request, items)
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


class _ChatAnswer(_Answer):
    """Makes the answer, whole or event by event."""

    def __init__(
        self, service: Service, tokenizer: ModelTokenizer, body: ChatBody, prompt: str
    ) -> None:
        super().__init__(service, tokenizer, body, "chat.completion.chunk")
        self._tools = body.used_tools
        self._prompt = prompt
        self._messages: dict[int, Message] = {}

    async def whole(self, choices: Sequence[Choice]) -> Event:
        """The answer with all choices at their end.

        Raises:
            Failed: if one of them fails.
        """
        async for choice, part in parts_until_failure(choices):
            self._changes(choice, part)
        told = [self._whole(choice) for choice in choices]
        return self._frame(told, "chat.completion", usage(choices, self._asked.choices))

    def _whole(self, choice: Choice) -> Event:
        reading = choice.reading
        told: Event = {
            "index": choice.index,
            "message": self._message(choice).told(),
            "logprobs": self._told_logprobs(reading.token_ids, reading.logprobs),
            **self._at_end(choice),
        }
        if self._asked.return_token_ids:
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
        logprobs = self._told_logprobs(part.token_ids, part.logprobs)
        more: Event = {"logprobs": logprobs, **self._ids(choice, part)}
        if part.over:
            more |= self._at_end(choice)
        # Tokens whose text is held back say nothing to a client that wants text alone.
        if last or part.over or self._logprobs or self._asked.return_token_ids:
            yield self._event(choice, last, more)

    def _changes(self, choice: Choice, part: Part) -> list[dict[str, Any]]:
        message = self._message(choice)
        changes = message.push(part.text)
        return changes + message.finish() if part.over else changes

    def _message(self, choice: Choice) -> Message:
        if choice.index not in self._messages:
            parser = self._tokenizer.parser(self._prompt, self._tools)
            self._messages[choice.index] = Message(parser)
        return self._messages[choice.index]

    def _at_end(self, choice: Choice) -> Event:
        told = told_at_end(self._service, choice)
        if self._message(choice).calls and told["finish_reason"] == "stop":
            told["finish_reason"] = "tool_calls"
        return told

    def _event(
        self, choice: Choice, delta: Mapping[str, Any], more: Mapping[str, Any] | None = None
    ) -> Event:
        told = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._frame([{**told, **(more or {})}])

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
