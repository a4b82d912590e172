"""Runs the campaign of seeds (tests/campaign) in a short and in a long form."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.campaign import agents, servers, trial
from tests.campaign.history import Outcome
from tests.campaign.mix import Mix

SEEDS_AT_ONCE = 10


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """Freeze the heap, so that the garbage collection at the end of each seed is cheap."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def engines(seed: int, *, companions: bool = False) -> Outcome:
    return trial.run(Mix.of(seed, companions=companions))


@pytest.mark.parametrize(
    ("part", "first"),
    [
        (engines, 0),
        *(pytest.param(engines, n, marks=pytest.mark.long) for n in range(10, 1000, SEEDS_AT_ONCE)),
        *(
            pytest.param(partial(engines, companions=True), n, marks=pytest.mark.long)
            for n in range(0, 300, SEEDS_AT_ONCE)
        ),
        pytest.param(servers.run, 0, marks=pytest.mark.long),
        pytest.param(partial(servers.run, companions=True), 0, marks=pytest.mark.long),
    ],
)
# Coroutines that the caller's code never awaits are its own fault.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_seed_loses_or_falsifies_a_rollout_or_hangs(part: Callable[[int], Outcome], first: int):
    found: list[str] = []
    for outcome in map(part, range(first, first + SEEDS_AT_ONCE)):
        if outcome.complaints:
            found.append(f"seed {outcome.seed}: {outcome.complaints}")
            found += outcome.history[-30:]
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1], ids=["letters", "odd calls"])
def test_five_hundred_agents_lose_nothing_that_was_saved(seed: int):
    outcome = agents.run(seed)
    assert not outcome.complaints
    assert outcome.ending == ["killed", "batch"]
    assert outcome.figures["sessions_at_once"] > 500
