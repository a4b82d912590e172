"""Makes the request of the embedded engine from a body, and refuses what SGLang would refuse.

An unknown sampling parameter fails the request, as in SGLang.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from aprilsched.engines.base import GenerationRequest
from aprilsched.engines.sim.config import SimConfig
from aprilsched.errors import ConfigError
from aprilsched.serving.bodies import GenerateBody
from aprilsched.serving.refusals import Crashed, Refused
from aprilsched.types import SamplingParams

__all__ = ["generation_request", "known_parameters"]

_DEFAULT_NEW_TOKENS = 128


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
