"""Weights of trainers for tests: a checkpoint's, read without a library, and changing ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def tensors(model: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint of one file, under its Hugging Face name.

    A safetensors file is the length of a JSON header in 8 bytes, the header, and the data.
    """
    data = (model / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        row = torch.frombuffer(bytearray(data[start + first : start + last]), dtype=torch.uint8)
        yield name, row.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])


class ChangingWeights:
    """Weights of which a share becomes those of another model in each version.

    Args:
        models: the first version, and a very different model; odd versions move towards the
            second one, even versions towards the first one.
        shares: the share of the elements that changes, for versions 1, 2, …; the last share
            repeats.
    """

    def __init__(self, models: Sequence[Path], shares: Sequence[float]) -> None:
        self._first, self._second = (dict(tensors(model)) for model in models)
        self._shares = shares
        self._random = torch.Generator().manual_seed(0)
        self.weights = {name: tensor.clone() for name, tensor in self._first.items()}

    def step(self, version: int) -> None:
        """Change the weights to those of `version`."""
        source = self._second if version % 2 else self._first
        share = self._shares[min(version, len(self._shares)) - 1]
        for name, tensor in self.weights.items():
            chosen = torch.rand(tensor.shape, generator=self._random) < share
            tensor[chosen] = source[name][chosen]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Return the pairs of name and tensor, as publishers read them."""
        yield from self.weights.items()
