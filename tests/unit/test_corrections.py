"""Tests the corrections for off-policy tokens against values computed by hand, and by properties.

Each value is computed with numpy and, where torch is installed, with tensors. What trl computes is
compared in test_corrections_trainers.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray

from aprilsched.errors import ConfigError
from aprilsched.trainers.corrections import (
    Level,
    clipped_loss,
    importance_weights,
    interpolated_proximal,
    ratios,
    renormalized,
    second_moment_mask,
    staleness,
    staleness_mask,
)
from tests.support.table import each_row

Make = Callable[..., Any]
LN2 = math.log(2)


def _numpy(values: Any, dtype: str = "float64") -> NDArray[Any]:
    return np.array(values, dtype=dtype)


def _tensor(values: Any, dtype: str = "float64") -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(np.array(values, dtype=dtype))


@pytest.fixture(params=[_numpy, _tensor], ids=["numpy", "torch"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes an array of the kind that the test runs on."""
    return request.param


def near(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-6, atol=1e-12)


# --- values by hand ------------------------------------------------------------------------------


def test_staleness_counts_versions_up_to_the_consumer(make: Make):
    versions = make([[-1, 0, 3], [4, 5, 6]], "int64")
    near(staleness(versions, version=5), [[0, 5, 2], [1, 0, 0]])
    assert staleness(versions, version=5).dtype == versions.dtype


def test_an_age_mask_leaves_young_tokens_only(make: Make):
    versions = make([2, 3, 4, 5, -1, 3], "int32")
    mask = make([1, 1, 1, 1, 0, 0], "int64")
    found = staleness_mask(versions, mask, version=5, max_staleness=2)
    near(found, [False, True, True, True, False, False])
    assert not staleness_mask(versions, mask, version=9, max_staleness=2).any()
    near(staleness_mask(versions, mask, version=5, max_staleness=0), versions == 5)


ROWS = [[LN2, 3 * LN2, -LN2, 5.0], [0.0, -LN2, -LN2, 7.0]]
"""Log-ratios; the last column does not count."""
COUNTED = [[True, True, True, False]] * 2
BY_LEVEL: dict[Level, list[list[float]]] = {
    "token": [[2, 8, 0.5, 0], [1, 0.5, 0.5, 0]],
    "sequence": [[8, 8, 8, 0], [0.25, 0.25, 0.25, 0]],
    "geometric": [[2, 2, 2, 0], [4 ** (-1 / 3)] * 3 + [0]],
}


@pytest.mark.parametrize("level", list(BY_LEVEL))
def test_ratios_of_each_level(make: Make, level: Level):
    behaviour = [[-3.0, -2.5, -1.0, -0.5]] * 2
    logprobs = np.add(ROWS, behaviour)
    found = ratios(make(logprobs), make(behaviour), make(COUNTED, "bool"), level=level)
    near(found, BY_LEVEL[level])


@pytest.mark.parametrize("level", list(BY_LEVEL))
def test_packed_ratios_are_those_of_padded_rows(make: Make, level: Level):
    taken = [ROWS[0], [], ROWS[1][:3], ROWS[1]]
    flat = [value for row in taken for value in row]
    mask = [place < 3 for row in taken for place in range(len(row))]
    bounds = make(np.cumsum([0, *map(len, taken)]), "int32")
    found = ratios(
        make(flat),
        make(np.zeros(len(flat))),
        make(mask, "bool"),
        level=level,
        cu_seqlens=None if level == "token" else bounds,
    )
    first, second = BY_LEVEL[level]
    near(found, [*first, *second[:3], *second])


def test_weights_are_truncated_or_masked(make: Make):
    logprobs = make([0.0, LN2, -LN2, 2 * LN2, -3 * LN2, LN2])
    behaviour, mask = make(np.zeros(6)), make([1, 1, 1, 1, 1, 0], "int64")
    near(importance_weights(logprobs, behaviour, mask), [1, 2, 0.5, 2, 0.125, 0])
    truncated = importance_weights(logprobs, behaviour, mask, low=0.5, high=2.5)
    near(truncated, [1, 2, 0.5, 2.5, 0.5, 0])
    masked = importance_weights(logprobs, behaviour, mask, low=0.5, high=2.5, outside="mask")
    near(masked, [1, 2, 0.5, 0, 0, 0])


def test_a_token_on_the_bound_is_not_masked(make: Make):
    mask = make([1, 1], "int64")
    logprobs = make([math.log(2.0), math.log(0.5)])
    ratio = np.asarray(ratios(logprobs, make(np.zeros(2)), mask))
    weights = importance_weights(
        logprobs,
        make(np.zeros(2)),
        mask,
        high=float(ratio[0]),
        low=float(ratio[1]),
        outside="mask",
    )
    near(weights, ratio)


def test_the_proximal_policy_is_interpolated_by_version(make: Make):
    # Current version 6, proximal version 5; (5 - v) / (6 - v) is 0, 1/2, 2/3 and 5/6.
    versions = make([5, 4, 3, 0, 6, 7, -1], "int32")
    behaviour = make([-1.0] * 6 + [0.0])
    logprobs = make([-4.0] * 6 + [-9.0])
    found = interpolated_proximal(logprobs, behaviour, versions, proximal_version=5)
    near(found, [-1, -2.5, -3, -3.5, -1, -1, 0])
    # AReaL's own example: behaviour 0, proximal 1, current 2.
    found = interpolated_proximal(
        make([-1.5]), make([-1.0]), make([0], "int64"), proximal_version=1, current_version=2
    )
    near(found, [-1.25])
    # No update since the proximal version: the interpolation must not divide by zero.
    now, then, versions = make([-4.0, -4.0]), make([-1.0, -1.0]), make([5, 3], "int64")
    found = interpolated_proximal(now, then, versions, proximal_version=5, current_version=5)
    near(found, [-1, -4])


def test_the_clipped_loss_by_hand(make: Make):
    log_ratio = [math.log(r) for r in (1.0, 1.5, 0.5, 1.5, 0.5, 1.5)]
    advantages = make([2.0, 2.0, 2.0, -2.0, -2.0, 2.0])
    mask = make([1, 1, 1, 1, 1, 0], "bool")
    zeros = make(np.zeros(6))
    arguments = (make(log_ratio), zeros, advantages, mask)
    found = clipped_loss(*arguments, clip_low=0.2, clip_high=0.3)
    near(found, [-2, -2.6, -1, 3, 1.6, 0])
    weights = make([1.0, 0.5, 2.0, 0.0, 1.0, 9.0])
    found = clipped_loss(*arguments, clip_low=0.2, clip_high=0.3, weights=weights)
    near(found, [-2, -1.3, -2, 0, 1.6, 0])
    found = clipped_loss(*arguments, clip_low=1, clip_high=math.inf)
    near(found, [-2, -3, -1, 3, 1, 0])
    zeros, mask = make(np.zeros((2, 3))), make(np.ones((2, 3)), "bool")
    found = clipped_loss(zeros, zeros, make([[1.0], [-2.0]]), mask)
    near(found, [[-1, -1, -1], [2, 2, 2]])


def test_the_second_moment_leaves_the_largest_ratios_out(make: Make):
    # Squares 0.01, 0.04, 0.09, 1; means of the smallest 0.01, 0.025, 0.0467, 0.285.
    differences = make([[0.2, -1.0, 0.1], [-0.3, 5.0, 5.0]])
    mask = make([[1, 1, 1], [1, 0, 0]], "int64")
    zeros = make(np.zeros((2, 3)))
    found = second_moment_mask(differences, zeros, mask)
    near(found, [[True, False, True], [False, False, False]])
    found = second_moment_mask(differences, zeros, mask, bound=0.05)
    near(found, [[True, False, True], [True, False, False]])
    assert not second_moment_mask(differences, zeros, mask, bound=0.001).any()
    near(second_moment_mask(differences, zeros, mask, bound=0.3), mask)


def test_the_second_moment_of_tokens_that_move_further_away(make: Make):
    differences = make([0.2, -1.0, 1.0, -0.1])
    zeros, mask = make(np.zeros(4)), make(np.ones(4), "bool")
    # The second one comes back to the trust region and is kept, the third one moves away from it.
    advantages = make([1.0, 1.0, 1.0, -1.0])
    found = second_moment_mask(differences, zeros, mask, advantages=advantages)
    near(found, [True, True, False, True])


def test_an_empty_batch(make: Make):
    empty, mask = make(np.zeros((0, 4))), make(np.zeros((0, 4)), "bool")
    assert ratios(empty, empty, mask, level="geometric").shape == (0, 4)
    assert second_moment_mask(empty, empty, mask).shape == (0, 4)
    assert clipped_loss(empty, empty, empty, mask).shape == (0, 4)
    nothing = make(np.zeros((2, 4))), make(np.zeros((2, 4))), make(np.zeros((2, 4)), "bool")
    near(ratios(*nothing, level="geometric"), np.zeros((2, 4)))
    assert not second_moment_mask(*nothing).any()


@pytest.mark.parametrize("hole", [math.nan, -math.inf, math.inf])
def test_what_does_not_count_has_no_influence(make: Make, hole: float):
    logprobs, behaviour = make([-1.0, hole]), make([-2.0, hole])
    mask, advantages = make([1, 0], "bool"), make([1.0, hole])
    near(ratios(logprobs, behaviour, mask), [math.e, 0])
    near(importance_weights(logprobs, behaviour, mask), [2, 0])
    near(importance_weights(logprobs, behaviour, mask, outside="mask"), [0, 0])
    near(clipped_loss(logprobs, behaviour, advantages, mask, weights=advantages), [-1.2, 0])
    near(second_moment_mask(logprobs, behaviour, mask, bound=1), [True, False])


def test_ratios_of_long_sequences_stay_finite(make: Make):
    logprobs = make(np.full((1, 4000), 0.5), "float32")
    zeros, mask = make(np.zeros((1, 4000)), "float32"), make(np.ones((1, 4000)), "bool")
    for sign in (1, -1):
        found = np.asarray(ratios(sign * logprobs, zeros, mask, level="sequence"))
        assert np.isfinite(found).all()
        assert (found > 0).all()


def nucleus(logits: NDArray[Any], top_k: int, top_p: float) -> tuple[list[int], float]:
    """The ids that top-k and top-p keep, and the log-probability of the last of them among these,
    by a softmax over the kept logits in float64."""
    order = np.argsort(-logits)[:top_k]
    share = np.exp(logits[order] - logits.max()) / np.exp(logits - logits.max()).sum()
    kept = order[np.cumsum(share) - share < top_p]
    among = np.exp(logits[kept] - logits[kept].max())
    return kept.tolist(), float(np.log(among[-1] / among.sum()))


@pytest.mark.parametrize("shape", [(12,), (3, 4)])
def test_a_renormalized_logprob_is_that_of_a_softmax_over_the_kept_ids(make: Make, shape: Any):
    """Under large logits too, and for batches that are padded or packed."""
    random = np.random.default_rng(3)
    logits = random.normal(0, 6, (12, 50)) + 1000 * random.normal(size=(12, 1))
    counted = random.random(12) < 0.7
    rows = [nucleus(each, 20, 0.9) for each in logits]
    kept = [ids if of else [] for (ids, _), of in zip(rows, counted, strict=True)]
    expected = [own if of else 0.0 for (_, own), of in zip(rows, counted, strict=True)]
    assert len({len(each) for each in kept}) > 3
    offsets = np.cumsum([0, *map(len, kept)])
    ids = np.array([each[-1] if each else 0 for each in kept]).reshape(shape)
    found = renormalized(
        make(np.roll(logits, -1, 0).reshape(*shape, 50)),  # each at the token before
        make(ids, "int64"),
        make(counted.reshape(shape), "bool"),
        kept=make([token for each in kept for token in each], "int32"),
        offsets=make(offsets, "int64"),
    )
    near(found, np.reshape(expected, shape))


# --- numpy and torch are the same ----------------------------------------------------------------

FINITE = st.floats(-6, 6)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, NDArray[Any]]:
    """Two rows of log-probabilities, with a mask, versions and advantages."""
    shape = draw(array_shapes(min_dims=2, max_dims=2, max_side=5))
    floats = arrays(np.float64, shape, elements=FINITE)
    return {
        "logprobs": draw(floats),
        "behaviour": draw(floats),
        "advantages": draw(floats),
        "mask": draw(arrays(np.bool_, shape)),
        "versions": draw(arrays(np.int64, shape, elements=st.integers(-1, 9))),
    }


def everything(batch: dict[str, Any]) -> list[Any]:
    """The result of every function."""
    logprobs, behaviour, mask = batch["logprobs"], batch["behaviour"], batch["mask"]
    proximal = interpolated_proximal(logprobs, behaviour, batch["versions"], proximal_version=7)
    found = [proximal, staleness_mask(batch["versions"], mask, version=8, max_staleness=3)]
    levels: tuple[Level, ...] = ("token", "sequence", "geometric")
    for level in levels:
        weights = importance_weights(proximal, behaviour, mask, level=level, outside="mask")
        loss = clipped_loss(
            logprobs, proximal, batch["advantages"], mask, weights=weights, level=level
        )
        found += [weights, loss]
    second = second_moment_mask(logprobs, behaviour, mask, advantages=batch["advantages"])
    return [*found, second]


@given(batches())
def test_numpy_and_torch_agree(batch: dict[str, Any]):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(array.copy()) for name, array in batch.items()}
    with pytest.raises(ConfigError, match="different kinds"):
        ratios(tensors["logprobs"], batch["behaviour"], batch["mask"])  # pyright: ignore
    three = tensors["logprobs"], tensors["behaviour"], batch["advantages"]
    with pytest.raises(ConfigError, match="different kinds"):
        clipped_loss(*three, tensors["mask"])  # pyright: ignore
    for of_numpy, of_torch in zip(everything(batch), everything(tensors), strict=True):
        assert str(of_torch.dtype) == f"torch.{of_numpy.dtype}"
        np.testing.assert_allclose(of_torch.numpy(), of_numpy, rtol=1e-12, atol=1e-12)


def test_narrow_floats_are_widened(make: Make):
    logprobs = make([-1.0, -2.0], "float16")
    found = ratios(logprobs, make([-1.0, -3.0], "float32"), make([1, 1], "bool"))
    assert str(found.dtype).removeprefix("torch.") == "float32"
    loss = clipped_loss(logprobs, logprobs, logprobs, make([1, 1], "bool"), weights=logprobs)
    assert str(loss.dtype).removeprefix("torch.") == "float32"


# --- gradients -----------------------------------------------------------------------------------


def leaves(*values: list[float]) -> list[Any]:
    torch = pytest.importorskip("torch")
    return [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in values]


def test_only_the_current_policy_has_a_gradient():
    torch = pytest.importorskip("torch")
    logprobs, proximal, behaviour, advantages, weights = leaves(
        [-1.0, -1.1, -5.0],
        [-1.0, -1.0, -1.0],
        [-2.0, -1.0, -1.0],
        [1.0, -2.0, 1.0],
        [0.5, 2.0, 1.0],
    )
    mask = torch.tensor([True, True, False])
    clipped_loss(logprobs, proximal, advantages, mask, weights=weights).sum().backward()
    # d(-w u A)/dθ = -w u A where the ratio u is not clipped.
    near(logprobs.grad, [-0.5, 4 * math.exp(-0.1), 0])
    assert all(leaf.grad is None for leaf in (proximal, advantages, weights))
    for constant in (
        importance_weights(logprobs, behaviour, mask),
        interpolated_proximal(logprobs, behaviour, torch.tensor([1, 2, 3]), proximal_version=3),
        second_moment_mask(logprobs, behaviour, mask, advantages=advantages),
    ):
        assert not constant.requires_grad
    ratios(logprobs, behaviour, mask).sum().backward()
    assert behaviour.grad is None


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("hole", [math.nan, -math.inf])
def test_padding_gives_no_nan_in_the_gradient(level: Level, hole: float):
    torch = pytest.importorskip("torch")
    (logprobs,) = leaves([-1.0, hole, 900.0])
    behaviour = torch.tensor([[-1.0, hole, -900.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True]])
    advantages = torch.tensor([[-1.0, hole, -1.0]], dtype=torch.float64)
    loss = clipped_loss(logprobs[None], behaviour, advantages, mask, level=level)
    loss.sum().backward()
    assert torch.isfinite(logprobs.grad).all()
    assert logprobs.grad[1] == 0


def test_gradients_of_renormalized_logprobs_are_those_of_the_kept_logits():
    torch = pytest.importorskip("torch")
    logits = torch.randn(
        4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True
    )
    ids, mask = torch.tensor([0, 1, 5, 2]), torch.tensor([False, True, False, True])
    kept, offsets = torch.tensor([1, 3, 2, 4]), torch.tensor([0, 0, 2, 2, 4])

    def of(logits: Any) -> Any:
        return renormalized(logits, ids, mask, kept=kept, offsets=offsets)

    assert torch.autograd.gradcheck(of, logits)
    of(logits).sum().backward()
    assert logits.grad is not None
    assert logits.grad.nonzero().tolist() == [[0, 1], [0, 3], [2, 2], [2, 4]]


# --- what is refused -----------------------------------------------------------------------------


def cut(logits: NDArray[Any], offsets: list[int]) -> Any:
    ids, mask, kept = np.zeros(3, dtype=int), np.ones(3, dtype=bool), np.zeros(3, dtype=int)
    rows = np.repeat(logits, 2, 0)[:3]
    return renormalized(rows, ids, mask, kept=kept, offsets=np.array(offsets))


ROW = np.zeros((2, 3))
TRUE = np.ones((2, 3), dtype=np.bool_)


@each_row(
    ("call", "part"),
    [
        (lambda: ratios([0.0], ROW, TRUE), "logprobs is a list"),  # pyright: ignore
        (lambda: ratios(ROW, ROW[0], TRUE), r"\(2, 3\) and behaviour_logprobs has shape \(3,\)"),
        (lambda: ratios(ROW, ROW, TRUE[:, :1]), "mask has shape"),
        (lambda: ratios(ROW, ROW, TRUE, level="word"), "level is 'word'"),  # pyright: ignore
        (lambda: ratios(ROW[0], ROW[0], TRUE[0], level="geometric"), "cu_seqlens"),
        (
            lambda: ratios(ROW, ROW, TRUE, level="sequence", cu_seqlens=np.array([0, 6])),
            "for packed tokens",
        ),
        (
            lambda: ratios(ROW[0], ROW[0], TRUE[0], level="sequence", cu_seqlens=np.array([0, 2])),
            "ends at 2 and there are 3",
        ),
        (lambda: importance_weights(ROW, ROW, TRUE, high=0.5), "low <= 1 <= high"),
        (lambda: importance_weights(ROW, ROW, TRUE, high=math.nan), "low <= 1 <= high"),
        (lambda: importance_weights(ROW, ROW, TRUE, low=-1), "low <= 1 <= high"),
        (lambda: importance_weights(ROW, ROW, TRUE, outside="drop"), "outside"),  # pyright: ignore
        (lambda: clipped_loss(ROW, ROW, ROW, TRUE, clip_low=2), "clip_low"),
        (lambda: clipped_loss(ROW, ROW, ROW[:, 0], TRUE), "one advantage for each token"),
        (lambda: clipped_loss(ROW, ROW, ROW[0], TRUE), "one advantage for each token"),
        (lambda: clipped_loss(ROW[0], ROW[0], ROW[0, :1], TRUE[0]), "one advantage"),
        (lambda: clipped_loss(ROW, ROW, ROW, TRUE, weights=ROW[:, :1]), "weights has shape"),
        (lambda: second_moment_mask(ROW, ROW, TRUE, bound=math.nan), "bound is nan"),
        (lambda: cut(ROW, [0, 1, 1, 2]), "has no sampling mask"),
        (lambda: cut(ROW, [0, 1, 2]), "give a row of logits and of kept ids for each token"),
        (lambda: cut(ROW[:1], [0, 1, 2, 3]), "give a row of logits and of kept ids"),
        (
            lambda: staleness_mask(np.zeros(3), np.ones(3), version=1, max_staleness=-1),
            "max_staleness is -1",
        ),
        (
            lambda: interpolated_proximal(
                ROW, ROW, np.zeros((2, 3)), proximal_version=4, current_version=3
            ),
            "current_version is 3",
        ),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[], object], part: str):
    with pytest.raises(ConfigError, match=part):
        call()
