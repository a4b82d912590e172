"""Tests which data-parallel rank of a server a request names."""

from __future__ import annotations

from collections import Counter

import numpy as np
from msgspec.structs import replace

from aprilsched import SamplingParams
from aprilsched.kernel.engines.base import GenerationRequest
from aprilsched.kernel.engines.sglang.dp_ranks import MAX_LEAD_REQUESTS, DpRanks
from tests.support.table import each_row


def request(number: int, affinity: int, *, tokens: int = 4096, **fields: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{number:032d}",
        input_ids=np.arange(tokens, dtype=np.int32),
        sampling=SamplingParams(request=fields),
        affinity=affinity,
    )


def placed(ranks: DpRanks, sent: GenerationRequest) -> int | None:
    ranks.choose(sent)
    return ranks.of(sent.request_id)


def test_a_group_shares_a_rank_and_groups_are_spread() -> None:
    ranks = DpRanks(4)
    found = {(n, g): placed(ranks, request(100 * g + n, g)) for g in range(1, 9) for n in range(8)}
    assert all(len({found[n, g] for n in range(8)}) == 1 for g in range(1, 9))
    assert Counter(found.values()) == dict.fromkeys(range(4), 16)


def test_a_large_group_leads_by_a_few_requests_at_most() -> None:
    ranks = DpRanks(2)
    for number in range(32):
        ranks.choose(request(number, 1))
    on = Counter(ranks.of(f"{number:032d}") for number in range(32))
    assert max(on.values()) - min(on.values()) <= MAX_LEAD_REQUESTS


@each_row(("tokens", "together"), [(8, 1), (1024, 2), (4096, 8), (16384, 8)])
def test_a_longer_prompt_keeps_more_of_its_group_on_a_rank(tokens: int, together: int) -> None:
    ranks = DpRanks(8)
    on = Counter(placed(ranks, request(number, 1, tokens=tokens)) for number in range(8))
    assert max(on.values()) == together


def test_requests_without_a_group_are_spread() -> None:
    ranks = DpRanks(4)
    assert [placed(ranks, request(number, 0)) for number in range(8)] == [0, 1, 2, 3] * 2


def test_a_later_turn_returns_to_the_rank_of_its_prefix() -> None:
    ranks = DpRanks(3)
    first = [placed(ranks, request(affinity, affinity + 1)) for affinity in range(3)]
    assert sorted(map(str, first)) == ["0", "1", "2"]
    for affinity in range(3):
        ranks.leave(f"{affinity:032d}")
        ranks.leave(f"{affinity:032d}")
    assert [placed(ranks, request(9 + a, a + 1)) for a in reversed(range(3))] == first[::-1]


def test_a_rollout_returns_to_its_own_rank_before_that_of_its_group() -> None:
    """Its own context is a longer prefix than the prompt."""
    ranks = DpRanks(4)
    sent = [replace(request(number, 1, tokens=8), rollout=number) for number in range(4)]
    assert [placed(ranks, each) for each in sent] == [0, 1, 2, 3]
    for each in sent:
        ranks.leave(each.request_id)
    again = [replace(request(9 + n, 1, tokens=2048), rollout=n) for n in (2, 0, 3, 1)]
    assert [placed(ranks, each) for each in again] == [2, 0, 3, 1]


def test_a_request_that_names_its_rank_keeps_it() -> None:
    ranks = DpRanks(3)
    for field in ("routed_dp_rank", "data_parallel_rank"):
        assert placed(ranks, request(1, 1, **{field: 2})) is None
    assert placed(DpRanks(1), request(2, 1)) is None
    ranks.leave(f"{1:032d}")
