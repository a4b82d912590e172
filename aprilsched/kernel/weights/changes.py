"""Finds the elements that a training step has changed, bit by bit.

Most updates of bfloat16 weights are smaller than the distance to the next number, so most elements
stay as they are from one version to the next. Values are replaced and never added, so nothing
drifts, and a patch that was applied in part can be applied again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aprilsched.kernel.values.extras import extra

if TYPE_CHECKING:
    from torch import Tensor


class LastWeights:
    """A copy of the weights that were published last, in host memory.

    Attributes:
        tensors: the copies by name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def changed(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return the flat indices of the changed elements (int64, ascending, on its device).

        None if there is no copy, or one of another dtype or shape. 0.0 and -0.0 differ.
        """
        last = self.tensors.get(name)
        if last is None or last.dtype != tensor.dtype or last.shape != tensor.shape:
            return None
        differs = bits(tensor) != bits(last.to(tensor.device))
        return differs.nonzero().flatten()


def bits(tensor: Tensor) -> Tensor:
    """The elements of a tensor in one row, as integers of their size."""
    with extra("torch"):
        import torch
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().flatten().view(sizes[tensor.element_size()])
