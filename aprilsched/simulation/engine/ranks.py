"""The data-parallel ranks of one engine: batchers that step together.

The ranks of a mixture of experts with data-parallel attention exchange tokens in every layer, so
the slowest rank sets the time of each step, and a prefill pass of one rank lets the others decode
one step (``prepare_mlp_sync_batch`` of SGLang).

Invariants: each rank has its own queue, KV pool, running limit and prefix cache. The works of all
ranks start and end together. With one rank the chunks are those of a Batcher, at the same times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from aprilsched.kernel.engines.base import Chunk, GenerationRequest, PauseMode
from aprilsched.kernel.engines.sglang.dp_ranks import DpRanks, named_rank
from aprilsched.simulation.engine.batcher import Batcher, Decode, Prefill
from aprilsched.simulation.engine.settings import Counters, SimConfig

_SECONDS = ("decode_seconds", "prefill_seconds", "paused_seconds")


class _Rank(Batcher):
    """A rank, whose steps are cut short only together with those of the others."""

    def __init__(
        self, config: SimConfig, shorten: Callable[[float], None], *, version: int, dp_rank: int
    ) -> None:
        super().__init__(config, version=version, dp_rank=dp_rank)
        self._shorten = shorten

    def _interrupt(self, now: float) -> None:
        if self.work is None:
            super()._interrupt(now)
        self._shorten(now)


class RankedBatcher:
    """The scheduler of an engine with ``dp_ranks`` ranks; the methods are those of Batcher."""

    def __init__(self, config: SimConfig, *, version: int = 0) -> None:
        self.config = config
        self.adapters: dict[str, int] = {}
        self.ranks: tuple[Batcher, ...] = tuple(
            _Rank(config, self._shorten, version=version, dp_rank=index)
            for index in range(config.dp_ranks)
        )
        """The batcher of each data-parallel rank."""
        for rank in self.ranks:
            rank.adapters = self.adapters
        self._places = DpRanks(config.dp_ranks)
        self._turn = 0
        """The rank of the next request that names none, under the round robin."""

    @property
    def counters(self) -> Counters:
        """Sums over the ranks; their seconds are means, and their steps those of the busiest."""
        each = [rank.counters for rank in self.ranks]
        sums: dict[str, Any] = {
            f.name: sum(getattr(one, f.name) for one in each) for f in fields(Counters)
        }
        sums |= {name: sums[name] / len(each) for name in _SECONDS}
        return Counters(**{**sums, "steps": max(one.steps for one in each)})

    @property
    def version(self) -> int:
        """Version of the weights of all ranks."""
        return self.ranks[0].version

    @property
    def weights_key(self) -> int:
        """The key of the weights of all ranks."""
        return self.ranks[0].weights_key

    @property
    def paused(self) -> PauseMode | None:
        """The mode of the pause in force on all ranks, or None."""
        return self.ranks[0].paused if all(rank.paused for rank in self.ranks) else None

    @property
    def running(self) -> int:
        """Number of requests that decode."""
        return sum(rank.running for rank in self.ranks)

    @property
    def waiting(self) -> int:
        """Number of requests in the queues, including those that a pause holds."""
        return sum(rank.waiting for rank in self.ranks)

    @property
    def kv_in_use(self) -> int:
        """Number of context tokens in the KV pools at the last event."""
        return sum(rank.kv_in_use for rank in self.ranks)

    def in_progress(self, now: float) -> tuple[int, float, float]:
        """The unfinished work: its tokens, and the ranks' mean seconds of decoding and prefill."""
        each = [rank.in_progress(now) for rank in self.ranks]
        tokens, *seconds = (sum(column) for column in zip(*each, strict=True))
        decoding, prefilling = (total / len(each) for total in seconds)
        return int(tokens), decoding, prefilling

    def knows(self, request_id: str) -> bool:
        """Return whether a request of this id exists and has not ended."""
        return any(rank.knows(request_id) for rank in self.ranks)

    def is_held(self, request_id: str) -> bool:
        """Return whether the request was sent during the pause and is not registered yet."""
        return any(rank.is_held(request_id) for rank in self.ranks)

    def samples_with(self, adapter: str) -> bool:
        """Return whether a request that has not ended yet names `adapter`."""
        return any(rank.samples_with(adapter) for rank in self.ranks)

    def refusal(self, request: GenerationRequest) -> str | None:
        """Why `request` is refused, in one sentence, or None."""
        named, count = named_rank(request), len(self.ranks)
        if named not in (None, *range(count)):
            return f"routed_dp_rank={named} out of range [0, {count})"
        return self._of(request.request_id).refusal(request)

    def submit(self, request: GenerationRequest, now: float, *, length: int | None = None) -> None:
        """Queue a request on the rank that it names, or else that the config's rule chooses.

        Raises:
            ValueError: if :meth:`refusal` gives a reason.
        """
        if (why := self.refusal(request)) is not None:
            raise ValueError(why)
        index = named_rank(request)
        if index is None and self.config.rank_rule == "prefix":
            self._places.choose(request)
            index = self._places.of(request.request_id)
        elif index is None:
            index, self._turn = self._turn, (self._turn + 1) % len(self.ranks)
        self.ranks[index or 0].submit(request, now, length=length)

    def abort(self, request_id: str, now: float) -> None:
        """End a request with its tokens so far, as :meth:`Batcher.abort`."""
        self._of(request_id).abort(request_id, now)

    def pause(self, mode: PauseMode, now: float) -> None:
        """Stop all ranks after the step or pass in progress."""
        for rank in self.ranks:
            rank.pause(mode, now)

    def resume(self, now: float) -> None:
        """Continue all ranks."""
        for rank in self.ranks:
            rank.resume(now)

    def flush(self) -> bool:
        """Drop all KV of all ranks; return False and do nothing if any rank could not."""
        is_busy = any(rank.work is not None or rank.running for rank in self.ranks)
        return not is_busy and all(rank.flush() for rank in self.ranks)

    def refit(self, version: int, weights_key: int | None = None) -> bool:
        """Take new weights on all ranks; return False if there are requests and no pause."""
        if self.paused is None and any(rank.running or rank.waiting for rank in self.ranks):
            return False
        return all(rank.refit(version, weights_key) for rank in self.ranks)

    def next_event_time(self) -> float | None:
        """Return the time of the next event; None while idle or paused."""
        ends = [rank.work.end for rank in self.ranks if rank.work is not None]
        due = [rank.next_event_time() for rank in self.ranks]
        return min(ends or [time for time in due if time is not None], default=None)

    def advance(self, to: float) -> list[tuple[str, Chunk]]:
        """Advance to the time `to`; return all chunks since the last call, with their ids."""
        while (due := self.next_event_time()) is not None and due <= to:
            for rank in self.ranks:
                rank.finish_work()
            for rank in self.ranks:
                rank.begin(due)
            self._synchronize(due)
        chunks = [chunk for rank in self.ranks for chunk in rank.advance(float("-inf"))]
        for request_id, chunk in chunks:
            if chunk.finish is not None:
                self._places.leave(request_id)
        return chunks

    def _of(self, request_id: str) -> Batcher:
        """Return the rank of a request, or any rank for an unknown one."""
        return next((rank for rank in self.ranks if rank.knows(request_id)), self.ranks[0])

    def _synchronize(self, now: float) -> None:
        """Let the works that start now end together."""
        passes = [rank.work.end for rank in self.ranks if isinstance(rank.work, Prefill)]
        most = [rank.work.steps for rank in self.ranks if isinstance(rank.work, Decode)]
        steps = 1 if passes else min(most, default=0)
        self._end_after(steps, max(passes, default=now), now)

    def _shorten(self, now: float) -> None:
        """Let all ranks look at their queues at the end of the step in progress."""
        works = [rank.work for rank in self.ranks if rank.work is not None]
        if not works or any(isinstance(work, Prefill) for work in works):
            return
        start = works[0].start
        steps = self._steps_within(now - start)
        if start + self._decode_seconds(steps) < now:
            steps += 1
        if any(isinstance(work, Decode) and steps < work.steps for work in works):
            self._end_after(steps, start, start)

    def _end_after(self, steps: int, least: float, start: float) -> None:
        """Let all works end after `steps` steps of decoding, and not before the time `least`."""
        end = max(least, start + self._decode_seconds(steps))
        for rank in self.ranks:
            if (work := rank.work) is not None:
                work.end = end
                if isinstance(work, Decode):
                    work.steps = steps

    def _decode_seconds(self, steps: int) -> float:
        """Return the seconds of `steps` steps of the slowest rank that decodes."""
        decoding = (rank for rank in self.ranks if isinstance(rank.work, Decode))
        return max((rank.decode_seconds(steps) for rank in decoding), default=0.0)

    def _steps_within(self, seconds: float) -> int:
        """Return the whole steps of all ranks that decode in at most `seconds`."""
        decoding = (rank for rank in self.ranks if isinstance(rank.work, Decode))
        return min((rank.steps_within(seconds) for rank in decoding), default=0)


def batcher_of(config: SimConfig) -> Batcher | RankedBatcher:
    """Return the scheduler of an engine with these settings."""
    return Batcher(config) if config.dp_ranks == 1 else RankedBatcher(config)
