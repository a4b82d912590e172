"""The data-parallel ranks of one SGLang server, as places for its requests.

Each rank has its own KV pool and prefix cache. With data-parallel attention all ranks step
together, so the rank with the most requests sets the pace of all (miles 2012: a step of a large
mixture took twice as long without a choice of the rank).
"""

from __future__ import annotations

from collections import OrderedDict

from aprilsched.kernel.engines.base import GenerationRequest

MAX_LEAD_REQUESTS = 8
"""Largest lead in requests, over the least loaded rank, of the rank that has the prefix of another
request of the same affinity."""
TOKENS_PER_LEAD = 512
"""Tokens of a context for each request of that lead. All ranks wait for the fullest at every step,
which costs more than prefilling a short prompt on several ranks: with 8 ranks of 30B-A3B in virtual
time a lead of 8 took 7 % of the speed for prompts of 8 tokens, and gave 44 % for 8,192 tokens."""
_MOST_PREFIXES = 2**17
RANK_FIELDS = ("routed_dp_rank", "data_parallel_rank")
"""Fields of a request that name its rank."""


def named_rank(request: GenerationRequest) -> int | None:
    """Return the rank that a request names itself, or None."""
    fields = request.sampling.request
    return next((fields[name] for name in RANK_FIELDS if fields.get(name) is not None), None)


class DpRanks:
    """Chooses the rank of each request by its cached prefix, the longer the better, and the load.

    Args:
        count: number of ranks; with one, no request names a rank.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._open: dict[str, int] = {}
        """The rank of each open request."""
        self._loads = [0] * count
        self._last = OrderedDict[tuple[int, int | None], int]()
        """The rank of the last request of each rollout and of each affinity, the latest last."""

    def choose(self, request: GenerationRequest) -> None:
        """Choose the rank of a request that will be sent; it counts until :meth:`leave`.

        A request that names its rank itself is ignored, and so is each one if there is one rank.
        """
        if self._count == 1 or named_rank(request) is not None:
            return
        least = min(self._loads)
        lead = min(MAX_LEAD_REQUESTS, max(1, len(request.input_ids) // TOKENS_PER_LEAD))
        # The longest prefix is that of the rollout's own last request.
        prefixes = ((request.affinity, request.rollout), (request.affinity, None))
        known = (self._last[prefix] for prefix in prefixes if prefix in self._last)
        rank = next(known, None) if request.affinity else None
        if rank is None or self._loads[rank] >= least + lead:
            rank = self._loads.index(least)
        for prefix in prefixes:
            self._last[prefix] = rank
            self._last.move_to_end(prefix)
        while len(self._last) > _MOST_PREFIXES:
            self._last.popitem(last=False)
        self._loads[rank] += 1
        self._open[request.request_id] = rank

    def leave(self, request_id: str) -> None:
        """Count a request no longer; one that was never placed is ignored."""
        if (rank := self._open.pop(request_id, None)) is not None:
            self._loads[rank] -= 1

    def of(self, request_id: str) -> int | None:
        """Return the rank of an open request; None if it names no rank."""
        return self._open.get(request_id)
