"""Tests the built-in workload: repeatable prompts, and lengths from the named distribution."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched.errors import ConfigError
from aprilsched.simulation.engine.sequence import drawn_length, with_length
from aprilsched.simulation.workload import (
    Empirical,
    LengthDistribution,
    Lognormal,
    LongTailWorkload,
    Mixture,
    Pareto,
)
from aprilsched.types import SamplingParams
from tests.support.table import each_row


def test_a_prompt_does_not_depend_on_the_order_of_use() -> None:
    workload = LongTailWorkload(seed=3)
    iterated = list(islice(workload, 20))[17]
    asked = LongTailWorkload(seed=3).prompt(17)
    assert np.array_equal(iterated.input_ids, asked.input_ids)
    assert iterated.sampling == asked.sampling
    assert iterated.key == asked.key == 17


def test_sampling_decides_the_length() -> None:
    workload = LongTailWorkload(group_size=4, prompt_tokens=5, vocab_size=10, limits="exact")
    prompt = workload.prompt(2)
    assert isinstance(prompt.sampling, tuple)
    assert [s.max_new_tokens for s in prompt.sampling] == workload.lengths(2).tolist()
    assert all(s.ignore_eos and s.temperature == 1.0 for s in prompt.sampling)
    assert len({s.sampling_seed for s in prompt.sampling}) == 4
    assert prompt.input_ids.shape == (5,)
    assert prompt.input_ids.max() < 10


def test_every_request_has_the_cap_as_its_limit_by_default() -> None:
    workload = LongTailWorkload(group_size=4)
    prompt, exact = workload.prompt(2), replace(workload, limits="exact").prompt(2)
    assert isinstance(prompt.sampling, tuple)
    assert isinstance(exact.sampling, tuple)
    assert {(s.max_new_tokens, s.ignore_eos) for s in prompt.sampling} == {(6000, False)}
    lengths = [drawn_length(s) for s in prompt.sampling]
    assert lengths == [drawn_length(s) for s in exact.sampling] == workload.lengths(2).tolist()
    assert np.array_equal(prompt.input_ids, exact.input_ids)
    for sampling in (*prompt.sampling, *exact.sampling):
        assert drawn_length(with_length(sampling, 7)) == 7
        assert with_length(sampling, 7).ignore_eos == sampling.ignore_eos
        assert drawn_length(sampling.after(1)) == drawn_length(sampling) - 1


def test_count_bounds_it_and_iterating_again_starts_again() -> None:
    workload = LongTailWorkload(count=3)
    assert [p.key for p in workload] == [0, 1, 2]
    assert [p.key for p in workload] == [0, 1, 2]


def test_moments_of_the_example() -> None:
    moments = LongTailWorkload().moments()
    assert moments.mean == pytest.approx(1029, rel=0.006)
    assert moments.cv2 == pytest.approx(0.98, rel=0.02)
    assert moments.capped == pytest.approx(0.0085, abs=0.0008)
    assert LongTailWorkload().mean_length() == moments.mean


def test_prompts_follow_the_moments() -> None:
    workload = LongTailWorkload()
    lengths = np.array([workload.lengths(i) for i in range(4000)])
    assert lengths.mean() == pytest.approx(workload.mean_length(), rel=0.04)
    assert lengths.max() == workload.cap
    assert lengths.min() >= 1


@each_row("share", [0.3, 0.9])
def test_spread_and_share_within_a_group(share: float) -> None:
    workload = LongTailWorkload(sigma=0.7, within_group=share, median=1e5, cap=10**9)
    logs = np.log([workload.lengths(i) for i in range(6000)])
    assert logs.std() == pytest.approx(0.7, rel=0.03)
    centred = logs - np.log(1e5)
    pairs = (centred[:, :4] * centred[:, 4:]).mean() / centred.var()
    assert pairs == pytest.approx(share, abs=0.04)


@each_row(
    "bad",
    [
        {"median": 0.0},
        {"sigma": -1.0},
        {"cap": 0},
        {"within_group": 1.5},
        {"prompt_tokens": 0},
        {"vocab_size": 1},
        {"seed": -1},
        {"group_size": 0},
        {"count": -1},
        {"epoch_prompts": 0},
        {"drift": -0.1},
        {"drift": 1.1},
        {"limits": "length"},
    ],
)
def test_bad_parameters_are_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        LongTailWorkload(**bad)  # pyright: ignore[reportArgumentType]


def test_a_response_of_one_token_is_possible() -> None:
    prompt = LongTailWorkload(median=0.01).prompt(0)
    assert isinstance(prompt.sampling, tuple)
    assert prompt.sampling[0] == SamplingParams(
        max_new_tokens=6000,
        min_new_tokens=1,
        sampling_seed=prompt.sampling[0].sampling_seed,
    )


def test_a_second_epoch_has_the_same_prompts_and_other_responses() -> None:
    workload = LongTailWorkload(epoch_prompts=50)
    first, second = workload.prompt(7), workload.prompt(57)
    assert first.key == second.key == 7
    assert np.array_equal(first.input_ids, second.input_ids)
    assert not np.array_equal(workload.lengths(7), workload.lengths(57))
    assert isinstance(second.sampling, tuple)
    assert [drawn_length(s) for s in second.sampling] == workload.lengths(57).tolist()
    alone = LongTailWorkload()
    assert np.array_equal(workload.lengths(7), alone.lengths(7))


@each_row(("drift", "low", "high"), [(0, 0.75, 1), (0.4, 0.3, 0.7), (1, -0.2, 0.2)])
def test_the_effect_of_a_prompt_stays_as_far_as_the_policy_does(
    drift: float, low: float, high: float
) -> None:
    workload = LongTailWorkload(epoch_prompts=400, drift=drift, cap=10**6)
    logs = np.log([workload.lengths(index) for index in range(800)]).mean(axis=1)
    assert low <= np.corrcoef(logs[:400], logs[400:])[0, 1] <= high
    assert logs[400:].std() == pytest.approx(logs[:400].std(), rel=0.2)


@each_row("epoch_prompts", [None, 500])
def test_a_prompt_that_is_generated_again_keeps_its_effect(epoch_prompts: int | None) -> None:
    made = LongTailWorkload(cap=10**9, within_group=0.8, epoch_prompts=epoch_prompts)
    indices = range(1000, 1400)
    first = np.log([made.lengths(index) for index in indices])
    prompts = [made.prompt(index) for index in indices]
    again = np.log([made.lengths_again(prompt, 7) for prompt in prompts])
    assert not (first == again).any(axis=1).all()
    levels = np.corrcoef(first.mean(axis=1), again.mean(axis=1))[0, 1]
    assert levels == pytest.approx(0.8 / (0.8 + 0.2 / 8), abs=0.03)
    assert again.std() == pytest.approx(first.std(), rel=0.05)
    assert (made.lengths_again(prompts[3], 7) == np.exp(again[3]).round()).all()
    assert (made.lengths_again(prompts[3], 8) != made.lengths_again(prompts[3], 7)).any()


DISTRIBUTIONS = (
    Lognormal(median=300, sigma=0.7),
    Pareto(least=100, alpha=1.2),
    Empirical((7, 90, 90, 4000)),
    Mixture((3, Lognormal(200, 0.5)), (1, Pareto(2000, 2.0))),
)


@each_row("distribution", DISTRIBUTIONS, ids=lambda distribution: type(distribution).__name__)
def test_lengths_have_the_distribution_of_a_value(
    distribution: LengthDistribution,
) -> None:
    workload = LongTailWorkload(distribution=distribution, cap=5000, within_group=0.5, seed=2)
    lengths = np.concatenate([workload.lengths(index) for index in range(4000)])
    for at in (50.0, 90.0, 300.0, 1500.0, 4000.0):
        share = float(distribution.cdf(np.array([at]))[0])
        assert (lengths <= at).mean() == pytest.approx(share, abs=0.02)
    assert lengths.max() <= 5000
    # Responses of a prompt are alike, and the mean is that of the moments.
    groups = np.log(lengths.reshape(-1, 8))
    assert np.corrcoef(groups[:, 0], groups[:, 1])[0, 1] > 0.2
    assert workload.mean_length(1 << 17) == pytest.approx(lengths.mean(), rel=0.06)


def test_a_prompt_may_have_a_law_of_its_own() -> None:
    workload = LongTailWorkload(
        distribution=lambda key: Empirical((10 * (key + 1),)), epoch_prompts=3
    )
    assert [workload.lengths(index)[0] for index in range(6)] == [10, 20, 30, 10, 20, 30]
    assert workload.mean_length() == 20


def test_lengths_are_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("12, 500\n80.0 80\n")
    assert Empirical.read(tmp_path / "lengths.txt").lengths == (12, 80, 80, 500)
    for name, content, sentence in (
        ("words", "12\n80 long", "line 2 of .* has 'long', which is not a length; write"),
        ("half", "12.5", "line 1 of .* has '12.5'"),
        ("zero", "12\n\n0", "line 3 of .* has '0'"),
        ("empty", "", "has no lengths; give at least one.$"),
        ("none", None, "cannot be read: No such file or directory.$"),
    ):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=sentence):
            Empirical.read(tmp_path / name)


class Backwards:
    def cdf(self, lengths: np.ndarray) -> np.ndarray:
        return 1 / lengths


class One:
    def cdf(self, lengths: np.ndarray) -> float:
        return float(lengths[0])


@dataclass
class Changing:
    mean: float = 50.0

    def cdf(self, lengths: np.ndarray) -> np.ndarray:
        return 1 - np.exp(-lengths / self.mean)


def tokens_of(key: int) -> int:
    return 10 + key


def name_of(key: int) -> str:
    return f"distribution {key}"


def wrong(value: Any) -> Any:
    """`value`, whose type is not the declared one."""
    return value


@each_row(
    ("make", "sentence"),
    [
        (lambda: Pareto(0, 1), "least is 0; give a finite number above 0"),
        (lambda: Pareto(alpha=wrong("1")), "alpha is '1'; give a finite number above 0"),
        (lambda: Lognormal(1, 0), "sigma is 0; give"),
        (lambda: Empirical(()), "lengths must not be empty"),
        (lambda: Empirical((0,)), "a length is below 1"),
        (lambda: Empirical(wrong((3, 2.5))), "a length is 2.5 (float); give a whole number"),
        (Mixture, "a mixture has no parts"),
        (lambda: Mixture((0, Pareto())), "a weight is not above 0"),
        (lambda: Mixture(wrong(Pareto())), "give each part as (weight, distribution)"),
        (
            lambda: Mixture(wrong((1, Pareto))),
            "a part of a mixture is the class Pareto; give a value",
        ),
        (lambda: Mixture(wrong(("1", Pareto()))), "a weight is '1' (str); give a finite number"),
        (lambda: drawn(distribution=Backwards()), "does not grow from 0 to 1"),
        (lambda: drawn(distribution=One()), "distribution.cdf gives the shape () for 6000 lengths"),
        (
            lambda: drawn(distribution=Lognormal),
            "distribution is the class Lognormal; give a value",
        ),
        (
            lambda: drawn(distribution=[1, 2]),
            "distribution is [1, 2] (list); give an object with cdf",
        ),
        (lambda: drawn(distribution=Changing()), "give an immutable one"),
        (
            lambda: drawn(distribution=tokens_of),
            "distribution(0) is 10 (int); give an object with cdf",
        ),
        (
            lambda: drawn(distribution=name_of),
            "distribution(0) is 'distribution 0' (str); give an object with cdf",
        ),
        (lambda: drawn(cap=100.0), "cap is 100.0; give a whole number, 1 to 2**31 - 1"),
        (lambda: drawn(count=2.0), "count is 2.0; choose one of a whole number, 0 or more, None"),
        (lambda: drawn(sigma="1"), "sigma is '1'; give a finite number, 0 or more"),
    ],
)
def test_an_invalid_law_is_refused(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        make()


def drawn(**settings: Any) -> object:
    """What a workload of these settings draws first."""
    return LongTailWorkload(**settings).lengths(0)


def test_lengths_that_no_engine_can_give_are_refused(tmp_path: Path):
    (tmp_path / "lengths").write_text("80 99999999999999999999\n")
    with pytest.raises(ConfigError, match="has '99999999999999999999', which is not a length"):
        Empirical.read(tmp_path / "lengths")
    with pytest.raises(ConfigError, match="a length must be at most"):
        Empirical((80, 10**20))
