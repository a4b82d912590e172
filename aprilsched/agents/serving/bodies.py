"""Reads request bodies, with limits on each and on all that are read at a time.

A body is read only when a handler requests it, which is after the key is checked.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
from aiohttp import StreamReader, hdrs, web

from aprilsched.agents.serving.refusals import Malformed, Unavailable

T = TypeVar("T")

_PIECE = 2**16
_READ_S = 120.0
"""Seconds for a body to arrive."""
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
"""zlib's value for either header."""
_MOST_VALUES = 2**21
"""Maximum number of quotes and opening brackets in a body; the limit of commas is twice that.

A body at these limits blocks the loop for half a second. 64 MiB of ``[],`` took 6 s, and of ``1,``
4 s. 8 MiB of code have 1.5 million quotes and brackets.
"""


class Bodies:
    """Reads request bodies, plain or compressed with gzip or deflate.

    Args:
        largest: maximum bytes of one body, uncompressed.
        together: maximum bytes of all bodies that are read or decoded at a time. Slow uploads
            count, so a body that takes more than two minutes is refused.
    """

    def __init__(self, *, largest: int, together: int) -> None:
        self._largest = largest
        self._together = together
        self._held = 0

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncGenerator[bytes]:
        """Read the body of a request; its bytes count until the block ends.

        Raises:
            HTTPRequestEntityTooLarge: if it exceeds the limit of one body.
            Unavailable: if it exceeds the limit together with the other bodies.
            Malformed: if its compression is unknown, or if it is damaged or too slow.
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
        except web.RequestPayloadError as error:
            raise Malformed("The body is damaged; send it again.") from error
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
    """Decompress gzip or deflate in bounded pieces: a few bytes may expand a thousandfold."""
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
    """Handle ``Expect: 100-continue`` when the body is read.

    aiohttp would send the 100 earlier, before the key is checked.
    """


BODIES: web.AppKey[Bodies] = web.AppKey("bodies", Bodies)
"""The application key of the reader that :func:`body_of` uses."""


async def body_of(request: web.Request, kind: type[T]) -> T:
    """Return the body of `request` as a `kind`.

    Raises:
        Refusal: if it cannot be read, or has another form.
    """
    async with request.app[BODIES].read(request) as body:
        return decode(body, kind)


def decode(body: bytes, kind: type[T]) -> T:
    """Decode `body` as a `kind`.

    Raises:
        Malformed: if it is missing, has another form or too many values.
    """
    if not body:
        raise Malformed("Field required: the request has no body.")
    if len(body) > _MOST_VALUES and (
        sum(map(body.count, (b'"', b"[", b"{"))) > _MOST_VALUES
        or body.count(b",") > 2 * _MOST_VALUES
    ):
        raise Malformed(
            f"The body must have at most {_MOST_VALUES} quotes and opening brackets, and "
            f"{2 * _MOST_VALUES} commas; send less."
        )
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(str(error)) from error
