"""Request bodies of SGLang's HTTP API as typed structs. Unknown fields of a body are ignored.

:class:`Bodies` reads them, within bounds on one and on all that are read at a time. Nothing reads a
body before a handler asks for it, which is after the key is checked.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import StreamReader, hdrs, web

from aprilsched.serving.refusals import Malformed, Unavailable

__all__ = [
    "BODIES",
    "AbortBody",
    "AdapterBody",
    "Bodies",
    "BroadcastBody",
    "DiskBody",
    "GenerateBody",
    "JoinBody",
    "LeaveBody",
    "MemoryBody",
    "PauseBody",
    "PromptsBody",
    "TensorBody",
    "VersionBody",
    "body_of",
    "decode",
    "expect_later",
]

T = TypeVar("T")

_PIECE = 2**16
_READ_S = 120.0
"""Seconds for a body to arrive."""
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
"""zlib's value for either header."""


class GenerateBody(msgspec.Struct, frozen=True):
    """POST /generate with one prompt."""

    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: dict[str, Any] | None = None
    rid: str | None = None
    stream: bool = False
    return_logprob: bool = False
    lora_path: str | None = None
    extra_key: str | None = None


class PromptsBody(msgspec.Struct, frozen=True):
    """POST /generate with one prompt or several, and a number of responses to each."""

    input_ids: list[int | list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool = False
    lora_path: str | None = None
    extra_key: str | None = None


class PauseBody(msgspec.Struct, frozen=True):
    """Body of POST /pause_generation; SGLang's default ends every request."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class AbortBody(msgspec.Struct, frozen=True):
    """POST /abort_request; the gateway alone knows a `group`."""

    rid: str | None = None
    abort_all: bool = False
    group: str | None = None


class DiskBody(msgspec.Struct, frozen=True):
    """POST /update_weights_from_disk."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class TensorBody(msgspec.Struct, frozen=True):
    """POST /update_weights_from_tensor: one handle or pickled bucket for each rank, as base64. They
    are passed on as they come; nothing here opens them."""

    serialized_named_tensors: list[str]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class BroadcastBody(msgspec.Struct, frozen=True):
    """POST /update_weights_from_distributed: what the ranks of a group receive next."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class JoinBody(msgspec.Struct, frozen=True):
    """POST /init_weights_update_group."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class LeaveBody(msgspec.Struct, frozen=True):
    """POST /destroy_weights_update_group."""

    group_name: str = "weight_update_group"


class VersionBody(msgspec.Struct, frozen=True):
    """Body of POST /update_weight_version; SGLang's default ends every request."""

    new_version: str
    abort_all_requests: bool = True


class AdapterBody(msgspec.Struct, frozen=True):
    """Body of POST /load_lora_adapter and /unload_lora_adapter; unloading needs no path."""

    lora_name: str
    lora_path: str = ""


class MemoryBody(msgspec.Struct, frozen=True):
    """Body of POST /release_memory_occupation and /resume_memory_occupation.

    Without `tags` the call is for all parts.
    """

    tags: list[str] | None = None


class Bodies:
    """Reads request bodies, plain or compressed with gzip or deflate.

    Args:
        largest: bytes of one body, uncompressed.
        together: bytes of all bodies that are read or decoded at a time. What a client sends slowly
            counts, so a body that is not there in two minutes is refused.
    """

    def __init__(self, *, largest: int, together: int) -> None:
        self._largest = largest
        self._together = together
        self._held = 0

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncGenerator[bytes]:
        """The body of a request, which counts until the block ends.

        Raises:
            HTTPRequestEntityTooLarge: if it is larger than one may be.
            Unavailable: if it would be too much together with the others.
            Malformed: if it is compressed in an unknown way, damaged or not there in time.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(_READ_S):
                async for piece in self._pieces(request):
                    body += piece
                    self._held += len(piece)
                    if len(body) > self._largest:
                        raise web.HTTPRequestEntityTooLarge(self._largest, len(body))
                    if self._held > self._together:
                        raise Unavailable("Too much is being sent at a time; try again later.")
            yield bytes(body)
        except TimeoutError as error:
            raise Malformed(f"The body was not there in {_READ_S:g} s; send it faster.") from error
        finally:
            self._held -= len(body)

    async def _pieces(self, request: web.Request) -> AsyncGenerator[bytes]:
        if request.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        coding = request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower()
        if coding == "identity":
            async for piece in request.content.iter_chunked(_PIECE):
                yield piece
        elif coding in ("gzip", "deflate"):
            async for piece in _unpacked(request.content):
                yield piece
        else:
            raise Malformed(f"Content-Encoding is {coding[:40]!r}; send gzip, deflate or none.")


async def _unpacked(content: StreamReader) -> AsyncGenerator[bytes]:
    """What gzip or deflate has compressed, a bounded piece at a time: a few bytes may stand for a
    thousand times as many."""
    unpacker = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        async for piece in content.iter_chunked(_PIECE):
            while piece and not unpacker.eof:
                yield unpacker.decompress(piece, _PIECE)
                piece = unpacker.unconsumed_tail
    except zlib.error as error:
        raise Malformed(f"The body cannot be uncompressed ({error}); send it again.") from error
    if not unpacker.eof:
        raise Malformed("The compressed body ends too soon; send all of it.")


async def expect_later(request: web.Request) -> None:
    """Handle ``Expect: 100-continue``: the body is asked for when it is read, where aiohttp would
    ask before anybody has looked at the key."""


BODIES: web.AppKey[Bodies] = web.AppKey("bodies", Bodies)
"""The key under which :func:`body_of` finds the reader of the application."""


async def body_of(request: web.Request, kind: type[T]) -> T:
    """The body of `request` as a `kind`.

    Raises:
        Refusal: if it cannot be read, or has another form.
    """
    async with request.app[BODIES].read(request) as body:
        return decode(body, kind)


def decode(body: bytes, kind: type[T]) -> T:
    """Decode `body` as a `kind`.

    Raises:
        Malformed: if it is missing or has another form.
    """
    if not body:
        raise Malformed("Field required: the request has no body.")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(str(error)) from error
