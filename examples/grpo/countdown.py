"""Countdown with three numbers: a task of guess and check for a very small policy.

A question is ``<bos> 3 7 12 -> 22 :``. A response is a row of attempts such as
``3 12 + 7 = 19 ; 19 - 3 = 16 22 no``. An attempt names the number that is left for its second step,
computes with the other two, computes with that result and the number that was left, says the target
again, and judges itself. After ``no`` follows the next attempt, ``yes <eos>`` ends a response that
claims to be right, and ``quit <eos>`` one that gives up. The reward is 1 if the last attempt uses
each number once, computes rightly and reaches the target, and 0 otherwise.

So a response is as long as the policy needs, between 15 tokens and any limit, and training changes
its length: it guesses better, which is shorter, or gives up later, which is longer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

__all__ = ["EOS", "Problem", "problems", "question", "result", "score"]

PAD, EOS, BOS, PLUS, MINUS, TIMES, EQUALS, THEN, NO, YES, QUIT, ARROW, COLON = range(13)
NUMBER = 16
"""The token of the number n is NUMBER + n."""
ASKED = 128
"""The number n of a question has a token of its own, ASKED + n, so that a small model finds it."""
LARGEST = 99
LARGEST_ASKED = 15
ATTEMPT = 13
"""Tokens of an attempt, without the verdict."""
_EASIEST = 0.12
_HELD_OUT = 5
"""One of so many triples of numbers is held out."""

Problem = tuple[tuple[int, ...], int]
"""Three numbers in ascending order, and a target."""


def problems(seed: int, *, held_out: bool) -> Iterator[Problem]:
    """Endlessly many problems. No triple of numbers is both held out and trained on."""
    draw = random.Random(seed)
    while True:
        numbers = tuple(sorted(draw.sample(range(1, LARGEST_ASKED + 1), 3)))
        target = _reached(draw, numbers)
        if target is None or target < 10 or target in numbers:
            continue
        kept = (numbers[0] * 31 + numbers[1] * 7 + numbers[2]) % _HELD_OUT == 0
        if kept == held_out and _chance(numbers, target) <= _EASIEST:
            yield numbers, target


def question(problem: Problem) -> list[int]:
    """The prompt's tokens."""
    numbers, target = problem
    return [BOS, *(ASKED + n for n in numbers), ARROW, NUMBER + target, COLON]


def score(response: Sequence[int], problem: Problem) -> float:
    """1.0 for a response whose last attempt is right and says so, and 0.0 otherwise."""
    numbers, target = problem
    tokens = [int(token) for token in response]
    begins = len(tokens) - ATTEMPT - 2
    if begins < 0 or tokens[-2:] != [YES, EOS] or (begins and tokens[begins - 1] != NO):
        return 0.0
    rest, a, op, b, equals, c, then, d, op2, e, equals2, f, said = tokens[begins:-2]
    if (equals, equals2, then) != (EQUALS, EQUALS, THEN):
        return 0.0
    rest, a, b, c, d, e, f, said = (token - NUMBER for token in (rest, a, b, c, d, e, f, said))
    right = (
        sorted((rest, a, b)) == sorted(numbers)
        and result(a, op, b) == c
        and sorted((d, e)) == sorted((c, rest))
        and result(d, op2, e) == f == target == said
    )
    return float(right)


def result(a: int, op: int, b: int) -> int | None:
    """What a step computes; None if it is not allowed."""
    results = {PLUS: a + b, MINUS: a - b, TIMES: a * b}
    result = results.get(op)
    return result if result is not None and 0 <= result <= LARGEST else None


def _steps(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """The numbers that can be there after one step."""
    found: list[tuple[int, ...]] = []
    for i in range(len(numbers)):
        for j in range(i):
            left = tuple(n for k, n in enumerate(numbers) if k not in (i, j))
            high, low = max(numbers[i], numbers[j]), min(numbers[i], numbers[j])
            results = (result(high, op, low) for op in (PLUS, MINUS, TIMES))
            found += [(*left, result) for result in results if result is not None]
    return found


def _reached(draw: random.Random, numbers: tuple[int, ...]) -> int | None:
    """What a random attempt reaches."""
    while len(numbers) > 1:
        steps = _steps(numbers)
        if not steps:
            return None
        numbers = draw.choice(steps)
    return numbers[0]


def _chance(numbers: tuple[int, ...], target: int) -> float:
    """How probable it is that a random attempt reaches the target."""
    if len(numbers) == 1:
        return float(numbers[0] == target)
    steps = _steps(numbers)
    return sum(_chance(step, target) for step in steps) / len(steps) if steps else 0.0
