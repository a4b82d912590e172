"""Tests the token log of a rollout: its shortcuts give the same as the full computation."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from aprilsched.kernel.core.state.token_log import TokenLog
from aprilsched.simulation import rare_collections
from aprilsched.types import Float32Array, Int32Array, VersionSpan
from tests.support.table import each_row


def chunk(tokens: int, first: int = 0) -> tuple[Int32Array, Float32Array]:
    ids = np.arange(first, first + tokens, dtype=np.int32)
    return ids, -ids.astype(np.float32)


def test_a_long_first_chunk_is_held_and_never_written_to() -> None:
    log = TokenLog()
    ids, logprobs = chunk(100)
    ids.flags.writeable = logprobs.flags.writeable = False
    log.append(ids, logprobs, version=0, engine="a")
    log.append(*chunk(5, first=100), version=1, engine="a")
    log.append(*chunk(3, first=105), version=1, engine="a")
    assert log.token_ids.tolist() == list(range(108))
    assert log.logprobs().tolist() == [-float(n) for n in range(108)]
    assert log.versions().tolist() == [0] * 100 + [1] * 8
    assert ids.tolist() == list(range(100))


def test_what_is_read_does_not_change_with_what_comes_later() -> None:
    log = TokenLog()
    log.append(*chunk(70), version=0, engine="a")
    before = log.token_ids
    before[:] = 7
    assert log.token_ids.tolist() == list(range(70))


@each_row("version", [3, 4])
@each_row("start", [0, 70, 90])
def test_one_span_equals_several_of_its_version(start: int, version: int) -> None:
    logs = [TokenLog(), TokenLog()]
    for log in logs:
        log.append(*chunk(70), version=2, engine="a")
        log.append(*chunk(50, first=70), version=3, engine="a")
    tokens = 120 - start
    whole = VersionSpan(version=version, start=0, end=tokens)
    halves = (
        VersionSpan(version=version, start=0, end=tokens // 2),
        VersionSpan(version=version, start=tokens // 2, end=tokens),
    )
    logs[0].assign(start, (whole,), engine="a")
    logs[1].assign(start, halves, engine="a")
    assert logs[0].segments() == logs[1].segments()


def test_tokens_of_the_environment_are_not_sampled() -> None:
    log = TokenLog()
    log.append_environment(np.arange(3, dtype=np.int32))
    log.append(*chunk(2), version=0, engine="a")
    assert log.sampled().tolist() == [False] * 3 + [True] * 2
    assert log.after(np.array([9], dtype=np.int32)).tolist() == [9, 0, 1, 2, 0, 1]


def test_the_collector_is_as_before_when_a_run_has_failed() -> None:
    before = gc.get_threshold()

    def fail() -> None:
        with rare_collections():
            assert gc.get_threshold() != before
            raise RuntimeError("over")

    with pytest.raises(RuntimeError, match="over"):
        fail()
    assert gc.get_threshold() == before
