"""Writes a tiny random model in the Hugging Face layout; module_runner.py runs it.

``main(DIRECTORY, SEED, KIND)``, where KIND is one of KINDS: a Qwen3, "dense" or "moe", a mixture of
EXPERTS experts, or a model whose layers are not all full attention.
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
WINDOW = 16
_MIXTURE = {
    "moe_intermediate_size": 64,
    "num_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS_PER_TOKEN,
    "norm_topk_prob": True,
}
_WINDOWS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 32,
}
KINDS = {
    "dense": ("Qwen3Config", {}),
    "moe": ("Qwen3MoeConfig", _MIXTURE),
    # SGLang skips the output layer of a checkpoint of Gemma 3, and vLLM's is stale if it is tied.
    "windows": ("Gemma3TextConfig", _WINDOWS),
    "tied windows": (
        "Gemma3TextConfig",
        # A larger range would make a tied model repeat each token.
        {**_WINDOWS, "tie_word_embeddings": True, "initializer_range": 0.1},
    ),
    "mamba": (
        "FalconH1Config",
        {
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_chunk_size": 32,
        },
    ),
    "linear": (
        "Qwen3NextConfig",
        {
            **_MIXTURE,
            # In bfloat16 a router would choose other experts, and larger weights would err more.
            "num_experts_per_tok": EXPERTS,
            "initializer_range": 0.1,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,  # vLLM's kernel for processors refuses 32.
            "linear_value_head_dim": 128,
            "shared_expert_intermediate_size": 64,
        },
    ),
}
"""The configuration's class and the settings of each kind."""


def write(directory: Path, seed: int, kind: str) -> None:
    """Write config.json and model.safetensors (float32) into `directory`."""
    import torch
    import transformers

    torch.manual_seed(seed)
    name, own = KINDS[kind]
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT_LENGTH,
        "tie_word_embeddings": False,
        # Larger than the default 0.02: greedy paths then depend on the context instead of
        # falling into a cycle of one token after a few steps.
        "initializer_range": 0.2,
        "eos_token_id": 0,
        "bos_token_id": 1,
        "pad_token_id": 2,
    }
    config = getattr(transformers, name)(**{**settings, **own})
    model = transformers.AutoModelForCausalLM.from_config(config)
    if kind == "linear":
        model.to(torch.bfloat16)  # Its servers compute in it, so the weights must have no more.
    model.to(torch.float32)
    model.save_pretrained(directory, safe_serialization=True)


def main(directory: str, seed: str, kind: str = "dense") -> None:
    write(Path(directory), int(seed), kind)
