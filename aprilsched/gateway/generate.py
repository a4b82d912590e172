"""POST /generate: responses, as a whole or as server-sent events, in SGLang's names.

A body has one prompt or several, and asks for ``n`` responses to each. A response stays open
through pauses, new weights and engines that fail. Its last event has ``weight_versions``, the label
of the weights that sampled each token.
"""

from __future__ import annotations

import itertools
import uuid
from base64 import b64encode
from collections.abc import AsyncGenerator, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Annotated, Any, cast

import msgspec
from aiohttp import web

from aprilsched.chat.openai_bodies import TextOptions
from aprilsched.companions import KINDS, TOP
from aprilsched.dialects.sglang import PromptsBody, finish_reason, token_logprobs
from aprilsched.errors import ConfigError
from aprilsched.gateway.reading import Part, Reading, TextRules, parts_of, parts_until_failure
from aprilsched.gateway.responses import Asked
from aprilsched.gateway.service import SERVICE, Service
from aprilsched.gateway.settings import MEDIA_FIELDS, TOP_FIELD
from aprilsched.sampling import sampling_params
from aprilsched.serving.bodies import BODIES, decode
from aprilsched.serving.refusals import Refused, Unavailable, as_json, error_event
from aprilsched.serving.streams import DONE, Event, Item, send_stream
from aprilsched.types import Media, MediaKind, Prompt, SamplingParams

GROUP_HEADER = "X-Aprilsched-Group"
"""Names the group that the responses to a request belong to."""

_NEW_TOKENS = 128
"""SGLang's default of max_new_tokens."""
_LONGEST_NAME = 256
_NOT_FOR_ENGINES = ("n", "stop", "no_stop_trim", "skip_special_tokens", "stream_interval")


class _Options(TextOptions, frozen=True, kw_only=True):
    """What of SGLang's sampling parameters is not for the engines."""

    n: Annotated[int, msgspec.Meta(ge=1)] | None = None


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer one body: with one response, or with a list where it asks for several."""
    service = request.app[SERVICE]
    async with request.app[BODIES].read(request) as content:
        content, fields = take_fields(service, content, {*service.settings.companions, TOP_FIELD})
        body = decode(content, PromptsBody)
    given = request.headers.get(GROUP_HEADER)
    asked, rules, several = await _asked(service, body, given, fields)
    with open_responses(service, asked, rules) as readings:
        answers = _Answers(
            service,
            several=several,
            logprobs=body.return_logprob,
            likely=fields.get(TOP_FIELD, 0),
        )
        if body.stream:
            # A client that sends text knows SGLang's default form, which repeats everything.
            repeating = body.text is not None
            return await streamed(request, answers.items(readings, repeating=repeating))
        async with aclosing(parts_until_failure(readings)) as parts:
            async for _ in parts:
                pass
        events = [answers.event(reading, reading.whole) for reading in readings]
        return as_json(events if several else events[0])


async def _asked(
    service: Service, body: PromptsBody, group: str | None, fields: Mapping[str, Any]
) -> tuple[list[Asked], list[TextRules], bool]:
    """What a body asks for, in the order of the answers, and whether the answer is a list.

    Raises:
        Refused: if it cannot be asked for.
    """
    if body.text is not None and body.input_ids is not None:
        raise Refused("Both text and input_ids are given; give either.")
    given, name = (body.text, "text") if body.input_ids is None else (body.input_ids, "input_ids")
    if given is None:
        raise Refused("Either text, input_ids or input_embeds should be provided.")
    # extra_key may be given and is not passed on: it keeps cached KV apart, which the scheduler
    # does itself where versions differ.
    if body.lora_path is not None:
        raise Refused("The gateway serves no adapters by name; leave lora_path out.")
    prompts, one = await prompts_of(service, given, name)
    check_media(fields, len(prompts))
    params: Any = body.sampling_params or {}
    each = cast("list[Any]", params if isinstance(params, list) else [params] * len(prompts))
    if len(each) != len(prompts):
        raise Refused(f"There are {len(prompts)} prompts and {len(each)} sampling_params.")
    try:
        options = [msgspec.convert(params, _Options) for params in each]
        n = options[0].n or 1
        if any((other.n or 1) != n for other in options):
            raise Refused("n differs between the prompts; give one n for all.")
        check_amount(service, len(prompts), n)
        several = n > 1 or not one
        rids = rids_of(body.rid, len(prompts) * n, several=several)
        if group is None:
            # Responses of one body belong together, under the name that the client gave to all.
            group = body.rid if several and isinstance(body.rid, str) else ""
        asked: list[Asked] = []
        rules: list[TextRules] = []
        for ids, params, option in zip(prompts, each, options, strict=True):
            rule = text_rules(service, option)
            near = group or (uuid.uuid4().hex if n > 1 else None)
            prompt = prompt_of(service, ids, rule.given(params), near, fields=fields)
            asked += [Asked(rid=next(rids), prompt=prompt, group=group) for _ in range(n)]
            rules += [rule] * n
    except msgspec.ValidationError as error:
        raise Refused(f"sampling_params: {error}.") from error
    except ConfigError as error:
        raise Refused(str(error)) from error
    return asked, rules, several


async def prompts_of(
    service: Service, given: str | Iterable[Any], name: str, n: int = 1
) -> tuple[list[list[int]], bool]:
    """The token ids of each prompt, and whether there is one that stands by itself.

    Args:
        service: has the tokenizer, and knows how much is too much.
        given: a text, token ids, or a list of several of either.
        name: the field that has it.
        n: number of responses to each.

    Raises:
        Refused: if there is none, if there are too many, or if they are of several kinds.
    """
    one = isinstance(given, str) or all(isinstance(each, int) for each in given)
    several: list[Any] = [given] if one else list(given)
    check_amount(service, len(several), n)
    kinds: set[type] = {type(each) for each in several}
    if len(kinds) > 1:
        raise Refused(f"{name} has texts, numbers and lists of numbers mixed; give one kind.")
    if str in kinds and all(several):
        several = await service.texts.encode_texts(several, service.context_tokens)
    if not all(several):
        raise Refused(f"{name} cannot be empty.")
    return several, one


def text_rules(
    service: Service, options: TextOptions, *, skip_special: bool | None = None
) -> TextRules:
    """What of the text is wanted; `skip_special` takes the place of what the request says of it.

    Raises:
        Refused: if there is a stop string and no tokenizer.
        ConfigError: if the stop strings cannot be used.
    """
    ends: frozenset[int] = frozenset()
    if options.stops or service.texts.there:
        size = service.vocab_size
        # The tokenizer may know tokens that the model does not have.
        found = service.texts.tokenizer.ends
        ends = frozenset(each for each in found if size is None or each < size)
    return TextRules(
        stops=options.stops,
        keep_stop=options.no_stop_trim,
        skip_special=options.skip_special_tokens if skip_special is None else skip_special,
        ends=ends.union(options.stop_token_ids or ()),
        ignore_ends=bool(options.ignore_eos),
    )


def check_amount(service: Service, prompts: int, n: int = 1) -> None:
    """Refuse more responses than the gateway may have, before anything is made for each.

    Raises:
        Refused: if `n` responses to each of so many prompts are too many.
    """
    asked, most = prompts * n, service.settings.max_requests
    if asked > most:
        raise Refused(f"The body asks for {asked} responses; ask for at most {most}.")


@contextmanager
def open_responses(
    service: Service, asked: Sequence[Asked], rules: Sequence[TextRules]
) -> Generator[list[Reading]]:
    """The responses that are asked for, which begin here, and are left together.

    Raises:
        Refused: if the gateway or an engine would refuse one of them; none begins then.
        Unavailable: if the gateway stops, or has as many requests as it may have.
    """
    if service.draining:
        raise Unavailable("The gateway stops and takes no new requests.")
    check_amount(service, len(asked))
    most = service.settings.max_requests
    for name in {name for ask in asked for name in (ask.rid, ask.group) if name is not None}:
        if len(name) > _LONGEST_NAME:
            raise Refused(f"A name has {len(name)} characters; give at most {_LONGEST_NAME}.")
    if "" in [ask.rid for ask in asked]:
        raise Refused(f"rid has 0 characters; give 1 to {_LONGEST_NAME}.")
    if len(service.responses) + service.responses.new(asked) > most:
        raise Unavailable(f"The gateway has {most} open responses; try again later.")
    try:
        responses = service.ask(*asked)
    except ConfigError as error:
        raise Refused(str(error)) from error
    try:
        readings: list[Reading] = []
        for index, (response, rule) in enumerate(zip(responses, rules, strict=True)):
            text = None
            if service.texts.there:
                prompt: list[int] = response.prompt.input_ids.tolist()
                text = service.texts.tokenizer.detokenizer(prompt, skip_special=rule.skip_special)
            readings.append(Reading(service.responses, response, text, rule, index))
        yield readings
    finally:
        for response in responses:
            service.responses.leave(response)


async def streamed(request: web.Request, items: AsyncGenerator[Item]) -> web.StreamResponse:
    """The answer that streams `items`; it counts among the open streams until it ends."""
    clients = request.app[SERVICE].clients
    clients.streams += 1
    try:
        return await send_stream(request, items)
    finally:
        clients.streams -= 1


def rids_of(
    given: str | list[str] | None, count: int, *, several: bool
) -> Generator[str | None, None, None]:
    """The name of each response. As in SGLang one name for several gets a number."""
    if isinstance(given, list) and len(given) != count:
        raise Refused(f"There are {count} responses and {len(given)} rids; give one for each.")
    if isinstance(given, list):
        yield from given
    elif given and several:
        yield from (f"{given}_{number}" for number in range(count))
    else:
        yield from itertools.repeat(given, count)


def take_fields(
    service: Service, content: bytes, companions: Collection[str] = ()
) -> tuple[bytes, dict[str, Any]]:
    """The body without the fields that the operator lets clients set, and these fields, among which
    are those of the `companions` that this call answers with.

    Raises:
        Malformed: if it is no object.
    """
    if not (service.settings.client_fields or any(name.encode() in content for name in companions)):
        return content, {}
    body = decode(content, dict[str, msgspec.Raw])
    found = [name for name in (*service.settings.passed_on, *companions) if name in body]
    fields = {name: msgspec.json.decode(body.pop(name)) for name in found}
    fields = {name: value for name, value in fields.items() if value is not None}
    return (msgspec.json.encode(body) if found else content), fields


def check_media(fields: Mapping[str, Any], prompts: int) -> None:
    """Refuse media for several prompts.

    Raises:
        Refused: if there are some.
    """
    if prompts > 1 and fields.keys() & MEDIA_FIELDS.keys():
        raise Refused("There are several prompts with media; send each in a body of its own.")


def media_of(kind: MediaKind, given: Any) -> list[Media]:
    """The media in a field of a body: one, or a list.

    Raises:
        Refused: if one is no URL: a client must not have an engine open the files of its machine.
    """
    several: list[Any] = cast("list[Any]", given) if isinstance(given, list) else [given]
    for each in several:
        if not isinstance(each, str) or not each.startswith(("data:", "http://", "https://")):
            raise Refused(f"{kind} is no URL that begins with data:, http: or https:; give one.")
    return [Media(kind, each) for each in several]


def prompt_of(
    service: Service,
    input_ids: Sequence[int],
    given: Mapping[str, Any],
    near: str | None,
    *,
    fields: Mapping[str, Any],
) -> Prompt:
    """The prompt of a response to `input_ids`, with the sampling parameters that are `given` and
    the further `fields` of the request; those with the same `near` are sent to one engine.

    Raises:
        Refused: if a token id would kill an engine.
        ConfigError: if a parameter cannot be used.
    """
    # How tokens travel between the gateway and its engines is not for a client to choose.
    params = {key: value for key, value in given.items() if key not in _NOT_FOR_ENGINES}
    for name in ("extra", "request", "keep"):
        if params.get(name) is not None:
            # Nobody has looked at what is in it, and an engine may fail for all because of it.
            raise Refused(
                f"{name} passes parameters on unchecked, which the gateway does not; give the "
                "parameters that it knows by their names."
            )
    companions = service.settings.companions
    check_likely(service, fields.get(TOP_FIELD, 0), TOP_FIELD)
    for name in companions.keys() & fields.keys() - {TOP_FIELD}:
        if not isinstance(fields[name], bool):
            raise Refused(f"{name} is {fields[name]!r}; give true or false.")
    plain = fields.keys() - MEDIA_FIELDS.keys() - companions.keys() - {TOP_FIELD}
    params["request"] = {name: fields[name] for name in plain}
    media = [media_of(MEDIA_FIELDS[k], fields[k]) for k in MEDIA_FIELDS if k in fields]
    if params.get("max_new_tokens") is None and params.get("max_tokens") is None:
        params["max_new_tokens"] = _NEW_TOKENS
    sampling = sampling_params(params)
    _check_vocabulary(service.vocab_size, input_ids, sampling)
    ids: Any = input_ids
    return Prompt(
        input_ids=ids,
        sampling=sampling,
        affinity=near,
        media=tuple(itertools.chain.from_iterable(media)),
        companions=tuple(each.name for name, each in companions.items() if fields.get(name)),
    )


def check_likely(service: Service, asked: Any, name: str) -> None:
    """Refuse a number of likely tokens that the gateway does not ask its servers for.

    Raises:
        Refused: with what to give.
    """
    most = service.settings.top_logprobs
    if not isinstance(asked, int) or not 0 <= asked <= most:
        raise Refused(
            f"{name} is {asked!r}; give a number from 0 to {most}, or start the gateway with a "
            "larger --top-logprobs."
        )


def _check_vocabulary(size: int | None, input_ids: Sequence[int], sampling: SamplingParams) -> None:
    """Refuse, as SGLang does, token ids that would kill the scheduler of an engine."""
    if size is None:
        return
    smallest, largest = min(input_ids), max(input_ids)
    if smallest < 0 or largest >= size:
        wrong = smallest if smallest < 0 else largest
        raise Refused(f"input_ids must be in [0, {size - 1}], got {wrong}.")
    for key in sampling.extra.get("logit_bias", ()):
        if not (key.isdecimal() and int(key) < size):
            raise Refused(f"logit_bias must has keys in [0, {size - 1}], got {key}.")
    for token_id in sampling.stop_token_ids:
        if not 0 <= token_id < size:
            raise Refused(f"stop_token_ids must be in [0, {size - 1}], got {token_id}.")


class _Answers:
    """Makes answers and events of what is read."""

    def __init__(self, service: Service, *, several: bool, logprobs: bool, likely: int) -> None:
        self._service = service
        self._several = several
        self._logprobs = logprobs
        self._likely = likely

    async def items(self, readings: Sequence[Reading], *, repeating: bool) -> AsyncGenerator[Item]:
        """The items of a stream; one that is `repeating` has in each event all that came so far."""
        async with aclosing(parts_of(readings)) as parts:
            async for reading, part in parts:
                yield self.event(reading, reading.whole if repeating else part)
        yield DONE

    def event(self, reading: Reading, part: Part) -> Event:
        """The event or answer with `part` of a response."""
        index = {"index": reading.index} if self._several else {}
        if reading.failure:
            self._service.refused(reading.response.status)
            return {**error_event(reading.failure, reading.response.status), **index}
        text = {} if reading.detokenizer is None else {"text": part.text}
        told = {**text, "output_ids": part.token_ids, "meta_info": self._meta(reading, part)}
        return {**told, **index}

    def _meta(self, reading: Reading, part: Part) -> dict[str, Any]:
        total = len(reading.token_ids)
        last = reading.token_ids[-1] if total else 0
        reason = finish_reason(reading.finish, tokens=total, last=last)
        if reason is not None and reading.matched is not None:
            reason["matched"] = reading.matched
        if reason is not None and reading.finish == "abort":
            reason["message"] = reading.response.message
        meta: dict[str, Any] = {
            "id": reading.response.rid,
            "finish_reason": reason,
            "prompt_tokens": reading.response.prompt_tokens,
            "weight_version": self._service.label,
        }
        if self._logprobs:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = token_logprobs(part.token_ids, part.logprobs)
            meta["output_token_logprobs_length"] = total
            if self._likely:
                meta["output_top_logprobs"] = reading.likely(part, self._likely)
        meta["completion_tokens"] = total
        meta["cached_tokens"] = 0
        meta |= _told_rows(reading, part)
        if part.over:
            meta["weight_versions"] = reading.labelled(self._service.label_of)
            meta["weight_versions_exact"] = reading.response.versions_exact
        return meta


def _told_rows(reading: Reading, part: Part) -> dict[str, Any]:
    """The rows of the companions that the client asked for, as SGLang tells them: those of tokens
    with their tokens, those of the context at the end."""
    told: dict[str, Any] = {}
    response, total = reading.response, len(reading.token_ids)
    for name in response.prompt.companions or ():
        if name == TOP:
            continue
        per_token = KINDS[name] == "token"
        begin, end = (part.start, total) if per_token else (0, response.prompt_tokens + total - 1)
        rows = response.rows(name, begin, end) if per_token or part.over else None
        if rows is not None and per_token:
            told[f"output_token_{name}"] = [rows.row(i).tolist() for i in range(len(rows))]
            told[f"output_token_{name}_length"] = total
        elif rows is not None:
            told[name] = b64encode(rows.values.astype("<i4").tobytes()).decode()
        if part.over and name in response.companions:
            told[f"{name}_exact"] = bool(response.companions[name].exact[:total].all())
    return told
