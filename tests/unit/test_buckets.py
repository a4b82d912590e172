"""Tests tensors in buckets: their order, the size of a bucket, and the alignment of tensors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from aprilsched.errors import ConfigError
from aprilsched.kernel.weights.tensor_buckets import iter_buckets, iter_buckets_async
from tests.support.table import each_row


def row(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(count, dtype=dtype)


def named(*tensors: Tensor) -> list[tuple[str, Tensor]]:
    return [(f"t{index}", tensor) for index, tensor in enumerate(tensors)]


ODD, EVEN = row(3, torch.bfloat16), row(4, torch.bfloat16)


@each_row(
    ("tensors", "size", "packed"),
    [
        pytest.param([], 16, [], id="none"),
        pytest.param([row(2), row(2), row(1), row(4)], 16, [2, 1, 1], id="to the last byte"),
        pytest.param([row(1), row(100), row(1), row(1)], 16, [1, 1, 2], id="a larger one alone"),
        pytest.param([row(0), row(4), row(0)], 16, [3], id="none without elements is lost"),
        # After six bytes of bfloat16, a float32 view would not start at a multiple of 4.
        pytest.param([ODD, row(1)], 100, [1, 1], id="torch can look at it as its own type"),
        pytest.param([EVEN, row(1)], 100, [2], id="even"),
        pytest.param([row(1), ODD, ODD], 100, [3], id="odd at the end"),
    ],
)
async def test_tensors_are_packed_in_their_order(
    tensors: list[Tensor], size: int, packed: list[int]
):
    pairs = named(*tensors)

    async def slowly() -> AsyncIterator[tuple[str, Tensor]]:
        for pair in pairs:
            yield pair

    buckets = list(iter_buckets(pairs, size))
    assert [len(bucket) for bucket in buckets] == packed
    assert [name for bucket in buckets for name, _ in bucket] == [name for name, _ in pairs]
    found = [bucket async for bucket in iter_buckets_async(slowly(), size)]
    assert [len(bucket) for bucket in found] == packed


def test_buckets_are_made_when_asked_for():
    asked: list[str] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named(row(4), row(4), row(4)):
            asked.append(name)
            yield name, tensor

    buckets = iter_buckets(weights(), 16)
    assert asked == []
    next(buckets)
    assert asked == ["t0", "t1"]


def test_a_bucket_of_no_bytes_is_refused():
    with pytest.raises(ConfigError, match="give 1 or more"):
        next(iter_buckets(named(row(1)), 0))
