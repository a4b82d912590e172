"""The JSON bodies of SGLang's calls as typed structs, and its streamed answers as chunks of tokens;
nothing is ever unpickled.

Unknown fields are ignored, because every server version adds some. A missing or mistyped field
that a token depends on makes decoding fail: no token is guessed.
"""

from __future__ import annotations

import zlib
from base64 import b64decode
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from aprilsched.errors import EngineBusy
from aprilsched.kernel.engines.base import Chunk, GenerationRequest
from aprilsched.kernel.engines.http import BUSY_STATUSES, quote
from aprilsched.kernel.engines.stream import (
    Count,
    ErrorBody,
    LabelSpan,
    Logprob,
    Name,
    ResponseReader,
    TokenId,
    guarded,
    media_source,
    version_number,
)
from aprilsched.kernel.values.companions import TOP, Rows
from aprilsched.types import Answer, FinishReason

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
    """What an event says about its tokens.

    `completion_tokens` and `output_token_logprobs_length` count from the beginning of the
    response, whatever part of it the event carries. `weight_version` is the server's label at the
    time of the event. `routed_experts` and `indexer_topk` are base64 of int32, in the last event.
    The list of sampling masks ends at `output_token_sampling_mask_length`, counted as above.
    The lists of likely tokens are beside those of sampled tokens, whatever part the event carries.
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
    schedule_low_priority_values_first: bool | None = None
    internal_states: list[InternalState] = []

    @property
    def stores_kv(self) -> bool:
        """Whether it says that it keeps KV where a flush does not reach."""
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
    `priority` is that of :class:`~aprilsched.kernel.engines.base.Capabilities`. A server with `one_seed`
    for all requests gets a seed of the request: all responses to a prompt would be the same."""
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


# --- chunks ---------------------------------------------------------------------------------------

# Turns the bytes of SGLang's streamed answers into chunks of tokens.
#
# Invariants:
#
# - A token and its logprob come from one ``[logprob, id, text]`` triple, never from two lists
#   paired by position: at an abort SGLang repeats the last output id, and where it joins that
#   repeat with a pending event, ``output_ids`` is shifted by one against the logprobs.
# - New tokens are found by count (``completion_tokens`` minus the tokens already held), not by the
#   form of the event, so incremental events, cumulative events and repeats are read alike. The
#   count never decreases, and never exceeds the number of tokens that were asked for.

_decoder = msgspec.json.Decoder(StreamEvent)
_LOGPROB, _ID = itemgetter(0), itemgetter(1)


class ChunkAssembler(ResponseReader):
    """Turns SGLang's events of one request into chunks; see :class:`ResponseReader`."""

    def __init__(self, engine: str, request: GenerationRequest, *, first_version: int = 0) -> None:
        super().__init__(engine, request, first_version=first_version)
        self._media = bool(request.media)
        self._keep = request.sampling.keep
        self._label: tuple[str | None, int | None] = (None, None)
        """The server's latest label, and the version that it stands for."""

    @guarded
    def feed(self, payload: bytes) -> Chunk:
        """Return the chunk that one event's payload carries."""
        event = self.event(payload)
        if event.index:
            raise self.broken("sent an event that is not one of a single response")
        return self.chunk(event, payload)

    @guarded
    def event(self, payload: bytes) -> StreamEvent:
        """Decode an event, of whichever request it is; errors as :meth:`feed`."""
        return _decoder.decode(payload)

    @guarded
    def chunk(self, event: StreamEvent, payload: bytes) -> Chunk:
        """Return the chunk of an event of this request; errors as :meth:`feed`."""
        if event.error is not None:
            raise self._rejected(event.error.message, event.error.code)
        if event.meta_info is None:
            raise self.broken("sent an event without meta_info")
        entries: Mapping[str, Any] = {}
        if self._keep and event.meta_info.finish_reason:
            entries = msgspec.json.decode(payload)["meta_info"]
        return self._chunk(event.output_ids or [], event.meta_info, entries)

    def _chunk(self, output_ids: list[int], meta: MetaInfo, entries: Mapping[str, Any]) -> Chunk:
        reason = meta.finish_reason
        finish = None if reason is None else self._finish(reason)
        where = self._fresh(meta, finish)
        fresh = (meta.output_token_logprobs or [])[where]
        tokens = list(map(_ID, fresh))
        # An abort is exempt: its output_ids hold a repeat of the last one.
        if finish != "abort" and tokens != output_ids[len(output_ids) - len(tokens) :]:
            raise self.broken("sent output_ids that are not the tokens of its logprobs")
        begin, self.held = self.held, self.held + len(tokens)
        spans = self._spans(meta.weight_versions) if finish else None
        return Chunk(
            # np.array would pass twice over the elements, at three times the cost.
            token_ids=np.fromiter(tokens, np.int32, len(tokens)),
            logprobs=np.fromiter(map(_LOGPROB, fresh), np.float32, len(tokens)),
            finish=finish,
            spans=spans,
            cached_tokens=meta.cached_tokens,
            label=self._version(meta.weight_version) if spans is None else None,
            token_rows=self._token_rows(meta, begin, where) if self._of_tokens else None,
            context_rows=self._rows_of_context(meta) if finish and self._companions else None,
            prompt_tokens=meta.prompt_tokens if self._media else None,
            answer=Answer.of(entries, self._keep) if finish and entries else None,
            busy=None if reason is None or finish != "abort" else self._busy(reason),
        )

    def _token_rows(self, meta: MetaInfo, begin: int, where: slice) -> dict[str, Rows]:
        """The rows of the tokens from `begin` to `held`, for each companion of tokens. `where` says
        where their log-probabilities are in the event."""
        found: dict[str, Rows] = {}
        for companion in self._of_tokens:
            if companion.name == TOP:
                likely = [
                    [each[:2] for each in row] for row in (meta.output_top_logprobs or [])[where]
                ]
                found[TOP] = self._top_rows(companion, likely, self.held - begin)
                continue
            masks = meta.output_token_sampling_mask or []
            length = meta.output_token_sampling_mask_length
            # As with log-probabilities, the end of the list is known, and not where it begins.
            first = len(masks) - ((length or 0) - begin)
            rows = masks[max(0, first) : first + self.held - begin]
            if first < 0 or len(rows) < self.held - begin:
                raise self.broken(
                    f"sent sampling masks that do not cover its tokens {begin} to {self.held}"
                )
            found[companion.name] = self._ragged_rows(companion, rows)
        return found

    def _rows_of_context(self, meta: MetaInfo) -> dict[str, Rows]:
        """The rows from the first missing one on, for each companion of the context."""
        return {
            companion.name: self._context_rows(
                companion,
                lambda encoded=encoded: np.frombuffer(b64decode(encoded, validate=True), "<i4"),
                first=start if companion.name == "routed_experts" else 0,
                start=start,
                # At an abort tokens may come without their logprobs, and one is not even counted.
                spare=1 + meta.completion_tokens - self.held,
            )
            for companion, start in self._companions
            if companion.per == "context"
            and (encoded := getattr(meta, companion.name, None)) is not None
        }

    def _version(self, label: str | None) -> int | None:
        if label != self._label[0]:
            known = None if label is None else version_number(label, self.first_version)
            self._label = (label, known)
        return self._label[1]

    def _fresh(self, meta: MetaInfo, finish: str | None) -> slice:
        """Where the triples of the tokens after the first `held` ones are.

        The event's list may begin anywhere (at `held` in the incremental form, at 0 in the
        cumulative one and at an abort), but its end is known: it is read from its end.
        """
        if meta.completion_tokens > self.max_tokens:
            raise self.broken(
                f"sent {meta.completion_tokens} tokens where {self.max_tokens} were asked for"
            )
        if meta.completion_tokens < self.held:
            raise self.broken(
                f"counts {meta.completion_tokens} tokens after it had sent {self.held}"
            )
        triples = meta.output_token_logprobs or []
        end = meta.output_token_logprobs_length
        end = meta.completion_tokens if end is None else end
        upto = min(end, meta.completion_tokens)
        if upto < meta.completion_tokens and finish != "abort":
            raise self.broken(
                f"sent {end} logprobs for {meta.completion_tokens} tokens; every token needs one"
            )
        if upto <= self.held:
            return slice(0)
        if end - self.held > len(triples):
            raise self.broken(
                f"sent {len(triples)} logprobs where {end - self.held} were missing; every "
                "token needs one"
            )
        return slice(len(triples) - (end - self.held), len(triples) - (end - upto))

    def _finish(self, reason: Finish) -> FinishReason | Literal["abort"]:
        match reason.type:
            case "stop" | "length" as natural:
                return natural
            case "abort" if reason.status_code is None or reason.status_code in BUSY_STATUSES:
                return "abort"
            case "abort":
                # The server itself failed the request (too long, timed out in the queue). Taken
                # for an abort of ours, it would be sent again for ever.
                raise self._rejected(reason.message or "aborted", reason.status_code)
            case other:
                raise self.broken(f"finished with the unknown reason {quote(other)!r}")

    def _busy(self, reason: Finish) -> EngineBusy | None:
        """Why the server itself aborted the request, whose tokens so far are good; None if it did
        not."""
        if reason.status_code is None:
            return None
        text = f"request {self.request_id}: {quote(reason.message or 'aborted')}"
        return EngineBusy(self.engine, text, status=reason.status_code)
