"""Reads the tensors of a checkpoint without a library, as a trainer's weights for tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
