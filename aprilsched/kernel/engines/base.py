"""The protocols of an engine and of a fleet: all calls that the coordinator makes to them.

An engine is one inference server (or the model of one). The coordinator never assumes what a
server can do: the engine detects its :class:`Capabilities` when it is opened.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from aprilsched.errors import EngineBusy
from aprilsched.kernel.engines.load import EngineLoad, ReportsLoad
from aprilsched.kernel.engines.refit import (
    RefitElsewhere,
    RefitFromDisk,
    RefitFromGroup,
    RefitFromSockets,
    RefitFromTensors,
    RefitGroup,
    SleepingEngine,
    TakesAdapters,
    TensorMeta,
)
from aprilsched.kernel.values.capabilities import Capabilities
from aprilsched.kernel.values.companions import Companion, Rows
from aprilsched.types import (
    Answer,
    FinishReason,
    Float32Array,
    Int32Array,
    Media,
    SamplingParams,
    VersionSpan,
)

__all__ = [
    "Capabilities",
    "Chunk",
    "Claimable",
    "Engine",
    "EngineLoad",
    "Fleet",
    "FleetChange",
    "GenerationRequest",
    "HasAddress",
    "HasLabel",
    "PauseMode",
    "RefitElsewhere",
    "RefitFromDisk",
    "RefitFromGroup",
    "RefitFromSockets",
    "RefitFromTensors",
    "RefitGroup",
    "ReportsLoad",
    "SleepingEngine",
    "TakesAdapters",
    "TellsPause",
    "TensorMeta",
    "WatchesMembership",
]


PauseMode: TypeAlias = Literal["retract", "in_place"]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One request for tokens: the whole context so far, and the sampling parameters.

    All `request_id` of a run have the same length, because SGLang aborts by prefix.
    `affinity` is equal for requests that share a prompt prefix; among them, those of one `rollout`
    continue each other's context. `adapter` names the LoRA adapter
    to sample with. Cached KV is shared only between requests of equal `cache_key`. `companions`
    lists the data to return in addition to the tokens, each with the first context position whose
    row is missing (unused for a companion of tokens). `media` are the prompt's media, whose
    placeholders in `input_ids` the engine expands. If the engine has priorities, requests with a
    lower `rank` should run first.
    """

    request_id: str
    input_ids: Int32Array
    sampling: SamplingParams
    affinity: int = 0
    rollout: int | None = None
    adapter: str | None = None
    cache_key: str | None = None
    companions: tuple[tuple[Companion, int], ...] = ()
    media: tuple[Media, ...] = ()
    rank: int = 0


class Chunk(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """New tokens of one request; only the last chunk has a `finish`.

    `token_ids` int32 [n] and `logprobs` float32 [n] describe the same n tokens; n may be 0. The
    receiver may keep both arrays, so the engine must not write to them after sending the chunk.
    `spans`, on the last chunk only, covers the request's whole output; None if the engine does
    not report it (``Capabilities.version_spans`` is False). `label` is the version of the base
    model that the engine has when it sends the chunk; None if the engine does not report it, or
    if `spans` gives the version of each token. `token_rows` contains the n rows of each companion
    of tokens; `context_rows`, on the last chunk only, the rows of each companion of the context,
    from the position in the request to the last one that was forwarded, or fewer.
    `prompt_tokens`, of requests with media, is the number of tokens of the context that was sent,
    with the media expanded. `answer`, on the last chunk only, is what the request wants to keep.
    `busy` is set if the engine aborted the request itself because it has no room for it now.
    `decode_seconds`, on the first chunk after a prefill, is the time since its first token; None if
    the engine does not report it.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    finish: FinishReason | Literal["abort"] | None = None
    spans: tuple[VersionSpan, ...] | None = None
    cached_tokens: int | None = None
    label: int | None = None
    token_rows: Mapping[str, Rows] | None = None
    context_rows: Mapping[str, Rows] | None = None
    prompt_tokens: int | None = None
    answer: Answer | None = None
    busy: EngineBusy | None = None
    decode_seconds: float | None = None


class Engine(Protocol):
    """One inference engine. All methods may be called concurrently.

    Every method raises only :class:`~aprilsched.errors.EngineError` and its subclasses.
    """

    @property
    def name(self) -> str:
        """The engine's name: unique in its fleet, and shown in segments, events and errors."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The engine's capabilities; available after :meth:`open`."""
        ...

    async def open(self) -> None:
        """Connect and probe; raise if the server does not speak the protocol."""
        ...

    async def close(self) -> None:
        """Release the connections. The server itself is left as it is."""
        ...

    async def version(self) -> int:
        """Ask the engine for its current policy version.

        A label that is not an integer (SGLang's is "default" before the first refit) counts
        as version 0.

        Raises:
            InconsistentWeights: if an update was started and did not succeed.
        """
        ...

    async def verify(self) -> int:
        """Ask for the version, and check that the process is still the one that was opened.

        Raises:
            EngineRestarted: if another process answers now; open the engine again to use it.
            InconsistentWeights: as :meth:`version`.
        """
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Stream one response until it finishes or is aborted.

        The stream stays open through pause and continue, however long they take. If the caller
        leaves it before its last chunk (by an error or a cancellation), the request is aborted.
        Otherwise the engine would decode tokens that no client reads.

        Raises:
            EngineBusy: the engine has no room for the request now; this is not a failure.
            EngineRejected: with status 400, 413 or 422 the request itself is at fault, and one
                other engine is tried; with any other status the engine is at fault.
            EngineUnreachable: no part of the request reached the engine.
            EngineError: the attempt failed; it is retried with the tokens received so far.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End one request; its stream then ends with the tokens so far and ``finish="abort"``.

        Unknown ids are ignored. An abort has no effect on a request that the engine has not yet
        registered, so the caller repeats it until the stream has ended.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; streams stay open. A second pause has no effect.

        It should return when no further step samples. Where it may return earlier (SGLang's does),
        :meth:`flush` succeeds only when the pause holds.
        """
        ...

    async def flush(self) -> None:
        """Drop all cached KV, so that no token attends to keys of older weights.

        A tier that is ``Capabilities.kv_tier`` may keep it for requests of an equal `cache_key`.

        It is allowed only while the engine is paused with "retract", and only where
        ``Capabilities.flush_while_paused`` is True.
        """
        ...

    async def resume(self) -> None:
        """Continue after a pause. It has no effect when the engine is not paused."""
        ...


@runtime_checkable
class HasAddress(Protocol):
    """An engine that is a server at an address, so that two objects may mean the same server."""

    @property
    def address(self) -> str:
        """Where the server listens."""
        ...


@runtime_checkable
class HasLabel(Protocol):
    """An engine that labels its weights by names which need not be numbers."""

    @property
    def label(self) -> str:
        """The label of the weights that it had when it was opened."""
        ...

    def join_run(self, name: str, former: str, *, decimal: bool, fresh: bool = False) -> None:
        """Label weights by version and `name` from now on, as in "7@3f2a9c".

        Labels of `former` count too, until :meth:`keep_label`; those of other names do not. Unless
        `decimal`, or `former` is empty, a decimal number does not count: another program set it.
        A `fresh` run takes the weights of a label as they are until then, whatever their folder.
        """
        ...

    async def keep_label(self, *, known: bool = True) -> None:
        """Let no former name count any longer; `known` weights get a label with the new name."""
        ...


_LABEL_DIGITS = len(str(2**31 - 1))


def label_parts(label: str | None) -> tuple[int, str]:
    """Return number and run of a label such as "7@3f2a9c", and (0, "") for a name.

    The run is empty in a decimal number, the label of a trainer that labels its weights itself.
    What follows a second "@" is a mark of the folder that the weights came from.
    """
    number, run, *_ = [*(label or "").split("@"), ""]
    is_number = number.isascii() and number.isdigit() and len(number) <= _LABEL_DIGITS
    return (int(number), run) if is_number else (0, "")


@runtime_checkable
class TellsPause(Protocol):
    """An engine that reports whether it is paused, whichever client paused it."""

    async def is_paused(self) -> bool | None:
        """Return whether the engine is paused, or None if unknown."""
        ...


CLAIM_S = 10.0
"""Longest time in seconds for which a claim outlives an owner that was killed."""
CLAIM_INTERVAL_S = 2.0
"""Seconds between two calls of :meth:`Claimable.claim` by the owner of an engine."""


@runtime_checkable
class Claimable(Protocol):
    """An engine that shows, across processes, whether another client owns it."""

    async def claim(self) -> bool:
        """Claim the engine, or renew the claim; False if another client has it.

        Raises:
            EngineError: if the engine does not answer; a claim that exists stays valid.
        """
        ...

    async def disclaim(self) -> None:
        """End the claim, if there is one."""
        ...


class Fleet(Protocol):
    """A set of engines of one model."""

    @property
    def engines(self) -> Sequence[Engine]: ...

    async def open(self) -> None:
        """Open every engine; if one fails, close all of them and raise."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FleetChange:
    """The change of a fleet since the last one; apply `left` before `joined`.

    `left` contains names; one of them may be in `joined` again. The engines in `joined` are open
    and serve the fleet's model, but may have any version of the weights: ask each for its version.
    """

    left: tuple[str, ...] = ()
    joined: tuple[Engine, ...] = ()


@runtime_checkable
class BeginsWithout(Protocol):
    """A fleet that may be opened while some of its servers do not answer."""

    @property
    def awaited(self) -> Sequence[str]:
        """Names of the servers that have not answered yet; each joins when it does."""
        ...


@runtime_checkable
class WatchesMembership(Protocol):
    """A fleet whose engines join and leave while it is open."""

    def watch(self) -> AsyncGenerator[FleetChange, None]:
        """Yield every change from now on, as it happens; one reader at a time.

        ``Fleet.engines`` already includes the change. An engine that left stays open until the
        reader of the change closes it or the fleet is closed: the reader first gives up the
        engine's streams and resumes it. A failure of one engine, or of the service that lists
        them, is logged and looked at again; it ends nothing.
        """
        ...
