"""Finds out what one server is and can do by asking it; its version is read, never assumed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from aprilsched.engines.base import Capabilities
from aprilsched.engines.http.failures import UNREADABLE, quoted
from aprilsched.engines.http.transport import ControlCalls
from aprilsched.engines.sglang.wire import Labelled, ModelInfo, OpenApi, ServerInfo, ServerProcess
from aprilsched.errors import EngineProtocolError, EngineRejected

T = TypeVar("T")

SPANS_SINCE = (0, 5, 19)
"""First release that reports `weight_versions`."""
WAITING_SINCE = (0, 5, 21)
"""First release that flushes the cache while requests wait in a pause, where older ones answer
400, and the first known to release memory meanwhile; 0.5.17 dies of it."""
STREAM_INTERVAL_SINCE = (0, 5, 0)
"""First release known to accept `stream_interval` as a sampling parameter; an older one fails the
request because it does not know the name."""

_SHORT_OF = 4
"""Number of tokens by which SGLang's longest input is shorter than its context and KV pool allow.
It takes 5 off, and the response to the longest input ends one token early (0.5.21)."""
_UNKNOWN_REQUEST = "aprilsched-probe-of-the-key"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """What :func:`probe` found out about a server.

    Attributes:
        label: the label of the weights at the time of the probe, as the server spells it.
        incremental: whether streams carry only new tokens; None where the server does not say.
        stream_interval: whether a request may set its stream interval.
        vocab_size: smallest token id that kills SGLang's scheduler; None where it is not known.
        torch_empty_cache: whether continue_generation has this parameter.
        update_sessions: whether tensors are refused outside of begin and end (0.5.21).
        pipelined: whether the layers are spread over several pipeline stages.
        metrics: whether the server runs with --enable-metrics.
        process: what distinguishes the server's process from a later one at its address.
        context_tokens: tokens of a prompt and its response together; None where it is not known.
    """

    model_path: str
    label: str
    capabilities: Capabilities
    vocab_size: int | None
    incremental: bool | None
    stream_interval: bool
    torch_empty_cache: bool
    update_sessions: bool
    pipelined: bool
    metrics: bool
    process: ServerProcess
    context_tokens: int | None = None


def release(version: str) -> tuple[int, int, int]:
    """The release in a version string: "0.5.18.dev3" is 0.5.18, and no release is (0, 0, 0)."""
    match = re.match(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", version)
    if match is None:
        return (0, 0, 0)
    major, minor, patch = match.groups("0")
    return (int(major), int(minor), int(patch))


def decode(engine: str, what: str, body: bytes, kind: type[T]) -> T:
    """Decode `body` as a `kind`, or raise an error that names the call."""
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise EngineProtocolError(
            engine, f"does not answer {what} like SGLang ({quoted(str(error))})."
        ) from error


async def weight_label(engine: str, transport: ControlCalls, timeout: float) -> str:  # noqa: ASYNC109
    """Ask for the label of the weights that the server has now."""
    answer = await transport.call("GET", "model_info", timeout=timeout, admin=False)
    label = decode(engine, "/model_info", answer.body, ModelInfo).weight_version
    if label is None:
        # Older servers have an endpoint for the label, which /model_info lacks.
        answer = await transport.call("GET", "get_weight_version", timeout=timeout, admin=False)
        label = decode(engine, "/get_weight_version", answer.body, Labelled).weight_version
    if label is None:
        raise EngineProtocolError(engine, "does not tell its weight_version; use a newer SGLang.")
    return label


async def probe(
    engine: str,
    transport: ControlCalls,
    timeout: float,  # noqa: ASYNC109
    *,
    vocab_size: int | None = None,
) -> ServerFacts:
    """Ask a server what it is; refuse one that is not SGLang or does not accept our key.

    The server is not asked for its `vocab_size` where the caller knows it.

    Raises:
        EngineProtocolError: if it does not answer like an SGLang server that generates.
        EngineRejected: if the server wants a key that we do not have.
    """
    model = await _model_info(engine, transport, timeout)
    answer = await transport.call("GET", "server_info", timeout=timeout, admin=False)
    server = decode(engine, "/server_info", answer.body, ServerInfo)
    process = decode(engine, "/server_info", answer.body, ServerProcess)
    # Control calls may want another key than these two calls, and a wrong key must show now and
    # not at the first pause. Only an abort of an unknown request has no effect.
    await transport.call("POST", "abort_request", {"rid": _UNKNOWN_REQUEST}, timeout=timeout)
    found = release(server.version)
    schema = await _schema(engine, transport, timeout)
    return ServerFacts(
        model_path=model.model_path,
        label=await weight_label(engine, transport, timeout),
        capabilities=_capabilities(server),
        vocab_size=vocab_size or await _vocab_size(engine, transport, timeout),
        incremental=server.incremental_streaming_output,
        stream_interval=found >= STREAM_INTERVAL_SINCE,
        torch_empty_cache="torch_empty_cache" in schema.properties("ContinueGenerationReqInput"),
        update_sessions="/begin_weight_update" in schema.paths,
        pipelined=(server.pp_size or 1) > 1,
        metrics=bool(server.enable_metrics),
        process=process,
        context_tokens=(
            None if server.max_req_input_len is None else server.max_req_input_len + _SHORT_OF
        ),
    )


async def server_process(engine: str, transport: ControlCalls, timeout: float) -> ServerProcess:  # noqa: ASYNC109
    """Ask for what distinguishes the process that answers now from others."""
    answer = await transport.call("GET", "server_info", timeout=timeout, admin=False)
    return decode(engine, "/server_info", answer.body, ServerProcess)


async def _model_info(engine: str, transport: ControlCalls, timeout: float) -> ModelInfo:  # noqa: ASYNC109
    try:
        answer = await transport.call("GET", "model_info", timeout=timeout, admin=False)
    except EngineRejected as error:
        if error.status in (401, 403):
            raise
        raise EngineProtocolError(
            engine,
            f"does not answer /model_info like SGLang (HTTP {error.status}); give the URL of an "
            "SGLang server.",
        ) from error
    model = decode(engine, "/model_info", answer.body, ModelInfo)
    if not model.is_generation:
        raise EngineProtocolError(engine, "serves a model that does not generate; use another.")
    return model


def _capabilities(server: ServerInfo) -> Capabilities:
    found = release(server.version)
    ranks = server.dp_size or 1
    running = server.max_running_requests
    if server.internal_states:
        per_rank = server.internal_states[0].effective_max_running_requests_per_dp
        running = per_rank * ranks if per_rank is not None else running
    tokens = server.max_total_num_tokens
    return Capabilities(
        version_spans=found >= SPANS_SINCE,
        flush_while_paused=found >= WAITING_SINCE,
        max_running_requests=running,
        kv_tokens=None if tokens is None else tokens * ranks,
        ranks=(server.tp_size or 1) * (server.pp_size or 1),
        release_while_paused=found >= WAITING_SINCE,
        keeps_released_weights=not server.enable_memory_saver
        or bool(server.enable_weights_cpu_backup),
        adapters=bool(server.enable_lora),
        server=f"SGLang {server.version or '(unknown version)'}",
    )


async def _schema(engine: str, transport: ControlCalls, timeout: float) -> OpenApi:  # noqa: ASYNC109
    """The server's OpenAPI schema; an empty one where it publishes none."""
    try:
        answer = await transport.call("GET", "openapi.json", timeout=timeout, admin=False)
    except EngineRejected:
        return OpenApi()
    return decode(engine, "/openapi.json", answer.body, OpenApi)


async def _vocab_size(engine: str, transport: ControlCalls, timeout: float) -> int | None:  # noqa: ASYNC109
    """The model's vocabulary size, which SGLang reports only in a refusal.

    A bias on an impossible id is refused before the request reaches the scheduler, so nothing
    is generated. A paused server is not asked, because it would hold the request instead.
    """
    ready = await transport.call(
        "GET", "ready", timeout=timeout, accept=(200, 404, 503), admin=False
    )
    if ready.status != 200:
        return None
    params = {"max_new_tokens": 1, "logit_bias": {str(2**31 - 1): 0.0}}
    answer = await transport.call(
        "POST",
        "generate",
        {"input_ids": [0], "sampling_params": params},
        timeout=timeout,
        accept=(200, 400, 500),
        admin=False,
    )
    match = re.search(rb"\[0, (\d{1,9})\]", answer.body) if answer.status == 400 else None
    return None if match is None else int(match.group(1)) + 1
