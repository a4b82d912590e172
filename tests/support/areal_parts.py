"""AReaL's own classes, as the tests of its adapter use them.

The package areal has an environment of its own (`make test-areal`), or `AREAL_ROOT` names a
checkout in its place.
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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["Client", "areal", "saved", "why_not"]


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


def areal(folder: Path) -> SimpleNamespace:
    """AReaL's classes and modules that a test needs, with its registry of names in `folder`."""
    api = importlib.import_module("areal.api")
    arguments = importlib.import_module("areal.api.cli_args")
    name_resolve = importlib.import_module("areal.utils.name_resolve")
    name_resolve.reconfigure(arguments.NameResolveConfig(type="nfs", nfs_record_root=str(folder)))
    return SimpleNamespace(
        Meta=api.WeightUpdateMeta,
        Request=api.ModelRequest,
        Generation=arguments.GenerationHyperparameters,
        Config=arguments.InferenceEngineConfig,
        names=importlib.import_module("areal.utils.names"),
        name_resolve=name_resolve,
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


class Client:
    """In the place of AReaL's client, whose broadcasts need NCCL; tests/sglang/test_areal.py has
    the real one. The servers answer at once, with `error` if there is one."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.error: Exception | None = None

    def __call__(self, config: Any) -> Client:
        return self

    def initialize(self, addr: list[str]) -> None:
        self.calls.append(("initialize", addr))

    def destroy(self) -> None:
        self.calls.append(("destroy", None))

    def init_weights_update_group(self, meta: Any, xccl_group_ranks: Any) -> Future[None]:
        return self._answer("group", meta.nccl_group_name)

    def update_weights_from_distributed(self, meta: Any, param_specs: Any) -> Future[None]:
        return self._answer("bucket", param_specs)

    def _answer(self, call: str, value: Any) -> Future[None]:
        self.calls.append((call, value))
        future: Future[None] = Future()
        if self.error is None:
            future.set_result(None)
        else:
            future.set_exception(self.error)
        return future
