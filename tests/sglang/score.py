"""Score token sequences with transformers; run by the server environment's Python.

``python score.py MODEL IN.npz OUT.npz``: IN holds int64 arrays; OUT gets for each, under the same
name, the float64 log-probability of every token given all before it (0 for the first).
"""

# pyright: basic, reportMissingImports=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import sys

import numpy as np
import stand_ins


def score(model_path: str, source: str, target: str) -> None:
    stand_ins.install()
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    scores = {}
    with torch.no_grad():
        for name, ids in np.load(source).items():
            row = torch.from_numpy(ids)
            logits = model(row[None]).logits[0].double()
            picked = logits.log_softmax(-1)[:-1].gather(1, row[1:, None])[:, 0]
            scores[name] = np.concatenate(([0.0], picked.numpy()))
    np.savez(target, **scores)


if __name__ == "__main__":
    score(*sys.argv[1:4])
