"""Tests the corrections against the losses of trl, run on the same numbers.

The extra dev-torch brings it. In an environment without torch the tests are skipped.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest

pytest.importorskip("torch")

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from aprilsched.trainers.corrections import Level, clipped_loss, importance_weights

ROWS, COLUMNS, WORDS = 3, 6, 11


def draw(seed: int) -> dict[str, Any]:
    """Log-probabilities, advantages for each row, and a mask that ends rows at different places."""
    random = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(WORDS, (ROWS, COLUMNS), generator=random),
        "noise": 0.4 * torch.randn((ROWS, COLUMNS), generator=random),
        "more_noise": 0.4 * torch.randn((ROWS, COLUMNS), generator=random),
        "advantages": torch.randn((ROWS, 1), generator=random),
        "mask": torch.arange(COLUMNS) < torch.tensor([[COLUMNS], [4], [1]]),
    }


@pytest.fixture(scope="module")
def tiny_model() -> Any:
    """A Llama of a few thousand random parameters."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


def trl_loss(folder: str, model: Any, inputs: dict[str, Any], **settings: Any) -> Any:
    """The loss of a GRPOTrainer of these settings."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    words = {str(token): token for token in range(WORDS)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), pad_token="0", eos_token="2"
    )

    def reward(completions: list[str], **_: Any) -> list[float]:
        raise AssertionError("nothing is generated here")

    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=trl.GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to="none",
            loss_type="bnpo",
            beta=0.0,
            gradient_checkpointing=False,
            **settings,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["3"]}),
        processing_class=tokenizer,
    )
    # The ratio of the engine's policy is applied for an engine only; none is asked here.
    trainer.use_vllm = "importance_sampling_ratio" in inputs
    trainer.current_gradient_accumulation_steps = 1
    return trainer._compute_loss(model, inputs)


@pytest.mark.parametrize("outside", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "geometric"])
def test_the_corrected_loss_is_trls(
    tiny_model: Any, tmp_path: Any, level: Level, outside: Literal["truncate", "mask"]
):
    drawn = draw(4)
    tokens, mask, advantages = drawn["tokens"], drawn["mask"], drawn["advantages"]
    prompts = torch.full((ROWS, 2), 5)
    logits = tiny_model(torch.cat([prompts, tokens], 1)).logits[:, 1:-1]
    logprobs = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    proximal = logprobs.detach() + drawn["noise"]
    behaviour = proximal + drawn["more_noise"]
    weights = importance_weights(proximal, behaviour, mask, high=1.3, low=0.5, outside=outside)
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": tokens,
        "completion_mask": mask.long(),
        "advantages": advantages[:, 0],
        "old_per_token_logps": proximal,
        "importance_sampling_ratio": weights,
    }
    theirs = trl_loss(
        str(tmp_path),
        tiny_model,
        inputs,
        epsilon=0.1,
        epsilon_high=0.3,
        importance_sampling_level="token" if level == "token" else "sequence",
    )
    losses = clipped_loss(
        logprobs,
        proximal,
        advantages,
        mask,
        weights=weights,
        clip_low=0.1,
        clip_high=0.3,
        level=level,
    )
    ours = losses.sum() / mask.sum()
    torch.testing.assert_close(ours, theirs)
    parameters = list(tiny_model.parameters())
    of_ours = torch.autograd.grad(ours, parameters)
    of_theirs = torch.autograd.grad(theirs, parameters)
    torch.testing.assert_close(of_ours, of_theirs)
