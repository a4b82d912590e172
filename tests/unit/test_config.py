"""Tests policies as values in the configuration, and the path of a setting in an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from aprilsched.config import (
    Groups,
    LengthBuckets,
    Pool,
    Prices,
    Refill,
    Samples,
    SchedulerConfig,
    Tokens,
    Wave,
)
from aprilsched.core.policies.refill import PoolView
from aprilsched.errors import ConfigError
from tests.support.driver import Driver


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"refill": Wave()}, {"refill": "wave"}),
        (
            {"refill": Pool(together=2, until=0.5)},
            {"refill": "pool", "refill_groups": 2, "refill_until": 0.5},
        ),
        (
            {"refill": LengthBuckets(store=3.0, probes=2, oldest=6)},
            {"refill": "rounds", "store_batches": 3.0, "probes": 2, "oldest_batches": 6},
        ),
        ({"stop": Samples(40)}, {"stop": "samples", "batch_samples": 40}),
        ({"stop": Tokens(4000)}, {"stop": "tokens", "batch_tokens": 4000}),
    ],
)
def test_a_value_is_what_its_name_and_settings_stand_for(
    value: dict[str, object], named: dict[str, object]
) -> None:
    first, second = SchedulerConfig(**value), SchedulerConfig(**named)  # type: ignore[arg-type]
    assert first.refill_policy == second.refill_policy
    assert first.stop_policy == second.stop_policy


@pytest.mark.parametrize(
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
            {"prices": Prices(prefill_tokens_per_s=float("nan"))},
            "prices.prefill_tokens_per_s is nan; give a number above 0.",
        ),
    ],
)
def test_an_error_names_the_path_of_the_setting(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SchedulerConfig(**changes)  # type: ignore[arg-type]
    assert str(refused.value) == message


def test_length_buckets_as_a_value_are_refused_where_nothing_can_be_deferred() -> None:
    with pytest.raises(ConfigError, match="cannot; set pace="):
        SchedulerConfig(refill=LengthBuckets(), straggler="run")


@dataclass(frozen=True, kw_only=True, slots=True)
class OneByOne(Refill):
    """A rule that the package does not know: the next group starts when the last has ended."""

    name: ClassVar[str] = "one by one"

    def launches(self, view: PoolView) -> int:
        return 1 if view.batch_open and not view.open_groups else 0

    def told(self, ratio: str) -> str:
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


@pytest.mark.parametrize(
    "setting",
    [{"refill": Groups(4)}, {"stop": Pool()}, {"straggler": Pool()}, {"pace": Groups(4)}],
    ids=lambda setting: next(iter(setting)),
)
def test_a_rule_is_taken_only_by_the_setting_that_it_is_for(setting: dict[str, Any]):
    with pytest.raises(ConfigError, match="choose one of"):
        SchedulerConfig(**setting)
