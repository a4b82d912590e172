"""Tests the policies, which are small functions of the scheduler's state, at their edges."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprilsched.config import SchedulerConfig
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.policies.placement import (
    EngineLoads,
    Placement,
    Preference,
    choose_engine,
    place_of,
    preference_of,
)
from aprilsched.kernel.core.policies.pool import Pool
from aprilsched.kernel.core.policies.refill import PoolView
from aprilsched.kernel.core.policies.schedule import Schedule
from aprilsched.kernel.core.policies.stop import Groups, Samples, Stop, Tokens
from aprilsched.kernel.core.policies.straggler import CachedKV, StragglerRule
from aprilsched.kernel.engines.base import Engine, PauseMode
from aprilsched.kernel.shell.opening import check_engines, examine
from aprilsched.kernel.values.capabilities import Capabilities
from tests.support.driver import Driver
from tests.support.table import each_row

# --- refill --------------------------------------------------------------------------------------


view: Any = partial(
    PoolView,
    batch_groups=8,
    group_size=2,
    target_groups=8,
    open_groups=4,
    ready_groups=3,
    in_flight=8,
    wave_due=False,
    batch_open=True,
    asynchronous=False,
)


@each_row(
    ("changes", "groups"),
    [
        ({}, 4),
        ({"ready_groups": 4}, 0),
        ({"ready_groups": 4, "in_flight": 1}, 0),
        ({"ready_groups": 4, "in_flight": 0}, 8),
        ({"ready_groups": 4, "wave_due": True}, 4),
        ({"ready_groups": 8, "batch_open": False}, 0),
        ({"ready_groups": 8, "batch_open": False, "wave_due": True}, 4),
        ({"ready_groups": 8, "batch_open": False, "asynchronous": True}, 4),
    ],
    ids=str,
)
def test_a_tapering_pool_is_not_refilled_near_its_batchs_end_unless_nothing_runs(
    changes: dict[str, object], groups: int
) -> None:
    assert Pool(together=2, until=0.5).launches(view(**changes)) == groups


def test_a_tapered_batch_still_fills_when_everything_else_has_ended() -> None:
    driver = Driver(
        SchedulerConfig(
            batch_groups=4,
            group_size=2,
            over_provision=1.0,
            refill=Pool(together=1, until=0.25),
        ),
        accepts=True,
    )
    driver.request_batch()
    driver.finish_groups(driver.group_ids())
    assert driver.state.in_flight.counters.launched == 4 * 2, "it tapers from the first group on"
    for verdict in driver.verdicts:
        driver.feed(ev.Filtered(group_id=verdict.unit.unit_id, accepted=False))
    driver.settle()
    while not driver.batches:
        assert driver.sends, "the trainer waits and nothing runs"
        driver.verdicts.clear()
        driver.finish_group(driver.group_ids()[0])
        for verdict in driver.verdicts:
            driver.feed(ev.Filtered(group_id=verdict.unit.unit_id, accepted=True))
    assert len(driver.batches[0].groups) == 4


# --- placement -----------------------------------------------------------------------------------


@dataclass
class SlowLoads:
    """A slow reference for EngineLoads, which computes everything again at each call."""

    loads: dict[str, int]
    max_lead: int

    def take(self, prefer: str, avoid: frozenset[str]) -> str | None:
        names = [name for name in self.loads if name not in avoid] or list(self.loads)
        if not names:
            return None
        taken = min(names, key=lambda name: (self.loads[name], name))
        near = self.loads[taken] + self.max_lead
        if prefer in names and prefer not in avoid and self.loads[prefer] <= near:
            taken = prefer
        self.loads[taken] += 1
        return taken


ENGINES = ("a", "b", "c", "d")


@given(
    loads=st.dictionaries(st.sampled_from(ENGINES), st.integers(0, 6)),
    max_lead=st.integers(-1, 4),
    asked=st.lists(
        st.tuples(st.sampled_from(["", *ENGINES]), st.frozensets(st.sampled_from(ENGINES))),
        max_size=40,
    ),
)
def test_engines_are_those_of_a_plain_search(
    loads: dict[str, int], max_lead: int, asked: list[tuple[str, frozenset[str]]]
) -> None:
    slow = SlowLoads(loads=dict(loads), max_lead=max_lead)
    fast = EngineLoads(loads)
    for prefer, avoid in asked:
        preference = Preference(engine=prefer, max_lead=max_lead) if prefer else None
        engine = choose_engine(fast, preference, avoid=avoid)
        assert engine == slow.take(prefer, avoid)
        if engine is not None:
            fast.add_request(engine)


PREFERENCES: list[tuple[Placement, dict[str, Any], Preference | None]] = [
    ("prefix", {}, Preference(engine="a", max_lead=4)),
    ("prefix", {"shares_context": True}, Preference(engine="a", max_lead=8)),
    ("prefix", {"shares_context": True, "members": 9}, Preference(engine="a", max_lead=9)),
    ("prefix", {"context_engine": ""}, None),
    ("spread", {"shares_context": True}, None),
    ("spread", {"destination": "b"}, Preference(engine="b", max_lead=math.inf)),
    ("spread", {"destination": "b", "avoid": {"b"}}, None),
    ("prefix", {"destination": "b", "avoid": {"b"}}, Preference(engine="a", max_lead=4)),
]


@each_row(("placement", "changes", "expected"), PREFERENCES)
def test_a_request_prefers_its_destination_and_then_the_engine_with_its_context(
    placement: Placement, changes: dict[str, Any], expected: Preference | None
) -> None:
    values: dict[str, Any] = {
        "destination": "",
        "avoid": frozenset[str](),
        "context_engine": "a",
        "members": 4,
        "shares_context": False,
    }
    assert preference_of(placement, **{**values, **changes}) == expected


def test_evaluations_go_first_then_carried_rollouts_then_older_groups() -> None:
    order: list[tuple[bool, bool, int, int]] = [
        (False, False, 9, 0),
        (True, True, 5, 0),
        (True, True, 5, 1),
        (True, False, 3, 1),
        (True, False, 4, 0),
    ]
    places = [
        place_of(training=training, carried=carried, group_id=group_id, index=index)
        for training, carried, group_id, index in order
    ]
    assert places == sorted(places)


# --- over-provisioning ---------------------------------------------------------------------------


@each_row(
    ("ratio", "batch_groups", "groups"),
    [(1.0, 7, 7), (1.1, 10, 11), (1.5, 3, 5), (1.0625, 32, 34), (1.01, 32, 33), (0.75, 32, 24)],
)
def test_a_ratio_is_rounded_up_but_not_by_rounding_errors(
    ratio: float, batch_groups: int, groups: int
) -> None:
    assert Schedule(over_provision=ratio, refill=Pool()).target_groups(batch_groups) == groups


# --- stragglers ----------------------------------------------------------------------------------


class OldServer:
    """An engine that cannot tell which version sampled a token, and cannot flush while requests
    wait."""

    name = "old"
    capabilities = Capabilities(version_spans=False, flush_while_paused=False, server="an old one")

    async def pause(self, mode: PauseMode) -> None:
        pass

    async def flush(self) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def version(self) -> int:
        return 0


REFUSED = {
    ("retract", "recompute"): (True, True),
    ("in_place", "keep"): (True, False),
    ("in_place", "apart"): (True, False),
    ("abort", "recompute"): (False, False),
    ("abort", "apart"): (False, False),
    ("run", "recompute"): (False, False),
    ("run", "apart"): (False, False),
}
"""Whether an old server is refused, and whether it still is where inexact versions are allowed."""


@each_row("allows", [False, True])
@each_row(("rule", "kv"), REFUSED)
def test_an_engine_that_cannot_keep_the_rules_promise_is_refused(
    rule: StragglerRule, kv: CachedKV, allows: bool
) -> None:
    config = SchedulerConfig(straggler=rule, kv_after_refit=kv, allow_inexact_versions=allows)
    server = cast("Engine", OldServer())
    if REFUSED[rule, kv][allows]:
        with pytest.raises(
            ConfigError, match=f'straggler="{rule}" would .*; use straggler="abort"'
        ):
            asyncio.run(check_engines([server], config))
    else:
        assert asyncio.run(check_engines([server], config)).engines[0].version == 0


def test_a_fleet_of_two_programs_is_refused() -> None:
    ours, other = OldServer(), OldServer()
    other.name, other.capabilities = "new", replace(OldServer.capabilities, server="vLLM 0.32.0")
    engines = cast("list[Engine]", [ours, other])
    config = SchedulerConfig(straggler="abort")
    with pytest.raises(ConfigError, match=r"new is vLLM 0.32.0 and old an old one.*one program"):
        asyncio.run(check_engines(engines, config))
    with pytest.raises(ConfigError, match="use engines of one program"):
        asyncio.run(examine(engines[1], config, engines))


# --- stop ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FakeGroup:
    members: Sequence[object]
    tokens: int


@dataclass
class FakeReady:
    samples: int
    tokens: int
    groups: int

    def __len__(self) -> int:
        return self.groups


GROUPS = [FakeGroup([0] * 2, 10), FakeGroup([0] * 4, 5), FakeGroup([0] * 1, 100)]


@each_row(
    ("stop", "count"),
    [
        (Groups(1), 1),
        (Groups(3), 3),
        (Groups(4), None),
        (Samples(2), 1),
        (Samples(3), 2),
        (Samples(8), None),
        (Tokens(10), 1),
        (Tokens(15), 2),
        (Tokens(16), 3),
        (Tokens(116), None),
    ],
)
def test_a_batch_is_the_fewest_whole_groups_that_hold_enough(stop: Stop, count: int | None) -> None:
    held = FakeReady(samples=7, tokens=115, groups=3)
    assert stop.take(GROUPS) == count
    assert stop.enough(held) is (count is not None)
