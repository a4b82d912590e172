"""Tests Score: the values that it accepts and refuses, and its means in a summary."""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from aprilsched import Score
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.messages.facts import BatchDelivered, DeliveredRollout
from aprilsched.observe.figures.batch_figures import measure
from aprilsched.observe.figures.figures import Figures, Measured, RewardFigures
from tests.support.table import each_row


class Name(str):
    """A string of the caller's own type."""


class Kind(enum.StrEnum):
    MATH = "math"


def test_numbers_and_mappings_become_plain_ones_of_its_own():
    info: dict[Any, Any] = {"tools": ("a", "b"), 7: np.arange(2), Name("n"): Name("x")}
    info["k"] = Kind.MATH
    parts = {"format": np.float32(0.5), "answer": True}
    score = Score(reward=np.float64(1.5), parts=parts, info=info)  # type: ignore[arg-type]
    info["tools"], parts["format"] = (), np.float32(9)
    assert (score.reward, score.parts) == (1.5, {"format": 0.5, "answer": 1.0})
    assert score.info == {"tools": ["a", "b"], "7": [0, 1], "n": "x", "k": "math"}
    assert {type(value) for value in score.parts.values()} == {float}
    assert msgspec.json.decode(msgspec.json.encode(score.info)) == score.info


@each_row(
    ("wrong", "text"),
    [
        ({"reward": math.nan}, "the reward is nan; give a finite number"),
        ({"parts": {"format": math.inf}}, "the part 'format' of the reward is inf"),
        ({"parts": [1.0]}, "parts is .* give a mapping"),
        ({"info": "text"}, "info is .* give a mapping"),
        ({"info": {"model": object()}}, "info holds .* JSON can hold"),
        ({"info": {"loss": math.nan}}, "info holds nan"),
        ({"info": {(1, 2): 3}}, "info has the key"),
        ({"info": {"text": "\ud800"}}, "not Unicode"),
        ({"info": {"text": "x" * 17_000}}, "need 17.* bytes as JSON; give at most 16384"),
        ({"parts": {f"part {i}": 0.0 for i in range(2_000)}}, "give at most 16384"),
    ],
)
def test_what_cannot_be_saved_and_logged_is_refused(wrong: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        Score(**wrong)


def batch(*rollouts: tuple[float | None, dict[str, float]]) -> BatchDelivered:
    return BatchDelivered(
        batch=0,
        version=0,
        rollouts=tuple(
            DeliveredRollout(
                rollout_id=i,
                group_id=i,
                prompt_tokens=1,
                tokens=1,
                segments=((0, 1, 0, "a"),),
                reward=reward,
                reward_parts=parts,
            )
            for i, (reward, parts) in enumerate(rollouts)
        ),
    )


def measured(fact: BatchDelivered, parts: set[str] | None = None) -> Measured:
    return measure(
        fact,
        seconds=1.0,
        trainer_seconds=0.0,
        bound=None,
        parts=parts,
        clocks=[None] * len(fact.rollouts),
    )


def test_means_are_over_the_rollouts_that_have_a_value():
    first = measured(batch((1.0, {"format": 1.0}), (None, {}), (0.0, {"format": 0.0, "rare": 4.0})))
    second = measured(batch((4.0, {"format": 1.0})))
    assert first.figures.rewards == RewardFigures(
        rollouts=2, mean=0.5, parts={"format": 0.5, "rare": 4.0}
    )
    whole = Figures.over([first, second]).rewards
    assert whole.rollouts == 3
    assert whole.mean == pytest.approx(5 / 3)
    assert whole.parts == {"format": pytest.approx(2 / 3), "rare": 4.0}
    assert (
        Figures.over([]).rewards == measured(batch((None, {}))).figures.rewards == RewardFigures()
    )


def test_a_mean_of_the_largest_rewards_is_finite():
    largest, none = 1.7e308, dict[str, float]()
    assert measured(batch(*[(largest, none)] * 7)).figures.rewards.mean == pytest.approx(largest)
    assert measured(batch(*[(1.0, none)] * 7)).figures.rewards.mean == 1.0


def test_names_without_end_are_not_all_counted():
    parts: set[str] = set()
    for start in range(0, 300, 30):
        names = {f"prompt {i}": 1.0 for i in range(start, start + 30)}
        found = measured(batch((0.0, {"answer": 1.0, **names})), parts)
        assert found.figures.rewards.parts["answer"] == 1.0
    assert len(parts) == 100
