"""The model that is published: the names and shapes of Qwen3-4B, filled with random numbers.

Two seeds give two policies. The numbers depend only on the seed and the kind of device, so a
trainer on another GPU of the same kind draws the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "QWEN3_0_6B",
    "QWEN3_4B",
    "QWEN3_8B",
    "QWEN3_30B_A3B",
    "TINY",
    "RandomWeights",
    "shapes",
    "write_config",
]

QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_8B: dict[str, Any] = {
    **QWEN3_4B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B: dict[str, Any] = {
    **QWEN3_4B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}
QWEN3_0_6B: dict[str, Any] = {
    **QWEN3_4B,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
}
TINY: dict[str, Any] = {
    **QWEN3_4B,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "head_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 8192,
    "max_window_layers": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 512,
}
_SHARD_BYTES = 3 * 2**30


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes in the Hugging Face layout of Qwen3."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{at}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{at}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{at}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{at}.self_attn.q_norm.weight", (head,)
        yield f"{at}.self_attn.k_norm.weight", (head,)
        experts = config.get("num_experts", 0)
        if experts:
            yield f"{at}.mlp.gate.weight", (experts, hidden)
        width = config["moe_intermediate_size"] if experts else inner
        for of in [f"experts.{expert}." for expert in range(experts)] or [""]:
            yield f"{at}.mlp.{of}gate_proj.weight", (width, hidden)
            yield f"{at}.mlp.{of}up_proj.weight", (width, hidden)
            yield f"{at}.mlp.{of}down_proj.weight", (hidden, width)
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def write_config(config: dict[str, Any], directory: Path) -> Path:
    """Write config.json, all that a server with dummy weights needs."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory


class RandomWeights:
    """All weights on one device, drawn again in place for another seed."""

    def __init__(self, config: dict[str, Any], device: str) -> None:
        self._config = config
        dtype = getattr(torch, config["torch_dtype"])
        self.tensors = {
            name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes(config)
        }
        self.device = device
        self.bytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def draw(self, seed: int) -> None:
        """Other numbers: 0.1 wide, so that greedy paths depend on the context; norms near 1."""
        generator = torch.Generator(device=self.device)
        generator.manual_seed(seed)
        for name, tensor in self.tensors.items():
            if name.endswith("norm.weight"):
                tensor.normal_(1.0, 0.1, generator=generator)
            else:
                tensor.normal_(0.0, 0.1, generator=generator)
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What a publisher asks for."""
        yield from self.tensors.items()

    def save(self, directory: Path) -> None:
        """Write config.json and shards of at most 3 GiB, as a trainer would."""
        from safetensors.torch import save_file

        write_config(self._config, directory)
        shards: list[dict[str, torch.Tensor]] = [{}]
        size = 0
        for name, tensor in self.named():
            if shards[-1] and size + tensor.nbytes > _SHARD_BYTES:
                shards.append({})
                size = 0
            shards[-1][name] = tensor
            size += tensor.nbytes
        index: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            save_file(shard, directory / file)
            index.update(dict.fromkeys(shard, file))
        text = json.dumps({"metadata": {"total_size": self.bytes}, "weight_map": index})
        (directory / "model.safetensors.index.json").write_text(text)
