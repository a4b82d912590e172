"""Probes one vLLM server for its properties, its capabilities and its load."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec

from aprilsched.errors import EngineProtocolError
from aprilsched.kernel.engines.control import Facts, Questions, graph_requests
from aprilsched.kernel.engines.server import release
from aprilsched.kernel.engines.stream import Count, Name
from aprilsched.kernel.values.capabilities import Capabilities
from aprilsched.types import MEDIA

SINCE = (0, 32, 0)
"""First release whose pause, labels and spans were tried."""
LOADING = "aprilsched-loading"
"""Label of weights that are being loaded. It is a separate label because the load and the label of
its version are two calls: a client that asks between them must not mistake new weights for old."""

_KEYED = frozenset(
    {
        *("OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector"),
        *("LMCacheMPConnector", "NixlConnector", "NixlPullConnector", "NixlPushConnector"),
        *("MooncakeConnector", "MoRIIOConnector", "HiSparseConnector"),
    }
)
"""Connectors that keep KV of other salts apart, or keep none (read in the source of 0.32). Others
find KV by its tokens alone, such as HF3FSKVConnector, or are not part of vLLM."""
_WITHOUT_MODEL = frozenset({"", "ngram", "ngram_gpu", "suffix"})
"""Methods of speculative decoding without a draft model. A refit leaves a draft model as it is
(0.32)."""
_NOT_FOUND = 404
_TOO_LARGE = 2**31 - 1
_SERIES_BYTES = 2**22
_FIRST_SECONDS = 120.0
"""At the first call of /server_info a process looks for the system's packages: 3 s (0.32), and more
than 30 on a busy machine."""


class _Model(msgspec.Struct, frozen=True):
    model: Name
    max_model_len: Count
    logprobs_mode: Name
    enable_sleep_mode: bool = False
    return_sampling_mask: bool = False
    multimodal_config: dict[str, Any] | None = None


class _Aux(msgspec.Struct, frozen=True):
    enable_return_routed_experts: bool = False


class _Cache(msgspec.Struct, frozen=True):
    enable_prefix_caching: bool | None = None
    kv_cache_size_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None = None


class _Parallel(msgspec.Struct, frozen=True):
    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    data_parallel_size: Count = 1
    api_processes: Count = msgspec.field(default=1, name="_api_process_count")


class _Scheduler(msgspec.Struct, frozen=True):
    max_num_seqs: Count


class _Speculative(msgspec.Struct, frozen=True):
    method: Name = ""


class _Device(msgspec.Struct, frozen=True):
    device: Name = ""


class _Several(msgspec.Struct, frozen=True):
    connectors: list[_Transfer] = []


class _Transfer(msgspec.Struct, frozen=True):
    kv_connector: Name | None = None
    kv_connector_extra_config: _Several = _Several()

    @property
    def is_keyed(self) -> bool:
        """Whether its connectors, several or one, are among :data:`_KEYED`."""
        if self.kv_connector == "MultiConnector":
            return all(each.is_keyed for each in self.kv_connector_extra_config.connectors)
        return self.kv_connector in _KEYED


class _Config(msgspec.Struct, frozen=True):
    model_config: _Model
    cache_config: _Cache
    parallel_config: _Parallel
    scheduler_config: _Scheduler
    device_config: _Device = _Device()
    lora_config: dict[str, Any] | None = None
    kv_transfer_config: _Transfer | msgspec.UnsetType | None = msgspec.UNSET
    aux_output_config: _Aux = _Aux()
    compilation_config: Any = None
    speculative_config: _Speculative | None = None


class ServerInfo(msgspec.Struct, frozen=True):
    """The part of GET /server_info that is used."""

    vllm_config: _Config
    vllm_env: dict[str, Any] = {}


class _Version(msgspec.Struct, frozen=True):
    version: Name


class _WeightInfo(msgspec.Struct, frozen=True):
    weight_version: Name


class _Paused(msgspec.Struct, frozen=True):
    is_paused: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts(Facts):
    """The properties of a server that :func:`probe` finds, beyond those that every server reports.

    Attributes:
        logprobs_mode: which logits the logprobs come from, as ``--logprobs-mode`` names it.
        device: the kind of device that it runs on, as "cuda" or "cpu".
    """

    logprobs_mode: str
    device: str


async def probe(asked: Questions) -> ServerFacts:
    """Probe a server; refuse one whose responses could not be paused, aborted and scored.

    Raises:
        EngineProtocolError: if it is another program or an older release, or if its settings do
            not fit; the message names what to change.
        EngineRejected: if the server wants a key that we do not have.
    """
    version = await asked.ask("version", accept=(200, _NOT_FOUND))
    if version.status == _NOT_FOUND:
        raise EngineProtocolError(
            asked.engine, "does not answer /version like vLLM; give the URL of a vLLM server."
        )
    found = asked.read("version", version, _Version).version
    if release(found) < SINCE:
        raise EngineProtocolError(asked.engine, f"is vLLM {found}; use vLLM 0.32 or later.")
    info = await _server_info(replace(asked, timeout=max(asked.timeout, _FIRST_SECONDS)))
    config = info.vllm_config
    parallel, model = config.parallel_config, config.model_config
    if parallel.api_processes > 1:
        raise EngineProtocolError(
            asked.engine,
            f"is served by {parallel.api_processes} processes, and an abort reaches only one of "
            "them; start it with --api-server-count 1.",
        )
    if not model.logprobs_mode.endswith("_logprobs"):
        raise EngineProtocolError(
            asked.engine,
            f"gives {model.logprobs_mode} in the place of logprobs; start it with "
            "--logprobs-mode processed_logprobs.",
        )
    label = await weight_label(asked)
    ranks, tokens = parallel.data_parallel_size, config.cache_config.kv_cache_size_tokens
    companions = {
        "routed_experts": config.aux_output_config.enable_return_routed_experts,
        "sampling_mask": model.return_sampling_mask,
        "top_logprobs": True,
    }
    asleep = model.enable_sleep_mode or config.device_config.device == "cpu"
    drafter = config.speculative_config.method if config.speculative_config else ""
    return ServerFacts(
        model_path=model.model,
        # The load was never finished, so the version is asked for later.
        label="0" if label == LOADING else label,
        capabilities=Capabilities(
            version_spans=True,
            flush_while_paused=True,
            max_running_requests=config.scheduler_config.max_num_seqs * ranks,
            kv_tokens=None if tokens is None else tokens * ranks,
            caches_contexts=bool(config.cache_config.enable_prefix_caching)
            and _kv_tier(config.kv_transfer_config) == "none",
            ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
            release_while_paused=asleep,
            keeps_released_weights=True,
            adapters=config.lora_config is not None
            and bool(info.vllm_env.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING")),
            kv_tier=_kv_tier(config.kv_transfer_config),
            companions=frozenset(name for name, able in companions.items() if able),
            media=frozenset(MEDIA if model.multimodal_config else ()),
            server=f"vLLM {found}",
        ),
        vocab_size=await _vocab_size(asked),
        process=await server_process(asked),
        context_tokens=model.max_model_len,
        graph_requests=graph_requests(
            config.compilation_config, "max_cudagraph_capture_size", ranks=ranks
        ),
        logprobs_mode=model.logprobs_mode,
        device=config.device_config.device,
        drafter=drafter,
        own_draft=drafter not in _WITHOUT_MODEL,
    )


def _kv_tier(
    transfer: _Transfer | msgspec.UnsetType | None,
) -> Literal["none", "keyed", "unkeyed"]:
    if transfer is None or (transfer is not msgspec.UNSET and transfer.kv_connector is None):
        return "none"
    return "keyed" if transfer is msgspec.UNSET or transfer.is_keyed else "unkeyed"


async def _server_info(asked: Questions) -> ServerInfo:
    """Ask for the server's configuration."""
    wanted = {"config_format": "json"}
    answer = await asked.ask("server_info", accept=(200, _NOT_FOUND), query=wanted)
    if answer.status == _NOT_FOUND:
        raise EngineProtocolError(
            asked.engine,
            "has no control calls, so it can be neither paused nor refitted; start it with "
            "VLLM_SERVER_DEV_MODE=1.",
        )
    return asked.read("server_info", answer, ServerInfo)


async def server_process(asked: Questions) -> str | None:
    """Return when the answering process was started, or None if the system does not report it."""
    page = await metrics_page(asked)
    match = re.search(rb"^process_start_time_seconds ([0-9.e+]{1,32})$", page, re.MULTILINE)
    return None if match is None else match[1].decode()


async def metrics_page(asked: Questions) -> bytes:
    return (await asked.ask("metrics", at_most=_SERIES_BYTES)).body


async def weight_label(asked: Questions) -> str:
    """Ask for the label of the weights that the server has now."""
    return (await asked.get("weight_info", _WeightInfo)).weight_version


async def paused(asked: Questions) -> bool:
    """Ask whether the server is paused, whichever client paused it."""
    return (await asked.get("is_paused", _Paused)).is_paused


async def pause_questions(asked: Questions) -> float:
    """How often the server has answered :func:`paused`, to any client; 0 if it does not count."""
    counted = re.findall(
        rb'^http_requests_total\{[^\n]*handler="/is_paused"[^\n]*\} ([0-9.e+]{1,32})$',
        await metrics_page(asked),
        re.MULTILINE,
    )
    return math.fsum(map(float, counted))


async def _vocab_size(asked: Questions) -> int | None:
    """Return the model's vocabulary size, which vLLM reports only in a refusal.

    A bias on an impossible id is refused before the request reaches the scheduler, so nothing
    is generated, even by a paused server.
    """
    # A server with --return-sampling-mask refuses requests without top_k before it looks further.
    params = {"max_tokens": 1, "top_k": 1, "logit_bias": {str(_TOO_LARGE): 0.0}}
    body = {"token_ids": [0], "sampling_params": params}
    answer = await asked.ask("inference/v1/generate", body, accept=(200, 400, _NOT_FOUND))
    if answer.status == _NOT_FOUND:
        raise EngineProtocolError(
            asked.engine,
            "has no /inference/v1/generate; start it with --tokens-only, or with "
            "--enable-scale-out where text is needed too.",
        )
    match = re.search(rb"Vocabulary size: (\d{1,9})", answer.body)
    return None if match is None else int(match[1])
