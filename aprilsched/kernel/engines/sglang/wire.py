"""The JSON bodies of SGLang's calls as typed structs, and its streamed answers as chunks of tokens;
nothing is ever unpickled.

Unknown fields are ignored, because every server version adds some. A missing or mistyped field
that a token depends on makes decoding fail: no token is guessed.
"""

from __future__ import annotations

import zlib
from typing import Any, TypeAlias

import msgspec

from aprilsched.kernel.engines.base import GenerationRequest
from aprilsched.kernel.engines.stream import (
    Count,
    ErrorBody,
    LabelSpan,
    Logprob,
    Name,
    TokenId,
    media_source,
)
from aprilsched.kernel.values.companions import TOP

Triple: TypeAlias = tuple[Logprob, TokenId, str | None]
"""A sampled token as SGLang reports it: logprob, id, text."""
Likely: TypeAlias = tuple[Logprob | None, TokenId, str | None]
"""A token that might have been sampled, in the same form."""


class Finish(msgspec.Struct, frozen=True):
    """Why a request ended; `status_code` is set only where the server itself failed it."""

    type: str
    message: str | None = None
    status_code: int | None = None


class MetaInfo(msgspec.Struct, frozen=True):
    """The metadata of an event's tokens.

    `completion_tokens` and `output_token_logprobs_length` count from the start of the
    response, whatever part of it the event carries. `weight_version` is the server's label at the
    time of the event. `routed_experts` and `indexer_topk` are base64 of int32, in the last event.
    The list of sampling masks ends at `output_token_sampling_mask_length`, counted as above.
    The lists of likely tokens match the lists of sampled tokens, whatever part the event carries.
    `prompt_tokens` counts media as the tokens that their placeholders became.
    """

    completion_tokens: Count
    finish_reason: Finish | None = None
    output_token_logprobs: list[Triple] | None = None
    output_token_logprobs_length: Count | None = None
    weight_versions: list[LabelSpan] | None = None
    weight_version: Name | None = None
    cached_tokens: Count | None = None
    prompt_tokens: Count | None = None
    routed_experts: str | None = None
    indexer_topk: str | None = None
    output_token_sampling_mask: list[list[TokenId]] | None = None
    output_token_sampling_mask_length: Count | None = None
    output_top_logprobs: list[list[Likely]] | None = None


class StreamEvent(msgspec.Struct, frozen=True):
    """One event of a streamed answer: tokens, or the error that ends it."""

    meta_info: MetaInfo | None = None
    output_ids: list[TokenId] | None = None
    error: ErrorBody | None = None
    index: Count | None = None


class ModelInfo(msgspec.Struct, frozen=True):
    """Answer to GET /model_info."""

    model_path: Name
    weight_version: Name
    is_generation: bool = True
    has_image_understanding: bool | None = None
    has_audio_understanding: bool | None = None


class InternalState(msgspec.Struct, frozen=True):
    """One data-parallel rank in /server_info."""

    effective_max_running_requests_per_dp: Count | None = None


class ServerProcess(msgspec.Struct, frozen=True):
    """The part of /server_info in which two processes of a server differ: the seconds that the
    steps of its start took (0.5.21), and the random seed, unless the command line gives it."""

    startup_time: dict[str, Any] | None = None
    random_seed: int | None = None


class ServerInfo(msgspec.Struct, frozen=True):
    """Answer to GET /server_info: a flat list of the server's arguments; these few are used."""

    version: Name = ""
    dp_size: Count | None = None
    attn_dp_size: Count | None = None
    max_running_requests: Count | None = None
    max_total_num_tokens: Count | None = None
    max_req_input_len: Count | None = None
    tp_size: Count | None = None
    pp_size: Count | None = None
    disable_radix_cache: bool | None = None
    enable_deterministic_inference: bool | None = None
    enable_lora: bool | None = None
    enable_metrics: bool | None = None
    enable_memory_saver: bool | None = None
    enable_weights_cpu_backup: bool | None = None
    incremental_streaming_output: bool | None = None
    enable_return_routed_experts: bool | None = None
    enable_return_indexer_topk: bool | None = None
    enable_priority_scheduling: bool | None = None
    enable_hierarchical_cache: bool | None = None
    hicache_storage_backend: Name | None = None
    disaggregation_decode_enable_offload_kvcache: bool | None = None
    enable_lmcache: bool | None = None
    enable_flexkv: bool | None = None
    enable_unified_cache_external_linker: bool | None = None
    unified_cache_external_linker_config: Any = None
    schedule_policy: Name | None = None
    schedule_conservativeness: float | None = None
    gateway: Any = None
    cuda_graph_config: Any = None
    schedule_low_priority_values_first: bool | None = None
    speculative_algorithm: Name | None = None
    internal_states: list[InternalState] = []

    @property
    def dp_ranks(self) -> int:
        """The number of data-parallel ranks, each with its own KV pool.

        With data-parallel attention dp_size is 1 since 0.5.22: its figures would be of one rank.
        """
        return (self.dp_size or 1) * (self.attn_dp_size or 1)

    @property
    def stores_kv(self) -> bool:
        """Whether the server reports that it keeps KV where a flush does not reach."""
        return any(
            (
                self.hicache_storage_backend,
                self.disaggregation_decode_enable_offload_kvcache,
                self.enable_lmcache,
                self.enable_flexkv,
                self.enable_unified_cache_external_linker,
                self.unified_cache_external_linker_config,
            )
        )


class Schema(msgspec.Struct, frozen=True):
    """One named body in /openapi.json."""

    properties: dict[str, msgspec.Raw] = {}


class Components(msgspec.Struct, frozen=True):
    """The named bodies of /openapi.json."""

    schemas: dict[str, Schema] = {}


class OpenApi(msgspec.Struct, frozen=True):
    """Answer to GET /openapi.json: which parameters the server knows."""

    components: Components = Components()
    paths: dict[str, msgspec.Raw] = {}

    def properties(self, body: str) -> frozenset[str]:
        """The parameters of a named body; empty where the server does not know the body."""
        schema = self.components.schemas.get(body)
        return frozenset() if schema is None else frozenset(schema.properties)


class UpdateAnswer(msgspec.Struct, frozen=True):
    """Answer to the calls that load weights or adapters."""

    success: bool
    message: str = ""
    error_message: str | None = None


def generate_body(
    request: GenerationRequest,
    *,
    stream_interval: int | None,
    priority: int = 0,
    one_seed: bool = False,
) -> dict[str, Any]:
    """The body of POST /generate; with `stream_interval` None the server's own interval holds.
    `priority` is as in :class:`~aprilsched.kernel.engines.base.Capabilities`. A server with
    `one_seed` for all requests gets a seed per request. Otherwise all responses to a prompt would
    be the same."""
    sampling, seed = request.sampling, request.sampling.sampling_seed
    if seed is None and one_seed:
        seed = zlib.crc32(request.request_id.encode())
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if seed is not None:
        params["sampling_seed"] = seed
    if stream_interval is not None:
        params["stream_interval"] = stream_interval
    body: dict[str, Any] = {
        "rid": request.request_id,
        "input_ids": request.input_ids.tolist(),
        "sampling_params": {**params, **sampling.extra},
        "stream": True,
        "return_logprob": True,
        "routing_key": str(request.affinity),
    }
    if request.adapter is not None:
        body["lora_path"] = request.adapter
    if request.cache_key is not None:
        body["extra_key"] = request.cache_key
    for companion, start in request.companions:
        if companion.name == TOP:
            body["top_logprobs_num"] = companion.shape[0]
            continue
        body[f"return_{companion.name}"] = True
        if companion.name == "routed_experts":
            body["routed_experts_start_len"] = start
    for media in request.media:
        body.setdefault(f"{media.kind}_data", []).append(media_source(media))
    if priority:
        body["priority"] = priority * request.rank
    return {**body, **sampling.request} if sampling.request else body
