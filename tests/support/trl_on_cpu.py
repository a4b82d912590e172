"""What TRL's AsyncGRPOTrainer needs to train a tiny random model on a CPU.

TRL 1.16 calls two things that exist on a GPU only: the FlashAttention-3 kernel from the Hugging
Face hub, and the name of the CUDA device. :func:`on_cpu` replaces both for a test.
"""

# pyright: basic
# The packages have no complete types.
from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pytest

__all__ = ["VOCABULARY", "kernel", "on_cpu", "tokenizer", "write_model"]

VOCABULARY = 512
_SPECIAL = ["<eos>", "<bos>", "<pad>", "<user>", "<assistant>"]
_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer() -> Any:
    """A tokenizer of words: the special tokens, and "w5" to "w511", each with that id."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = [*_SPECIAL, *(f"w{index}" for index in range(len(_SPECIAL), VOCABULARY))]
    model = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, "<pad>"))
    model.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>"
    )
    made.chat_template = _TEMPLATE
    return made


def write_model(folder: Path) -> Path:
    """Write a tiny random Qwen3 and its tokenizer, as TRL loads them; the same each time."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        # Larger than the default, so that a step of the optimizer changes logprobs visibly.
        initializer_range=0.1,
        eos_token_id=0,
        bos_token_id=1,
        pad_token_id=2,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Replace the calls of TRL that need a GPU."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    patch.setattr(packing, "_flash_attn", kernel)
    patch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda accelerator, dtype: None)


def kernel() -> Any:
    """In the place of FlashAttention-3 from the hub."""
    return SimpleNamespace(flash_attn_varlen_func=_attention)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    begins_q: Any,
    begins_k: Any,
    longest_q: int,
    longest_k: int,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> Any:
    """FlashAttention for sequences of many lengths: the queries are the last of their keys."""
    assert causal
    assert window_size == (-1, -1)
    parts = []
    for (q0, q1), (k0, k1) in zip(_spans(begins_q), _spans(begins_k), strict=True):
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=query.device)
        seen = seen.tril(k1 - k0 - (q1 - q0))
        part = torch.nn.functional.scaled_dot_product_attention(
            *(
                x[a:b].transpose(0, 1)
                for x, a, b in ((query, q0, q1), (key, k0, k1), (value, k0, k1))
            ),
            attn_mask=seen,
            scale=softmax_scale,
            enable_gqa=True,
        )
        parts.append(part.transpose(0, 1))
    return torch.cat(parts)


def _spans(starts: Any) -> list[tuple[int, int]]:
    bounds = starts.tolist()
    return list(pairwise(bounds))
