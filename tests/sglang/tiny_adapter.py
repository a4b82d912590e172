"""Writes a random LoRA adapter in the PEFT layout, and the same model with it merged in.

``main(MODEL, ADAPTER, MERGED, SEED)``; module_runner.py runs it.
MERGED holds ``W + alpha / r * B @ A`` for every adapted matrix: scoring with it is scoring with
the adapter.
"""

# pyright: basic, reportMissingImports=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import json
import shutil
from pathlib import Path

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 8
ALPHA = 16
SPREAD = 0.15


def write(model: Path, adapter: Path, merged: Path, seed: int) -> None:
    """Adapt every projection of `model`."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for name, weight in list(weights.items()):
        if name.split(".")[-2] in MODULES:
            a = torch.randn(RANK, weight.shape[1], generator=generator) * SPREAD
            b = torch.randn(weight.shape[0], RANK, generator=generator) * SPREAD
            place = f"base_model.model.{name.removesuffix('.weight')}"
            parts[f"{place}.lora_A.weight"], parts[f"{place}.lora_B.weight"] = a, b
            weights[name] = weight + ALPHA / RANK * (b @ a)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(MODULES),
    }
    adapter.mkdir()
    save_file(parts, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    shutil.copytree(model, merged)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})


def main(model: str, adapter: str, merged: str, seed: str) -> None:
    write(Path(model), Path(adapter), Path(merged), int(seed))
