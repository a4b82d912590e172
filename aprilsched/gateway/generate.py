"""POST /generate: one response, as a whole or as server-sent events, in SGLang's names.

A response stays open through pauses, new weights and engines that fail. Its last event has
``weight_versions``, the label of the weights that sampled each token.
"""

from __future__ import annotations

import uuid
from typing import Any, cast

from aiohttp import web

from aprilsched.errors import ConfigError
from aprilsched.gateway.responses import Response
from aprilsched.gateway.service import SERVICE, Service
from aprilsched.sampling import sampling_params
from aprilsched.serving.answers import (
    DONE,
    STREAM_HEADERS,
    finish_reason,
    framed,
    token_logprobs,
)
from aprilsched.serving.bodies import GenerateBody, decode
from aprilsched.serving.refusals import Refusal, Refused, as_json
from aprilsched.types import Prompt, SamplingParams

__all__ = ["generate"]

_NEW_TOKENS = 128
"""SGLang's default of max_new_tokens."""
_LONGEST_RID = 256
_FULL = 503


class _Unavailable(Refusal):
    """The gateway takes no request now."""

    def answer(self) -> web.Response:
        return as_json({"error": {"message": str(self)}}, _FULL)


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer one prompt."""
    service = request.app[SERVICE]
    body = decode(await request.read(), GenerateBody)
    response = _asked(service, body)
    try:
        if body.stream:
            return await _streamed(request, service, response, logprobs=body.return_logprob)
        await response.end()
        if response.failure:
            return as_json({"error": {"message": response.failure}}, 500)
        return as_json(_event(service, response, 0, logprobs=body.return_logprob))
    finally:
        service.responses.leave(response)


def _asked(service: Service, body: GenerateBody) -> Response:
    """The response to `body`, which is begun here.

    Raises:
        Refused: if the body asks for something that the gateway or an engine would refuse.
        _Unavailable: if the gateway stops, or has as many requests as it may have.
    """
    if service.draining:
        raise _Unavailable("The gateway stops and takes no new requests.")
    if len(service.responses) >= service.settings.max_requests:
        raise _Unavailable(
            f"The gateway has {service.settings.max_requests} open responses; try again later."
        )
    rid = uuid.uuid4().hex if body.rid is None else body.rid
    if not 0 < len(rid) <= _LONGEST_RID:
        raise Refused(f"rid has {len(rid)} characters; give 1 to {_LONGEST_RID}.")
    if rid in service.responses:
        raise Refused(f"Duplicate request ID detected: {rid}")
    try:
        sampling = _sampling(service, body)
        return service.ask(rid, lambda key: _prompt(body, key, sampling))
    except ConfigError as error:
        raise Refused(str(error)) from error


def _prompt(body: GenerateBody, key: str, sampling: SamplingParams) -> Prompt:
    return Prompt(input_ids=body.input_ids, sampling=sampling, key=key)  # type: ignore[arg-type]


def _sampling(service: Service, body: GenerateBody) -> SamplingParams:
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
    params = dict(body.sampling_params or {})
    # How tokens travel between the gateway and its engines is not for a client to choose.
    params.pop("stream_interval", None)
    if params.pop("n", 1) not in (1, None):
        raise Refused("n is not 1; send each response as a request of its own.")
    if params.get("max_new_tokens") is None and params.get("max_tokens") is None:
        params["max_new_tokens"] = _NEW_TOKENS
    _check_vocabulary(service.vocab_size, body.input_ids, params.get("logit_bias"))
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
    request: web.Request, service: Service, response: Response, *, logprobs: bool
) -> web.StreamResponse:
    stream = web.StreamResponse(headers=STREAM_HEADERS)
    sent = 0
    try:
        await stream.prepare(request)
        while True:
            await response.news()
            if response.failure:
                error = {"message": response.failure, "type": "internal_error", "code": 500}
                await stream.write(framed({"error": {**error, "retryable": True}}))
                break
            over, tokens = response.over, len(response.token_ids)
            await stream.write(framed(_event(service, response, sent, logprobs=logprobs)))
            sent = tokens
            if over:
                break
        await stream.write(DONE)
    except ConnectionResetError:  # The client is gone.
        pass
    return stream


def _event(service: Service, response: Response, sent: int, *, logprobs: bool) -> dict[str, Any]:
    """The event with the tokens behind the first `sent` ones."""
    ids = response.token_ids[sent:]
    total = len(response.token_ids)
    meta: dict[str, Any] = {
        "id": response.rid,
        "finish_reason": finish_reason(
            response.finish, tokens=total, last=response.token_ids[-1] if total else 0
        ),
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
