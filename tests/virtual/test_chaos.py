"""Runs the chaos campaign (experiments/chaos) in a short and in a long form."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from experiments.chaos import agents, servers
from experiments.chaos.history import Outcome
from experiments.chaos.mix import Mix
from experiments.chaos.trial import run

SEEDS_AT_ONCE = 10


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """Freeze the heap, so that the garbage collection at the end of each seed is cheap."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(
    ("first", "companions"),
    [
        (0, False),
        *(pytest.param(n, False, marks=pytest.mark.long) for n in range(10, 1000, SEEDS_AT_ONCE)),
        *(pytest.param(n, True, marks=pytest.mark.long) for n in range(0, 300, SEEDS_AT_ONCE)),
    ],
)
# What the caller's code leaves behind (a coroutine that is never awaited) is its own.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nothing_is_lost_wrong_or_hangs_under_chaos(first: int, companions: bool):
    found: list[str] = []
    for seed in range(first, first + SEEDS_AT_ONCE):
        mix = Mix.of(seed, only=None, without=(), repeatable=True, companions=companions)
        outcome = run(mix)
        if outcome.complaints:
            found.append(f"seed {seed}: {outcome.complaints}")
            found += outcome.history[-30:]
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("part", "first"),
    [
        (servers.run, 0),
        (partial(servers.run, companions=True), 0),
    ],
)
def test_faults_of_servers_lose_nothing_and_keep_no_call(
    part: Callable[[int], Outcome], first: int
):
    outcomes = map(part, range(first, first + SEEDS_AT_ONCE))
    found = [f"seed {each.seed}: {each.complaints}" for each in outcomes if each.complaints]
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1], ids=["letters", "odd calls"])
def test_five_hundred_agents_lose_nothing_that_was_saved(seed: int):
    outcome = agents.run(seed)
    assert not outcome.complaints
    assert outcome.ending == ["killed", "batch"]
    assert outcome.figures["sessions_at_once"] > 500
