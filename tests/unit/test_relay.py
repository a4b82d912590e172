"""Tests the relay of weights with members in this process, which really join groups over gloo."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from aprilsched.errors import ConfigError
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.weights.relay import RelayPublisher
from tests.support.group_engine import GroupMember


class Trainer:
    """Overwrites its tensors in place, as an optimizer does."""

    def __init__(self) -> None:
        self.tensors = {"a": torch.zeros(8), "b": torch.zeros(3, dtype=torch.bfloat16)}

    def step(self) -> None:
        for tensor in self.tensors.values():
            tensor += 1

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()


def relay(weights: Any) -> RelayPublisher:
    return RelayPublisher(weights, backend="gloo", bucket_bytes=16, timeout_s=20.0)


def fleet(*members: GroupMember) -> Sequence[Engine]:
    return cast(Sequence[Engine], members)


def values(member: GroupMember) -> set[float]:
    return {float(value) for tensor in member.weights.values() for value in tensor}


async def test_engines_take_the_version_one_after_the_other_whatever_the_trainer_does_since():
    trainer, a, b = Trainer(), GroupMember("a"), GroupMember("b", ranks=2)
    made = relay(trainer.weights)
    trainer.step()
    await made.prepare(1)
    trainer.step()
    assert await made.publish(1, fleet(a)) == {"a": None}
    await made.prepare(2)
    trainer.step()
    assert await made.publish(2, fleet(b)) == {"b": None}
    assert (values(a), values(b)) == ({1.0}, {2.0})
    assert (a.version_now, b.version_now) == (1, 2)
    assert not made.holds(1)
    assert await made.publish(2, fleet(a)) == {"a": None}
    assert values(a) == {2.0}
    assert a.calls.count("join") == 1  # its group has lasted
    await made.aclose()
    assert (a.calls[-1], b.calls[-1]) == ("leave", "leave")
    assert not made.holds(2)


async def test_a_version_is_kept_while_an_engine_takes_it():
    trainer, slow, fast = Trainer(), GroupMember("slow"), GroupMember("fast")
    made, may_go = relay(trainer.weights), asyncio.Event()
    start = slow.begin_update

    async def begin_later() -> None:
        await may_go.wait()
        await start()

    slow.begin_update = begin_later  # type: ignore[method-assign]
    trainer.step()
    await made.prepare(1)
    taking = asyncio.create_task(made.publish(1, fleet(slow)))
    await asyncio.sleep(0)
    trainer.step()
    await made.prepare(2)
    assert await made.publish(2, fleet(fast)) == {"fast": None}
    assert made.holds(1)
    may_go.set()
    assert await taking == {"slow": None}
    assert (values(slow), values(fast)) == ({1.0}, {2.0})
    await made.aclose()


async def test_an_engine_that_fails_breaks_no_other_group():
    trainer = Trainer()
    bad, good = GroupMember("bad", fail_at="receive 1", dies=True), GroupMember("good")
    made = relay(trainer.weights)
    await made.prepare(1)
    outcomes = await made.publish(1, fleet(bad, good))
    assert outcomes["good"] is None
    assert outcomes["bad"] is not None
    assert good.calls.count("join") == 1
    await made.aclose()


async def test_asynchronous_weights_are_read_once():
    reads: list[int] = []

    async def weights() -> AsyncIterator[tuple[str, Tensor]]:
        reads.append(1)
        yield "a", torch.ones(4)

    member, made = GroupMember("m"), relay(weights)
    await made.prepare(1)
    assert await made.publish(1, fleet(member)) == {"m": None}
    assert await made.publish(1, fleet(member)) == {"m": None}
    assert len(reads) == 1
    await made.aclose()


async def test_invalid_relays_and_versions_are_refused():
    made = relay(lambda: iter(()))
    with pytest.raises(ConfigError, match="gave no tensors"):
        await made.prepare(1)
    with pytest.raises(ConfigError, match="version 1 was not prepared"):
        await made.publish(1, fleet(GroupMember("m")))
    with pytest.raises(ConfigError, match="backend is 'mpi'"):
        RelayPublisher(Trainer().weights, backend="mpi")
