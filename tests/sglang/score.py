"""Score token sequences with transformers; run by the server environment's Python.

``python score.py IN.npz MODEL OUT.npz [MODEL OUT.npz]…``: IN holds int64 arrays; each OUT gets for
every array, under the same name, the float64 log-probability that its MODEL gives each token given
all before it (0 for the first), and under ``best-NAME`` that of the token it finds likeliest.
"""

# pyright: basic, reportMissingImports=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import sys

import numpy as np
import stand_ins


def score(source: str, model_path: str, target: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    scores = {}
    with torch.no_grad():
        for name, ids in np.load(source).items():
            row = torch.from_numpy(ids)
            logits = model(row[None]).logits[0].double()
            logprobs = logits.log_softmax(-1)[:-1]
            picked = logprobs.gather(1, row[1:, None])[:, 0]
            scores[name] = np.concatenate(([0.0], picked.numpy()))
            scores[f"best-{name}"] = np.concatenate(([0.0], logprobs.amax(-1).numpy()))
    np.savez(target, **scores)


if __name__ == "__main__":
    stand_ins.install()
    for model, out in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        score(sys.argv[1], model, out)
