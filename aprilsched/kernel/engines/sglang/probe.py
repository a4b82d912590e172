"""Probes one server for its properties and capabilities; its version is read, never assumed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from aprilsched.errors import EngineProtocolError, EngineRejected
from aprilsched.kernel.engines.control import Facts, Questions, graph_requests
from aprilsched.kernel.engines.server import release
from aprilsched.kernel.engines.sglang.wire import ModelInfo, OpenApi, ServerInfo, ServerProcess
from aprilsched.kernel.values.capabilities import Capabilities, Reservation

SPANS_SINCE = (0, 5, 19)
"""First release that reports `weight_versions`."""
WAITING_SINCE = (0, 5, 21)
"""First release that flushes the cache while paused requests wait; older ones answer 400. Also the
first known to release memory in that state; 0.5.17 crashes."""

KEYED_SINCE = (0, 5, 23)
"""First release known to keep KV of other cache keys apart in its storage (SGLang 38577); in older
ones, and in FlexKV, keys separate the KV in the server's own memory alone."""
FIXED_IN_FULL_SINCE = (0, 5, 22)
"""First release whose admission reserves all tokens to come of running requests with
``ignore_eos`` (PrefillAdder in schedule_policy.py)."""

_SHORT_OF = 4
"""Number of tokens by which SGLang's longest input is shorter than its context and KV pool allow.
It takes 5 off, and the response to the longest input ends one token early (0.5.21)."""
_OWN_DRAFT = frozenset({"EAGLE3", "STANDALONE", "DFLASH"})
"""Algorithms whose draft model has a checkpoint of its own. EAGLE's drafts may come from layers of
the target's checkpoint (MTP)."""
_UNKNOWN_REQUEST = "aprilsched-probe-of-the-key"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts(Facts):
    """The properties of a server that :func:`probe` finds, beyond those that every server reports.

    Attributes:
        incremental: whether streams carry only new tokens; None if the server does not report it.
        update_sessions: whether tensors are refused outside of an update session (0.5.21).
        pipelined: whether the layers are spread over several pipeline stages.
        metrics: whether the server runs with --enable-metrics.
        tiered: whether it reports a KV cache outside of the GPU's memory too.
        shares_bodies: whether a body may ask for several responses. With --schedule-policy
            routing-key none does, because their routing keys would be lost.
        request_fields: the fields of a request that it knows; empty if it does not report them.
        expiring_sessions: whether a session of the server may have a timeout.
        one_seed: whether requests without a seed have the same one, with
            --enable-deterministic-inference.
        dp_ranks: number of data-parallel ranks of which a request may name its own.
    """

    incremental: bool | None
    update_sessions: bool
    pipelined: bool
    metrics: bool
    tiered: bool
    shares_bodies: bool
    request_fields: frozenset[str] = frozenset()
    expiring_sessions: bool = False
    one_seed: bool = False
    dp_ranks: int = 1


async def probe(asked: Questions, *, vocab_size: int | None = None) -> ServerFacts:
    """Probe a server; refuse one that is not SGLang or does not accept our key.

    The query for its `vocab_size` is skipped if the caller knows it.

    Raises:
        EngineProtocolError: if it does not answer like an SGLang server that generates.
        EngineRejected: if the server wants a key that we do not have.
    """
    model = await _model_info(asked)
    answer = await asked.ask("server_info")
    info = asked.read("server_info", answer, ServerInfo)
    # Control calls may want another key than these two calls, and a wrong key must show now and
    # not at the first pause. Only an abort of an unknown request has no effect.
    unknown = {"rid": _UNKNOWN_REQUEST}
    await asked.server.call("POST", "abort_request", unknown, timeout=asked.timeout)
    schema = await _schema(asked)
    fields = schema.properties("GenerateReqInput")
    return ServerFacts(
        model_path=model.model_path,
        label=model.weight_version,
        capabilities=_capabilities(model, info, schema),
        vocab_size=vocab_size or await _vocab_size(asked),
        incremental=info.incremental_streaming_output,
        update_sessions="/begin_weight_update" in schema.paths,
        pipelined=(info.pp_size or 1) > 1,
        metrics=bool(info.enable_metrics),
        tiered=bool(info.enable_hierarchical_cache) or info.stores_kv,
        shares_bodies=info.schedule_policy != "routing-key",
        process=asked.read("server_info", answer, ServerProcess),
        context_tokens=(
            None if info.max_req_input_len is None else info.max_req_input_len + _SHORT_OF
        ),
        graph_requests=graph_requests(
            info.cuda_graph_config, "decode", "max_bs", ranks=info.dp_ranks
        ),
        conservativeness=info.schedule_conservativeness,
        is_gateway=info.gateway is not None,
        request_fields=fields,
        expiring_sessions="timeout" in schema.properties("OpenSessionReqInput"),
        one_seed=bool(info.enable_deterministic_inference),
        drafter=info.speculative_algorithm or "",
        dp_ranks=info.dp_ranks if "routed_dp_rank" in fields else 1,
        own_draft=info.speculative_algorithm in _OWN_DRAFT,
    )


async def _model_info(asked: Questions) -> ModelInfo:
    try:
        model = await asked.get("model_info", ModelInfo)
    except EngineRejected as error:
        if error.status in (401, 403):
            raise
        raise EngineProtocolError(
            asked.engine,
            f"does not answer /model_info like SGLang (HTTP {error.status}); give the URL of an "
            "SGLang server, or vllm+http://… for one of vLLM.",
        ) from error
    if not model.is_generation:
        why = "serves a model that does not generate; use another."
        raise EngineProtocolError(asked.engine, why)
    return model


def _capabilities(model: ModelInfo, info: ServerInfo, schema: OpenApi) -> Capabilities:
    found = release(info.version)
    ranks = info.dp_ranks
    running = info.max_running_requests
    if info.internal_states:
        per_rank = info.internal_states[0].effective_max_running_requests_per_dp
        running = per_rank * ranks if per_rank is not None else running
    tokens = info.max_total_num_tokens
    companions = {
        "routed_experts": info.enable_return_routed_experts,
        "indexer_topk": info.enable_return_indexer_topk,
        "sampling_mask": "return_sampling_mask" in schema.properties("GenerateReqInput"),
        "top_logprobs": True,
    }
    media = {
        "image": model.has_image_understanding,
        "video": model.has_image_understanding,
        "audio": model.has_audio_understanding,
    }
    sign = 1 if info.schedule_low_priority_values_first else -1
    return Capabilities(
        version_spans=found >= SPANS_SINCE,
        flush_while_paused=found >= WAITING_SINCE,
        max_running_requests=running,
        kv_tokens=None if tokens is None else tokens * ranks,
        caches_contexts=info.disable_radix_cache is False and _kv_tier(info, found) == "none",
        reservation=Reservation(
            fixed_in_full=found >= FIXED_IN_FULL_SINCE,
            conservativeness=info.schedule_conservativeness or 1.0,
        ),
        ranks=(info.tp_size or 1) * (info.pp_size or 1),
        release_while_paused=found >= WAITING_SINCE,
        keeps_released_weights=not info.enable_memory_saver or bool(info.enable_weights_cpu_backup),
        adapters=bool(info.enable_lora),
        kv_tier=_kv_tier(info, found),
        companions=frozenset(name for name, able in companions.items() if able),
        media=frozenset(kind for kind, able in media.items() if able is not False),
        priority=sign if info.enable_priority_scheduling else 0,
        server=f"SGLang {info.version or '(unknown version)'}",
    )


def _kv_tier(info: ServerInfo, found: tuple[int, ...]) -> Literal["none", "keyed", "unkeyed"]:
    if info.stores_kv and (found < KEYED_SINCE or info.enable_flexkv):
        return "unkeyed"
    # A storage can be attached to a hierarchical cache at any time, which /server_info does not
    # show (0.5.23), so one without a storage counts too.
    shown = info.stores_kv or info.enable_hierarchical_cache is not False
    return "keyed" if shown else "none"


async def _schema(asked: Questions) -> OpenApi:
    """The server's OpenAPI schema; an empty one where it publishes none."""
    try:
        return await asked.get("openapi.json", OpenApi)
    except EngineRejected:
        return OpenApi()


async def _vocab_size(asked: Questions) -> int | None:
    """The model's vocabulary size, which SGLang reports only in a refusal.

    A bias on an impossible id is refused before the request reaches the scheduler, so nothing
    is generated. A paused server is not asked, because it would hold the request instead.
    """
    ready = await asked.ask("ready", accept=(200, 404, 503))
    if ready.status != 200:
        return None
    params = {"max_new_tokens": 1, "logit_bias": {str(2**31 - 1): 0.0}}
    body = {"input_ids": [0], "sampling_params": params}
    answer = await asked.ask("generate", body, accept=(200, 400, 500))
    match = re.search(rb"\[0, (\d{1,9})\]", answer.body) if answer.status == 400 else None
    return None if match is None else int(match.group(1)) + 1
