"""Makes the policy of this example from random weights, with a tokenizer and a chat template.

The policy is a Qwen3 of 0.5 million parameters. It learns to write calls of the tool and answers
from traces of a careful agent first, because it finds out soon then that names and codes are
copied, and at last from those of a careless one, which reads some note or other in a third of the
turns. That is what GRPO begins with.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from agent import CODES, NAMES, TOOLS, Task, question, task
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
END = SPECIAL.index("<|im_end|>")
PAD = SPECIAL.index("<pad>")
CALL = '{"name": "read", "arguments": {"path": "'
PIECES = (
    "user\n", "assistant\n", "tool\n", "tools: read", "Find the code. Begin with ",
    "look in ", "the code is ", "no such note", CALL, '"}}', *NAMES, *CODES,
)  # fmt: skip
"""Texts of one token each; other text is a token for each byte."""
TEMPLATE = (
    "{% if tools %}<|im_start|>tools: "
    "{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*"},
    },
}
CARELESS = 0.35
"""How often the careless agent reads some note or other."""


def make_tokenizer() -> Any:
    """A tokenizer of the pieces and of bytes, with the chat template and the form of tool calls."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate([*SPECIAL, *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in PIECES])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[END], pad_token=SPECIAL[PAD]
    )
    made.chat_template = TEMPLATE
    made.response_template = RESPONSE
    return made


def trace(draw: random.Random, given: Task, careless: float) -> list[dict[str, Any]]:
    """What an agent does with a task: its messages. It reads some note or other so often."""
    told = question(given.first)
    messages: list[dict[str, Any]] = [{"role": "user", "content": told}]
    hint: str | None = given.first
    for _ in range(6):
        if told.startswith("the code is ") and draw.random() >= careless:
            return [*messages, {"role": "assistant", "content": told.split()[-1]}]
        name = hint if hint and draw.random() >= careless else draw.choice(NAMES)
        call = {"name": "read", "arguments": {"path": name}}
        told = given.notes.get(name, "no such note")
        hint = told.split()[-1] if told.startswith("look in ") else None
        messages += [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": call}],
            },
            {"role": "tool", "content": told},
        ]
    return [*messages, {"role": "assistant", "content": draw.choice(CODES)}]


def rows(
    draw: random.Random, tokenizer: Any, count: int, careless: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Traces as tokens, and which tokens are the agent's, both [count, longest]."""
    begins = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    found: list[list[int]] = []
    for _ in range(count):
        text = tokenizer.apply_chat_template(
            trace(draw, task(draw), careless), tools=TOOLS, tokenize=False
        )
        found.append(tokenizer.encode(text, add_special_tokens=False))
    longest = max(map(len, found))
    tokens = torch.full((count, longest), PAD)
    own = torch.zeros(count, longest, dtype=torch.bool)
    for row, ids in enumerate(found):
        tokens[row, : len(ids)] = torch.tensor(ids)
        place = 0
        while place < len(ids):
            if ids[place : place + len(begins)] != begins:
                place += 1
                continue
            place += len(begins)
            end = ids.index(END, place) + 1
            own[row, place:end] = True
            place = end
    return tokens, own


def write_policy(folder: Path, *, steps: int, seed: int = 0, batch: int = 32) -> list[float]:
    """Train a policy from random weights and save it with its tokenizer; returns the losses."""
    torch.manual_seed(seed)
    draw, tokenizer = random.Random(seed), make_tokenizer()
    model: Any = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=1, head_dim=64, tie_word_embeddings=True,
            max_position_embeddings=2048, eos_token_id=END, pad_token_id=PAD,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        )
    )  # fmt: skip
    matrices = [p for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() < 2 or "embed" in n]
    optimizers = (
        (0.02, torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.0)),
        (3e-3, torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)),
    )
    losses: list[float] = []
    for step in range(steps):
        careful = step < 0.7 * steps
        tokens, own = rows(draw, tokenizer, batch, 0.0 if careful else CARELESS)
        logits = model(input_ids=tokens[:, :-1]).logits
        each = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        loss = (each * own[:, 1:]).sum() / own[:, 1:].sum()
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for peak, optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * min(1.0, (step + 1) / 20, 2 * (1 - step / steps))
            optimizer.step()
        losses.append(loss.item())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return losses
