"""The embedded engine: the batcher behind the Engine protocol, on the running loop's clock.

It needs no GPU, no server and no threads. Modelled time is the loop's time divided by
``time_scale``, so the same engine runs in wall time, faster than wall time, or on a virtual clock,
where runs are exactly repeatable.

Invariants:
- The same calls at the same loop times give the same chunks.
- It behaves like SGLang in the corner cases: a request that is sent during a pause is held, and an
  abort of it is lost; an abort under an in-place pause takes effect after it, with one more
  token; an abort after a retract gives what was streamed; a request id in use is refused.
- A call that needs released memory is refused.
- A stream that is left early has its request aborted, even one that a pause still holds.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from aprilsched.errors import (
    EngineBusy,
    EngineError,
    EngineProtocolError,
    EngineRejected,
    EngineRestarted,
    InconsistentWeights,
)
from aprilsched.kernel.engines.base import Chunk, GenerationRequest, PauseMode
from aprilsched.kernel.engines.load import EngineLoad
from aprilsched.kernel.engines.stream import empty_chunk
from aprilsched.kernel.values.bounds import AT_LEAST_0, check_range
from aprilsched.kernel.values.capabilities import Capabilities
from aprilsched.simulation.engine.batcher import Batcher
from aprilsched.simulation.engine.clock import Pacer
from aprilsched.simulation.engine.ranks import RankedBatcher, batcher_of
from aprilsched.simulation.engine.settings import Counters, SimConfig

TAGS = ("kv_cache", "weights", "cuda_graph")
"""The parts of the memory that can be released."""


PAUSE_SECONDS = 2e-3
"""Duration of a pause beyond the step in progress; on SGLang both together take 2 to 22 ms."""


class SimEngine:
    """One simulated inference server.

    Args:
        name: name of the engine, unique in its fleet.
        config: the modelled machine, server and model.
        time_scale: loop seconds for each modelled second. 1.0 is wall time, 0.01 is a hundred
            times faster; use 1.0 under a virtual clock.
        refit_seconds: modelled duration of a refit.
        pause_seconds: modelled duration of a pause beyond the step in progress.

    Raises:
        ConfigError: if `time_scale` is not positive or a time is negative.
    """

    def __init__(
        self,
        name: str = "sim-0",
        config: SimConfig | None = None,
        *,
        time_scale: float = 1.0,
        refit_seconds: float = 0.0,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        check_range(AT_LEAST_0, refit_seconds=refit_seconds, pause_seconds=pause_seconds)
        self.name = name
        self._config = config or SimConfig()
        self._refit_seconds = refit_seconds
        self._pause_seconds = pause_seconds
        self._pacer = Pacer(name, time_scale)
        self.batcher = batcher_of(self._config)
        """The batcher inside the engine, for inspection."""
        self._released: frozenset[str] = frozenset()
        """The parts of the memory that are released."""
        self._streams: dict[str, asyncio.Queue[Chunk | EngineError]] = {}
        self._orphans: set[str] = set()
        self._control, self._unloading = asyncio.Lock(), asyncio.Lock()
        self._advanced = asyncio.Event()
        """Modelled time has advanced, so a request may have ended."""
        self._expects_weights = False
        self._process = self._opened = 0
        """Number of restarts: until now, and until the engine was last opened."""

    @property
    def capabilities(self) -> Capabilities:
        return self._config.capabilities

    @property
    def counters(self) -> Counters:
        """Totals since the engine was made (or restarted), in modelled seconds."""
        return self.batcher.counters

    async def open(self) -> None:
        """Start the engine's clock on the running loop. A second open has no effect."""
        self._opened = self._process
        self._start()

    def _start(self) -> None:
        if self._pacer.started:
            return
        # Older ones may be bound to an earlier loop.
        self._control, self._unloading = asyncio.Lock(), asyncio.Lock()
        self._advanced = asyncio.Event()
        self._pacer.start()
        self._schedule()

    async def close(self) -> None:
        """Stop the clock. Open streams fail, and their requests are aborted."""
        if not self._pacer.started:
            return
        self._pump()
        left = list(self._streams)
        self._break_streams("the engine was closed before the last chunk")
        for request_id in left:
            self._abandon(request_id)
        # An abort takes effect after the step in progress. The step is finished unless a pause
        # forbids it; otherwise the ids would still be in use when the engine is opened again.
        while any(map(self.batcher.knows, left)) and (due := self.batcher.next_event_time()):
            self._pump(due)
        self._pacer.stop()

    def crash(self) -> None:
        """Fail like a killed server process, for tests: streams break and calls fail."""
        self._break_streams("the connection broke before the last chunk")
        self._pacer.stop()

    async def restart(self) -> None:
        """Start again after :meth:`crash`: empty, not paused, with the weights of version 0."""
        self.batcher = batcher_of(self._config)
        self._released = frozenset()
        self._expects_weights = False
        self._orphans.clear()
        self._process += 1
        self._start()

    def decode_at(self, rate: float) -> None:
        """Compute at `rate` times the modelled speed from now on, for tests; 0 stops it."""
        if self._pacer.started:
            self._pump()
        self._pacer.set_rate(rate)
        if self._pacer.started:
            self._schedule()

    def _break_streams(self, why: str) -> None:
        for stream in self._streams.values():
            stream.put_nowait(EngineProtocolError(self.name, why))
        self._streams.clear()
        self._advanced.set()

    async def generate(
        self, request: GenerationRequest, *, length: int | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Stream one response; see :class:`~aprilsched.kernel.engines.base.Engine`.

        The response ends by itself after `length` tokens, if that is given.

        Raises:
            EngineRejected: (400) if the request id is in use, the adapter is not loaded, a token id
                is not in the vocabulary, or the request needs more tokens than the KV pool has.
            EngineUnreachable: if the engine is not open.
            EngineProtocolError: if the engine is closed or crashes during the request.
        """
        now = self._pacer.now()
        self.check(request)
        most = self._config.max_queued
        if most is not None and self.batcher.waiting >= most:
            busy = EngineBusy(self.name, "The request queue is full.", status=503)
            yield empty_chunk(spans_known=True, busy=busy)
            return
        stream: asyncio.Queue[Chunk | EngineError] = asyncio.Queue()
        self._streams[request.request_id] = stream
        self.batcher.submit(request, now, length=length)
        self._schedule()
        try:
            while True:
                chunk = await stream.get()
                if isinstance(chunk, EngineError):
                    raise chunk
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            if self._streams.get(request.request_id) is stream:
                del self._streams[request.request_id]
                self._abandon(request.request_id)

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request that could not be taken now; errors as :meth:`generate`."""
        size, largest = self.batcher.config.vocab_size, int(request.input_ids.max())
        why = f"input_ids must be in [0, {size - 1}], got {largest}." if largest >= size else None
        if (why := why or self.batcher.refusal(request)) is not None:
            raise EngineRejected(self.name, why, status=400)

    async def abort(self, request_id: str) -> None:
        """End one request; as in SGLang, this is lost for a request that a pause holds."""
        self.batcher.abort(request_id, self._pacer.now())
        self._pump()

    def _abandon(self, request_id: str) -> None:
        """Abort a request without a reader, at the latest after the pause."""
        if self.batcher.is_held(request_id):
            self._orphans.add(request_id)
        else:
            self.batcher.abort(request_id, self._pacer.now())
            self._schedule()

    async def version(self) -> int:
        """Return the version of the last refit; 0 before the first.

        Raises:
            InconsistentWeights: after :meth:`expect_weights`, until the weights are accepted.
        """
        self._pacer.now()
        if self._expects_weights:
            why = "another client may have loaded a part of its weights; it needs a complete refit."
            raise InconsistentWeights(self.name, why)
        return self.batcher.version

    async def verify(self) -> int:
        """Return the version, unless the engine was restarted since it was opened.

        Raises:
            EngineRestarted: if it was restarted.
        """
        self._check_process()
        return await self.version()

    def _check_process(self) -> None:
        self._pacer.now()
        if self._process != self._opened:
            raise EngineRestarted(self.name, "was restarted since it was opened.")

    async def is_paused(self) -> bool:
        """Return whether the engine is paused, by this client or another."""
        self._pacer.now()
        return self.batcher.paused is not None

    async def load(self, *, metrics: bool = False) -> EngineLoad:
        """Return the load now, including the work in progress."""
        return load_of(self.batcher, self._pacer.now(), self._pacer.scale)

    async def pause(self, mode: PauseMode) -> None:
        """Pause; return when decoding has stopped. A cancelled call still takes effect."""
        async with self._control:
            now = self._pacer.now()
            self.batcher.pause(mode, now)
            stopped = self.batcher.next_event_time() or now
            self._pump()
            await self._pacer.sleep(stopped - now + self._pause_seconds)
            self._pump(stopped)

    async def flush(self) -> None:
        """Drop all KV.

        Raises:
            EngineRejected: (400) unless the engine is paused with "retract" or has no request.
        """
        async with self._control:
            self._pump()
            if not self.batcher.flush():
                why = "the cache is in use; pause with retract first."
                raise EngineRejected(self.name, why, status=400)

    async def resume(self) -> None:
        """Continue, and abort the requests that were left while a pause held them.

        Raises:
            EngineRejected: (409) if memory is released: a real server would continue without it.
        """
        async with self._control:
            now = self._pacer.now()
            self._check_awake()
            self.batcher.resume(now)
            for request_id in self._orphans:
                self.batcher.abort(request_id, now)
            self._orphans.clear()
            self._pump()

    async def refit(
        self, version: int, weights_key: int | None = None, *, complete: bool = False
    ) -> None:
        """Take the weights of `version`; KV stays.

        Two versions with the same `weights_key` have the same weights; by default every version
        has its own key. `complete` weights make the engine consistent, even after another client
        loaded a part of its weights.

        Raises:
            EngineRejected: (409) if the engine has requests and is not paused (a real server
                would wait for every running request), or if its weights are released.
        """
        async with self._control:
            self._pacer.now()
            self._check_awake("weights")
            await self._pacer.sleep(self._refit_seconds)
            self._pump()
            if not self.batcher.refit(version, weights_key):
                why = "new weights want a paused engine; pause it first."
                raise EngineRejected(self.name, why, status=409)
            if complete:
                self._expects_weights = False

    def expect_weights(self) -> None:
        """Treat the weights as inconsistent, because another client may start loading some."""
        self._expects_weights = True

    async def accept_weights(self, version: int, *, label: bool = False) -> None:
        """Accept the weights as `version`; another client has loaded them by :meth:`refit`.

        Raises:
            EngineRejected: (409) if they have another version, and `label` is not set.
            EngineRestarted: if the engine was restarted since it was opened.
        """
        self._check_process()
        if label:
            await self._relabel(version)
        elif self.batcher.version != version:
            why = f"has version {self.batcher.version} and not {version}; use label=True."
            raise EngineRejected(self.name, why, status=409)
        self._expects_weights = False

    async def _relabel(self, version: int) -> None:
        """Give the weights another version, between two steps."""
        runs = self.batcher.paused is None
        if runs:
            await self.pause("in_place")
        try:
            self.batcher.refit(version, self.batcher.weights_key)
        finally:
            if runs:
                await self.resume()

    async def update_from_disk(self, path: Path, version: int) -> None:
        """Take weights from ``path``; their key is the checksum of its safetensors files.

        Raises:
            EngineRejected: (400) if the files are missing, (409) as for :meth:`refit`.
        """
        await self.refit(version, await self._weights_key(path), complete=True)

    async def _weights_key(self, path: Path) -> int:
        try:
            key = await weights_key_of_files(Path(path))
        except OSError as error:
            raise EngineRejected(self.name, f"cannot read {path}: {error}", status=400) from error
        if key is None:
            why = f"no *.safetensors file in {path}; publish one."
            raise EngineRejected(self.name, why, status=400)
        return key

    async def release(self, tags: Sequence[str]) -> None:
        """Release the memory of `tags`; releasing the cache empties it.

        Raises:
            EngineRejected: (409) if the engine is not paused with "retract", (400) if a tag is
                unknown or released already.
        """
        async with self._control:
            self._pump()
            if self.batcher.paused != "retract":
                why = "memory is released only under a pause; pause with retract first."
                raise EngineRejected(self.name, why, status=409)
            if unknown := sorted(set(tags) - set(TAGS)):
                why = f"memory has no part {unknown[0]!r}; release some of {', '.join(TAGS)}."
                raise EngineRejected(self.name, why, status=400)
            if twice := sorted(self._released.intersection(tags)):
                why = f"{twice[0]} is released already; release each part once."
                raise EngineRejected(self.name, why, status=400)
            self._released |= set(tags)
            if "kv_cache" in tags:
                self.batcher.flush()

    async def wake(self, tags: Sequence[str]) -> None:
        """Take the memory of `tags` back.

        Raises:
            EngineRejected: (400) if a tag is not released; a real server dies of it.
        """
        async with self._control:
            self._pump()
            if awake := sorted(set(tags) - self._released):
                why = f"{awake[0]!r} was not released; wake only what was."
                raise EngineRejected(self.name, why, status=400)
            self._released -= set(tags)

    async def released(self) -> frozenset[str]:
        """Return the tags whose memory is released now."""
        self._pacer.now()
        return self._released

    def _check_awake(self, *needed: str) -> None:
        """Refuse a call while a part that it needs is released; without arguments, any part."""
        if missing := sorted(self._released.intersection(needed or TAGS)):
            why = f"its {missing[0]} is released; wake it first."
            raise EngineRejected(self.name, why, status=409)

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load the adapter in `path`; its weights key is the checksum of its safetensors files.

        Raises:
            EngineRejected: (400) if the files are missing, or the name is loaded already.
        """
        await self.add_adapter(name, await self._weights_key(path))

    async def add_adapter(self, name: str, key: int) -> None:
        """Serve the adapter `name` with the weights key `key`, in addition to the others.

        Raises:
            EngineRejected: (400) if the name is loaded already.
        """
        self._pacer.now()
        async with self._unloading:
            if name in self.batcher.adapters:
                why = f"adapter {name!r} is already loaded; unload it first."
                raise EngineRejected(self.name, why, status=400)
            self.batcher.adapters[name] = key or 1

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter after its last request has ended; an unknown one is ignored."""
        self._pump()
        async with self._unloading:
            self.batcher.adapters.pop(name, None)
            while self.batcher.samples_with(name):
                self._advanced.clear()
                await self._advanced.wait()
                self._pacer.now()

    def _pump(self, at_least: float = 0.0) -> None:
        """Advance modelled time to the loop's time, and put the chunks into their streams."""
        for request_id, chunk in self.batcher.advance(self._pacer.reached(at_least)):
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.put_nowait(chunk)
                if chunk.finish is not None:
                    del self._streams[request_id]
        self._advanced.set()
        self._schedule()

    def _schedule(self) -> None:
        """Set the timer for the batcher's next event.

        Even an event that is due now waits for the timer, so that requests that are sent together
        are all in the queue before the first pass is planned, as on a server that reads its
        sockets between steps.
        """
        self._pacer.arm(self.batcher.next_event_time(), self._pump)


def load_of(batcher: Batcher | RankedBatcher, now: float, scale: float) -> EngineLoad:
    """The load at the modelled time `now`; `scale` is the loop seconds of a modelled second."""
    tokens, decoding, prefilling = batcher.in_progress(now)
    counters, config = batcher.counters, batcher.config
    return EngineLoad(
        running=batcher.running,
        queued=batcher.waiting,
        max_running=config.max_running * config.dp_ranks,
        kv_tokens=batcher.kv_in_use + tokens,
        kv_capacity=config.kv_tokens * config.dp_ranks,
        preemptions=counters.preemptions,
        generated=counters.decoded + tokens,
        decode_seconds=(counters.decode_seconds + decoding) * scale,
        prefill_seconds=(counters.prefill_seconds + prefilling) * scale,
    )


MOST_ENGINES = 2**16
"""Largest fleet; all its engines are in this process."""
_READ_BYTES = 1 << 24


async def weights_key_of_files(path: Path) -> int | None:
    """Return the CRC-32 over the ``*.safetensors`` files of `path`, in the order of their names.

    None if there are none. It reads in blocks, so that the loop is not blocked, and without a
    thread, so that runs on a virtual clock repeat exactly.

    Raises:
        OSError: if a file cannot be read.
    """
    files = _weight_files(path)
    key = 0
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                key = zlib.crc32(block, key)
                await asyncio.sleep(0)
    return key if files else None


def _weight_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))
