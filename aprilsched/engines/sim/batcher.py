"""Continuous batching on explicit time: no asyncio, no clock, nothing hidden.

Callers pass the time (in modelled seconds) to every call and ask :meth:`Batcher.next_event_time`
when to call :meth:`Batcher.advance` again. Between two changes of the batch decoding is one
closed form, so the cost of a run is that of its events, not of its steps.

Invariants:
- Control takes effect between steps: a call in the middle of a step or of a prefill pass waits
  for its end.
- Prefill goes before decoding and stalls it; the pass that completes a context samples its next
  token.
- The KV pool is never exceeded: running contexts plus KV kept for waiting ones fit in
  ``kv_tokens``. Kept KV is evicted first (last in the queue first), then the request admitted
  last goes back to the queue without its KV.
- The weights change only while nothing is computed and every sampled token is known to the
  model, so a token's version is always the one whose weights sampled it.
- Every submitted request ends with exactly one chunk that has ``finish``.

Differences from SGLang: ticks of ``stream_interval`` steps are the engine's own, not each
request's; a prefix cache saves time and no memory, and takes no notice of cache keys; KV outlives
a retract until it is flushed.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from aprilsched.engines.base import Chunk, GenerationRequest, PauseMode
from aprilsched.engines.sim.cache import KvPool, PrefixCache
from aprilsched.engines.sim.config import Counters, SimConfig
from aprilsched.engines.sim.model import weights_key_of_version
from aprilsched.engines.sim.output import Ending, Output
from aprilsched.engines.sim.sequence import Sequence

__all__ = ["Batcher", "RunningBatch"]


@dataclass(slots=True)
class _Decode:
    """`steps` steps of the whole running batch, from `start` to `end`."""

    start: float
    end: float
    steps: int


@dataclass(slots=True)
class _Prefill:
    """One pass: how many tokens of each picked request it computes."""

    start: float
    end: float
    picks: list[tuple[Sequence, int]]


_Work: TypeAlias = _Decode | _Prefill


class Batcher:
    """One engine's scheduler and clockwork. All times are seconds and never go backwards."""

    def __init__(self, config: SimConfig, *, version: int = 0) -> None:
        self.config = config
        self.counters = Counters()
        self.version = version
        self.weights_key = weights_key_of_version(version)
        self._pool = KvPool(config)
        self._prefixes = PrefixCache(config.kv_tokens) if config.prefix_cache else None
        self.adapters: dict[str, int] = {}
        """The weights key of each adapter that can be sampled with."""
        self._output = Output(config)
        self._batch = RunningBatch(config.stream_interval, self._output)
        self._by_id: dict[str, Sequence] = {}
        self._held: dict[str, Sequence] = {}
        self._aborting = False
        self._work: _Work | None = None
        self._wake: float | None = None
        self._pausing: PauseMode | None = None
        self._paused: PauseMode | None = None
        self._paused_since = 0.0

    # -- what can be seen -------------------------------------------------------------------

    @property
    def paused(self) -> PauseMode | None:
        """The mode of the pause in force, or None."""
        return self._paused

    @property
    def running(self) -> int:
        """Requests in the decoding batch."""
        return len(self._batch)

    @property
    def waiting(self) -> int:
        """Requests in the queue, those held by a pause included."""
        return len(self._pool.waiting) + len(self._held)

    @property
    def kv_in_use(self) -> int:
        """Context tokens with a place in the KV pool, at the last event."""
        return self._pool.used

    def in_progress(self, now: float) -> tuple[int, float, float]:
        """Steps of the work that is not done yet, and its seconds: of decoding, of prefill."""
        work = self._work
        seconds = 0.0 if work is None else max(0.0, min(now, work.end) - work.start)
        if not isinstance(work, _Decode):
            return 0, 0.0, seconds
        timing = self.config.timing
        return timing.steps_within(len(self._batch), self._pool.running, seconds), seconds, 0.0

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id has not ended yet."""
        return request_id in self._by_id

    def is_held(self, request_id: str) -> bool:
        """Whether the request was sent during the pause and is not registered yet."""
        return request_id in self._held

    def samples_with(self, adapter: str) -> bool:
        """Whether a request that has not ended yet names `adapter`."""
        return any(s.request.adapter == adapter for s in self._by_id.values())

    def refusal(self, request: GenerationRequest) -> str | None:
        """Why `request` cannot be taken, in one sentence, or None."""
        if request.request_id in self._by_id:
            return f"request id {request.request_id!r} is in use; give every request its own."
        if request.adapter is not None and request.adapter not in self.adapters:
            return f"adapter {request.adapter!r} is not loaded; load it first."
        total = len(request.input_ids) + request.sampling.max_new_tokens
        if total > self.config.kv_tokens:
            return (
                f"prompt and max_new_tokens need {total} tokens of KV cache and the engine has "
                f"{self.config.kv_tokens}; ask for fewer tokens."
            )
        return None

    # -- requests ---------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, now: float) -> None:
        """Queue a request. During a pause it is held and cannot be aborted (as in SGLang).

        Raises:
            ValueError: what :meth:`refusal` says.
        """
        if (why := self.refusal(request)) is not None:
            raise ValueError(why)
        adapter = 0 if request.adapter is None else self.adapters[request.adapter]
        stops, seed = self._output.stop_ids(request.sampling), self._output.seed(request)
        sequence = Sequence(request, stops, adapter, seed)
        self._by_id[request.request_id] = sequence
        if self._paused or self._pausing:
            self._held[request.request_id] = sequence
            return
        blocked = bool(self._pool.waiting) or len(self._batch) >= self.config.max_running
        self._pool.waiting.append(sequence)
        if not blocked:
            self._interrupt(now)

    def abort(self, request_id: str, now: float) -> None:
        """End a request with what it has; unknown ids and those held by a pause are ignored.

        A running one ends after the step in progress; under an in-place pause that is the first
        step after it, so it gets one more token. A waiting one ends at once, with what was
        streamed.
        """
        sequence = self._by_id.get(request_id)
        if sequence is None or request_id in self._held:
            return
        if not sequence.running and self._pool.remove(sequence):
            self._end_unfinished(sequence)
        else:
            sequence.aborting = self._aborting = True
        self._interrupt(now)

    # -- control ----------------------------------------------------------------------------

    def pause(self, mode: PauseMode, now: float) -> None:
        """Stop after the step or pass in progress; :attr:`paused` then says so."""
        if self._work is None:
            self._apply_pause(mode, now)
        else:
            self._pausing = mode
            self._interrupt(now)

    def resume(self, now: float) -> None:
        """Go on; what was held during the pause is queued behind what waited already."""
        self._pausing = None
        if self._paused is not None:
            self.counters.paused_seconds += now - self._paused_since
            self._paused = None
            self._batch.predict_anew(self.weights_key)
        self._pool.waiting.extend(self._held.values())
        self._held.clear()
        self._interrupt(now)

    def flush(self) -> bool:
        """Drop all KV. False, and nothing done, while anything is computed or running."""
        if self._work is not None or len(self._batch):
            return False
        self._pool.flush()
        if self._prefixes is not None:
            self._prefixes.flush()
        return True

    def refit(self, version: int, weights_key: int | None = None) -> bool:
        """Take new weights. False, and nothing done, unless paused or without any request."""
        if self._paused is None and self._by_id:
            return False
        if version != self.version:
            for sequence in (*self._batch.members, *self._pool.waiting):
                if out := self._batch.sampled(sequence):
                    sequence.changes.append((self.version, out))
        self.version = version
        self.weights_key = weights_key_of_version(version) if weights_key is None else weights_key
        return True

    # -- time -------------------------------------------------------------------------------

    def next_event_time(self) -> float | None:
        """When something happens next; None while idle or paused."""
        return self._wake if self._work is None else self._work.end

    def advance(self, to: float) -> list[tuple[str, Chunk]]:
        """Let time pass; returns all chunks since the last call, in order, with their ids."""
        while (due := self.next_event_time()) is not None and due <= to:
            self._finish_work()
            self._begin(due)
        return self._output.take()

    def _interrupt(self, now: float) -> None:
        """Let the scheduler look at its queue at the end of the step in progress."""
        work = self._work
        if work is None:
            if self._paused is None and self._wake is None and self._by_id:
                self._wake = now
        elif isinstance(work, _Decode):
            batch, kv = len(self._batch), self._pool.running
            timing = self.config.timing
            steps = timing.steps_within(batch, kv, now - work.start)
            if work.start + timing.decode_seconds(batch, kv, steps) < now:
                steps += 1
            if steps < work.steps:
                work.steps = steps
                work.end = work.start + timing.decode_seconds(batch, kv, steps)

    def _begin(self, now: float) -> None:
        self._wake = None
        if self._pausing is not None:
            self._apply_pause(self._pausing, now)
        if self._paused is None:
            self._work = self._plan_prefill(now) or self._plan_decode(now)

    def _finish_work(self) -> None:
        work, self._work = self._work, None
        if isinstance(work, _Decode):
            self._complete_decode(work)
            computed = list(self._batch.members) if self._aborting else []
        elif isinstance(work, _Prefill):
            self._complete_prefill(work)
            computed = [sequence for sequence, _ in work.picks]
        else:
            return
        for sequence in self._batch.take_finished(self.weights_key):
            self._pool.running -= sequence.context
            self._end(sequence, "stop" if sequence.stopped else "length")
        if aborting := [s for s in computed if s.aborting]:
            self._end_aborting(aborting)
        if self._batch.steps >= self._batch.next_tick:
            self._batch.tick(self.weights_key, self.version)

    # -- work -------------------------------------------------------------------------------

    def _plan_decode(self, now: float) -> _Decode | None:
        if not len(self._batch):
            return None
        wanted = 1 if self._aborting else self._batch.next_due() - self._batch.steps
        while not (steps := self._pool.room_for_steps(len(self._batch), wanted)):
            self._preempt()
        seconds = self.config.timing.decode_seconds(len(self._batch), self._pool.running, steps)
        return _Decode(now, now + seconds, steps)

    def _complete_decode(self, work: _Decode) -> None:
        batch, seconds, counters = len(self._batch), work.end - work.start, self.counters
        tokens = work.steps * batch
        self._batch.steps += work.steps
        self._pool.running += tokens
        counters.steps += work.steps
        counters.generated += tokens
        counters.decoded += tokens
        counters.decoded_squares += tokens * batch
        counters.decode_seconds += seconds
        counters.request_seconds += seconds * batch

    def _preempt(self) -> None:
        """The request admitted last gives its place back; it is prefilled again later."""
        (sequence,) = self._batch.take([self._batch.newest], self.weights_key)
        self._pool.running -= sequence.context
        sequence.drop_kv()
        self._pool.waiting.append(sequence)
        self.counters.preemptions += 1

    def _plan_prefill(self, now: float) -> _Prefill | None:
        if not self._pool.waiting:
            return None
        places = self.config.max_running - len(self._batch)
        picks = self._pool.pick(places, self._batch.members, self._batch.steps)
        if not picks:
            return None
        computed = sum(take for _, take in picks) - self._found(picks)
        seconds = self.config.timing.prefill_seconds(max(1, computed))
        return _Prefill(now, now + seconds, picks)

    def _found(self, picks: list[tuple[Sequence, int]]) -> int:
        """Tokens of the pass that a prefix cache has already."""
        if self._prefixes is None:
            return 0
        found = 0
        for sequence, take in picks:
            if not sequence.cached and not sequence.out:
                sequence.shared = self._prefixes.begin(sequence.request)
            hit = min(take, sequence.shared)
            sequence.shared -= hit
            found += hit
        self.counters.cached += found
        return found

    def _complete_prefill(self, work: _Prefill) -> None:
        self.counters.prefill_passes += 1
        self.counters.prefill_seconds += work.end - work.start
        self._pool.end_pass()
        joined: list[Sequence] = []
        for sequence, take in work.picks:
            again = min(sequence.computed, sequence.cached + take) - sequence.cached
            self.counters.prefilled += take
            self.counters.reprefilled += max(0, again)
            self._output.prefill(sequence, take, self.weights_key)
            if sequence.cached < sequence.context:
                self._pool.put_back(sequence)
                continue
            self._batch.join(sequence)
            self._pool.running += sequence.context
            joined.append(sequence)
        self.counters.generated += len(joined)
        self._batch.predict(joined, self.weights_key)

    # -- endings and pauses -----------------------------------------------------------------

    def _end_aborting(self, aborting: list[Sequence]) -> None:
        """End the aborted requests that took part in the work just done.

        Others wait for a step of their own, as in SGLang: under an in-place pause that step
        comes after the refit, and gives one token of the new version.
        """
        running = [s for s in aborting if s.running]
        for sequence in self._batch.take(running, self.weights_key):
            self._pool.running -= sequence.context
            self._end(sequence, "abort")
        for sequence in aborting:
            if self._pool.remove(sequence):
                self._end_unfinished(sequence)
        self._aborting = any(s.aborting for s in self._batch.members)

    def _end_unfinished(self, sequence: Sequence) -> None:
        """An abort in the queue: what has not been streamed is lost, as in SGLang."""
        sequence.drop_unsent()
        self._end(sequence, "abort")

    def _end(self, sequence: Sequence, ending: Ending) -> None:
        del self._by_id[sequence.request.request_id]
        if self._prefixes is not None:
            self._prefixes.end(sequence.request, sequence.context)
        self._output.end(sequence, ending, self.version)

    def _apply_pause(self, mode: PauseMode, now: float) -> None:
        self._pausing = self._wake = None
        if self._paused is None:
            self._paused_since = now
        if self._paused != "retract":
            self._paused = mode
        running = list(self._batch.members)
        self._batch.make(running, self.weights_key)
        if self.config.stream_at_pause:
            self._output.stream(running, self.version)
        if mode == "retract":
            for sequence in self._batch.take(running, self.weights_key):
                self._pool.running -= sequence.context
                self._pool.retain(sequence)


class RunningBatch:
    """Requests that decode together, on a step counter with ticks every `interval` steps."""

    def __init__(self, interval: int, output: Output) -> None:
        self.steps = 0
        self.next_tick = interval
        self._interval = interval
        self._output = output
        self._members: dict[int, Sequence] = {}
        self._finishing: list[tuple[int, int, Sequence]] = []
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def members(self) -> Collection[Sequence]:
        """In the order of admission; do not join or leave while iterating."""
        return self._members.values()

    @property
    def newest(self) -> Sequence:
        """The one admitted last."""
        return next(reversed(self._members.values()))

    def sampled(self, sequence: Sequence) -> int:
        """Output tokens so far, of a member or of anyone else."""
        return self.steps - sequence.joined if sequence.running else sequence.out

    def join(self, sequence: Sequence) -> None:
        """The pass that ends now has sampled its next token; it decodes from here on."""
        sequence.out += 1
        sequence.joined = self.steps - sequence.out
        sequence.ticket = self._tickets
        self._tickets += 1
        self._members[sequence.ticket] = sequence

    def leave(self, sequence: Sequence) -> None:
        """Out of the batch; its tokens are made and its KV, all but the last token's, stays."""
        del self._members[sequence.ticket]
        sequence.out = self.steps - sequence.joined
        sequence.ticket = -1
        sequence.cached = sequence.computed = sequence.context - 1

    def next_due(self) -> int:
        """The step at which the batch changes next: somebody's last one, or the tick."""
        heap = self._finishing
        while heap and heap[0][2].ticket != heap[0][1]:
            heapq.heappop(heap)
        return min(self.next_tick, heap[0][0]) if heap else self.next_tick

    def take_finished(self, weights_key: int) -> list[Sequence]:
        """Those whose last token is sampled; they have left."""
        done: list[Sequence] = []
        while self._finishing and self._finishing[0][0] <= self.steps:
            _, ticket, sequence = heapq.heappop(self._finishing)
            if sequence.ticket == ticket:
                done.append(sequence)
        return self.take(done, weights_key) if done else done

    def take(self, sequences: list[Sequence], weights_key: int) -> list[Sequence]:
        """Make the tokens of these members and let them leave."""
        self.make(sequences, weights_key)
        for sequence in sequences:
            self.leave(sequence)
        return sequences

    def make(self, sequences: Collection[Sequence], weights_key: int) -> None:
        """Have the model make what these members have sampled."""
        if sequences:
            self._output.make(sequences, self.steps, weights_key)

    def predict(self, sequences: Collection[Sequence], weights_key: int) -> None:
        """Note when these members will end, where that is known before the next tick."""
        for sequence in self._output.predict(sequences, self.next_tick, weights_key):
            heapq.heappush(self._finishing, (sequence.finish_at, sequence.ticket, sequence))

    def predict_anew(self, weights_key: int) -> None:
        """After a refit other tokens follow, so stop tokens come at other places."""
        self._finishing.clear()
        self.predict(self.members, weights_key)

    def tick(self, weights_key: int, version: int) -> None:
        """Send what every member has, and look one interval ahead for stop tokens."""
        self.next_tick = (self.steps // self._interval + 1) * self._interval
        self.make(self.members, weights_key)
        self._output.stream(self.members, version)
        self.predict([s for s in self.members if s.stops], weights_key)
