"""Make a request of the embedded engine from a body, and refuse what SGLang would refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from aprilsched.agents.dialects.sglang import GenerateBody, check_vocabulary
from aprilsched.agents.serving.refusals import Crashed, Refused
from aprilsched.errors import ConfigError
from aprilsched.kernel.engines.base import GenerationRequest
from aprilsched.kernel.engines.sglang.dp_ranks import RANK_FIELDS
from aprilsched.kernel.values.checks import OWN
from aprilsched.kernel.values.companions import MOST_KEPT, Companion, top_logprobs
from aprilsched.kernel.values.sampling import SERVER, sampling_params
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.types import SamplingParams

_DEFAULT_NEW_TOKENS = 128
_KNOWN = {*OWN, *SERVER, "n", "stop", "stream_interval"}
"""SGLang's sampling parameters; the server-specific ones are not modelled."""


_TOLD = ("priority", *RANK_FIELDS, "custom_logit_processor", "return_hidden_states")
_KEPT = ("request", "dp_rank")
"""Fields of the request that the last event of its response repeats, so that tests can check what
the server received, and the rank that generated it."""


def known_parameters(body: GenerateBody) -> None:
    """Fail like SGLang at an unknown sampling parameter.

    Raises:
        Crashed: if a parameter is unknown.
    """
    if not (body.sampling_params or {}).keys() <= _KNOWN:
        raise Crashed


def generation_request(body: GenerateBody, rid: str, config: SimConfig) -> GenerationRequest:
    """Return the generation request for `body`.

    Raises:
        Refused: if SGLang, or this model of it, would refuse it.
    """
    if body.text is not None:
        raise Refused("The engine has no tokenizer and cannot take text; provide input_ids.")
    if body.input_ids is None:
        raise Refused("Either text, input_ids or input_embeds should be provided.")
    if not body.input_ids:
        raise Refused("input_ids cannot be empty.")
    # The rank 0 is a value, and a priority of 0 or False is the default.
    fields = {n: v for n in _TOLD if (v := getattr(body, n)) or (n in RANK_FIELDS and v == 0)}
    sampling = _sampling(body.sampling_params or {})
    check_vocabulary(config.vocab_size, body.input_ids, sampling)
    sampling = replace(sampling, extra={}, request=fields, keep=_KEPT)
    ids = np.array(body.input_ids, np.int32)
    return GenerationRequest(
        request_id=rid,
        input_ids=ids,
        sampling=sampling,
        adapter=body.lora_path,
        cache_key=body.extra_key,
        companions=_companions(body, len(ids), sampling, config),
        media=body.media,
        rank=body.priority or 0,
    )


def _companions(
    body: GenerateBody, prompt: int, sampling: SamplingParams, config: SimConfig
) -> tuple[tuple[Companion, int], ...]:
    found: list[tuple[Companion, int]] = []
    if body.return_routed_experts:
        start = body.routed_experts_start_len
        if not 0 <= start <= prompt:
            raise Refused(f"routed_experts_start_len is {start}, outside of 0 to {prompt}.")
        found.append((Companion("routed_experts", "uint8", config.rows), start))
    if body.return_indexer_topk:
        found.append((Companion("indexer_topk", "int32", config.rows), 0))
    if body.return_sampling_mask:
        if sampling.temperature > 0 and not 1 <= sampling.top_k <= MOST_KEPT:
            raise Refused(
                "return_sampling_mask requires top_k=1 for greedy sampling or finite "
                f"1 < top_k <= {MOST_KEPT}; got top_k={sampling.top_k}."
            )
        found.append((Companion("sampling_mask"), 0))
    if body.top_logprobs_num > 0:
        found.append((top_logprobs(body.top_logprobs_num), 0))
    return tuple(found)


def _sampling(given: dict[str, Any]) -> SamplingParams:
    n = given.get("n")
    if n not in (None, 1):
        raise Refused(f"n is {n}; this engine gives one response for each request.")
    names = [name for name in (*OWN, *SERVER) if given.get(name) is not None]
    try:
        return sampling_params(
            {"max_new_tokens": _DEFAULT_NEW_TOKENS} | {name: given[name] for name in names}
        )
    except ConfigError as error:
        raise Refused(str(error)) from error
