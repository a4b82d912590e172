"""The waiting queue, the KV pool and the prefix cache of a simulated engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from aprilsched.kernel.engines.base import GenerationRequest
from aprilsched.planning.reserved_share import ReservedShare
from aprilsched.simulation.engine.sequence import Sequence
from aprilsched.simulation.engine.settings import SimConfig


class KvPool:
    """Counts tokens: of the `running` contexts, of a prefill pass, and of waiting requests' KV."""

    def __init__(self, config: SimConfig) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running = 0
        self._in_pass = 0
        self._kept = 0
        self._kv_tokens = config.kv_tokens
        self._rule = config.reservation
        self.share = ReservedShare(conservativeness=config.conservativeness)
        self._any_fixed = False
        """Whether a request came whose tokens to come count in full."""
        self._full_at = 0
        """Number of running requests at which the next one did not fit; 0 if it fits.

        As in SGLang, admission is retried only when fewer requests run. It is not retried when a
        prefill pass ends, although the pass's own requests then need less room.
        """
        self._chunk = config.timing.prefill_chunk
        self._by_rank = config.priority

    @property
    def used(self) -> int:
        return self._kv_tokens - self.free

    @property
    def free(self) -> int:
        return self._kv_tokens - self.running - self._in_pass - self._kept

    def queue(self, sequence: Sequence) -> None:
        """Put a request at the end of the queue, or before those of a higher rank."""
        rule = self._rule
        if rule is not None and rule.fixed_in_full and sequence.request.sampling.ignore_eos:
            self._any_fixed = sequence.fixed = True
        if not self._by_rank:
            self.waiting.append(sequence)
            return
        place = len(self.waiting)
        while place:
            if self.waiting[place - 1].request.rank <= sequence.request.rank:
                break
            place -= 1
        self.waiting.insert(place, sequence)

    def pick(
        self, places: int, running: Collection[Sequence], steps: int
    ) -> list[tuple[Sequence, int]]:
        """Take the next pass out of the queue: the requests, and how many tokens of each.

        First come, first served: up to `places` requests and one chunk of tokens; a context
        longer than the rest of the chunk is computed in part. The step counter `steps` gives the
        progress of the `running` requests. There must be the room that the engine's
        :class:`~aprilsched.kernel.values.capabilities.Reservation` demands. If its share applied
        to the requests of the pass too, a full pool would admit requests in passes of 17, where a
        server's passes had 6.
        """
        picks: list[tuple[Sequence, int]] = []
        budget, to_come = self._chunk, 0
        if not self.waiting or places < 1 or 0 < self._full_at <= len(running):
            return picks
        self._full_at = 0
        clip = 0 if self._rule is None else self._rule.clip
        share = self.share.at(steps)
        largest = 1.0 if self._any_fixed else share
        while self.waiting and budget and len(picks) < places:
            sequence = self.waiting[0]
            context = sequence.context
            need = context + 1 - sequence.cached
            to_come += min(sequence.limit - sequence.out, clip)
            if running or picks:
                need += to_come
            # The exact reserve needs every running request, so it is computed only near the limit.
            if self.free - need < len(running) * largest * clip:
                left = sum(
                    (1.0 if s.fixed else share) * min(s.limit - (steps - s.joined), clip)
                    for s in running
                )
                if not self._make_room(need + round(left), sequence):
                    self._full_at = len(running) + len(picks)
                    break
            self.waiting.popleft()
            self._kept -= sequence.cached
            self._in_pass += context + 1
            take = min(context - sequence.cached, budget)
            budget -= take
            picks.append((sequence, take))
        return picks

    def end_pass(self) -> None:
        """End the pass: its requests join the running ones or are put back."""
        self._in_pass = 0

    def put_back(self, sequence: Sequence) -> None:
        """Put a request back at the head of the queue, with the KV that is computed so far."""
        self.waiting.appendleft(sequence)
        self._kept += sequence.cached

    def retain(self, sequence: Sequence) -> None:
        """Put a request at the end of the queue with its KV."""
        self.queue(sequence)
        self._kept += sequence.cached

    def remove(self, sequence: Sequence) -> bool:
        """Take a request out of the queue; False if it is not in it."""
        # The test comes first: deque.remove() would write the whole repr into its error.
        if sequence not in self.waiting:
            return False
        self.waiting.remove(sequence)
        self._kept -= sequence.cached
        return True

    def flush(self) -> None:
        """Drop all kept KV."""
        for sequence in self.waiting:
            sequence.drop_kv()
        self._kept = 0

    def room_for_steps(self, batch: int, wanted: int) -> int:
        """The number of the `wanted` steps of `batch` requests for which the pool has room."""
        short = batch * wanted - self.free
        if short > 0:
            self._evict(short, spare=None)
        return min(wanted, self.free // batch)

    def _make_room(self, tokens: int, sequence: Sequence) -> bool:
        short = tokens - self.free
        if short <= 0:
            return True
        if self._kept - sequence.cached < short:
            return False
        self._evict(short, spare=sequence)
        return True

    def _evict(self, tokens: int, spare: Sequence | None) -> None:
        for victim in reversed(self.waiting):
            if tokens <= 0 or not self._kept:
                return
            if victim is not spare and victim.cached:
                tokens -= victim.cached
                self._kept -= victim.cached
                victim.drop_kv()


class PrefixCache:
    """Counts the tokens of ended requests and of groups' prompts whose KV is cached.

    They use the part of the pool that running requests leave free; the least recently used ones
    are evicted first.
    """

    def __init__(self) -> None:
        self._held = 0
        self._tokens: dict[str | int, int] = {}

    def attach(self, request: GenerationRequest) -> int:
        """Start a prefill; return how many tokens of the context need not be computed.

        The last token is always computed. From now on the request's siblings find what they share
        with it, which is at most the shortest context of any of them. The request's own entry
        becomes KV of a running request.
        """
        own, group = _name(request), request.affinity
        context = len(request.input_ids)
        known = self._tokens.pop(own, 0)
        self._held -= known
        if group:
            shared = self._tokens.get(group)
            known = max(known, shared or 0)
            self._put(group, context if shared is None else min(shared, context))
        return min(known, context - 1)

    def trim(self, room: int) -> None:
        """Evict what exceeds `room` tokens, the least recently used entries first."""
        while self._held > max(0, room):
            self._held -= self._tokens.pop(next(iter(self._tokens)))

    def end(self, request: GenerationRequest, tokens: int) -> None:
        """Record that a request has ended or was aborted with `tokens` context tokens computed."""
        self._put(_name(request), tokens)

    def flush(self) -> None:
        """Drop everything."""
        self._tokens.clear()
        self._held = 0

    def _put(self, key: str | int, tokens: int) -> None:
        self._held += tokens - self._tokens.pop(key, 0)
        self._tokens[key] = tokens


def _name(request: GenerationRequest) -> str:
    """Return the id without its attempt number: all attempts start with the same tokens.

    In virtual time it is the id of the rollout, whose turns start with the same tokens.
    """
    return request.request_id.rpartition("-")[0] or request.request_id
