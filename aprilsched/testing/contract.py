"""Checks of everything that the scheduler relies on: a test suite for any engine.

Each check is a coroutine function that takes a :class:`Subject`. It raises an AssertionError if the
engine does not keep its contract, or a TimeoutError if it does not answer. A project tests its own
engine like this::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_engine(check):
        asyncio.run(check_on_a_new_engine(check))

`CHECKS` apply to every engine, and the other tuples to engines with the named capabilities.
``aprilsched doctor`` runs them against a live server, and a scheduler runs the first one before it
uses an engine again.

The requests have up to 8,000 greedy tokens and token ids below 35. If greedy tokens depend on the
batch, as on most GPUs, a check may raise :class:`OtherTokens`; to avoid this, run the engine with a
small float32 model on a CPU.

pytest is not needed. For messages with the compared values, call
``pytest.register_assert_rewrite("aprilsched.testing.contract")`` before the import, or use the
plugin :mod:`aprilsched.testing.fixtures`, which does that.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from aprilsched.errors import EngineError, EngineRejected
from aprilsched.kernel.engines.base import Chunk, Engine, GenerationRequest, PauseMode
from aprilsched.kernel.engines.load import ReportsLoad
from aprilsched.kernel.engines.refit import RefitFromDisk, SleepingEngine
from aprilsched.kernel.engines.self_check import check as self_check
from aprilsched.kernel.values.companions import TOP, Rows, top_logprobs
from aprilsched.types import Float32Array, Int32Array, SamplingParams, VersionSpan

PROMPT = np.arange(3, 35, dtype=np.int32)
ENDLESS = 8000
"""Tokens of a response that must still run when a test inspects it. A response of 200 tokens ended
while the test process stalled for a third of a second."""
WAIT_SECONDS = 600.0
"""Longest wait for anything. Usually one or two seconds are enough; a busy machine needs more."""
REFERENCE_TOKENS = 200
"""Tokens of the reference response, with which other responses are compared."""
SETTLE_SECONDS = 0.3
"""Seconds until nothing changes: a pause may take effect late, and an event may be delayed."""
MAX_WINDOWS = 10
"""Windows, each of twice the above time, in which tokens may still arrive after a pause."""
CACHED_TOKENS = 257
"""Tokens of a prompt that is looked up in the cache, which may have pages of 256 tokens."""


class EndedTooSoon(AssertionError):
    """A response ended before the check could act on it, so the check is inconclusive."""


class OtherTokens(AssertionError):
    """Greedy tokens or logprobs differ from another response with the same context."""


def require(condition: bool, message: str) -> None:
    """Raise an AssertionError unless `condition` holds, also under ``python -O``."""
    if not condition:
        raise AssertionError(message)


def greedy(
    tokens: int = 64, *, prompt: Int32Array = PROMPT, request_id: str | None = None
) -> GenerationRequest:
    """Return a request for exactly `tokens` greedy tokens, with an id of the usual length."""
    return GenerationRequest(
        request_id=request_id or uuid.uuid4().hex,
        input_ids=prompt,
        sampling=SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True),
    )


@dataclass
class Stream:
    """A request whose stream a task reads, and its chunks so far."""

    engine: Engine
    request: GenerationRequest
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    task: asyncio.Task[None] | None = None

    def start(self) -> Stream:
        """Read the stream in a new task."""
        self.task = asyncio.create_task(self._read())
        return self

    async def end(self) -> Stream:
        """Wait for its last chunk."""
        assert self.task is not None
        await asyncio.wait_for(self.task, WAIT_SECONDS)
        return self

    async def reach(self, tokens: int) -> Stream:
        """Wait for `tokens` tokens of a response, which must not end with them."""
        await until(lambda: len(self) >= tokens or self.done)
        if self.done:
            finish = (await self.end()).last.finish
            require(finish == "length", f'a response ended with "{finish}"')
            raise EndedTooSoon("the response ended too soon; ask for more tokens")
        return self

    async def cut(self, tokens: int = 0) -> Stream:
        """Wait for `tokens` tokens, then repeat aborts until it ends, as a scheduler does.

        A single abort may be lost while the engine is paused.
        """
        await until(lambda: len(self) >= tokens or self.done)
        async with asyncio.timeout(WAIT_SECONDS):
            while not self.done:
                await self.engine.abort(self.request.request_id)
                await asyncio.sleep(0.05)
        return await self.end()

    @property
    def done(self) -> bool:
        return self.task is not None and self.task.done()

    @property
    def last(self) -> Chunk:
        return self.chunks[-1]

    @property
    def ids(self) -> list[int]:
        return [int(token) for chunk in self.chunks for token in chunk.token_ids]

    @property
    def logprobs(self) -> Float32Array:
        return np.concatenate([chunk.logprobs for chunk in self.chunks])

    def __len__(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    async def _read(self) -> None:
        async with aclosing(self.engine.generate(self.request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                self.chunks.append(chunk)


async def whole(engine: Engine, request: GenerationRequest) -> Stream:
    """Read the response to `request` to its end."""
    return await Stream(engine, request).start().end()


async def until(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]], seconds: float = WAIT_SECONDS
) -> None:
    """Wait for `condition`."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.01)


@dataclass(kw_only=True)
class Subject:
    """An open engine, and what a check must know about it.

    Attributes:
        engine: the engine, not paused, without requests, and with the first of the `weights`.
        busy: returns the number of requests that the engine runs or queues.
        weights: two checkpoints that sample different tokens; None if no check loads weights. A
            check may leave the engine with either of them, so each check needs a fresh or a
            refitted engine.
        endless: tokens of a response that must run until the check ends it.
        settle_s: seconds in which a pause takes effect, and by which events may be delayed.
        streams: the responses that checks have started.
    """

    engine: Engine
    busy: Callable[[], Awaitable[int]]
    weights: tuple[Path, Path] | None = None
    endless: int = ENDLESS
    settle_s: float = SETTLE_SECONDS
    streams: list[Stream] = field(default_factory=list[Stream])
    _reference: Stream | None = None

    def start(self, request: GenerationRequest | None = None) -> Stream:
        """Start `request`; None for a response that runs until it is aborted."""
        stream = Stream(self.engine, request or greedy(self.endless)).start()
        self.streams.append(stream)
        return stream

    async def whole(self, request: GenerationRequest) -> Stream:
        """Start `request` and read its response to its end."""
        return await self.start(request).end()

    async def reference(self) -> Stream:
        """Read the response with which others are compared, once for all checks."""
        if self._reference is None:
            self._reference = await self.whole(greedy(REFERENCE_TOKENS))
        return self._reference

    async def leave(self) -> None:
        """End every response that a check left running, as a failed check does."""
        tasks = [stream.task for stream in self.streams if stream.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.streams.clear()

    async def settle(self) -> None:
        """Wait for delayed effects."""
        await asyncio.sleep(self.settle_s)

    async def has_two(self) -> bool:
        """Whether the engine has two requests or more."""
        return await self.busy() > 1

    async def idle(self) -> bool:
        """Whether the engine has no requests."""
        return await self.busy() == 0

    def other_weights(self) -> Path:
        """Return the checkpoint that is not loaded at the start."""
        assert self.weights is not None, "this check loads weights; give two checkpoints"
        return self.weights[1]


Check = Callable[[Subject], Awaitable[None]]


def _check_end(stream: Stream, finish: str) -> None:
    """Check that a response ended with the finish reason `finish`."""
    found = stream.last.finish
    require(found == finish, f'a response ended with "{found}" instead of "{finish}"')


def _check_length(stream: Stream, tokens: int) -> None:
    """Check that a response has `tokens` tokens and ended for that reason."""
    _check_end(stream, "length")
    count = len(stream)
    require(count == tokens, f"a response for {tokens} tokens has {count}")
    known = len(stream.logprobs)
    require(count == known, f"a response of {count} tokens has {known} logprobs")


def _check_aborted(stream: Stream, least: int = 0) -> None:
    """Check that a response ended by its abort and has at least `least` tokens."""
    if stream.last.finish == "length":
        raise EndedTooSoon("the response ended before its abort")
    _check_end(stream, "abort")
    require(len(stream) >= least, f"an aborted response has {len(stream)} of {least} tokens")


def _check_same(
    stream: Stream, reference: Stream, *, start: int = 0, tokens: int | None = None
) -> None:
    """Check that tokens and logprobs from `start` on equal the `reference`, up to the end of the
    shorter one."""
    end = min(len(stream), start + len(reference) if tokens is None else start + tokens)
    length = end - start
    if stream.ids[start:end] != reference.ids[:length]:
        raise OtherTokens("a response has other greedy tokens than one without the check")
    gap = np.abs(stream.logprobs[start:end] - reference.logprobs[:length]).max(initial=0.0)
    if not gap <= 2e-3:
        raise OtherTokens(f"logprobs differ by {gap:.4f} from those of a response like it")


def _check_spans(subject: Subject, stream: Stream, *spans: VersionSpan) -> None:
    """Check that an engine that reports the version of each token reports `spans`."""
    reports = subject.engine.capabilities.version_spans
    expected = spans if reports else None
    require(
        stream.last.spans == expected,
        f"a response has the version spans {stream.last.spans} instead of {expected}",
    )


@contextmanager
def _refused() -> Generator[None]:
    """Check that the call in the block is refused."""
    try:
        yield
    except EngineRejected:
        return
    raise AssertionError("the engine accepted the call, and should have refused it")


async def passes_the_self_check(subject: Subject) -> None:
    """It returns tokens with finite logprobs, pauses and continues, and ends aborted requests."""
    try:
        await self_check(subject.engine)
    except EngineError as error:
        raise AssertionError(str(error)) from error


async def every_token_arrives_once(subject: Subject) -> None:
    """Each token arrives once with its logprob, and only the last chunk ends the response."""
    reports = subject.engine.capabilities.version_spans
    for length in (1, 2, 15, 16, 17, 33):
        stream = await subject.whole(greedy(length))
        _check_length(stream, length)
        require(bool(np.isfinite(stream.logprobs).all()), "a logprob is not finite")
        finishes = [chunk.finish for chunk in stream.chunks]
        expected = [*itertools.repeat(None, len(finishes) - 1), "length"]
        require(finishes == expected, f"chunks ended with {finishes}")
        require(
            (stream.last.spans is not None) == reports
            and all(chunk.spans is None for chunk in stream.chunks[:-1]),
            "version spans did not come with the last chunk alone",
        )
        if reports:
            covered = sum(span.end - span.start for span in stream.last.spans or ())
            require(covered == length, f"version spans cover {covered} of {length} tokens")


async def _check_paused(subject: Subject, streams: Sequence[Stream]) -> None:
    """Check that a pause has stopped the `streams` and ended none of them.

    On a busy machine tokens that were sent before the pause arrive late.
    """
    before, windows = [-1], 0
    while (counts := [len(stream) for stream in streams]) != before:
        require(windows < MAX_WINDOWS, "tokens arrive while it is paused")
        before, windows = counts, windows + 1
        await asyncio.sleep(2 * subject.settle_s)
    for stream in streams:
        if stream.done and (await stream.end()).last.finish == "length":
            # A response that ran through several windows was not stopped.
            require(windows < 4, "a response went on to its end while it was paused")
            raise EndedTooSoon("the response ended before the pause")
        require(not stream.done, "a response ended while it was paused")


async def _pause_keeps_streams_open(subject: Subject, mode: PauseMode) -> None:
    engine = subject.engine
    reference = await subject.reference()
    streams = [subject.start() for _ in range(3)]
    for stream in streams:
        await stream.reach(20)
    await engine.pause(mode)
    await _check_paused(subject, streams)
    await engine.resume()
    for stream in streams:
        await stream.cut(REFERENCE_TOKENS)
        require(len(stream) >= REFERENCE_TOKENS, "a response did not continue after the pause")
    for stream in streams:
        _check_same(stream, reference)


async def retract_keeps_streams_open(subject: Subject) -> None:
    """No token arrives while paused; then every stream continues to its end, tokens unchanged."""
    await _pause_keeps_streams_open(subject, "retract")


async def in_place_keeps_streams_open(subject: Subject) -> None:
    """Streams also stay open with the mode that keeps the cache."""
    await _pause_keeps_streams_open(subject, "in_place")


async def abort_returns_the_partial(subject: Subject) -> None:
    """An abort returns the tokens so far, with the versions of all of them."""
    version = await subject.engine.version()
    reference = await subject.reference()
    stream = await subject.start().reach(20)
    await stream.cut()
    _check_aborted(stream, 20)
    _check_spans(subject, stream, VersionSpan(version=version, start=0, end=len(stream)))
    _check_same(stream, reference)


async def abort_after_retract_returns_the_partial(subject: Subject) -> None:
    """An abort during a pause loses no token that was streamed."""
    stream = await subject.start().reach(20)
    await subject.engine.pause("retract")
    await subject.settle()
    await stream.cut(least := len(stream))
    await subject.engine.resume()
    _check_aborted(stream, least)
    if subject.engine.capabilities.version_spans:
        covered = sum(span.end - span.start for span in stream.last.spans or ())
        require(covered == len(stream), f"version spans cover {covered} of {len(stream)} tokens")
    await until(subject.idle)


async def a_request_sent_during_a_pause_is_held(subject: Subject) -> None:
    """The request returns no token until the pause ends, and then all tokens."""
    await subject.engine.pause("retract")
    stream = subject.start(greedy(40))
    await asyncio.sleep(2 * subject.settle_s)
    require(not stream.chunks and not stream.done, "it answered a request while it was paused")
    await subject.engine.resume()
    await stream.end()
    _check_length(stream, 40)


async def a_held_request_can_be_aborted(subject: Subject) -> None:
    """Aborts repeated until the stream ends succeed, even if aborts during a pause are lost."""
    await subject.engine.pause("retract")
    stream = subject.start()
    await subject.settle()
    await subject.engine.abort(stream.request.request_id)
    await subject.settle()
    await subject.engine.resume()
    await stream.cut()
    _check_aborted(stream)
    await until(subject.idle)


async def requests_of_one_turn_end_each_by_itself(subject: Subject) -> None:
    """Requests started in one turn of the event loop may share a call, but an abort or a closed
    stream ends only its own request."""
    reference = await subject.reference()
    lengths = (60, subject.endless, 40, subject.endless)
    first, aborted, second, left = [subject.start(greedy(tokens)) for tokens in lengths]
    await left.reach(20)
    assert left.task is not None
    left.task.cancel()
    await aborted.reach(20)
    await aborted.cut()
    _check_aborted(aborted, 20)
    for stream in (first, second):
        await stream.end()
        _check_length(stream, stream.request.sampling.max_new_tokens)
    await until(subject.idle)
    for stream in (first, second, aborted):
        _check_same(stream, reference)


async def held_requests_of_one_turn_are_aborted_or_whole(subject: Subject) -> None:
    """A request held by a pause can be aborted, at the latest after the pause. The other requests
    of the same turn then return all their tokens, or also end without any, so that they can be
    sent again."""
    await subject.engine.pause("retract")
    aborted, *others = [subject.start(greedy(tokens)) for tokens in (subject.endless, 30, 30)]
    await subject.settle()
    for _ in range(2):
        await subject.engine.abort(aborted.request.request_id)
    await subject.settle()
    await subject.engine.resume()
    await aborted.cut()
    _check_aborted(aborted)
    for stream in others:
        await stream.end()
        ending = (stream.last.finish, len(stream))
        require(ending in (("length", 30), ("abort", 0)), f"a held request ended with {ending}")
    await until(subject.idle)


async def spans_tell_the_version_of_every_token(subject: Subject) -> None:
    """After a refit in mid-response, spans show which tokens come from old and new weights."""
    engine = subject.engine
    old = await engine.version()
    reference = await whole(engine, greedy(600))
    stream = await subject.start().reach(20)
    await _refit(subject, subject.other_weights(), old + 7)
    assert await engine.version() == old + 7
    await stream.cut(len(stream) + 200)
    assert stream.last.spans is not None
    assert len(stream.last.spans) == 2
    first, second = stream.last.spans
    assert (first.version, second.version) == (old, old + 7)
    assert 0 == first.start < first.end == second.start < second.end == len(stream)
    known = min(first.end, 600)
    _check_same(stream, reference, tokens=known)
    prefix = np.concatenate([PROMPT, np.array(stream.ids[: first.end], np.int32)])
    rest = await whole(engine, greedy(200, prompt=prefix))
    _check_same(stream, rest, start=first.end)
    assert rest.last.spans == (VersionSpan(version=old + 7, start=0, end=200),)
    other = await whole(engine, greedy(600))
    assert other.ids != reference.ids, "the two weights must differ"


async def retract_and_flush_keep_greedy_tokens(subject: Subject) -> None:
    """Flushed KV is recomputed, so with unchanged weights the tokens are the same."""
    reference = await subject.reference()
    stream = await subject.start().reach(20)
    for _ in range(2):
        await subject.engine.pause("retract")
        await subject.engine.flush()
        await subject.engine.resume()
    await stream.cut(REFERENCE_TOKENS)
    require(len(stream) >= REFERENCE_TOKENS, "a response did not continue after the flush")
    _check_same(stream, reference)


async def repeated_and_unknown_calls_are_harmless(subject: Subject) -> None:
    """Pausing or resuming twice, resuming when running, aborting unknown ids: all are harmless."""
    engine = subject.engine
    await engine.resume()
    await engine.abort("0" * 32)
    stream = await subject.start().reach(1)
    for mode in ("retract", "retract", "in_place"):
        await engine.pause(mode)
    await engine.abort("0" * 32)
    for _ in range(2):
        await engine.resume()
    await stream.cut(before := len(stream) + 100)
    _check_aborted(stream, before)
    await engine.abort(stream.request.request_id)
    _check_length(await subject.whole(greedy(8)), 8)


async def a_re_sent_prefix_continues_the_response(subject: Subject) -> None:
    """The known tokens become part of the prompt, as in failover and with straggler="abort"."""
    reference = await subject.reference()
    stream = await subject.start().reach(20)
    await stream.cut()
    known = stream.ids[:100]
    prefix = np.concatenate([PROMPT, np.array(known, np.int32)])
    rest = await subject.whole(greedy(120 - len(known), prompt=prefix))
    _check_length(rest, 120 - len(known))
    if known + rest.ids != reference.ids[:120]:
        raise OtherTokens("a response that was sent again continued with other greedy tokens")


async def leaving_a_stream_ends_its_request(subject: Subject) -> None:
    """A request whose stream is cancelled, or closed after its first chunk, is not decoded
    further."""
    # It starts first and has the same length, so it would end before the request that continues.
    other = await subject.start().reach(1)
    stream = await subject.start().reach(1)
    await until(subject.has_two)
    assert stream.task is not None
    stream.task.cancel()
    await asyncio.wait([stream.task])
    await _only_one_is_left(subject, other)
    request = greedy(subject.endless)
    async with aclosing(subject.engine.generate(request)) as chunks:  # type: ignore[type-var]
        async for _ in chunks:
            await until(subject.has_two)
            break
    await _only_one_is_left(subject, other)
    await other.cut()
    await until(subject.idle)


async def leaving_a_held_stream_ends_its_request(subject: Subject) -> None:
    """A request that a pause holds must not run after the pause, if its stream was closed."""
    other = await subject.start().reach(1)
    await subject.engine.pause("retract")
    stream = subject.start()
    await subject.settle()
    assert stream.task is not None
    stream.task.cancel()
    await asyncio.wait([stream.task])
    await subject.engine.resume()
    await subject.settle()
    await _only_one_is_left(subject, other)
    await other.cut()
    await until(subject.idle)


async def _only_one_is_left(subject: Subject, other: Stream) -> None:
    """Wait until the engine has one request, and check that it is `other`."""

    async def one_at_most() -> bool:
        return not await subject.has_two()

    await until(one_at_most)
    require(not other.done, "a request whose stream was left went on to its end")


async def cache_keys_keep_prefixes_apart(subject: Subject) -> None:
    """With another key no KV is shared, and the tokens are the same."""
    # Another prompt each time, so that the check can be repeated on one engine.
    random = np.random.default_rng(uuid.uuid4().int)
    prompt = random.integers(3, 35, CACHED_TOKENS).astype(np.int32)
    request = greedy(40, prompt=prompt)
    found = [
        await subject.whole(
            msgspec.structs.replace(request, cache_key=key, request_id=uuid.uuid4().hex)
        )
        for key in ("version-1", "version-2", "version-3", None)
    ]
    for stream in found:
        shared = stream.last.cached_tokens
        require(not shared, f"{shared} tokens of KV came from a request with another cache key")
    for stream in found:
        _check_same(stream, found[0])


async def released_memory_comes_back(subject: Subject) -> None:
    """Stragglers wait in the pause while memory is released, and continue with the same tokens."""
    engine = subject.engine
    assert isinstance(engine, SleepingEngine)
    assert engine.capabilities.release_while_paused
    assert engine.capabilities.keeps_released_weights
    version = await engine.version()
    reference = await whole(engine, greedy(400))
    stream = await Stream(engine, greedy(ENDLESS)).start().reach(20)
    await engine.pause("retract")
    await engine.flush()
    await engine.release(["kv_cache", "weights"])
    assert await engine.version() == version
    await engine.wake(["weights"])
    await engine.wake(["kv_cache"])
    await engine.resume()
    await stream.cut(max(400, len(stream) + 100))
    assert stream.ids[:400] == reference.ids
    np.testing.assert_allclose(stream.logprobs[:400], reference.logprobs, atol=1e-3)


async def weights_are_taken_while_the_cache_is_away(subject: Subject) -> None:
    """A colocated trainer resumes the weights, refits, and then resumes the KV cache."""
    engine = subject.engine
    assert isinstance(engine, SleepingEngine)
    assert isinstance(engine, RefitFromDisk)
    old = await engine.version()
    stream = await Stream(engine, greedy(ENDLESS)).start().reach(20)
    await engine.pause("retract")
    await engine.flush()
    await engine.release(["kv_cache", "weights"])
    await engine.wake(["weights"])
    await engine.update_from_disk(subject.other_weights(), old + 1)
    await engine.wake(["kv_cache"])
    await engine.resume()
    await stream.cut(len(stream) + 200)
    assert stream.last.spans is not None
    assert [span.version for span in stream.last.spans] == [old, old + 1]
    boundary = stream.last.spans[1].start
    prefix = np.concatenate([PROMPT, np.array(stream.ids[:boundary], np.int32)])
    rest = await whole(engine, greedy(100, prompt=prefix))
    assert stream.ids[boundary : boundary + 100] == rest.ids


async def memory_calls_in_a_wrong_order_are_refused(subject: Subject) -> None:
    """Each of these calls would crash a server, or let it run without its memory."""
    engine = subject.engine
    assert isinstance(engine, SleepingEngine)
    await engine.pause("retract")
    with _refused():
        await engine.wake(["kv_cache"])
    await engine.release(["kv_cache", "weights"])
    with _refused():
        await engine.release(["kv_cache"])
    await engine.wake(["weights"])
    with _refused():
        await engine.wake(["weights", "kv_cache"])
    with _refused():
        await engine.resume()
    await engine.wake(["kv_cache"])
    await engine.resume()
    assert len(await whole(engine, greedy(8))) == 8


async def the_load_tells_what_is_on_it(subject: Subject) -> None:
    """The load contains requests, KV and tokens, and step times if the engine counts them; their
    age is present only if known."""
    engine = subject.engine
    assert isinstance(engine, ReportsLoad)
    before = await engine.load()
    assert (before.running, before.queued) == (0, 0)
    assert before.max_running == engine.capabilities.max_running_requests
    assert before.kv_capacity == engine.capabilities.kv_tokens
    streams = [await Stream(engine, greedy(ENDLESS)).start().reach(20) for _ in range(3)]

    async def all_are_told() -> bool:
        load = await engine.load()
        return load.running == 3 and load.kv_tokens is not None and load.kv_tokens > 3 * len(PROMPT)

    await until(all_are_told)
    await engine.pause("retract")
    await asyncio.sleep(subject.settle_s)
    paused = await engine.load()
    assert paused.running + paused.queued == 3
    assert paused.age_s >= 0
    await engine.resume()
    for stream in streams:
        await stream.cut()
    await until(subject.idle)
    after = await engine.load()
    assert before.generated is not None
    assert after.generated is not None
    assert 0 < after.generated - before.generated <= sum(map(len, streams)) + len(streams)
    for started, ended in (
        (before.decode_seconds, after.decode_seconds),
        (before.prefill_seconds, after.prefill_seconds),
    ):
        assert (started is None) == (ended is None), "a time is told always or never"
        assert started is None or ended is None or ended >= started


async def _refit(subject: Subject, weights: Path, version: int) -> None:
    engine = subject.engine
    assert isinstance(engine, RefitFromDisk)
    await engine.pause("retract")
    await engine.flush()
    await engine.update_from_disk(weights, version)
    await engine.resume()


async def likely_tokens_come_with_each_token(subject: Subject) -> None:
    """The likeliest tokens arrive for each token of a request with this option, and for no other
    request: through both kinds of pause, and up to an abort."""
    engine, n = subject.engine, 3
    asked = msgspec.structs.replace(greedy(ENDLESS), companions=((top_logprobs(n), 0),))
    stream, plain = Stream(engine, asked).start(), Stream(engine, greedy(ENDLESS)).start()
    for mode in ("in_place", "retract"):
        await stream.reach(len(stream) + 20)
        await engine.pause(mode)
        await engine.resume()
    await stream.cut(len(stream) + 20)
    await plain.cut()
    assert not any(chunk.token_rows for chunk in plain.chunks)
    rows = Rows.join([chunk.token_rows[TOP] for chunk in stream.chunks if chunk.token_rows]).values
    assert rows.shape == (len(stream), n, 2)
    assert rows[:, 0, 0].tolist() == stream.ids  # They are greedy.
    assert rows[:, 0, 1].tolist() == stream.logprobs.tolist()
    assert (np.diff(rows[:, :, 1]) <= 0).all()
    assert all(len(set(ids)) == n for ids in rows[:, :, 0].tolist())


CHECKS: tuple[Check, ...] = (
    passes_the_self_check,
    every_token_arrives_once,
    retract_keeps_streams_open,
    in_place_keeps_streams_open,
    abort_returns_the_partial,
    abort_after_retract_returns_the_partial,
    a_request_sent_during_a_pause_is_held,
    a_held_request_can_be_aborted,
    requests_of_one_turn_end_each_by_itself,
    held_requests_of_one_turn_are_aborted_or_whole,
    repeated_and_unknown_calls_are_harmless,
    a_re_sent_prefix_continues_the_response,
    leaving_a_stream_ends_its_request,
    leaving_a_held_stream_ends_its_request,
    cache_keys_keep_prefixes_apart,
)
"""For every engine."""

REFIT_CHECKS: tuple[Check, ...] = (
    retract_and_flush_keep_greedy_tokens,
    spans_tell_the_version_of_every_token,
)
"""For engines with ``flush_while_paused`` and ``version_spans`` that load weights from a disk
(:class:`~aprilsched.kernel.engines.refit.RefitFromDisk`)."""

MEMORY_CHECKS: tuple[Check, ...] = (
    released_memory_comes_back,
    weights_are_taken_while_the_cache_is_away,
    memory_calls_in_a_wrong_order_are_refused,
)
"""For engines that pass the `REFIT_CHECKS` and are a
:class:`~aprilsched.kernel.engines.refit.SleepingEngine` with ``release_while_paused`` and
``keeps_released_weights``."""

LOAD_CHECKS: tuple[Check, ...] = (the_load_tells_what_is_on_it,)
"""For engines that report their load (:class:`~aprilsched.kernel.engines.load.ReportsLoad`)."""

LIKELY_CHECKS: tuple[Check, ...] = (likely_tokens_come_with_each_token,)
"""For engines that return the companion "top_logprobs"."""

ALL_CHECKS: tuple[Check, ...] = CHECKS + REFIT_CHECKS + MEMORY_CHECKS + LOAD_CHECKS + LIKELY_CHECKS
