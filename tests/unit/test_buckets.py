"""Tests tensors in buckets: their order, the size of a bucket, and the alignment of tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from aprilsched.errors import ConfigError
from aprilsched.weights.publisher import Bucket, iter_buckets


def row(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(count, dtype=dtype)


def named(*tensors: Tensor) -> list[tuple[str, Tensor]]:
    return [(f"t{index}", tensor) for index, tensor in enumerate(tensors)]


def names(buckets: Iterator[Bucket]) -> list[list[str]]:
    return [[name for name, _ in bucket] for bucket in buckets]


def test_a_bucket_is_filled_up_to_its_last_byte():
    buckets = iter_buckets(named(row(2), row(2), row(1), row(4)), 16)
    assert names(buckets) == [["t0", "t1"], ["t2"], ["t3"]]


def test_a_larger_tensor_goes_alone():
    buckets = iter_buckets(named(row(1), row(100), row(1), row(1)), 16)
    assert names(buckets) == [["t0"], ["t1"], ["t2", "t3"]]


def test_no_tensors_make_no_bucket():
    assert names(iter_buckets([], 16)) == []


def test_tensors_without_elements_are_not_lost():
    assert names(iter_buckets(named(row(0), row(4), row(0)), 16)) == [["t0", "t1", "t2"]]


def test_a_tensor_begins_where_torch_can_look_at_it_as_its_own_type():
    """After six bytes of bfloat16, a view as float32 would not begin at a multiple of 4."""
    odd, even = row(3, torch.bfloat16), row(4, torch.bfloat16)
    assert names(iter_buckets(named(odd, row(1)), 100)) == [["t0"], ["t1"]]
    assert names(iter_buckets(named(even, row(1)), 100)) == [["t0", "t1"]]
    assert names(iter_buckets(named(row(1), odd, odd), 100)) == [["t0", "t1", "t2"]]


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
