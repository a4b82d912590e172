"""Two modules that SGLang's import chain wants and a machine without a GPU cannot give.

Call :func:`install` before sglang or transformers' models are imported, in every process.
"""

from __future__ import annotations

import sys
import types

__all__ = ["install"]

_VLLM_OPERATORS = ("rms_norm", "fused_add_rms_norm", "rotary_embedding", "awq_dequantize")


def install() -> None:
    """Put the stand-ins into ``sys.modules``."""
    # torchvision's CUDA build cannot register its operators against a torch without CUDA.
    sys.modules["torchvision._meta_registrations"] = types.ModuleType("_meta_registrations")
    # Imported on processors without AMX and never called: the layers run native PyTorch code.
    operators = types.ModuleType("vllm._custom_ops")
    for name in _VLLM_OPERATORS:
        setattr(operators, name, None)
    package = types.ModuleType("vllm")
    package.__dict__.update(__path__=[], _custom_ops=operators)
    sys.modules["vllm"] = package
    sys.modules["vllm._custom_ops"] = operators
