"""What the coordinator asks of an engine, and nothing else.

An engine is one inference server (or the model of one). The coordinator never assumes what a
server can do: :class:`Capabilities` is probed when the engine is opened.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from aprilsched.types import FinishReason, Float32Array, Int32Array, SamplingParams, VersionSpan

__all__ = [
    "Capabilities",
    "Chunk",
    "Engine",
    "Fleet",
    "FleetChange",
    "GenerationRequest",
    "HasAddress",
    "PauseMode",
    "WatchesMembership",
]

PauseMode: TypeAlias = Literal["retract", "in_place"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What one engine can do, as it said itself when it was opened."""

    version_spans: bool
    """A finished or aborted request reports which version sampled each of its tokens."""
    flush_while_paused: bool
    """The KV cache can be flushed between pause(retract) and continue."""
    max_running_requests: int | None = None
    kv_tokens: int | None = None
    ranks: int = 1
    """Processes that hold a part of the weights: tensor-parallel times pipeline-parallel."""
    release_while_paused: bool = False
    """Memory can be released while requests wait in a pause(retract)."""
    keeps_released_weights: bool = False
    """Weights that were released come back as they were (a copy on the CPU, or no release)."""
    adapters: bool = False
    """Several LoRA adapters can be served at a time."""
    server: str = ""
    """Name and version of the server, for people."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GenerationRequest:
    """One call for tokens: the whole context so far, and how to go on.

    `request_id` has one fixed length in a run, because SGLang aborts by prefix.
    `affinity` is equal for requests that share a prompt prefix. `adapter` names the LoRA adapter
    to sample with. Cached KV is shared only between requests of equal `cache_key`.
    """

    request_id: str
    input_ids: Int32Array
    sampling: SamplingParams
    affinity: int = 0
    adapter: str | None = None
    cache_key: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunk:
    """New tokens of one request; the last one has `finish`.

    `token_ids` int32 [n] and `logprobs` float32 [n] belong together; n may be 0. They are the
    receiver's: it may keep them, so whoever made a chunk must not write to them afterwards.
    `spans`, on the last chunk only, covers the request's whole output; None where the engine
    cannot tell (``Capabilities.version_spans`` is False). `label` is the version of the base model
    that the engine has when it sends the chunk; None where it does not say, or where `spans` say
    it of each token.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    finish: FinishReason | Literal["abort"] | None = None
    spans: tuple[VersionSpan, ...] | None = None
    cached_tokens: int | None = None
    label: int | None = None


class Engine(Protocol):
    """One inference engine. All methods may be called concurrently.

    Errors: :class:`~aprilsched.errors.EngineError` and its children, nothing else.
    """

    @property
    def name(self) -> str:
        """Unique in its fleet; appears in segments, events and errors."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Known after :meth:`open`."""
        ...

    async def open(self) -> None:
        """Connect and probe. Refuses a server that does not speak the protocol."""
        ...

    async def close(self) -> None:
        """Release connections. Does not touch the server."""
        ...

    async def version(self) -> int:
        """The policy version the engine says it has now.

        A label that is not an integer (SGLang's is "default" before the first refit) counts
        as version 0.

        Raises:
            TornWeights: if an update was begun and did not end well.
        """
        ...

    async def verify(self) -> int:
        """The same, of the process that was opened.

        Raises:
            EngineRestarted: if another process answers now; open the engine anew to use it.
            TornWeights: as :meth:`version`.
        """
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Stream one response to its end, or to its abort.

        The stream stays open through pause and continue, for as long as that takes. Whenever
        it is left before its last chunk (an error, a cancellation), the engine has been told
        to abort the request, so that nothing decodes unseen.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End one request: its stream gives what is there, with ``finish="abort"``.

        Unknown ids are ignored. A request that the engine has not yet registered survives an
        abort, so the caller repeats it until the stream has ended.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; streams stay open. Pausing twice is harmless."""
        ...

    async def flush(self) -> None:
        """Forget all cached KV, so that no token attends to keys of older weights.

        Only while paused with "retract", and only where ``flush_while_paused``.
        """
        ...

    async def resume(self) -> None:
        """Go on after a pause (SGLang: continue). Harmless when not paused."""
        ...


@runtime_checkable
class HasAddress(Protocol):
    """An engine that is a server at an address: another object may stand for the same one."""

    @property
    def address(self) -> str:
        """Where the server listens."""
        ...


class Fleet(Protocol):
    """A set of engines of one model."""

    @property
    def engines(self) -> Sequence[Engine]: ...

    async def open(self) -> None:
        """Open every engine, all or none."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FleetChange:
    """What changed in a fleet since it was last asked; `left` comes before `joined`.

    `joined` are open and probed, of the fleet's model, and of whatever weights they happen to
    have: ask each for its version. `left` are names; one of them may be back in `joined`.
    """

    left: tuple[str, ...] = ()
    joined: tuple[Engine, ...] = ()


@runtime_checkable
class WatchesMembership(Protocol):
    """A fleet whose engines join and leave while it is open."""

    def watch(self) -> AsyncGenerator[FleetChange, None]:
        """Every change from now on, as it happens; one reader at a time.

        ``Fleet.engines`` is already as after the change. An engine that left stays open until
        the reader of the change closes it, or the fleet is closed: the reader gives up its streams
        and lets it go on first. Trouble with one engine, or with what lists them, changes nothing
        and ends nothing: it is logged, and looked at again.
        """
        ...
