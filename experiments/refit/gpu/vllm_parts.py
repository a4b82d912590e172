"""Lets vLLM's transfer code run without vLLM: a few of its files, and stand-ins for their imports.

Both ends of the transfer, the communicator, the packing and the sparse patches are vLLM's own
files, unchanged (FILES, carried in an archive). What is replaced does not move weights:
configuration, logging, the platform, and the layerwise reload around an update.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

__all__ = ["FILES", "install"]

FILES = (
    "vllm/envs.py",
    "vllm/utils/nccl.py",
    "vllm/distributed/utils.py",
    "vllm/distributed/device_communicators/pynccl.py",
    "vllm/distributed/device_communicators/pynccl_wrapper.py",
    *(
        f"vllm/distributed/weight_transfer/{name}.py"
        for name in (
            *("__init__", "base", "clients", "factory", "nccl_common", "nccl_engine"),
            *("ipc_engine", "packed_tensor", "sparse_nccl_engine"),
        )
    ),
    "vllm/model_executor/model_loader/checkpoint_weight_patch.py",
    "vllm/model_executor/model_loader/mtp_validation.py",
)


@dataclass
class _Config:
    backend: str = "nccl"


def _nothing(*arguments: object, **named: object) -> None:
    pass


def install(site: Path) -> None:
    """Make the files below `site` importable; none of vLLM's own packages is executed."""
    sys.path.insert(0, str(site))

    def stand_in(name: str, **content: Any) -> None:
        module = ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module

    def logger(name: str) -> logging.Logger:
        made: Any = logging.getLogger(name)
        for level in ("debug", "info", "warning"):
            setattr(made, f"{level}_once", getattr(made, level))
        return made

    stand_in("vllm.logger", init_logger=logger)
    stand_in("vllm.config", VllmConfig=object, ModelConfig=object)
    stand_in("vllm.config.parallel", ParallelConfig=object)
    stand_in("vllm.config.weight_transfer", WeightTransferConfig=_Config)
    platform = SimpleNamespace(is_rocm=lambda: False, fp8_dtype=lambda: torch.float8_e4m3fn)
    stand_in("vllm.platforms", current_platform=platform)
    stand_in("vllm.utils.torch_utils", current_stream=torch.cuda.current_stream)
    stand_in("vllm.utils.network_utils", get_tcp_uri="tcp://{}:{}".format)
    stand_in("vllm.utils.system_utils", suppress_stdout=contextlib.nullcontext)
    stand_in(
        "vllm.model_executor.model_loader.reload",
        initialize_layerwise_reload=_nothing,
        finalize_layerwise_reload=_nothing,
    )
    stand_in("pybase64", b64encode=base64.b64encode, b64decode=base64.b64decode)
    if torch.cuda.is_available():
        _drop_what_this_nccl_lacks()


def _drop_what_this_nccl_lacks() -> None:
    """vLLM 0.32 wants NCCL 2.29.7 for suspending a communicator, which no transfer does."""
    import ctypes
    import importlib

    wrapper = importlib.import_module("vllm.distributed.device_communicators.pynccl_wrapper")
    library = ctypes.CDLL("libnccl.so.2")
    functions: list[Any] = wrapper.NCCLLibrary.exported_functions
    wrapper.NCCLLibrary.exported_functions = [f for f in functions if hasattr(library, f.name)]
