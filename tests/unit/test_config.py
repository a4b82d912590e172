"""Tests policies as values in the configuration, and the path of a setting in an error."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from inspect import isabstract
from typing import Any, ClassVar

import numpy as np
import pytest

from aprilsched import config
from aprilsched.config import (
    Dispatch,
    Groups,
    Health,
    LengthBuckets,
    Pool,
    Prices,
    Refill,
    Retries,
    Samples,
    SamplingParams,
    SchedulerConfig,
    Staleness,
    Timeouts,
    Tokens,
    Wave,
)
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.policies.refill import PoolView
from tests.support.driver import Driver
from tests.support.table import each_row


@each_row(
    ("short", "whole"),
    [
        ({"refill": "wave"}, {"refill": Wave()}),
        ({"refill": "pool"}, {"refill": Pool(together=4, until=1.0)}),
        ({"refill": "buckets"}, {"refill": LengthBuckets(store=5.0, probes=1, oldest=16)}),
        ({"stop": "groups"}, {"stop": Groups(32)}),
        ({"stop": "samples", "group_size": 4}, {"stop": Samples(128), "group_size": 4}),
        ({"over_provision": 2}, {"over_provision": 2}),
        ({"max_staleness": 2}, {"max_staleness": Staleness(2, rule="mask")}),
        ({}, {"max_staleness": Staleness(4, rule="mask")}),
        ({"max_staleness": None}, {"max_staleness": Staleness(None)}),
    ],
)
def test_a_shorthand_stands_for_a_policy(
    short: dict[str, object], whole: dict[str, object]
) -> None:
    first, second = SchedulerConfig(**short), SchedulerConfig(**whole)  # type: ignore[arg-type]
    assert first.policies == second.policies


@each_row(
    ("changes", "message"),
    [
        ({"batch_groups": 0}, "batch_groups is 0; give 1 or more."),
        ({"refill": Pool(together=0)}, "refill.together is 0; give 1 or more."),
        (
            {"refill": Pool(until=1.5)},
            "refill.until is 1.5; give a share above 0 and at most 1.",
        ),
        ({"refill": LengthBuckets(probes=-1)}, "refill.probes is -1; give 0 or more."),
        ({"stop": Tokens(0)}, "stop.amount is 0; give 1 or more."),
        (
            {"over_provision": 0.5},
            "over_provision is 0.5; give a ratio from 1 (synchronous) to 64.",
        ),
        ({"max_staleness": -1}, "max_staleness is -1; give 0 or more."),
        ({"max_staleness": Staleness(-1)}, "max_staleness.bound is -1; give 0 or more."),
        ({"dispatch": Dispatch(max_in_flight=0)}, "dispatch.max_in_flight is 0; give 1 or more."),
        ({"retries": Retries(attempts=0)}, "retries.attempts is 0; give 1 or more."),
        (
            {"health": Health(slow_share=1)},
            "health.slow_share is 1; give a share below 1, or 0 for never.",
        ),
        ({"timeouts": Timeouts(refit_s=0)}, "timeouts.refit_s is 0; give 0.001 or more."),
        ({"batch_groups": "32"}, "batch_groups is '32'; give a whole number, 1 or more."),
        ({"batch_groups": True}, "batch_groups is True; give a whole number, 1 or more."),
        (
            {"refill": "rounds"},
            "refill is 'rounds'; choose one of wave, pool, buckets, tail, an instance of Refill.",
        ),
        ({"dispatch": {"rate": 5}}, "dispatch is {'rate': 5}; give an instance of Dispatch."),
        (
            {"max_staleness": Staleness(2, rule="drop")},  # type: ignore[arg-type]
            "max_staleness.rule is 'drop'; choose one of mask, evict, finish, restart.",
        ),
        (
            {"max_staleness": Staleness(rule="evict")},
            'max_staleness.rule is "evict" without a bound; set max_staleness to a number of '
            "versions too.",
        ),
        (
            {"stop": Groups(4)},
            "stop.amount is 4 groups, and batch_groups is 32; set batch_groups alone, or another "
            "unit than groups as stop.",
        ),
        (
            {"stop": "tokens"},
            'stop="tokens" does not set how many tokens fill a batch; set stop.amount, or give '
            "Tokens(100_000), for example.",
        ),
        (
            {"prices": Prices(prefill_tokens_per_s=float("nan"))},
            "prices.prefill_tokens_per_s is nan; give a number above 0.",
        ),
    ],
)
def test_an_error_names_the_path_of_the_setting(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SchedulerConfig(**changes)  # type: ignore[arg-type]
    assert str(refused.value) == message


@dataclass(frozen=True, kw_only=True, slots=True)
class OneByOne(Refill):
    """A rule that the package does not know: the next group starts when the last has ended."""

    name: ClassVar[str] = "one by one"

    def launches(self, view: PoolView) -> int:
        return 1 if view.batch_open and not view.open_groups else 0

    def describe(self, ratio: str) -> str:
        return f"one group after the other of {ratio} batches"


def test_a_refill_rule_of_the_callers_own_is_followed() -> None:
    driver = Driver(SchedulerConfig(batch_groups=3, group_size=2, refill=OneByOne()))
    driver.request_batch()
    for _ in range(3):
        (group_id,) = driver.group_ids()
        for key in driver.attempts(group_id):
            driver.finish(key, 5)
    assert len(driver.batches) == 1
    assert len(driver.batches[0].groups) == 3


@each_row(
    "setting",
    [{"refill": Groups(4)}, {"stop": Pool()}, {"straggler": Pool()}, {"pace": Groups(4)}],
    ids=lambda setting: next(iter(setting)),
)
def test_a_rule_is_taken_only_by_the_setting_that_it_is_for(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="choose one of"):
        SchedulerConfig(**setting)


def test_numbers_of_numpy_are_numbers() -> None:
    values: dict[str, Any] = {"batch_groups": np.int64(3), "over_provision": np.float32(1.5)}
    assert SchedulerConfig(**values).policies.stop == Groups(3)


def test_a_rule_whose_types_only_the_type_checker_knows_is_taken() -> None:
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Typed(OneByOne):
        count: UnknownAtRunTime = 1  # type: ignore[name-defined] # noqa: F821
        most: int = 1

    assert SchedulerConfig(refill=Typed()).policies.refill == Typed()


SETTINGS = [
    kind
    for kind in map(config.__dict__.get, config.__all__)
    if isinstance(kind, type)
    and is_dataclass(kind)
    and fields(kind)
    and not isabstract(kind)
    and kind not in (config.Policies, config.PoolView, config.OpenGroups)
]


@each_row("kind", SETTINGS)
def test_an_unknown_name_is_refused_with_the_nearest_one(kind: Any) -> None:
    known = fields(kind)[0].name
    with pytest.raises(ConfigError, match=f"{known}z is no setting .* {known}"):
        kind(**{f"{known}z": 1})


@each_row(
    ("other", "ours"),
    [("max_tokens", "max_new_tokens"), ("stop", "stop_token_ids"), ("seed", "sampling_seed")],
)
def test_a_name_of_another_library_is_refused_with_ours(other: str, ours: str) -> None:
    given: Any = {other: 3}
    with pytest.raises(ConfigError, match=f"the nearest known one is {ours}."):
        SamplingParams(**given)


def test_other_mistakes_of_a_call_stay_what_they_are() -> None:
    positional: Any = SchedulerConfig
    with pytest.raises(TypeError, match="positional"):
        positional(3)
