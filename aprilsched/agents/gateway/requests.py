"""Requests of every dialect: each response is a separate rollout.

A body has one or more prompts, and requests ``n`` responses per prompt. A response stays open
through pauses, weight updates and engine failures, and its end has the label of the weights that
sampled each token. Text is tokenised and detokenised with the model's own tokenizer files.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from aprilsched.agents.chat.openai_bodies import ForcedCalls, Message, for_template
from aprilsched.agents.dialects.sglang import check_vocabulary
from aprilsched.agents.dialects.values import Asked, Chat, Dialect, Names, Question, TextOptions
from aprilsched.agents.gateway.reading import Failed, Reading, TextRules, parts_of
from aprilsched.agents.gateway.responses import NewResponse
from aprilsched.agents.gateway.service import SERVICE, Service
from aprilsched.agents.gateway.settings import MEDIA_FIELDS, TOP_FIELD
from aprilsched.agents.serving.bodies import BODIES, decode
from aprilsched.agents.serving.refusals import Refused, Unavailable, as_json
from aprilsched.agents.serving.streams import STREAM_STATUS, Item, send_stream
from aprilsched.errors import ConfigError
from aprilsched.kernel.values.sampling import sampling_params
from aprilsched.types import Media, Prompt

GROUP_HEADER = "X-Aprilsched-Group"
"""Header that names the group of a request's responses."""
REQUEST_ID: ContextVar[str] = ContextVar("REQUEST_ID", default="-")
"""Id of the request in the log: its rid, or its X-Request-Id while the rid is not read yet."""

_NOT_FOR_ENGINES = ("n", "stop", "no_stop_trim", "skip_special_tokens", "stream_interval")
_UNCHECKED = ("extra", "request", "keep")
"""Sampling parameters that pass other fields on unchecked."""


def answer_in(dialect: type[Dialect]) -> Handler:
    """Return the handler for the requests of a dialect."""

    async def handle(request: web.Request) -> web.StreamResponse:
        service = request.app[SERVICE]
        rows = {*service.settings.companions, TOP_FIELD} if dialect.is_native else ()
        async with request.app[BODIES].read(request) as content:
            size = len(content)
            content, fields = _take_fields(service, content, rows)
            body = decode(content, dialect.body)
        asked = dialect.parse(body)
        answer_name = asked.name if isinstance(asked.name, str) else uuid.uuid4().hex
        REQUEST_ID.set(answer_name)
        service.check_model(asked.model)
        service.admission.check_amount(asked.count)
        name, likely = asked.likely or (TOP_FIELD, fields.get(TOP_FIELD, 0))
        _check_likely(service, likely, name)
        fields |= {TOP_FIELD: likely} if likely else {}
        inputs = await _inputs(service, dialect, asked, fields, size)
        group = request.headers.get(GROUP_HEADER)
        asked_for = _new_responses(service, asked, inputs, fields, group, answer_name)
        if (cause := service.controls.stranded_cause) is not None:
            raise Unavailable(cause)
        with service.admission.open(asked_for) as responses:
            if dialect.is_native and len(responses) == 1:
                REQUEST_ID.set(responses[0].rid)  # The id in its answer.
            repeated = [each for each in inputs for _ in range(asked.n)]
            readings = [
                Reading(
                    responses=service.responses,
                    response=response,
                    rules=each.rules,
                    detokenizer=service.texts.detokenizer(response.prompt, each.rules.skip_special),
                    message=None if each.parser is None else Message(each.parser()),
                    index=index,
                    likely=likely,
                    label_of=service.labels.__getitem__,
                )
                for index, (response, each) in enumerate(zip(responses, repeated, strict=True))
            ]
            names = Names(
                answer=answer_name,
                model=asked.model or service.model_name,
                token=service.texts.text_of,
                label=lambda: service.label,
            )
            answer = dialect(asked, names)
            if asked.stream:
                service.clients.streams += 1
                try:
                    items = _items(service, asked, answer, readings)
                    return await send_stream(request, items, dialect.ping)
                finally:
                    service.clients.streams -= 1
            async with aclosing(parts_of(readings)) as parts:
                async for reading, _ in parts:
                    if reading.failure:
                        raise Failed(reading.response)
            return as_json(answer.whole([each.whole for each in readings]))

    return handle


async def _items(
    service: Service, asked: Asked, answer: Dialect, readings: Sequence[Reading]
) -> AsyncGenerator[Item]:
    dialect = type(answer)
    for event in answer.first():
        yield event
    try:
        async with aclosing(parts_of(readings)) as parts:
            async for reading, part in parts:
                if not reading.failure:
                    for event in answer.events(reading.whole if asked.repeats else part):
                        yield event
                    continue
                if not answer.survives_failure:
                    raise Failed(reading.response)
                status = reading.response.status
                STREAM_STATUS.set(status)
                service.refused(status)
                index = {"index": reading.index} if asked.is_listed else {}
                yield {**dialect.stream_error(reading.failure, status), **index}
        for event in answer.last([each.whole for each in readings]):
            yield event
    except Failed as failed:
        STREAM_STATUS.set(failed.status)
        service.refused(failed.status)
        yield dialect.stream_error(str(failed), failed.status)
    yield dialect.done


@dataclass(frozen=True, kw_only=True)
class _Input:
    """A prompt as tokens.

    Attributes:
        ids: its token ids.
        rules: the text options of the response.
        new_tokens: max tokens of the response; None if its parameters set them.
        parser: makes the parser of the response's text; None if this is not a chat.
    """

    ids: Sequence[int]
    rules: TextRules
    new_tokens: int | None
    parser: Callable[[], Any] | None


async def _inputs(
    service: Service, dialect: type[Dialect], asked: Asked, fields: dict[str, Any], size: int
) -> list[_Input]:
    """Return the tokens of each prompt; the prompts of a body have the same kind.

    Raises:
        Refused: if the gateway has no tokenizer, or a prompt has no tokens.
        ConfigError: if a prompt cannot be used, or does not fit the context.
        Unavailable: if too much text waits for a thread.
    """
    prompts = [each.prompt for each in asked.questions]
    first, skip_special = prompts[0], None
    parser: Callable[[], Any] | None = None
    if isinstance(first, Chat):
        text = await _render(service, first, fields, size)
        tokenizer = service.texts.tokenizer
        # The delimiters of regions may be special tokens.
        skip_special = False if tokenizer.parses else None
        parser = ForcedCalls if first.forced else partial(tokenizer.parser, text, first.tools)
        # The template has already written the special tokens.
        several = await service.texts.encode_texts([text], service.context_tokens, special=False)
    elif isinstance(first, str):
        texts = cast("list[str]", prompts)
        several = await service.texts.encode_texts(texts, service.context_tokens)
    else:
        several = cast("list[list[int]]", prompts)
    if not dialect.is_native:
        _ = service.texts.tokenizer  # Every answer has text, so the tokenizer is required.
    if not all(several):
        raise Refused("The prompt has no tokens; give some text.")
    return [
        _Input(
            ids=ids,
            rules=_text_rules(service, question.text, skip_special),
            new_tokens=_new_tokens(service, dialect, question, ids),
            parser=parser,
        )
        for ids, question in zip(several, asked.questions, strict=True)
    ]


async def _render(service: Service, chat: Chat, fields: dict[str, Any], size: int) -> str:
    """Render a chat of `size` bytes; append its images to the further fields."""
    tokenizer = service.texts.tokenizer
    if chat.tools and not tokenizer.knows_tools:
        raise ConfigError("The model's chat template has no place for tools; leave tools out.")
    if chat.tools and not (tokenizer.parses or chat.forced):
        raise ConfigError(
            "How the model writes tool calls is not known; start the gateway with "
            "--response-template, or leave tools out."
        )
    messages, images = for_template(chat.messages)
    if images and "image_data" not in service.settings.client_fields:
        raise ConfigError("This gateway takes no images; start it with --client-fields image_data.")
    if images and "image_data" in fields:
        raise ConfigError(
            "The body has image_data in addition to the images of its messages; give all in the "
            "messages."
        )
    if images:
        fields["image_data"] = images
    return await tokenizer.work_out(
        lambda: tokenizer.render(messages, chat.tools, go_on=chat.goes_on, options=chat.options),
        size=size,
    )


def _text_rules(service: Service, options: TextOptions, skip_special: bool | None) -> TextRules:
    ends: frozenset[int] = frozenset()
    if options.stops or service.texts.there:
        size = service.vocab_size
        # The tokenizer may have tokens that the model lacks.
        found = service.texts.tokenizer.ends
        ends = frozenset(each for each in found if size is None or each < size)
    return TextRules(
        stops=options.stops,
        keep_stop=options.no_stop_trim,
        skip_special=options.skip_special_tokens if skip_special is None else skip_special,
        ends=ends.union(options.stop_token_ids or ()),
        ignore_ends=bool(options.ignore_eos),
    )


def _new_tokens(
    service: Service, dialect: type[Dialect], question: Question, ids: Sequence[int]
) -> int | None:
    wanted = question.max_tokens
    wanted = dialect.default_tokens if wanted is None else wanted
    context = service.context_tokens
    if dialect.is_native:
        return None if "max_tokens" in question.params else wanted
    if context is None and wanted is None:
        raise ConfigError(
            "The length of the model's context is not known; give max_completion_tokens."
        )
    if context is None:
        return wanted
    free = context - len(ids)
    if free <= 0:
        raise ConfigError(
            f"The prompt has {len(ids)} tokens, and the model's context is {context} tokens; "
            "shorten it."
        )
    if wanted is not None and wanted > free:
        raise ConfigError(
            f"`max_tokens` must be at most {free}, got {wanted}: the prompt has {len(ids)} tokens, "
            f"and the model's context is {context} tokens."
        )
    return free if wanted is None else wanted


def _new_responses(
    service: Service,
    asked: Asked,
    inputs: Sequence[_Input],
    fields: Mapping[str, Any],
    group: str | None,
    name: str,
) -> list[NewResponse]:
    """Return the responses of a request, in the order of the answer.

    Raises:
        ConfigError: if a parameter cannot be used.
        Refused: if an engine would refuse a prompt.
    """
    if len(inputs) > 1 and fields.keys() & MEDIA_FIELDS.keys():
        raise Refused("There are several prompts with media; send each in a body of its own.")
    several = asked.is_listed or asked.count > 1
    rids = _rids_of(asked.name, asked.count, several=several)
    together = group or (name if several and isinstance(asked.name, str) else None)
    found: list[NewResponse] = []
    for each, question in zip(inputs, asked.questions, strict=True):
        near = together or (uuid.uuid4().hex if asked.n > 1 else None)
        params = each.rules.given(question.params)
        if each.new_tokens is not None:
            params["max_new_tokens"] = each.new_tokens
        # A shared seed would make every response the same.
        seeds = [] if asked.seed is None else [{"seed": asked.seed + i} for i in range(asked.n)]
        prompts = [
            _prompt_of(service, each.ids, params | seed, near, fields) for seed in seeds or [{}]
        ]
        found += [
            NewResponse(rid=next(rids), prompt=prompt, group=group or name)
            for prompt in itertools.islice(itertools.cycle(prompts), asked.n)
        ]
    return found


def _rids_of(
    given: str | list[str] | None, count: int, *, several: bool
) -> Generator[str | None, None, None]:
    """Yield the name of each response. As in SGLang, one name for several gets a number."""
    if isinstance(given, list) and len(given) != count:
        raise Refused(f"There are {count} responses and {len(given)} rids; give one for each.")
    if isinstance(given, list):
        yield from given
    elif given and several:
        yield from (f"{given}_{number}" for number in range(count))
    else:
        yield from itertools.repeat(given, count)


def _prompt_of(
    service: Service,
    input_ids: Sequence[int],
    params: Mapping[str, Any],
    near: str | None,
    fields: Mapping[str, Any],
) -> Prompt:
    # Clients may not choose how tokens travel between the gateway and its engines.
    params = {key: value for key, value in params.items() if key not in _NOT_FOR_ENGINES}
    for name in _UNCHECKED:
        if params.get(name) is not None:
            # A bad value in it may make an engine fail for all clients.
            raise Refused(
                f"{name} passes parameters on unchecked, which the gateway does not; give the "
                "parameters that it knows by their names."
            )
    companions = service.settings.companions
    for name in companions.keys() & fields.keys() - {TOP_FIELD}:
        if not isinstance(fields[name], bool):
            raise Refused(f"{name} is {fields[name]!r}; give true or false.")
    plain = fields.keys() - MEDIA_FIELDS.keys() - companions.keys() - {TOP_FIELD}
    params["request"] = {name: fields[name] for name in plain}
    sampling = sampling_params(params)
    if (size := service.vocab_size) is not None:
        check_vocabulary(size, input_ids, sampling)
    ids: Any = input_ids
    return Prompt(
        input_ids=ids,
        sampling=sampling,
        affinity=near,
        media=_media_of(fields),
        companions=tuple(each.name for name, each in companions.items() if fields.get(name)),
    )


def _media_of(fields: Mapping[str, Any]) -> tuple[Media, ...]:
    """Return the media in the fields of a body: one, or a list, in each.

    Raises:
        Refused: if one is not a URL: a client must not have an engine open files of its machine.
    """
    found: list[Media] = []
    for name, kind in MEDIA_FIELDS.items():
        given: Any = fields.get(name, [])
        for each in cast("list[Any]", given if isinstance(given, list) else [given]):
            if not isinstance(each, str) or not each.startswith(("data:", "http://", "https://")):
                raise Refused(f"{kind} must be a URL that starts with data:, http: or https:.")
            found.append(Media(kind, each))
    return tuple(found)


def _take_fields(
    service: Service, content: bytes, rows: Collection[str]
) -> tuple[bytes, dict[str, Any]]:
    """Return the body without the operator's client fields, and these fields.

    They include the fields of the `rows` that this dialect answers with.

    Raises:
        Malformed: if it is not an object.
    """
    if not (service.settings.client_fields or any(name.encode() in content for name in rows)):
        return content, {}
    body = decode(content, dict[str, msgspec.Raw])
    found = [name for name in (*service.settings.passed_on, *rows) if name in body]
    fields = {name: msgspec.json.decode(body.pop(name)) for name in found}
    fields = {name: value for name, value in fields.items() if value is not None}
    return (msgspec.json.encode(body) if found else content), fields


def _check_likely(service: Service, wanted: Any, name: str) -> None:
    most = service.settings.top_logprobs
    if not isinstance(wanted, int) or not 0 <= wanted <= most:
        raise Refused(
            f"{name} is {wanted!r}; give a number from 0 to {most}, or start the gateway with a "
            "larger --top-logprobs."
        )
