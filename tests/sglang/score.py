"""Scores token sequences with transformers; module_runner.py runs it.

``main(IN.npz, MODEL, OUT.npz, [MODEL, OUT.npz]…)``: IN holds int64 arrays; each OUT gets for every
array, under the same name, the float64 log-probability that its MODEL gives each token given all
before it (0 for the first), and under ``best-NAME`` that of the token it finds likeliest. Of a
mixture of experts it also gets ``experts-NAME``, uint8 [tokens, layers, experts per token], the
experts of every token in ascending order, and ``all-NAME``, float32 [tokens, vocabulary], all
log-probabilities of the next token.
"""

# pyright: basic, reportMissingImports=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import numpy as np


def score(source: str, model_path: str, target: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    scores = {}
    with torch.no_grad():
        for name, ids in np.load(source).items():
            row = torch.from_numpy(ids)
            mixture = hasattr(model.config, "num_experts")
            output = model(row[None], **({"output_router_logits": True} if mixture else {}))
            logprobs = output.logits[0].double().log_softmax(-1)[:-1]
            picked = logprobs.gather(1, row[1:, None])[:, 0]
            scores[name] = np.concatenate(([0.0], picked.numpy()))
            if mixture:
                chosen = [
                    layer.reshape(len(row), -1).topk(model.config.num_experts_per_tok).indices
                    for layer in output.router_logits
                ]
                experts = torch.stack(chosen, 1).sort(-1).values
                scores[f"experts-{name}"] = experts.to(torch.uint8).numpy()
                scores[f"all-{name}"] = logprobs.float().numpy()
            scores[f"best-{name}"] = np.concatenate(([0.0], logprobs.amax(-1).numpy()))
    np.savez(target, **scores)


def main(source: str, *models_and_targets: str) -> None:
    for model, out in zip(models_and_targets[::2], models_and_targets[1::2], strict=True):
        score(source, model, out)
