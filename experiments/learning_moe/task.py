"""Countdown with four numbers: a task of guess and check whose responses have a heavy tail.

A question is ``<bos> 2 3 7 12 -> 45 :``. A response is a row of attempts of 17 tokens, such as
``2 3 12 + 7 19 3 19 * 2 38 38 + 3 41 45 no``: the two numbers that are left over, the first step
and its result, the number that is left over then, the second step and its result, the third step
and its result, the target, and the verdict. After ``no`` follows the next attempt, ``yes <eos>``
ends a response that claims to be right, and ``quit <eos>`` one that gives up. The reward is 1 if
the last attempt uses each number once, computes rightly and reaches the target, and 0 otherwise.

The tokens and the symbols are those of examples/grpo/countdown.py. With three numbers one of 27
attempts is right, and hardly a response has more than 1,000 tokens. With four it is one of 8 to one
of 100, by the problem, so a policy that does not give up needs from one attempt to the limit.

Everything here works on tensors of many problems, because millions of attempts are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from countdown import (
    ARROW,
    ASKED,
    BOS,
    COLON,
    EOS,
    MINUS,
    NO,
    NUMBER,
    PAD,
    PLUS,
    QUIT,
    TIMES,
    YES,
    question,
)

__all__ = ["ATTEMPT", "EOS", "PAD", "QUESTION", "Problem", "problems", "question", "rows", "score"]

LARGEST, LARGEST_ASKED = 99, 15
ATTEMPT, QUESTION = 17, 8
"""Tokens of an attempt with its verdict, and of a question."""
CHANCES = (0.01, 0.12)
"""How probable it is that a random attempt reaches the target of a problem."""
VERDICT = 5.0
"""Weight of a verdict in the loss of the supervised stage. Other tokens have 1."""
_HELD_OUT = 5
"""One of so many quadruples of numbers is held out."""
_DRAWN = 512
"""Random attempts by which the chance of a problem is estimated."""

Problem = tuple[tuple[int, ...], int]
"""Four numbers in ascending order, and a target."""


def _draw(source: torch.Generator, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=source, device=source.device)


def _computed(
    a: torch.Tensor, op: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a step gives, clamped to what there is a token for, and whether there is one."""
    found = torch.where(op == PLUS, a + b, torch.where(op == MINUS, a - b, a * b))
    return found.clamp(0, LARGEST), found <= LARGEST


def attempts(source: torch.Generator, numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Random attempts for problems with these `numbers` [B, 4]: tokens [B, count, 15], without the
    target and the verdict; the last one is what the attempt reaches."""
    more, device = 2 * count + 16, source.device
    order = torch.rand(len(numbers), more, 4, generator=source, device=device).argsort(-1)
    mixed = numbers[:, None].expand(-1, more, -1).gather(-1, order)
    left = mixed[..., 2:].sort(-1).values
    ops = torch.tensor([PLUS, MINUS, TIMES], device=device)[_draw(source, 3, 3, len(numbers), more)]
    a, b = mixed[..., :2].amax(-1), mixed[..., :2].amin(-1)
    c, valid = _computed(a, ops[0], b)
    rest = torch.cat([c[..., None], left], -1)
    last = _draw(source, 3, len(numbers), more, 1)
    t = rest.gather(-1, last)[..., 0]
    # The two that are not left over.
    pair = rest.gather(-1, torch.cat([(last + 1) % 3, (last + 2) % 3], -1))
    d, e = pair.amax(-1), pair.amin(-1)
    f, allowed = _computed(d, ops[1], e)
    g, h = torch.maximum(f, t), torch.minimum(f, t)
    i, allowed_too = _computed(g, ops[2], h)
    given = torch.stack([left[..., 0], left[..., 1], a, ops[0], b, c, t, d, ops[1], e, f, g, ops[2],
                        h, i], -1)  # fmt: skip
    symbols = torch.zeros(15, dtype=torch.bool, device=device)
    symbols[[3, 8, 12]] = True
    given = torch.where(symbols, given, given + NUMBER)
    # The valid ones come first; where there are too few, the rest repeats the first of them.
    valid = valid & allowed & allowed_too
    place = (~valid).to(torch.uint8).sort(dim=-1, stable=True)
    place = torch.where(place.values > 0, place.indices[:, :1], place.indices)[:, :count]
    return given.gather(1, place[..., None].expand(-1, -1, 15))


def _numbers(source: torch.Generator, count: int, held_out: bool | None) -> torch.Tensor:
    """Quadruples [count, 4] that are held out, or are not, or both for None."""
    numbers = torch.rand(4 * _HELD_OUT * count, LARGEST_ASKED, generator=source,
                         device=source.device).argsort(-1)[:, :4].sort(-1).values + 1  # fmt: skip
    if held_out is not None:
        times = torch.tensor([31, 7, 17, 1], device=source.device)
        numbers = numbers[((numbers * times).sum(-1) % _HELD_OUT == 0) == held_out]
    return numbers[:count]


def _asked(numbers: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Whether these are problems: the target is no number of the question, and 10 at least."""
    return (targets >= 10) & (numbers != targets[:, None]).all(-1)


def _drawn(
    source: torch.Generator, count: int, held_out: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` problems at most: numbers [n, 4] and targets [n]."""
    numbers = _numbers(source, 2 * count, held_out)
    targets = attempts(source, numbers, 1)[:, 0, -1] - NUMBER
    reached = attempts(source, numbers, _DRAWN)[..., -1] - NUMBER
    chance = (reached == targets[:, None]).double().mean(-1)
    kept = _asked(numbers, targets) & (chance >= CHANCES[0]) & (chance <= CHANCES[1])
    return numbers[kept][:count], targets[kept][:count]


def problems(seed: int, *, held_out: bool) -> Iterator[Problem]:
    """Endlessly many problems. No quadruple of numbers is both held out and trained on. They are
    the same for a seed on devices of one kind."""
    source = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(seed)
    while True:
        numbers, targets = _drawn(source, 64, held_out)
        yield from zip(map(tuple, numbers.tolist()), targets.tolist(), strict=True)


def score(response: Sequence[int], problem: Problem) -> float:
    """1.0 for a response whose last attempt is right and says so, and 0.0 otherwise."""
    numbers, target = problem
    tokens = [int(token) for token in response]
    starts = len(tokens) - ATTEMPT - 1
    if starts < 0 or tokens[-2:] != [YES, EOS] or (starts and tokens[starts - 1] != NO):
        return 0.0
    r, s, a, op, b, c, t, d, op2, e, f, g, op3, h, i, text = tokens[starts:-2]
    r, s, a, b, c, t, d, e, f, g, h, i, text = (
        token - NUMBER for token in (r, s, a, b, c, t, d, e, f, g, h, i, text)
    )

    def computes(x: int, symbol: int, y: int, gives: int) -> bool:
        right = {PLUS: x + y, MINUS: x - y, TIMES: x * y}.get(symbol)
        return right == gives and 0 <= gives <= LARGEST

    return float(
        sorted((r, s, a, b)) == sorted(numbers)
        and computes(a, op, b, c)
        and sorted((t, d, e)) == sorted((c, r, s))
        and computes(d, op2, e, f)
        and sorted((g, h)) == sorted((f, t))
        and computes(g, op3, h, i)
        and i == target == text
    )


# --- rows of the supervised stage ----------------------------------------------------------------


def rows(
    source: torch.Generator, count: int, longest: int, *, drill: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows to learn the form from: tokens [n, S], the weight of each in the loss [n, S], and the
    length of each row [n].

    A response has random attempts up to the right one, or until its writer gives up, at a rate
    between 0.005 and 0.2 for each attempt. A drill has one to three attempts, of which the last is
    right because the target is chosen so, and only targets and verdicts count.
    """
    device = source.device
    most = 3 if drill else (longest - QUESTION - 1) // ATTEMPT
    if drill:
        numbers = _numbers(source, count, False)
        tried = attempts(source, numbers, most)
        ends = 1 + _draw(source, most, len(numbers))
        reached = tried[..., -1] - NUMBER
        targets = reached.gather(1, ends[:, None] - 1)[:, 0]
        kept = _asked(numbers, targets)
        numbers, tried, targets, reached = (
            each[kept] for each in (numbers, tried, targets, reached)
        )
        quits = torch.full_like(targets, most)
    else:
        numbers, targets = _drawn(source, count, False)
        tried = attempts(source, numbers, most)
        reached = tried[..., -1] - NUMBER
        chances = torch.rand(2, len(numbers), generator=source, device=device)
        rate = 0.005 * 40 ** chances[0]
        quits = (chances[1].log() / (1 - rate).log()).clamp(max=most).long()
    right = reached == targets[:, None]
    solved = torch.where(right.any(1), right.float().argmax(1), most)
    ends = torch.minimum(torch.minimum(solved, quits) + 1, torch.full_like(solved, most))
    shown = torch.full((len(numbers), most, ATTEMPT), NO, device=device)
    shown[..., : ATTEMPT - 2] = tried
    shown[..., -2] = targets[:, None] + NUMBER
    index = torch.arange(len(numbers), device=device)
    last = torch.where(solved < ends, YES, torch.where(quits < ends, QUIT, NO))
    shown[index, ends - 1, -1] = last
    lengths = QUESTION + ATTEMPT * ends
    tokens = torch.full((len(numbers), QUESTION + ATTEMPT * most + 1), PAD, device=device)
    tokens[:, 0], tokens[:, 5], tokens[:, 7] = BOS, ARROW, COLON
    tokens[:, 1:5], tokens[:, 6] = numbers + ASKED, targets + NUMBER
    tokens[:, QUESTION:-1] = shown.flatten(1)
    tokens[index, lengths] = torch.where(last == NO, PAD, EOS)
    lengths = lengths + (last != NO)
    place = torch.arange(tokens.shape[1], device=device)
    weights = ((place >= QUESTION) & (place < lengths[:, None])).float()
    verdicts = (place - QUESTION) % ATTEMPT == ATTEMPT - 1
    weights = torch.where(verdicts, VERDICT * weights, weights)
    if drill:
        weights = weights * ((place - QUESTION) % ATTEMPT >= ATTEMPT - 2)
    tokens = torch.where(place < lengths[:, None], tokens, PAD)
    return tokens, weights, lengths
