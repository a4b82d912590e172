"""POST /generate: responses, as a whole or as server-sent events, in SGLang's names.

A body has one prompt or several, and asks for ``n`` responses to each. A response stays open
through pauses, new weights and engines that fail. Its last event has ``weight_versions``, the label
of the weights that sampled each token.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

import msgspec
from aiohttp import web

from aprilsched.errors import ConfigError
from aprilsched.gateway.reading import Part, Reading, TextRules, parts_of
from aprilsched.gateway.responses import Asked, Response
from aprilsched.gateway.service import SERVICE, Service
from aprilsched.gateway.tokenizer import Detokenizer
from aprilsched.sampling import sampling_params
from aprilsched.serving import (
    DONE,
    Item,
    PromptsBody,
    Refused,
    Unavailable,
    as_json,
    body_of,
    finish_reason,
    streamed,
    token_logprobs,
)
from aprilsched.types import Prompt, SamplingParams

GROUP_HEADER = "X-Aprilsched-Group"
"""Names the group that the responses to a request belong to."""

_NEW_TOKENS = 128
"""SGLang's default of max_new_tokens."""
_LONGEST_NAME = 256
_RETRYABLE = 500
"""Statuses from here on are no fault of the request."""


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer one body: with one response, or with a list where it asks for several."""
    service = request.app[SERVICE]
    body = await body_of(request, PromptsBody)
    by_text = body.text is not None
    if by_text:
        body = await _tokenized(service, body)
    asked, rules, several = _asked(service, body, request.headers.get(GROUP_HEADER))
    responses = begin(service, asked)
    try:
        readings = [
            Reading(service.responses, response, _detokenizer(service, response, rule), rule)
            for response, rule in zip(responses, rules, strict=True)
        ]
        answers = _Answers(service, readings, several=several, logprobs=body.return_logprob)
        if body.stream:
            # A client that sends text knows SGLang's default form, which repeats everything.
            return await streamed(request, _items(answers, repeating=by_text))
        return await answers.whole()
    finally:
        for response in responses:
            service.responses.leave(response)


async def _tokenized(service: Service, body: PromptsBody) -> PromptsBody:
    """`body` with token ids in the place of its text."""
    if body.input_ids is not None:
        raise Refused("Both text and input_ids are given; give either.")
    texts = [body.text] if isinstance(body.text, str) else body.text or []
    check_amount(service, len(texts))
    ids = await service.texts.encoded(texts, service.context_tokens)
    if not all(ids):
        raise Refused("text cannot be empty.")
    tokens: Any = ids[0] if isinstance(body.text, str) else ids
    return msgspec.structs.replace(body, text=None, input_ids=tokens)


def _detokenizer(service: Service, response: Response, rules: TextRules) -> Detokenizer | None:
    if not service.texts.there:
        return None
    prompt: list[int] = response.prompt.input_ids.tolist()
    return service.texts.tokenizer.detokenizer(prompt, skip_special=rules.skip_special)


def check_amount(service: Service, prompts: int, n: int = 1) -> None:
    """Refuse more responses than the gateway may have, before anything is made for each.

    Raises:
        Refused: if `n` responses to each of so many prompts are too many.
    """
    asked, most = prompts * n, service.settings.max_requests
    if asked > most:
        raise Refused(f"The body asks for {asked} responses; ask for at most {most}.")


def begin(service: Service, asked: Sequence[Asked]) -> list[Response]:
    """The responses that are asked for, which begin here.

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
        return service.ask(*asked)
    except ConfigError as error:
        raise Refused(str(error)) from error


def _asked(
    service: Service, body: PromptsBody, group: str | None
) -> tuple[list[Asked], list[TextRules], bool]:
    """What a body asks for, in the order of the answers, and whether the answer is a list.

    Raises:
        Refused: if it cannot be asked for.
    """
    if body.input_ids is None:
        raise Refused("Either text, input_ids or input_embeds should be provided.")
    if not body.input_ids:
        raise Refused("input_ids cannot be empty.")
    # extra_key may be given and is not passed on: it keeps cached KV apart, which the scheduler
    # does itself where versions differ.
    if body.lora_path is not None:
        raise Refused("The gateway serves no adapters by name; leave lora_path out.")
    if isinstance(body.input_ids[0], list):
        check_amount(service, len(body.input_ids))
    prompts, one = _prompts(body.input_ids)
    params = body.sampling_params or {}
    each = params if isinstance(params, list) else [params] * len(prompts)
    if len(each) != len(prompts):
        raise Refused(f"There are {len(prompts)} prompts and {len(each)} sampling_params.")
    n = _number(each)
    check_amount(service, len(prompts), n)
    several = n > 1 or not one
    rids = _rids(body.rid, len(prompts) * n, several=several)
    if group is None:
        # Responses of one body belong together, under the name that the client gave to all.
        group = body.rid if several and isinstance(body.rid, str) else ""
    asked: list[Asked] = []
    rules: list[TextRules] = []
    try:
        for ids, given in zip(prompts, each, strict=True):
            rule, params = _rules(service, given)
            sampling = sampled(service, ids, params)
            near = group or (uuid.uuid4().hex if n > 1 else None)
            prompt = Prompt(input_ids=ids, sampling=sampling, affinity=near)  # type: ignore[arg-type]
            asked += [Asked(rid=next(rids), prompt=prompt, group=group) for _ in range(n)]
            rules += [rule] * n
    except ConfigError as error:
        raise Refused(str(error)) from error
    return asked, rules, several


def _rules(service: Service, given: Mapping[str, Any]) -> tuple[TextRules, Mapping[str, Any]]:
    """What of the text is wanted, and the sampling parameters without it.

    Raises:
        Refused: if there is a stop string and no tokenizer.
        ConfigError: if the stop strings cannot be used.
    """
    params = dict(given)
    stop: Any = params.pop("stop", None) or []
    keep, skip = params.pop("no_stop_trim", False), params.pop("skip_special_tokens", True)
    listed = cast("list[Any]", stop) if isinstance(stop, list) else None
    stops = [stop] if isinstance(stop, str) else listed
    if stops is None or not all(isinstance(each, str) for each in stops):
        raise Refused("stop has something else than strings; give a string or a list of strings.")
    ends: Any = params.get("stop_token_ids") or []
    if not (isinstance(ends, list) and all(type(i) is int for i in cast("list[Any]", ends))):
        raise Refused("stop_token_ids is no list of whole numbers; give token ids.")
    known: frozenset[int] = frozenset()
    if stops or service.texts.there:
        size = service.vocab_size
        # The tokenizer may know tokens that the model does not have.
        known = frozenset(
            each for each in service.texts.tokenizer.ends if size is None or each < size
        )
    rules = TextRules(
        stops=stops,
        keep_stop=bool(keep),
        skip_special=bool(skip),
        ends=known.union(cast("list[int]", ends)),
        ignore_ends=bool(params.get("ignore_eos")),
    )
    return rules, rules.given(params)


def _prompts(given: list[int | list[int]]) -> tuple[list[list[int]], bool]:
    """The token ids of each prompt, and whether there is one that stands by itself."""
    if isinstance(given[0], int):
        if not all(isinstance(each, int) for each in given):
            raise Refused("input_ids has numbers and lists; give token ids, or lists of them.")
        return [cast("list[int]", given)], True
    if not all(isinstance(each, list) and each for each in given):
        raise Refused("input_ids has an empty list or a number beside lists; give lists of ids.")
    return cast("list[list[int]]", given), False


def _number(params: Sequence[Mapping[str, Any]]) -> int:
    """The number of responses to each prompt."""
    found = [1 if each.get("n") is None else each["n"] for each in params]
    for n in found:
        if type(n) is not int or n < 1:
            raise Refused(f"n is {str(n)[:40]}; give a whole number, 1 or more.")
    if len(set(found)) > 1:
        raise Refused("n differs between the prompts; give one n for all.")
    return found[0]


def _rids(
    given: str | list[str] | None, count: int, *, several: bool
) -> Generator[str | None, None, None]:
    """The name of each response. As in SGLang one name for several gets a number."""
    if isinstance(given, list):
        if len(given) != count:
            raise Refused(f"There are {count} responses and {len(given)} rids; give one for each.")
        return (rid for rid in given)
    if given is None or not several:
        return (given for _ in range(count))
    return (f"{given}_{number}" for number in range(count))


def sampled(service: Service, input_ids: Sequence[int], given: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of a response to `input_ids`.

    Raises:
        Refused: if a token id would kill an engine.
        ConfigError: if a parameter cannot be used.
    """
    # How tokens travel between the gateway and its engines is not for a client to choose.
    params = {key: value for key, value in given.items() if key not in ("n", "stream_interval")}
    if params.get("extra") is not None:
        # Nobody has looked at what is in it, and an engine may fail for all because of it.
        raise Refused(
            "extra passes parameters on unchecked, which the gateway does not; give the parameters "
            "that it knows by their names."
        )
    if params.get("max_new_tokens") is None and params.get("max_tokens") is None:
        params["max_new_tokens"] = _NEW_TOKENS
    sampling = sampling_params(params)
    _check_vocabulary(service.vocab_size, input_ids, sampling)
    return sampling


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


async def _items(answers: _Answers, *, repeating: bool) -> AsyncGenerator[Item]:
    async with aclosing(parts_of(answers.readings)) as parts:
        async for at, part in parts:
            yield answers.event(at, answers.so_far(at, part) if repeating else part)
    yield DONE


class _Answers:
    """Makes answers and events of what is read."""

    def __init__(
        self, service: Service, readings: Sequence[Reading], *, several: bool, logprobs: bool
    ) -> None:
        self.readings = readings
        self._service = service
        self._several = several
        self._logprobs = logprobs
        self._texts = [""] * len(readings)

    async def whole(self) -> web.Response:
        """The answer when all have ended."""
        async with aclosing(parts_of(self.readings)) as parts:
            async for at, part in parts:
                if self.readings[at].failure:
                    return as_json(
                        {"error": {"message": self.readings[at].failure}},
                        self.readings[at].response.status,
                    )
                self.so_far(at, part)
        events = [self.event(at, self._all(at)) for at in range(len(self.readings))]
        return as_json(events if self._several else events[0])

    def so_far(self, at: int, part: Part) -> Part:
        """Everything up to `part`."""
        self._texts[at] += part.text
        return self._all(at)

    def _all(self, at: int) -> Part:
        reading = self.readings[at]
        return Part(
            start=0,
            token_ids=reading.token_ids,
            logprobs=reading.logprobs,
            text=self._texts[at],
            over=reading.over,
        )

    def event(self, at: int, part: Part) -> dict[str, Any]:
        """The event or answer with `part` of the response at a place."""
        reading = self.readings[at]
        index = {"index": at} if self._several else {}
        if reading.failure:
            status = reading.response.status
            error = {"message": reading.failure, "type": "internal_error", "code": status}
            return {"error": {**error, "retryable": status >= _RETRYABLE}, **index}
        text = {} if reading.text is None else {"text": part.text}
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
        meta["completion_tokens"] = total
        meta["cached_tokens"] = 0
        if part.over:
            meta["weight_versions"] = reading.labelled(self._service.label_of)
            meta["weight_versions_exact"] = reading.response.versions_exact
        return meta
