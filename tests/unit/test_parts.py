"""Tests which units of a batch the trainer takes next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from aprilsched.kernel.core.policies.parts import Part, Supply, next_part


def one(_: str) -> int:
    return 1


def supply(
    units: Sequence[str],
    *,
    lacking: int,
    due: int = 0,
    awaited: int = 0,
    exact: bool = True,
    ends: bool = False,
    measure: Callable[[str], int] = one,
) -> Supply[str]:
    return Supply(
        units=tuple(units), measure=measure, lacking=lacking, due=due, awaited=awaited, exact=exact,
        ends=ends,
    )  # fmt: skip


def taken_one_by_one(offer: Supply[str]) -> list[Part[str]]:
    """The parts of a batch whose trainer takes one unit at a time."""
    parts: list[Part[str]] = []
    units, lacking, due = list(offer.units), offer.lacking, offer.due
    while not (parts and parts[-1].last):
        left = supply(
            units, lacking=lacking, due=due, awaited=offer.awaited, exact=offer.exact,
            ends=offer.ends, measure=offer.measure,
        )  # fmt: skip
        part = next_part(left, whole=False)
        if part is None:
            break
        parts.append(part)
        due = max(0, due - len(part.units))
        lacking -= sum(offer.measure(unit) for unit in part.units)
        units = units[len(part.units) :]
    return parts


WHOLE: dict[str, tuple[Supply[str], str | None]] = {
    "too few": (supply("ab", lacking=3), None),
    "enough": (supply("abc", lacking=3), "abc"),
    "more than enough": (supply("abcd", lacking=3), "abc"),
    "the source has ended": (supply("ab", lacking=3, ends=True), "ab"),
    "the source has ended with nothing": (supply("", lacking=3, ends=True), ""),
    "a unit that it must contain is awaited": (supply("abc", lacking=3, awaited=1), None),
    "all that it must contain": (supply("abcd", lacking=3, due=2), "abc"),
    "exact: no more than it lacks": (supply("abcd", lacking=3, due=4), "abc"),
    "at least: all that it must contain": (supply("abcd", lacking=3, due=4, exact=False), "abcd"),
    "at least: one is awaited": (supply("abcd", lacking=3, awaited=1, exact=False), None),
    "units count what they measure": (
        supply(["aa", "bbb", "c"], lacking=4, exact=False, measure=len),
        "aabbb",
    ),
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_whole_batch_is_one_part(case: str) -> None:
    given, expected = WHOLE[case]
    part = next_part(given, whole=True)
    if expected is None:
        assert part is None
    else:
        assert part is not None
        assert part.last
        assert "".join(part.units) == expected


@pytest.mark.parametrize("case", WHOLE)
def test_the_parts_of_a_batch_together_are_the_whole_batch(case: str) -> None:
    given, expected = WHOLE[case]
    parts = taken_one_by_one(given)
    assert all(len(part.units) <= 1 for part in parts)
    assert [part.last for part in parts[:-1]] == [False] * len(parts[:-1])
    if expected is None:
        assert not any(part.last for part in parts)
    else:
        assert parts[-1].last
        assert "".join("".join(part.units) for part in parts) == expected


@pytest.mark.parametrize(("exact", "taken"), [(True, 1), (False, 3)])
def test_an_exact_batch_keeps_places_for_units_that_it_must_contain(
    exact: bool, taken: int
) -> None:
    parts = taken_one_by_one(supply("abcd", lacking=3, awaited=2, exact=exact))
    assert len(parts) == taken
    assert not any(part.last for part in parts)


def test_a_batch_ends_without_a_unit_if_the_one_that_it_waited_for_is_gone() -> None:
    assert next_part(supply("a", lacking=0), whole=False) == Part(units=(), last=True)
