"""The choices of one request: they begin, are read and are left together."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from aiohttp import web

from aprilsched.errors import ConfigError
from aprilsched.gateway.generate import begin, sampled
from aprilsched.gateway.openai.bodies import ChatBody, CompletionBody, sampling_of
from aprilsched.gateway.openai.errors import error_content
from aprilsched.gateway.reading import Part, Reading, TextRules, labelled, parts_of
from aprilsched.gateway.responses import Asked
from aprilsched.gateway.service import Service
from aprilsched.serving.answers import DONE, STREAM_HEADERS, framed
from aprilsched.serving.refusals import Refusal, as_json
from aprilsched.types import Prompt

__all__ = [
    "Choice",
    "Event",
    "Failed",
    "begun",
    "parts_until_failure",
    "room",
    "streamed",
    "told_at_end",
    "usage",
]

Event: TypeAlias = dict[str, Any]


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


async def streamed(
    request: web.Request,
    choices: Sequence[Choice],
    events: Callable[[Choice, Part], Iterable[Event]],
    *,
    first: Iterable[Event] = (),
    last: Callable[[], Event | None],
) -> web.StreamResponse:
    """A stream of the events `first`, then of the `events` of all parts, and then of `last`."""
    stream = web.StreamResponse(headers=STREAM_HEADERS)
    try:
        await stream.prepare(request)
        for event in first:
            await stream.write(framed(event))
        try:
            async with aclosing(parts_until_failure(choices)) as parts:
                async for choice, part in parts:
                    for event in events(choice, part):
                        await stream.write(framed(event))
            final = last()
        except Failed as failed:
            final = error_content(str(failed), failed.status)
        if final is not None:
            await stream.write(framed(final))
        await stream.write(DONE)
    except ConnectionResetError:  # The client is gone.
        pass
    return stream


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
        "weight_versions": labelled(reading.segments, service.label_of),
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
