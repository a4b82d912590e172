"""Continuous batching on explicit time, without asyncio and without a clock.

Callers pass the time (in modelled seconds) to every call, and :meth:`Batcher.next_event_time`
returns when to call :meth:`Batcher.advance` again. Between two changes of the batch, decoding has a
closed form, so the cost of a run depends on its number of events and not of decode steps.

Invariants:
- Control takes effect between steps: a call in the middle of a step or of a prefill pass waits
  for its end.
- Prefill goes before decoding and stalls it; the pass that completes a context samples its next
  token.
- The KV pool is never exceeded: running contexts plus KV kept for waiting ones fit in
  ``kv_tokens``. Kept KV is evicted first (last in the queue first), then the request admitted
  last goes back to the queue without its KV.
- The weights change only while nothing is computed and the model has sampled every token that
  was decoded, so a token's version is always the one whose weights sampled it.
- Every submitted request ends with exactly one chunk that has ``finish``.

Differences from SGLang: ticks of ``stream_interval`` steps are common to all requests; a prefix
cache ignores cache keys, and what siblings share counts for each of them; KV stays after a retract
until it is flushed.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from aprilsched.kernel.engines.base import Chunk, GenerationRequest, PauseMode
from aprilsched.simulation.engine.cache import KvPool, PrefixCache
from aprilsched.simulation.engine.output import Ending, Output
from aprilsched.simulation.engine.sequence import MEDIA_TOKENS, Sequence, expand
from aprilsched.simulation.engine.settings import Counters, SimConfig
from aprilsched.simulation.engine.toy_model import weights_key_of_version


@dataclass(slots=True)
class Decode:
    """Decode `steps` steps of the whole running batch, from `start` to `end`."""

    start: float
    end: float
    steps: int


@dataclass(slots=True)
class Prefill:
    """A prefill pass; `picks` contains the number of tokens that it computes per request."""

    start: float
    end: float
    picks: list[tuple[Sequence, int]]


Work: TypeAlias = Decode | Prefill


class Batcher:
    """The scheduler of one engine. All times are seconds and never go backwards."""

    def __init__(self, config: SimConfig, *, version: int = 0, dp_rank: int | None = None) -> None:
        self.config = config
        self.counters = Counters()
        self.version = version
        self.weights_key = weights_key_of_version(version)
        self._pool = KvPool(config)
        self._prefixes = PrefixCache() if config.prefix_cache else None
        self.adapters: dict[str, int] = {}
        """The weights key of each adapter that requests may name."""
        self._output = Output(config, dp_rank)
        self._batch = RunningBatch(config.stream_interval, self._output)
        self._by_id: dict[str, Sequence] = {}
        self._held: dict[str, Sequence] = {}
        self._aborting = False
        self.work: Work | None = None
        """The step or pass in progress; None while idle or paused."""
        self._wake: float | None = None
        self._pausing: PauseMode | None = None
        self.paused: PauseMode | None = None
        """The mode of the pause in force, or None."""
        self._paused_since = 0.0

    @property
    def ranks(self) -> tuple[Batcher, ...]:
        """The batcher of each data-parallel rank."""
        return (self,)

    @property
    def running(self) -> int:
        """Number of requests in the decoding batch."""
        return len(self._batch)

    @property
    def waiting(self) -> int:
        """Number of requests in the queue, including those that a pause holds."""
        return len(self._pool.waiting) + len(self._held)

    @property
    def kv_in_use(self) -> int:
        """Number of context tokens in the KV pool at the last event."""
        return self._pool.used

    def in_progress(self, now: float) -> tuple[int, float, float]:
        """The unfinished work: its tokens, its seconds of decoding and its seconds of prefill."""
        work = self.work
        seconds = 0.0 if work is None else max(0.0, min(now, work.end) - work.start)
        if not isinstance(work, Decode):
            return 0, 0.0, seconds
        steps = min(work.steps, self.steps_within(seconds))
        return steps * len(self._batch), seconds, 0.0

    def steps_within(self, seconds: float) -> int:
        """Return the number of whole steps of the present batch that take at most `seconds`."""
        return self.config.timing.steps_within(len(self._batch), self._pool.running, seconds)

    def decode_seconds(self, steps: int) -> float:
        """Return the seconds of `steps` steps of the present batch."""
        return self.config.timing.decode_seconds(len(self._batch), self._pool.running, steps)

    def knows(self, request_id: str) -> bool:
        """Return whether a request of this id exists and has not ended."""
        return request_id in self._by_id

    def is_held(self, request_id: str) -> bool:
        """Return whether the request was sent during the pause and is not registered yet."""
        return request_id in self._held

    def samples_with(self, adapter: str) -> bool:
        """Return whether a request that has not ended yet names `adapter`."""
        return any(s.request.adapter == adapter for s in self._by_id.values())

    def refusal(self, request: GenerationRequest) -> str | None:
        """Why `request` is refused, in one sentence, or None."""
        if request.request_id in self._by_id:
            return f"request id {request.request_id!r} is in use; give every request its own."
        if request.adapter is not None and request.adapter not in self.adapters:
            return f"adapter {request.adapter!r} is not loaded; load it first."
        prompt = len(request.input_ids) + MEDIA_TOKENS * len(request.media)
        total = prompt + request.sampling.max_new_tokens
        if total > self.config.kv_tokens:
            return (
                f"prompt and max_new_tokens need {total} tokens of KV cache and the engine has "
                f"{self.config.kv_tokens}; ask for fewer tokens."
            )
        return None

    def submit(self, request: GenerationRequest, now: float, *, length: int | None = None) -> None:
        """Queue a request. During a pause it is held and cannot be aborted (as in SGLang).

        The response ends by itself after `length` tokens, if that is given.

        Raises:
            ValueError: if :meth:`refusal` gives a reason.
        """
        if (why := self.refusal(request)) is not None:
            raise ValueError(why)
        adapter = 0 if request.adapter is None else self.adapters[request.adapter]
        stops, seed = self._output.stop_ids(request.sampling), self._output.seed(request)
        ids = expand(request, self.config.vocab_size)
        sequence = Sequence(request, ids, stops, adapter, seed, length)
        self._by_id[request.request_id] = sequence
        if self.paused or self._pausing:
            self._held[request.request_id] = sequence
            return
        blocked = bool(self._pool.waiting) or len(self._batch) >= self.config.max_running
        self._pool.queue(sequence)
        if not blocked:
            self._interrupt(now)

    def abort(self, request_id: str, now: float) -> None:
        """End a request with its tokens so far; unknown ids and held requests are ignored.

        A running request ends after the step in progress. Under an in-place pause that is the
        first step after the pause, so it gets one more token. A waiting request ends at once,
        with the tokens that were streamed.
        """
        sequence, self._output.now = self._by_id.get(request_id), now
        if sequence is None or request_id in self._held:
            return
        if not sequence.running and self._pool.remove(sequence):
            self._end_unfinished(sequence)
        else:
            sequence.aborting = self._aborting = True
        self._interrupt(now)

    def pause(self, mode: PauseMode, now: float) -> None:
        """Stop after the step or pass in progress; :attr:`paused` is set from then on."""
        if self.work is None:
            self._apply_pause(mode, now)
        else:
            self._pausing = mode
            self._interrupt(now)

    def resume(self, now: float) -> None:
        """Continue; the requests held during the pause are queued behind those that waited."""
        self._pausing = None
        if self.paused is not None:
            self.counters.paused_seconds += now - self._paused_since
            self.paused = None
            self._batch.predict_again(self.weights_key)
        for sequence in self._held.values():
            self._pool.queue(sequence)
        self._held.clear()
        self._interrupt(now)

    def flush(self) -> bool:
        """Drop all KV; return False and do nothing while something is computed or running."""
        if self.work is not None or len(self._batch):
            return False
        self._pool.flush()
        if self._prefixes is not None:
            self._prefixes.flush()
        return True

    def refit(self, version: int, weights_key: int | None = None) -> bool:
        """Take new weights; return False and do nothing if there are requests and no pause."""
        if self.paused is None and self._by_id:
            return False
        if version != self.version:
            for sequence in (*self._batch.members, *self._pool.waiting):
                if out := self._batch.tokens_of(sequence):
                    sequence.changes.append((self.version, out))
        self.version = version
        self.weights_key = weights_key_of_version(version) if weights_key is None else weights_key
        return True

    def next_event_time(self) -> float | None:
        """Return the time of the next event; None while idle or paused."""
        return self._wake if self.work is None else self.work.end

    def advance(self, to: float) -> list[tuple[str, Chunk]]:
        """Advance to the time `to`; return all chunks since the last call, with their ids."""
        while (due := self.next_event_time()) is not None and due <= to:
            self.finish_work()
            self.begin(due)
        return self._output.take()

    def _interrupt(self, now: float) -> None:
        """Let the scheduler look at its queue at the end of the step in progress."""
        work = self.work
        if work is None:
            if self.paused is None and self._wake is None and self._by_id:
                self._wake = now
        elif isinstance(work, Decode):
            steps = self.steps_within(now - work.start)
            if work.start + self.decode_seconds(steps) < now:
                steps += 1
            if steps < work.steps:
                work.steps = steps
                work.end = work.start + self.decode_seconds(steps)

    def begin(self, now: float) -> None:
        """Start a pause that is due, or plan the next pass or steps, at the time `now`."""
        self._wake = None
        if self._pausing is not None:
            self._apply_pause(self._pausing, now)
        if self.paused is None:
            self.work = self._plan_prefill(now) or self._plan_decode(now)

    def finish_work(self) -> None:
        """Finish the work in progress, if any."""
        work, self.work = self.work, None
        self._output.now = 0.0 if work is None else work.end
        if isinstance(work, Decode):
            self._complete_decode(work)
            computed = list(self._batch.members) if self._aborting else []
        elif isinstance(work, Prefill):
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

    def _plan_decode(self, now: float) -> Decode | None:
        batch = len(self._batch)
        if not batch:
            return None
        wanted = 1 if self._aborting else self._batch.next_due() - self._batch.steps
        while not (steps := self._pool.room_for_steps(batch, wanted)):
            self._preempt()
            batch -= 1
        seconds = self.config.timing.decode_seconds(batch, self._pool.running, steps)
        return Decode(now, now + seconds, steps)

    def _complete_decode(self, work: Decode) -> None:
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
        """Put the request that was admitted last back into the queue; it is prefilled again."""
        pool, members = self._pool, self._batch.members
        if self.config.admission != "vllm":
            pool.share.overflow(
                self._batch.steps,
                requests=len(members),
                generated=sum(self._batch.tokens_of(s) for s in members),
                limits=sum(s.limit for s in members),
            )
        (sequence,) = self._batch.take([self._batch.newest], self.weights_key)
        pool.running -= sequence.context
        sequence.drop_kv()
        if self.config.admission == "vllm":
            pool.put_back(sequence)
        else:
            pool.queue(sequence)
        self.counters.preemptions += 1

    def _plan_prefill(self, now: float) -> Prefill | None:
        if not self._pool.waiting:
            return None
        if self._prefixes is not None:
            self._prefixes.trim(self._pool.free)
        places = self.config.max_running - len(self._batch)
        picks = self._pool.pick(places, self._batch.members, self._batch.steps)
        if not picks:
            return None
        computed = sum(take for _, take in picks) - self._found(picks)
        seconds = self.config.timing.prefill_seconds(max(1, computed))
        return Prefill(now, now + seconds, picks)

    def _found(self, picks: list[tuple[Sequence, int]]) -> int:
        """Return the number of tokens of the pass that are in the prefix cache already."""
        if self._prefixes is None:
            return 0
        found = 0
        for sequence, take in picks:
            if not sequence.cached and not sequence.out:
                sequence.shared = self._prefixes.attach(sequence.request)
            hit = min(take, sequence.shared)
            sequence.shared -= hit
            found += hit
        self._prefixes.trim(self._pool.free)
        self.counters.cached += found
        return found

    def _complete_prefill(self, work: Prefill) -> None:
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
            if sequence.first_at is None:
                sequence.first_at = work.end
            joined.append(sequence)
        self.counters.generated += len(joined)
        self._batch.predict(joined, self.weights_key)

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
        """Abort a request in the queue: as in SGLang, its unsent tokens are lost."""
        sequence.drop_unsent()
        self._end(sequence, "abort")

    def _end(self, sequence: Sequence, ending: Ending) -> None:
        del self._by_id[sequence.request.request_id]
        if not self._by_id:
            self._pool.share.idle(self._batch.steps)
        if self._prefixes is not None:
            self._prefixes.end(sequence.request, sequence.context)
            self._prefixes.trim(self._pool.free)
        self._output.end(sequence, ending, self.version)

    def _apply_pause(self, mode: PauseMode, now: float) -> None:
        self._pausing = self._wake = None
        if self.paused is None:
            self._paused_since = now
        if self.paused != "retract":
            self.paused = mode
        running = list(self._batch.members)
        self._batch.make(running, self.weights_key)
        self._output.now = now
        if self.config.stream_at_pause:
            self._output.stream(running, self.version)
        if mode == "retract":
            for sequence in self._batch.take(running, self.weights_key):
                self._pool.running -= sequence.context
                self._pool.retain(sequence)
                sequence.first_at = None


class RunningBatch:
    """The requests that decode together, with a step counter and a tick every `interval` steps."""

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
        """The members in the order of admission; do not join or leave while iterating."""
        return self._members.values()

    @property
    def newest(self) -> Sequence:
        """The member that was admitted last."""
        return next(reversed(self._members.values()))

    def tokens_of(self, sequence: Sequence) -> int:
        """Return the number of output tokens so far, of a member or of another request."""
        return self.steps - sequence.joined if sequence.running else sequence.out

    def join(self, sequence: Sequence) -> None:
        """Add a request whose prefill ends now and has sampled its next token."""
        sequence.out += 1
        sequence.joined = self.steps - sequence.out
        sequence.ticket = self._tickets
        self._tickets += 1
        self._members[sequence.ticket] = sequence

    def leave(self, sequence: Sequence) -> None:
        """Remove a member whose tokens are sampled; its KV stays, except the last token's."""
        del self._members[sequence.ticket]
        sequence.out = self.steps - sequence.joined
        sequence.ticket = -1
        sequence.cached = sequence.computed = sequence.context - 1

    def next_due(self) -> int:
        """Return the step at which the batch changes next: a member's last step, or the tick."""
        heap = self._finishing
        while heap and heap[0][2].ticket != heap[0][1]:
            heapq.heappop(heap)
        return min(self.next_tick, heap[0][0]) if heap else self.next_tick

    def take_finished(self, weights_key: int) -> list[Sequence]:
        """Remove and return the members whose last token is decoded."""
        done: list[Sequence] = []
        while self._finishing and self._finishing[0][0] <= self.steps:
            _, ticket, sequence = heapq.heappop(self._finishing)
            if sequence.ticket == ticket:
                done.append(sequence)
        return self.take(done, weights_key) if done else done

    def take(self, sequences: list[Sequence], weights_key: int) -> list[Sequence]:
        """Sample the tokens of these members and remove them."""
        self.make(sequences, weights_key)
        for sequence in sequences:
            self.leave(sequence)
        return sequences

    def make(self, sequences: Collection[Sequence], weights_key: int) -> None:
        """Sample the tokens that these members have decoded."""
        if sequences:
            self._output.make(sequences, self.steps, weights_key)

    def predict(self, sequences: Collection[Sequence], weights_key: int) -> None:
        """Record when these members end, where that is known before the next tick."""
        for sequence in self._output.predict(sequences, self.next_tick, weights_key):
            heapq.heappush(self._finishing, (sequence.finish_at, sequence.ticket, sequence))

    def predict_again(self, weights_key: int) -> None:
        """Predict again after a refit: other tokens follow, so stop tokens come elsewhere."""
        self._finishing.clear()
        self.predict(self.members, weights_key)

    def tick(self, weights_key: int, version: int) -> None:
        """Send every member's tokens, and search the next interval for stop tokens."""
        self.next_tick = (self.steps // self._interval + 1) * self._interval
        self.make(self.members, weights_key)
        self._output.stream(self.members, version)
        self.predict([s for s in self.members if s.stops], weights_key)
