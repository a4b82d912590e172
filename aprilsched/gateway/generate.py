"""POST /generate: responses, as a whole or as server-sent events, in SGLang's names.

A body has one prompt or several, and asks for ``n`` responses to each. A response stays open
through pauses, new weights and engines that fail. Its last event has ``weight_versions``, the label
of the weights that sampled each token.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

from aiohttp import web

from aprilsched.errors import ConfigError
from aprilsched.gateway.responses import Asked, Response
from aprilsched.gateway.service import SERVICE, Service
from aprilsched.sampling import sampling_params
from aprilsched.serving.answers import (
    DONE,
    STREAM_HEADERS,
    finish_reason,
    framed,
    token_logprobs,
)
from aprilsched.serving.bodies import PromptsBody, decode
from aprilsched.serving.refusals import Refusal, Refused, as_json
from aprilsched.types import Prompt, SamplingParams

__all__ = ["GROUP_HEADER", "begin", "generate", "with_news"]

GROUP_HEADER = "X-Aprilsched-Group"
"""Names the group that the responses to a request belong to."""

_NEW_TOKENS = 128
"""SGLang's default of max_new_tokens."""
_LONGEST_NAME = 256
_FULL = 503


class _Unavailable(Refusal):
    """The gateway takes no request now."""

    def answer(self) -> web.Response:
        return as_json({"error": {"message": str(self)}}, _FULL)


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer one body: with one response, or with a list where it asks for several."""
    service = request.app[SERVICE]
    body = decode(await request.read(), PromptsBody)
    asked, several = _asked(service, body, request.headers.get(GROUP_HEADER))
    responses = begin(service, asked)
    try:
        if body.stream:
            return await _streamed(
                request, service, responses, several=several, logprobs=body.return_logprob
            )
        for response in responses:
            await response.end()
            if response.failure:
                return as_json({"error": {"message": response.failure}}, response.status)
        events = [_event(service, r, 0, logprobs=body.return_logprob) for r in responses]
        return as_json(
            [{**event, "index": at} for at, event in enumerate(events)] if several else events[0]
        )
    finally:
        for response in responses:
            service.responses.leave(response)


def begin(service: Service, asked: Sequence[Asked]) -> list[Response]:
    """The responses that are asked for, which begin here.

    Raises:
        Refused: if the gateway or an engine would refuse one of them; none begins then.
        _Unavailable: if the gateway stops, or has as many requests as it may have.
    """
    if service.draining:
        raise _Unavailable("The gateway stops and takes no new requests.")
    most = service.settings.max_requests
    if len(asked) > most:
        raise Refused(f"The body asks for {len(asked)} responses; ask for at most {most}.")
    for name in {name for ask in asked for name in (ask.rid, ask.group) if name is not None}:
        if len(name) > _LONGEST_NAME:
            raise Refused(f"A name has {len(name)} characters; give at most {_LONGEST_NAME}.")
    if "" in [ask.rid for ask in asked]:
        raise Refused(f"rid has 0 characters; give 1 to {_LONGEST_NAME}.")
    if len(service.responses) + service.responses.new(asked) > most:
        raise _Unavailable(f"The gateway has {most} open responses; try again later.")
    try:
        return service.ask(*asked)
    except ConfigError as error:
        raise Refused(str(error)) from error


def _asked(service: Service, body: PromptsBody, group: str | None) -> tuple[list[Asked], bool]:
    """What a body asks for, in the order of the answers, and whether the answer is a list.

    Raises:
        Refused: if it cannot be asked for.
    """
    if body.text is not None:
        raise Refused("The gateway has no tokenizer and cannot take text; provide input_ids.")
    if body.input_ids is None:
        raise Refused("Either text, input_ids or input_embeds should be provided.")
    if not body.input_ids:
        raise Refused("input_ids cannot be empty.")
    # extra_key may be given and is not passed on: it keeps cached KV apart, which the scheduler
    # does itself where versions differ.
    if body.lora_path is not None:
        raise Refused("The gateway serves no adapters by name; leave lora_path out.")
    prompts, one = _prompts(body.input_ids)
    params = body.sampling_params or {}
    each = params if isinstance(params, list) else [params] * len(prompts)
    if len(each) != len(prompts):
        raise Refused(f"There are {len(prompts)} prompts and {len(each)} sampling_params.")
    n = _number(each)
    several = n > 1 or not one
    rids = _rids(body.rid, len(prompts) * n, several=several)
    if group is None:
        # Responses of one body belong together, under the name that the client gave to all.
        group = body.rid if several and isinstance(body.rid, str) else ""
    asked: list[Asked] = []
    try:
        for ids, given in zip(prompts, each, strict=True):
            sampling = _sampling(service, ids, given)
            near = group or (uuid.uuid4().hex if n > 1 else None)
            prompt = Prompt(input_ids=ids, sampling=sampling, affinity=near)  # type: ignore[arg-type]
            asked += [Asked(rid=next(rids), prompt=prompt, group=group) for _ in range(n)]
    except ConfigError as error:
        raise Refused(str(error)) from error
    return asked, several


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
    found = {1 if each.get("n") is None else each["n"] for each in params}
    if len(found) > 1:
        raise Refused("n differs between the prompts; give one n for all.")
    (n,) = found
    if type(n) is not int or n < 1:
        raise Refused(f"n is {n}; give a whole number, 1 or more.")
    return n


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


def _sampling(service: Service, input_ids: list[int], given: Mapping[str, Any]) -> SamplingParams:
    # How tokens travel between the gateway and its engines is not for a client to choose.
    params = {key: value for key, value in given.items() if key not in ("n", "stream_interval")}
    if params.get("max_new_tokens") is None and params.get("max_tokens") is None:
        params["max_new_tokens"] = _NEW_TOKENS
    _check_vocabulary(service.vocab_size, input_ids, params.get("logit_bias"))
    return sampling_params(params)


def _check_vocabulary(size: int | None, input_ids: list[int], bias: object) -> None:
    """Refuse, as SGLang does, token ids that would kill the scheduler of an engine."""
    if size is None:
        return
    smallest, largest = min(input_ids), max(input_ids)
    if smallest < 0 or largest >= size:
        wrong = smallest if smallest < 0 else largest
        raise Refused(f"input_ids must be in [0, {size - 1}], got {wrong}.")
    # The other types are refused with the sampling parameters.
    for key in cast("dict[object, object]", bias) if isinstance(bias, dict) else ():
        if not (isinstance(key, str) and key.isdecimal() and int(key) < size):
            raise Refused(f"logit_bias must has keys in [0, {size - 1}], got {key}.")


async def _streamed(
    request: web.Request,
    service: Service,
    responses: Sequence[Response],
    *,
    several: bool,
    logprobs: bool,
) -> web.StreamResponse:
    stream = web.StreamResponse(headers=STREAM_HEADERS)
    sent = [0] * len(responses)
    try:
        await stream.prepare(request)
        async with aclosing(with_news(responses)) as news:
            async for at in news:
                event = _event(service, responses[at], sent[at], logprobs=logprobs)
                sent[at] = len(responses[at].token_ids)
                await stream.write(framed({**event, "index": at} if several else event))
        await stream.write(DONE)
    except ConnectionResetError:  # The client is gone.
        pass
    return stream


async def with_news(responses: Sequence[Response]) -> AsyncGenerator[int, None]:
    """The place of each response that has new tokens or has ended, until all have ended."""
    if len(responses) == 1:
        over = False
        while not over:
            await responses[0].news()
            over = responses[0].over
            yield 0
        return
    waiting = {asyncio.ensure_future(r.news()): at for at, r in enumerate(responses)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for at in sorted([waiting.pop(each) for each in done]):
                if not responses[at].over:
                    waiting[asyncio.ensure_future(responses[at].news())] = at
                yield at
    finally:
        for each in waiting:
            each.cancel()


def _event(service: Service, response: Response, sent: int, *, logprobs: bool) -> dict[str, Any]:
    """The event with the tokens behind the first `sent` ones."""
    if response.failure:
        error = {"message": response.failure, "type": "internal_error", "code": response.status}
        return {"error": {**error, "retryable": True}}
    ids = response.token_ids[sent:]
    total = len(response.token_ids)
    reason = finish_reason(
        response.finish, tokens=total, last=response.token_ids[-1] if total else 0
    )
    if response.finish == "abort" and reason is not None:
        reason["message"] = response.message
    meta: dict[str, Any] = {
        "id": response.rid,
        "finish_reason": reason,
        "prompt_tokens": response.prompt_tokens,
        "weight_version": service.label,
    }
    if logprobs:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = token_logprobs(ids, response.logprobs[sent:])
        meta["output_token_logprobs_length"] = total
    meta["completion_tokens"] = total
    meta["cached_tokens"] = 0
    if response.over:
        meta["weight_versions"] = _spans(service, response)
        meta["weight_versions_exact"] = response.versions_exact
    return {"output_ids": ids, "meta_info": meta}


def _spans(service: Service, response: Response) -> list[dict[str, str | int]]:
    """The label of each token, as SGLang writes it: adjacent tokens of one label are one span."""
    found: list[dict[str, str | int]] = []
    for part in response.segments:
        label = service.label_of(part.version)
        if found and found[-1]["version"] == label:
            found[-1]["end"] = part.end
        elif part.start < part.end:
            found.append({"version": label, "start": part.start, "end": part.end})
    return found
