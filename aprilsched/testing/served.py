"""A served engine that behaves like an SGLang process: requests by rid, and control calls.

Invariants:
- Every change of the label creates a new version of the engine. Adjacent tokens of one label form
  one span, as SGLang reports it.
- As in SGLang, an abort needs an exact rid and then ends every request whose rid starts with it; a
  second abort of one rid is not passed on.
- As in SGLang, an update outside of a pause waits for every running request and admits none; the
  default pause ends all requests and checks once a second whether they have ended; during a pause
  the reported load is the load before the pause.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
import zlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from aiohttp import web

from aprilsched.agents.dialects.sglang import GenerateBody, labelled
from aprilsched.agents.serving.calls import BroadcastBody, DiskBody, JoinBody, PauseMode, TensorBody
from aprilsched.agents.serving.refusals import Refused, Unavailable
from aprilsched.errors import ConfigError, EngineError, EngineRejected
from aprilsched.kernel.engines.base import Chunk, GenerationRequest
from aprilsched.kernel.values.companions import Rows
from aprilsched.simulation.engine.batcher import Batcher
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.engine.sim_engine import SimEngine
from aprilsched.simulation.workload import LongTailWorkload
from aprilsched.types import Int32Array, SamplingParams, VersionSpan

T = TypeVar("T")

MODEL = "aprilsched-sim"
_VERSION = "0.5.23"
"""The SGLang release that the responses match."""
_ABORT_POLL_SECONDS = 1.0
"""Time between two checks of a pause in abort mode, as in SGLang."""
_HEALTH_SECONDS = 20.0
_MICROSECONDS = 1e6
_KEPT = 50
"""Tokens between two reports of SGLang's scheduler about a request that is not streamed."""
_DRAWN_TOGETHER = 64
"""Number of responses to one prompt whose lengths share the prompt's effect."""
_FAR = 1 << 40
_REMEMBERED = 1 << 16
"""Largest number of prompts, and of interrupted responses, whose lengths are stored."""


@dataclass(slots=True)
class Call:
    """One generation in flight."""

    request: GenerationRequest
    entered: bool = False
    abort_sent: bool = False
    retractions: int = 0


class DrawnLengths:
    """Lengths, drawn from a distribution, of responses that end by themselves.

    An interrupted response that is requested again with its tokens so far keeps its total length,
    even on another server that shares this object. With other tokens it counts as a response to
    another prompt.

    Args:
        workload: the distribution. Its prompts are assigned to the received prompts in order of
            arrival.
    """

    def __init__(self, workload: LongTailWorkload) -> None:
        self._workload = replace(workload, group_size=_DRAWN_TOGETHER)
        self._prompts: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """The index of each prompt, and the number of responses drawn for it."""
        self._left: OrderedDict[bytes, int] = OrderedDict()
        """Remaining tokens of each interrupted response, by its context."""
        self._seen = 0

    def take(self, context: Int32Array) -> int:
        """Return the number of tokens of the response to `context`, 1 or more."""
        key = context.tobytes()
        if (left := self._left.pop(key, None)) is not None:
            return left
        number, drawn = self._prompts.pop(key, (self._seen, 0))
        self._seen += number == self._seen
        _remember(self._prompts, key, (number, drawn + 1))
        round_, place = divmod(drawn, _DRAWN_TOGETHER)
        # Further responses to a prompt count as responses to another prompt of the distribution.
        lengths = self._workload.lengths(number + round_ * _FAR)
        return int(lengths[place])

    def give_back(self, context: Int32Array, left: int) -> None:
        """Record that the response at the end of `context` has `left` tokens remaining."""
        _remember(self._left, context.tobytes(), left)


def _remember(kept: OrderedDict[bytes, Any], key: bytes, value: Any) -> None:
    kept[key] = value
    if len(kept) > _REMEMBERED:
        kept.popitem(last=False)


class ServedEngine:
    """One engine, its requests and its control calls; it belongs to one loop."""

    generate_body = GenerateBody

    def __init__(
        self,
        engine: SimEngine,
        config: SimConfig,
        *,
        time_scale: float,
        lengths: DrawnLengths | None = None,
    ) -> None:
        self.engine = engine
        self._lengths = lengths
        self.config = config
        self.model_path = MODEL
        self.time_scale = time_scale
        self.random_seed = secrets.randbelow(2**31)
        """The seed that a server draws at its start; it distinguishes one process from another."""
        self.adapters: dict[str, str] = {}
        """The path of each loaded adapter."""
        self.groups: dict[str, tuple[int, int]] = {}
        """The rank offset and the size of each group for weight broadcasts."""
        self._updating = False
        self._labels = {0: "default"}
        self._calls: dict[str, Call] = {}
        self._stale: list[dict[str, Any]] | None = None
        self._late: set[asyncio.Task[None]] = set()
        self._closures = 0
        self._gate = asyncio.Event()
        self._gate.set()
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def label(self) -> str:
        """The label of the engine's current weights."""
        return self._labels[self.engine.batcher.version]

    @property
    def paused(self) -> bool:
        return self.engine.batcher.paused is not None

    @property
    def retracted(self) -> bool:
        return self.engine.batcher.paused == "retract"

    @property
    def ready(self) -> bool:
        """Whether it is not paused."""
        return not self.paused

    def rank_loads(self) -> list[dict[str, Any]]:
        """Return the load of each rank; during a pause, the load before the pause.

        Figures that SGLang measures only with --enable-metrics are 0.
        """
        return self._stale or self._loads()

    def _loads(self) -> list[dict[str, Any]]:
        batcher = self.engine.batcher
        # Requests that have entered and are not in a queue yet count as waiting.
        entering = max(0, len(self._entered()) - batcher.running - batcher.waiting)
        first, *others = [self._load_of(rank) for rank in batcher.ranks]
        first["num_waiting_reqs"] += entering
        return [first, *others]

    def _load_of(self, batcher: Batcher) -> dict[str, Any]:
        config, counters = self.config, batcher.counters
        scale = self.time_scale * _MICROSECONDS
        moments = [
            float(counters.steps),
            float(counters.decoded),
            counters.decode_seconds * scale,
            float(counters.decoded_squares),
            counters.request_seconds * scale,
            float(counters.decoded),
        ]
        return {
            "timestamp": time.time(),
            "num_running_reqs": batcher.running,
            "num_waiting_reqs": batcher.waiting,
            "num_waiting_uncached_tokens": 0,
            "num_used_tokens": batcher.kv_in_use,
            "num_total_tokens": batcher.kv_in_use,
            "num_active_tokens": batcher.kv_in_use,
            "num_prealloc_ready_tokens": 0,
            "max_total_num_tokens": config.kv_tokens,
            "max_running_requests": config.max_running,
            "token_usage": round(batcher.kv_in_use / config.kv_tokens, 4),
            "gen_throughput": 0.0,
            "cache_hit_rate": 0.0,
            "utilization": 0.0,
            "total_prefill_uncached_tokens": counters.prefilled - counters.cached,
            "total_prefill_busy_us": int(counters.prefill_seconds * scale),
            "decode_moments": moments if counters.steps else None,
        }

    def model_facts(self) -> dict[str, Any]:
        """Return the response of /model_info for the toy model."""
        architectures = ["AprilschedToy"]
        return {
            "load_format": "auto",
            "model_type": "aprilsched-toy",
            "architectures": architectures,
        }

    def server_facts(self) -> dict[str, Any]:
        """Return the response of /server_info; its field ``simulated`` marks a fake SGLang."""
        config, ranks = self.config, self.config.dp_ranks
        rank = {"effective_max_running_requests_per_dp": config.max_running}
        return {
            "skip_tokenizer_init": True,
            "stream_interval": config.stream_interval,
            "disable_radix_cache": not config.prefix_cache,
            "tp_size": ranks,
            "attn_dp_size": ranks,
            "enable_dp_attention": ranks > 1,
            "enable_lora": True,
            "enable_return_routed_experts": True,
            "enable_return_indexer_topk": True,
            "enable_priority_scheduling": config.priority,
            "enable_hierarchical_cache": config.tier is not None,
            "schedule_low_priority_values_first": True,
            "enable_metrics": False,
            "enable_memory_saver": False,
            "enable_weights_cpu_backup": False,
            "max_running_requests": config.max_running * ranks,
            "max_total_num_tokens": config.kv_tokens,
            "random_seed": self.random_seed,
            "internal_states": [rank] * ranks,
            "version": _VERSION,
            "simulated": True,
        }

    def labelled(self, spans: tuple[VersionSpan, ...], tokens: int) -> list[dict[str, str | int]]:
        """Return the `spans` of the first `tokens` tokens, with labels instead of versions."""
        clipped = ((span.version, span.start, min(span.end, tokens)) for span in spans)
        return labelled(clipped, self._labels.__getitem__)

    # -- requests ---------------------------------------------------------------------------

    async def generate(self, call: Call) -> AsyncGenerator[Chunk, None]:
        """Stream one response; closing the stream early aborts the request.

        Raises:
            Refused: if the rid is in use, or the request can never fit.
        """
        rid = call.request.request_id
        self._check_id(rid)
        self._calls[rid] = call
        try:
            await self._gate.wait()
            call.entered = True
            self._quiet.clear()
            async with aclosing(self._generated(call.request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except EngineRejected as error:
            raise Refused(str(error)) from error
        finally:
            del self._calls[rid]
            if not self._entered():
                self._quiet.set()

    def check(self, call: Call) -> None:
        """Refuse what :meth:`generate` would refuse."""
        self._check_id(call.request.request_id)
        try:
            self.engine.check(call.request)
        except EngineRejected as error:
            raise Refused(str(error)) from error

    def _check_id(self, rid: str) -> None:
        if rid in self._calls:
            raise Refused(f"Duplicate request ID detected: {rid}")

    async def _generated(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Yield the engine's chunks of a response, up to its drawn length."""
        lengths = self._lengths
        if lengths is None or request.sampling.ignore_eos:
            async with aclosing(self.engine.generate(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        length, tokens = lengths.take(request.input_ids), list[Int32Array]()
        ends = False
        try:
            async with aclosing(self.engine.generate(request, length=length)) as chunks:
                async for chunk in chunks:
                    tokens.append(chunk.token_ids)
                    ends = chunk.finish in ("length", "stop")
                    yield chunk
        finally:
            done = sum(map(len, tokens))
            if not ends and done < length:
                lengths.give_back(np.concatenate([request.input_ids, *tokens]), length - done)

    async def whole(self, call: Call) -> Chunk:
        """Return one response as one chunk. As in SGLang, an abort after a retract returns only a
        multiple of 50 tokens."""
        async with aclosing(self.generate(call)) as found:
            chunks = [chunk async for chunk in found]
        last = chunks[-1]
        if last.busy is not None:
            raise Unavailable(str(last.busy))
        ids = np.concatenate([chunk.token_ids for chunk in chunks])
        logprobs = np.concatenate([chunk.logprobs for chunk in chunks])
        if last.finish == "abort" and self.retracted:
            kept = len(ids) // _KEPT * _KEPT
            ids, logprobs = ids[:kept], logprobs[:kept]
        rows = [chunk.token_rows for chunk in chunks if chunk.token_rows is not None]
        joined = {name: Rows.join([each[name] for each in rows]) for name in last.token_rows or ()}
        return msgspec.structs.replace(
            last, token_ids=ids, logprobs=logprobs, token_rows=joined or None
        )

    async def alive(self) -> bool:
        """Return the same as `healthy`: SGLang's /health also generates a token."""
        return await self.healthy()

    async def healthy(self) -> bool:
        """Return whether it generates a token in time, like SGLang's health checks, which hang
        during a pause."""
        request = GenerationRequest(
            request_id=f"HEALTH_CHECK_{uuid.uuid4().hex}",
            input_ids=np.array([0], np.int32),
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
        )
        try:
            async with asyncio.timeout(_HEALTH_SECONDS):
                await self.whole(Call(request))
        except (TimeoutError, EngineError):
            return False
        return True

    def _entered(self) -> list[Call]:
        return [call for call in self._calls.values() if call.entered]

    async def abort(self, rid: str) -> None:
        """End the request `rid` and all whose rids start with it; ignore an unknown rid."""
        call = self._calls.get(rid)
        if call is None or call.abort_sent:
            return
        call.abort_sent = True
        for other in [name for name in self._calls if name.startswith(rid)]:
            await self.engine.abort(other)

    async def abort_group(self, name: str) -> None:
        """Do nothing: SGLang servers have no groups."""

    async def abort_all(self) -> None:
        """End every request except the ones held by a pause."""
        for rid in list(self._calls):
            await self.engine.abort(rid)

    def abort_later(self, seconds: float, rid: str) -> None:
        """Abort `rid` after `seconds` seconds, whichever request then has this rid."""

        async def work() -> None:
            await asyncio.sleep(seconds * self.time_scale)
            await self.abort(rid)

        task = asyncio.create_task(work())
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    def cancel_late_aborts(self) -> None:
        """Cancel the late aborts."""
        for task in self._late:
            task.cancel()

    # -- control calls ----------------------------------------------------------------------

    async def carry_out(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a control call immediately."""
        return await call

    @property
    def idle(self) -> list[str]:
        """Return no name: a server pauses itself, with or without requests."""
        return []

    async def pause(self, mode: PauseMode) -> None:
        """Pause; the mode "abort" ends all running requests first."""
        if not self.paused:
            self._stale = self._loads()
        if mode != "abort":
            await self._pause(mode)
            return
        if self.paused:
            await self._pause("retract")  # An abort under in_place would wait for the continue.
        held = self.engine.batcher.is_held
        async with self._closed():
            await self.abort_all()
            while any(not held(call.request.request_id) for call in self._entered()):
                await asyncio.sleep(_ABORT_POLL_SECONDS * self.time_scale)
                await self.abort_all()
            await self._pause("retract")

    async def _pause(self, mode: Literal["retract", "in_place"]) -> None:
        if mode == "retract" and not self.retracted:
            for call in self._entered():
                call.retractions += 1
        await self.engine.pause(mode)

    async def resume(self) -> None:
        """Continue after a pause."""
        await self.engine.resume()
        self._stale = None

    async def flush(self) -> bool:
        """Drop all KV; return False while it is in use."""
        try:
            await self.engine.flush()
        except EngineRejected:
            return False
        return True

    async def load(self, body: DiskBody) -> str:
        """Load the weights in a directory.

        Raises:
            EngineError: if that fails.
        """
        version = self._version(body.weight_version or self.label)
        async with self._exclusive():
            if body.flush_cache:
                await self.engine.flush()
            await self.engine.update_from_disk(Path(body.model_path), version)
        self.model_path = body.model_path
        return ""

    async def relabel(self, label: str) -> str:
        """Give the weights the label `label`, even while requests run."""
        version, key = self._version(label), self.engine.batcher.weights_key
        # Requests of disconnected clients remain on the engine until their late aborts.
        running = not self.paused
        if running:
            await self.engine.pause("in_place")
        try:
            await self.engine.refit(version, key)
        finally:
            if running:
                await self.engine.resume()
        return ""

    async def begin_with(self, path: str, label: str, key: int) -> None:
        """Start with other weights than version 0."""
        self.model_path = path
        await self.engine.refit(self._version(label), key)

    async def begin_update(self) -> None:
        """Start an update in parts.

        Raises:
            ConfigError: if an update is already open.
        """
        if self._updating:
            raise ConfigError("an update is open already; end it first")
        self._updating = True

    async def end_update(self) -> None:
        """End the update in parts.

        Raises:
            ConfigError: if none is open.
        """
        if not self._updating:
            raise ConfigError("no update is open; start one first")
        self._updating = False

    async def take_tensors(self, body: TensorBody) -> str:
        """Accept a bucket without opening it; any content produces new weights.

        Raises:
            AprilschedError: if no update is open, or the engine cannot accept one now.
        """
        return await self._take("".join(body.serialized_named_tensors))

    async def take_broadcast(self, body: BroadcastBody) -> str:
        """Accept a bucket without receiving tensors; any names produce new weights.

        Raises:
            AprilschedError: as :meth:`take_tensors`, or if the group is unknown.
        """
        if body.group_name not in self.groups:
            raise ConfigError(f"Group {body.group_name} not in groups.")
        return await self._take(",".join(body.names))

    async def _take(self, content: str) -> str:
        if not self._updating:
            raise ConfigError("begin_weight_update must be called first")
        batcher = self.engine.batcher
        key = zlib.crc32(content.encode(), batcher.weights_key)
        await self.engine.refit(batcher.version, key)
        return ""

    async def join_group(self, body: JoinBody) -> None:
        """Join a group.

        Raises:
            ConfigError: if a group of this name exists.
        """
        if body.group_name in self.groups:
            raise ConfigError(f"The group {body.group_name} exists already.")
        self.groups[body.group_name] = (body.rank_offset, body.world_size)

    async def leave_group(self, name: str) -> None:
        """Leave a group.

        Raises:
            ConfigError: if it is unknown.
        """
        if self.groups.pop(name, None) is None:
            raise ConfigError(f"The group {name} does not exist.")

    async def load_adapter(self, name: str, path: str) -> None:
        """Load the adapter in `path`.

        Raises:
            EngineError: if that fails.
        """
        await self.engine.load_adapter(name, Path(path))
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter after its last request.

        Raises:
            ConfigError: if it is unknown.
        """
        if self.adapters.pop(name, None) is None:
            raise ConfigError(f"LoRA with name {name} does not exist.")
        await self.engine.unload_adapter(name)

    def _version(self, label: str) -> int:
        version = max(self._labels) + 1
        self._labels[version] = label
        return version

    @asynccontextmanager
    async def _exclusive(self) -> AsyncGenerator[None, None]:
        """Wait until no request runs, and admit none; during a pause this already holds."""
        if self.paused:
            yield
            return
        async with self._closed():
            await self._quiet.wait()
            yield

    @asynccontextmanager
    async def _closed(self) -> AsyncGenerator[None, None]:
        """Make new requests wait."""
        self._closures += 1
        self._gate.clear()
        try:
            yield
        finally:
            self._closures -= 1
            if not self._closures:
                self._gate.set()


SERVED: web.AppKey[ServedEngine] = web.AppKey("served", ServedEngine)
"""The key under which the handlers find their engine in the application."""
