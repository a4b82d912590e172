"""Tests the distributed publisher with members in this process: ranks, failures, a new group.

Real servers are tested in ``tests/sglang/test_distributed.py``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from aprilsched.errors import ConfigError, EngineError, EngineRejected
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.engines.refit import TensorMeta
from aprilsched.kernel.weights.collective import behind
from aprilsched.kernel.weights.distributed import DistributedPublisher
from aprilsched.kernel.weights.process_group import address_towards
from aprilsched.simulation.engine import SimEngine
from tests.support.group_engine import GroupMember
from tests.support.table import each_row

WEIGHTS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "c": torch.tensor(7.0),
    "d": torch.arange(64, dtype=torch.float32).reshape(8, 8).t(),
    "e": torch.ones(3, dtype=torch.int8),
}
ALL_CALLS = ["join", "begin", *(f"receive {n}" for n in range(1, 5)), "end"]


def weights() -> Iterator[tuple[str, Tensor]]:
    yield from WEIGHTS.items()


def publisher(given: Any = weights, **settings: Any) -> DistributedPublisher:
    """A publisher over gloo that sends four buckets."""
    own: dict[str, Any] = {"backend": "gloo", "bucket_bytes": 64, "timeout_s": 20.0}
    made = DistributedPublisher(given, **(own | settings))
    MADE.append(made)
    return made


MADE: list[DistributedPublisher] = []


@pytest.fixture(autouse=True)
def publishers_are_closed() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().close()


def fleet(*members: GroupMember) -> Sequence[Engine]:
    return cast(Sequence[Engine], members)


def has_all(member: GroupMember) -> bool:
    return member.weights.keys() == WEIGHTS.keys() and all(
        torch.equal(tensor, WEIGHTS[name]) for name, tensor in member.weights.items()
    )


async def test_every_rank_receives_every_byte_and_the_group_lasts():
    members = [GroupMember(f"m{ranks}", ranks=ranks) for ranks in (1, 2, 4)]
    made = publisher()
    for version in (1, 2):
        for member in members:
            member.weights.clear()
        assert await made.publish(version, fleet(*members)) == {"m1": None, "m2": None, "m4": None}
        assert all(has_all(member) and member.version_now == version for member in members)
    for member, offset in zip(members, (1, 2, 4), strict=True):
        assert member.calls == [*ALL_CALLS, *ALL_CALLS[1:]]
        ((group, found),) = member.joined
        assert (found, group.world_size, group.backend) == (offset, 8, "gloo")
    await made.aclose()
    assert all(member.calls[-1] == "leave" for member in members)


async def test_asynchronous_weights_and_those_of_a_coroutine_are_taken():
    async def one_by_one() -> AsyncIterator[tuple[str, Tensor]]:
        for pair in WEIGHTS.items():
            yield pair

    async def gathered() -> list[tuple[str, Tensor]]:
        return list(WEIGHTS.items())

    for given in (one_by_one, gathered):
        member = GroupMember("m")
        made = publisher(given)
        assert await made.publish(1, fleet(member)) == {"m": None}
        assert has_all(member)


async def test_another_set_of_engines_gets_a_group_of_its_own():
    first, second = GroupMember("first"), GroupMember("second")
    made = publisher()
    await made.publish(1, fleet(first))
    await made.publish(2, fleet(first, second))
    assert has_all(second)
    (one, _), (two, _) = first.joined
    assert one.name != two.name
    assert first.calls[7:9] == ["leave", "join"]


@each_row("fail_at", ["join", "begin", "receive 1", "receive 3"])
@each_row("dies", [True, False])
@each_row("place", [0, 1, 2])
async def test_an_engine_that_fails_is_left_behind_and_tears_no_other(
    fail_at: str, dies: bool, place: int
):
    members = [GroupMember("m0"), GroupMember("m1"), GroupMember("m2")]
    bad = members[place]
    bad.fail_at, bad.dies = fail_at, dies
    made = publisher()
    outcome = dict(await made.publish(1, fleet(*members)))
    assert isinstance(outcome.pop(bad.name), EngineError if dies else EngineRejected)
    assert list(outcome.values()) == [None, None]
    assert all(has_all(m) and m.version_now == 1 for m in members if m is not bad)
    assert bad.version_now == 0


async def test_a_failure_at_the_very_end_repeats_nothing():
    good, bad = GroupMember("good"), GroupMember("bad", fail_at="end")
    made = publisher()
    outcome = await made.publish(1, fleet(good, bad))
    assert outcome["good"] is None
    assert isinstance(outcome["bad"], EngineRejected)
    assert good.calls == ALL_CALLS


class Loading(GroupMember):
    """Keeps loading the second bucket, after its bytes have arrived, until `may_go_on` is set."""

    def __init__(self, name: str, *, refuses: bool = False) -> None:
        super().__init__(name)
        self.loads, self.may_go_on = asyncio.Event(), asyncio.Event()
        self._refuses = refuses

    async def receive(self, tensors: Sequence[TensorMeta], *, group: str) -> None:
        await super().receive(tensors, group=group)
        if self.received == 2:
            self.loads.set()
            await self.may_go_on.wait()
            if self._refuses:
                raise EngineRejected(self.name, "a name is not the model's", status=400)


async def test_the_next_bucket_is_read_while_engines_load_and_announced_when_all_have_loaded():
    third = threading.Event()

    def given() -> Iterator[tuple[str, Tensor]]:
        for number, pair in enumerate(WEIGHTS.items()):
            if number == 4:  # It is beyond the third bucket.
                third.set()
            yield pair

    slow, quick = Loading("slow"), GroupMember("quick")
    made = publisher(given)
    task = asyncio.create_task(made.publish(1, fleet(slow, quick)))
    await slow.loads.wait()
    assert await asyncio.to_thread(third.wait, 60)
    for _ in range(100):
        await asyncio.sleep(0)
    assert slow.received == quick.received == 2
    slow.may_go_on.set()
    assert await task == {"slow": None, "quick": None}
    assert has_all(slow)
    assert has_all(quick)


@each_row("once", [False, True])
async def test_an_engine_that_cannot_load_a_bucket_tears_no_other_although_the_next_is_read(
    once: bool,
):
    given, good, bad = Gathered(), GroupMember("good"), Loading("bad", refuses=True)
    bad.may_go_on.set()
    made = publisher(given, once=once)
    outcome = await made.publish(1, fleet(good, bad))
    await made.conclude()
    assert isinstance(outcome["bad"], EngineRejected)
    assert bad.version_now == 0
    if once:
        assert given.once
        assert isinstance(outcome["good"], EngineError)
        assert good.version_now == 0
    else:
        assert outcome["good"] is None
        assert has_all(good)
        assert good.version_now == 1


async def test_a_fault_in_later_weights_precedes_an_engine_failure():
    """The engine is loading a bucket when reading fails, and must not take the new version."""
    asked = threading.Event()

    def broken() -> Iterator[tuple[str, Tensor]]:
        for number, pair in enumerate(WEIGHTS.items()):
            if number == 4:
                asked.set()
                raise ZeroDivisionError
            yield pair

    member = Loading("m", refuses=True)
    made = publisher(broken)
    task = asyncio.create_task(made.publish(1, fleet(member)))
    assert await asyncio.to_thread(asked.wait, 60)
    member.may_go_on.set()
    with pytest.raises(ZeroDivisionError):
        await task
    assert member.version_now == 0


@each_row("loads", [False, True])
async def test_a_cancelled_publish_ends_its_reading_and_the_next_one_succeeds(loads: bool):
    """The trainer hangs while it gathers weights, and an engine loads the last bucket or waits."""
    ended, reached = asyncio.Event(), asyncio.Event()

    async def stuck() -> AsyncIterator[tuple[str, Tensor]]:
        try:
            for pair in list(WEIGHTS.items())[:4]:
                yield pair
            reached.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    given: list[Any] = [stuck, weights]
    member = Loading("m") if loads else GroupMember("m")
    made = publisher(lambda: given.pop(0)())
    task = asyncio.create_task(made.publish(1, fleet(member)))
    await reached.wait()
    if isinstance(member, Loading):
        await member.loads.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    if isinstance(member, Loading):
        member.may_go_on.set()
    assert await made.publish(2, fleet(member)) == {"m": None}
    assert has_all(member)


async def test_a_mistake_in_the_weights_tears_no_engine():
    def broken() -> Iterator[tuple[str, Tensor]]:
        raise ZeroDivisionError
        yield  # pyright: ignore[reportUnreachable]

    member = GroupMember("m")
    with pytest.raises(ZeroDivisionError):
        await publisher(broken).publish(1, fleet(member))
    with pytest.raises(ConfigError, match="gave no tensors"):
        await publisher(dict).publish(1, fleet(member))
    assert "begin" not in member.calls


async def test_an_engine_that_joins_no_group_is_refused():
    engine = cast(Engine, SimEngine("sim"))
    outcome = await publisher().publish(1, [engine])
    assert isinstance(outcome[engine.name], ConfigError)


@each_row(
    ("settings", "part"),
    [
        ({"backend": "mpi"}, "gloo, nccl"),
        ({"port": -1}, "port is -1"),
        ({"bucket_bytes": 0}, "bucket_bytes is 0"),
        ({"timeout_s": 0.0}, "timeout_s is 0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], part: str):
    with pytest.raises(ConfigError, match=part):
        publisher(**settings)


async def test_a_missing_backend_and_a_foreign_address_are_refused():
    if not torch.distributed.is_nccl_available():
        with pytest.raises(ConfigError, match="has no nccl"):
            await publisher(backend="nccl").prepare(1)
    with pytest.raises(ConfigError, match="give the address of this machine"):
        await publisher(address="192.0.2.1").publish(1, fleet(GroupMember("m")))


def test_the_address_is_that_of_the_way_to_the_engines():
    assert address_towards([]) == "127.0.0.1"
    names = ["127.0.0.1:30000", "localhost:1", "[::1]:2/path", "sim-0", "a.invalid:1"]
    assert address_towards(names) == "127.0.0.1"


def test_no_engine_is_blamed_for_a_failure_of_the_trainers_side():
    refused = {"a": EngineRejected("a", "refused", status=400)}
    assert behind(refused, before=["a"], own_failed=True) == set()


# --- weights that are read once ------------------------------------------------------------------


class Gathered:
    """Weights that every rank gathers: counts how often reading starts and reaches the end."""

    def __init__(self) -> None:
        self.started = self.ended = 0

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        self.started += 1
        yield from WEIGHTS.items()
        self.ended += 1

    @property
    def once(self) -> bool:
        return (self.started, self.ended) == (1, 1)


async def test_weights_that_are_read_once_are_read_to_their_end_for_each_version():
    given, member = Gathered(), GroupMember("m")
    made = publisher(given, once=True)
    for version in (1, 2):
        await made.prepare(version)
        assert await made.publish(version, fleet(member)) == {"m": None}
        await made.conclude()
        assert (given.started, given.ended) == (version, version)
        assert has_all(member)


@each_row("fail_at", ["join", "begin"])
async def test_a_failure_before_the_first_bucket_reads_weights_once(fail_at: str):
    given, good, bad = Gathered(), GroupMember("good"), GroupMember("bad", fail_at=fail_at)
    made = publisher(given, once=True)
    outcome = await made.publish(1, fleet(good, bad))
    await made.conclude()
    assert outcome["good"] is None
    assert isinstance(outcome["bad"], EngineError)
    assert has_all(good)
    assert given.once


@each_row("fail_at", ["receive 1", "receive 3"])
async def test_a_partial_transfer_ends_for_every_engine(fail_at: str):
    given, good, bad = Gathered(), GroupMember("good"), GroupMember("bad", fail_at=fail_at)
    made = publisher(given, once=True)
    outcome = await made.publish(1, fleet(good, bad))
    await made.conclude()
    assert given.once
    assert good.version_now == 0
    with pytest.raises(EngineError, match=r"are not read again; call update_weights\(\) again\."):
        raise outcome["good"] or AssertionError
    assert isinstance(outcome["bad"], EngineRejected)
    assert await made.publish(2, fleet(good)) == {"good": None}
    assert (given.started, given.ended) == (2, 2)


async def test_other_ranks_are_not_left_alone_where_nothing_is_published():
    given = Gathered()
    made = publisher(given, once=True)
    await made.prepare(1)
    await made.conclude()
    assert given.once
    again = Gathered()
    await publisher(again).conclude()
    assert not again.started


async def test_a_cancelled_publish_reads_the_rest():
    reached, may_go_on = threading.Event(), threading.Event()
    given = Gathered()

    def slow() -> Iterator[tuple[str, Tensor]]:
        for pair in given():
            if pair[0] == "d":
                reached.set()
                may_go_on.wait(60)
            yield pair

    made, member = publisher(slow, once=True), GroupMember("m")
    task = asyncio.create_task(made.publish(1, fleet(member)))
    await asyncio.to_thread(reached.wait, 60)
    task.cancel()
    await asyncio.sleep(0)
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await made.conclude()
    assert given.once
    assert member.version_now == 0


def test_weights_themselves_are_refused():
    with pytest.raises(ConfigError, match="weights is a generator; give a function that returns"):
        publisher(weights())
