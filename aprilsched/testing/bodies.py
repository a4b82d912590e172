"""Request bodies as typed structs, and the sampling parameters in them.

Unknown fields of a body are ignored; an unknown sampling parameter fails the request, as in SGLang.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from aprilsched.engines.base import GenerationRequest
from aprilsched.engines.sim.config import SimConfig
from aprilsched.errors import ConfigError
from aprilsched.testing.refusals import Crashed, Malformed, Refused
from aprilsched.types import SamplingParams

__all__ = [
    "AbortBody",
    "AdapterBody",
    "DiskBody",
    "GenerateBody",
    "MemoryBody",
    "PauseBody",
    "VersionBody",
    "decode",
    "generation_request",
    "known_parameters",
]

T = TypeVar("T")


class GenerateBody(msgspec.Struct, frozen=True):
    """POST /generate."""

    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: dict[str, Any] | None = None
    rid: str | None = None
    stream: bool = False
    return_logprob: bool = False
    lora_path: str | None = None
    extra_key: str | None = None


class PauseBody(msgspec.Struct, frozen=True):
    """Body of POST /pause_generation; SGLang's default ends every request."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class AbortBody(msgspec.Struct, frozen=True):
    """POST /abort_request."""

    rid: str | None = None
    abort_all: bool = False


class DiskBody(msgspec.Struct, frozen=True):
    """POST /update_weights_from_disk."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class VersionBody(msgspec.Struct, frozen=True):
    """Body of POST /update_weight_version; SGLang's default ends every request."""

    new_version: str
    abort_all_requests: bool = True


class AdapterBody(msgspec.Struct, frozen=True):
    """Body of POST /load_lora_adapter and /unload_lora_adapter; unloading needs no path."""

    lora_name: str
    lora_path: str = ""


class MemoryBody(msgspec.Struct, frozen=True):
    """Body of POST /release_memory_occupation and /resume_memory_occupation.

    Without `tags` the call is for all parts.
    """

    tags: list[str] | None = None


class _Sampling(msgspec.Struct, frozen=True):
    """SGLang's sampling parameters and their defaults; those after `n` are not modelled."""

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None
    logit_bias: dict[str, float] | None = None
    n: int = 1

    stream_interval: int | None = None
    stop: Any = None
    stop_regex: Any = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    custom_params: Any = None


_DEFAULT_NEW_TOKENS = 128


def decode(body: bytes, kind: type[T]) -> T:
    """Decode `body` as a `kind`.

    Raises:
        Malformed: if it is missing or has another form.
    """
    if not body:
        raise Malformed("Field required: the request has no body.")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(str(error)) from error


def known_parameters(body: GenerateBody) -> None:
    """Fail like SGLang at a sampling parameter that it does not know.

    Raises:
        Crashed: if there is one.
    """
    if not (body.sampling_params or {}).keys() <= set(_Sampling.__struct_fields__):
        raise Crashed


def generation_request(body: GenerateBody, rid: str, config: SimConfig) -> GenerationRequest:
    """The request that `body` asks for.

    Raises:
        Refused: if SGLang, or this model of it, would refuse it.
    """
    if body.text is not None:
        raise Refused("The engine has no tokenizer and cannot take text; provide input_ids.")
    if body.input_ids is None:
        raise Refused("Either text, input_ids or input_embeds should be provided.")
    if not body.input_ids:
        raise Refused("input_ids cannot be empty.")
    sampling = _sampling(body.sampling_params or {}, config.vocab_size)
    largest, smallest = max(body.input_ids), min(body.input_ids)
    if smallest < 0 or largest >= config.vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise Refused(f"input_ids must be in [0, {config.vocab_size - 1}], got {wrong}.")
    ids = np.array(body.input_ids, np.int32)
    return GenerationRequest(
        request_id=rid,
        input_ids=ids,
        sampling=sampling,
        adapter=body.lora_path,
        cache_key=body.extra_key,
    )


def _sampling(given: dict[str, Any], vocab_size: int) -> SamplingParams:
    try:
        params = msgspec.convert(given, _Sampling)
    except msgspec.ValidationError as error:
        raise Refused(f"sampling_params: {error}.") from error
    for key in params.logit_bias or {}:
        if not (key.isdecimal() and int(key) < vocab_size):
            raise Refused(f"logit_bias must has keys in [0, {vocab_size - 1}], got {key}.")
    if params.n != 1:
        raise Refused(f"n is {params.n}; this engine gives one response for each request.")
    new = _DEFAULT_NEW_TOKENS if params.max_new_tokens is None else params.max_new_tokens
    try:
        return SamplingParams(
            max_new_tokens=new,
            min_new_tokens=params.min_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            stop_token_ids=tuple(params.stop_token_ids or ()),
            ignore_eos=params.ignore_eos,
            sampling_seed=params.sampling_seed,
        )
    except ConfigError as error:
        raise Refused(str(error)) from error
