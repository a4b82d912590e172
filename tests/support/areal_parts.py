"""The parts of AReaL that the adapter meets: AReaL's own where it can be imported.

Where the package areal and what it needs are installed, or with `AREAL_ROOT` set to a checkout in
its place, :func:`areal` gives the real classes. Otherwise it puts modules of the same names into
`sys.modules`, which have what the adapter calls. The same tests run with both.
"""

# pyright: basic, reportMissingImports=false
# The package has no complete types.
from __future__ import annotations

import functools
import importlib
import os
import sys
import time
import warnings
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

__all__ = ["areal", "is_real", "saved", "why_not"]


@functools.cache
def why_not() -> str:
    """Why AReaL cannot be imported; empty if it can."""
    root = os.environ.get("AREAL_ROOT")
    if root and root not in sys.path:
        sys.path.insert(0, root)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("areal.engine.sglang_remote")
    except ImportError as error:
        for name in [name for name in sys.modules if name.partition(".")[0] == "areal"]:
            del sys.modules[name]  # What could be imported before the error.
        return f"AReaL cannot be imported ({error}); `make test-areal` has its packages"
    return ""


def is_real() -> bool:
    """Whether AReaL can be imported."""
    return not why_not()


def areal(patch: pytest.MonkeyPatch) -> SimpleNamespace:
    """AReaL's classes and modules that a test needs."""
    if not is_real():
        for name, module in _modules().items():
            patch.setitem(sys.modules, name, module)
    api = importlib.import_module("areal.api")
    arguments = importlib.import_module("areal.api.cli_args")
    return SimpleNamespace(
        Meta=api.WeightUpdateMeta,
        Request=api.ModelRequest,
        Generation=arguments.GenerationHyperparameters,
        Config=arguments.InferenceEngineConfig,
        names=importlib.import_module("areal.utils.names"),
        name_resolve=importlib.import_module("areal.utils.name_resolve"),
        context=importlib.import_module("areal.infra.workflow_context"),
        stats=importlib.import_module("areal.utils.stats_tracker"),
    )


def saved(parts: SimpleNamespace, config: Any, version: int, path: Path) -> None:
    """Write a checkpoint in `path` and say so, as AReaL's training engine does."""
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(str(path).encode())
    name = parts.names.update_weights_from_disk(config.experiment_name, config.trial_name, version)
    parts.name_resolve.add(name, str(time.time()), keepalive_ttl=120, replace=True)


# --- without AReaL -------------------------------------------------------------------------------


@dataclass
class _Generation:
    n_samples: int = 1
    max_new_tokens: int = 16384
    min_new_tokens: int = 0
    max_tokens: int = 32768
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = int(1e8)
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stop: list[str] | None = None
    frequency_penalty: float = 0.0
    use_beam_search: bool = False

    def new(self, **changes: Any) -> _Generation:
        return replace(self, **changes)


@dataclass
class _Request:
    rid: str = ""
    input_ids: list[int] = field(default_factory=list)
    gconfig: _Generation = field(default_factory=_Generation)
    tokenizer: Any = None
    image_data: list[str] | None = field(default_factory=list)
    processor: Any = None


@dataclass
class _Response:
    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: str
    tokenizer: Any
    latency: float
    ttft: float
    input_images: list[str] = field(default_factory=list)
    processor: Any = None
    routed_experts: Any = None


@dataclass
class _Config:
    backend: str
    experiment_name: str | None = None
    trial_name: str | None = None
    max_concurrent_rollouts: int | None = None
    consumer_batch_size: int = 1
    max_head_offpolicyness: int = 0
    request_timeout: float = 3600
    use_lora: bool = False
    return_routed_experts: bool = False
    tokenizer_path: str = ""
    agent: Any = None


@dataclass
class _Meta:
    type: str
    path: str | None = None
    use_lora: bool = False
    clear_checkpoint_after_load: bool = True
    version: int | None = None
    nccl_group_name: str | None = None

    def with_version(self, version: int) -> _Meta:
        path = None if self.path is None else str(Path(self.path).parent / f"v{version}")
        return replace(self, version=version, path=path)


@dataclass(frozen=True)
class _Context:
    is_eval: bool = False
    task_id: int | None = None


class _Client:
    """AReaL's own engine, as far as it moves weights; the servers answer at once."""

    calls: ClassVar[list[tuple[str, Any]]] = []
    error: Exception | None = None

    def __init__(self, config: Any) -> None:
        self.config = config

    def initialize(self, addr: list[str]) -> None:
        self.calls.append(("initialize", addr))

    def init_weights_update_group(self, meta: Any, xccl_group_ranks: Any) -> Future[None]:
        self.calls.append(("group", meta.nccl_group_name))
        return _done()

    def update_weights_from_distributed(self, meta: Any, param_specs: Any) -> Future[None]:
        self.calls.append(("bucket", param_specs))
        return _done(self.error)

    def destroy(self) -> None:
        self.calls.append(("destroy", None))


def _done(error: Exception | None = None) -> Future[None]:
    future: Future[None] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return future


def _modules() -> dict[str, ModuleType]:
    nothing = _Context()
    current: ContextVar[_Context] = ContextVar("context")
    registry: dict[str, str] = {}
    recorded: dict[str, list[float]] = {}

    def wait(name: str, timeout: float, poll_frequency: float) -> str:
        end = time.monotonic() + timeout
        while name not in registry:
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(poll_frequency)
        return registry[name]

    def tracker(scope: str) -> SimpleNamespace:
        def scalar(**values: float) -> None:
            for name, value in values.items():
                recorded.setdefault(f"{scope}/{name}", []).append(value)

        return SimpleNamespace(scalar=scalar)

    def export_all(reduce_group: Any) -> dict[str, float]:
        found = {name: sum(each) / len(each) for name, each in recorded.items()}
        recorded.clear()
        return found

    def concatenated(rows: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        found: dict[str, Any] = {}
        for name, first in rows[0].items():
            values = [row[name] for row in rows]
            if isinstance(first, list):
                found[name] = [each for value in values for each in value]
            elif first.ndim < 2:
                found[name] = torch.cat(values)
            else:
                flat = [value[0] for value in values]
                found[name] = torch.nn.utils.rnn.pad_sequence(flat, batch_first=True)
        return found

    def imported(path: str) -> Any:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    async def no_client() -> None:
        """OpenAI's client makes one of its own."""

    context = _module(
        "areal.infra.workflow_context",
        WorkflowContext=_Context,
        set=current.set,
        get=lambda: current.get(nothing),
        stat_scope=lambda: "eval-rollout" if current.get(nothing).is_eval else "rollout",
        get_httpx_client=no_client,
    )
    found = [
        _module("areal"),
        _module(
            "areal.api", ModelRequest=_Request, ModelResponse=_Response, WeightUpdateMeta=_Meta
        ),
        _module(
            "areal.api.cli_args",
            GenerationHyperparameters=_Generation,
            InferenceEngineConfig=_Config,
        ),
        _module("areal.engine", RemoteSGLangEngine=_Client),
        _module("areal.infra", workflow_context=context),
        context,
        _module("areal.infra.rpc"),
        _module(
            "areal.infra.rpc.serialization",
            deserialize_value=_deserialized,
            serialize_value=_serialized,
        ),
        _module("areal.utils"),
        _module("areal.utils.data", concat_padded_tensors=concatenated),
        _module("areal.utils.dynamic_import", import_from_string=imported),
        _module(
            "areal.utils.names", update_weights_from_disk=lambda *parts: "/".join(map(str, parts))
        ),
        _module(
            "areal.utils.name_resolve",
            wait=wait,
            add=lambda name, value, **_: registry.update({name: value}),
        ),
        _module("areal.utils.network", gethostip=lambda: "127.0.0.1"),
        _module("areal.utils.stats_tracker", get=tracker, export_all=export_all),
    ]
    modules = {module.__name__: module for module in found}
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    return modules


def _serialized(value: Any) -> Any:
    return {"a meta": asdict(value)} if isinstance(value, _Meta) else value


def _deserialized(value: Any) -> Any:
    return _Meta(**value["a meta"]) if isinstance(value, dict) and "a meta" in value else value


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    return module
