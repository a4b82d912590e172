"""Writes a tiny random Qwen3 in the Hugging Face layout; module_runner.py runs it.

``main(DIRECTORY, SEED, KIND)``, where KIND is "dense" or "moe", a mixture of EXPERTS experts.
Another seed gives very different weights of the same shape: their logprobs differ by several nats,
so a test notices if a token is scored with the wrong weights.
"""

# pyright: basic, reportMissingImports=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

from pathlib import Path

VOCAB_SIZE = 512
CONTEXT_LENGTH = 8192
LAYERS = 2
EXPERTS = 8
EXPERTS_PER_TOKEN = 2


def write(directory: Path, seed: int, kind: str) -> None:
    """Write config.json and model.safetensors (float32) into `directory`."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    torch.manual_seed(seed)
    mixture = {
        "moe_intermediate_size": 64,
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "norm_topk_prob": True,
    }
    config = (Qwen3MoeConfig if kind == "moe" else Qwen3Config)(
        **(mixture if kind == "moe" else {}),
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=False,
        # Larger than the default 0.02: greedy paths then depend on the context instead of
        # falling into a cycle of one token after a few steps.
        initializer_range=0.2,
        eos_token_id=0,
        bos_token_id=1,
        pad_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config).to(torch.float32)
    model.save_pretrained(directory, safe_serialization=True)


def main(directory: str, seed: str, kind: str = "dense") -> None:
    write(Path(directory), int(seed), kind)
