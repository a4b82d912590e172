"""Tokens of a streamed response, whatever server sends them: types, versions, the end of a stream.

Invariants of every reader of a stream:

- The spans of the last chunk cover exactly the tokens that were given.
- Whatever a server sends, the result is chunks or an error of this package, and the number of
  bytes is bounded. Every number has bounds, so that a server cannot send one that does not fit
  into our arrays.
"""

from __future__ import annotations

from base64 import b64encode
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Annotated, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from aprilsched.errors import EngineBusy, EngineError, EngineProtocolError, EngineRejected
from aprilsched.kernel.engines.base import Chunk, GenerationRequest, label_parts
from aprilsched.kernel.engines.failures import quote, refusal
from aprilsched.kernel.engines.sse import Allowance, EventSplitter
from aprilsched.kernel.values.companions import Companion, Rows, fitting
from aprilsched.types import Media, VersionSpan

P = ParamSpec("P")
T = TypeVar("T")
ReaderT = TypeVar("ReaderT", bound="ResponseReader")

DONE = b"[DONE]"
"""The payload at the end of a stream of SGLang's or OpenAI's form."""
_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3.4028234663852886e38
FOREIGN = -1
"""Version of tokens whose label is that of another run."""
_ROUNDING = 1e-3
"""Amount by which rounding may lift the logarithm of a probability above 0."""

TokenId = Annotated[int, msgspec.Meta(ge=0, le=_INT32_MAX)]
Logprob = Annotated[float, msgspec.Meta(ge=-_FLOAT32_MAX, le=_ROUNDING)]
"""A NaN or an infinity arrives as null, which fails to decode."""
Count = Annotated[int, msgspec.Meta(ge=0, le=_INT32_MAX)]
Name = Annotated[str, msgspec.Meta(max_length=4096)]


_MIME: Mapping[str, str] = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}
"""A server needs a media type before the data, and looks at the data alone."""


def media_source(media: Media) -> str:
    """The path or URL of media, or a URL that is their content."""
    if isinstance(media.source, str):
        return media.source
    return f"data:{_MIME[media.kind]};base64,{b64encode(media.source).decode()}"


class LabelSpan(msgspec.Struct, frozen=True):
    """Tokens `start` to `end`, which were sampled with the weights labelled `version`."""

    version: Name
    start: Count
    end: Count


class ErrorBody(msgspec.Struct, frozen=True):
    """An error inside a stream, after the HTTP status 200: that a prompt is too long, for one."""

    message: str = ""
    code: int | None = None


VersionOf: TypeAlias = Callable[[str], int]
"""Returns the policy version for a label."""


def version_number(label: str | None, first: int = 0, runs: Collection[str] = ()) -> int:
    """Return the policy version for a label.

    "0", and any label that is not a number, stands for version `first`. Unless `runs` is empty, a
    number of a run that it does not contain stands for :data:`FOREIGN`."""
    number, run = label_parts(label)
    if runs and run and run not in runs:
        return FOREIGN
    return first + number if first + number <= _INT32_MAX else first


def guarded(
    read: Callable[Concatenate[ReaderT, P], T],
) -> Callable[Concatenate[ReaderT, P], T]:
    """Let `read` raise only errors of this package, whatever a server sends: a decoder may raise
    anything, and so may what works on decoded values."""

    @wraps(read)
    def reading(self: ReaderT, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return read(self, *args, **kwargs)
        except EngineError:
            raise
        except Exception as error:
            raise self.broken(f"sent an event that cannot be read ({quote(str(error))})") from error

    return reading


class ResponseReader:
    """Turns the events of one request into chunks, and counts the tokens that were given.

    `version_of` returns the version that a label stands for.
    """

    def __init__(
        self, engine: str, request: GenerationRequest, version_of: VersionOf = version_number
    ) -> None:
        self.engine = engine
        self._request = request
        self.request_id = request.request_id
        self.max_tokens = request.sampling.max_new_tokens
        self._context = len(request.input_ids)
        self._companions = request.companions
        self._of_tokens = [each for each, _ in request.companions if each.per == "token"]
        self.version_of = version_of
        self.held: int = 0

    def feed(self, payload: bytes) -> Chunk | None:
        """Return the chunk that one event's payload carries; None if it carries none.

        The payload is what follows ``data:`` in a line of server-sent events.

        Raises:
            EngineProtocolError: if the payload is not what the server should send.
            EngineRejected: if the server reports that it failed the request.
        """
        raise NotImplementedError

    def _spans(self, spans: Sequence[LabelSpan] | None) -> tuple[VersionSpan, ...] | None:
        """Return the spans over exactly the held tokens, or None if the server reports none."""
        if self.held == 0:
            return ()
        if spans is None:
            return None
        exact: list[VersionSpan] = []
        at = 0
        for span in spans:
            end = min(span.end, self.held)
            if end <= span.start:  # Zero-length spans occur at a change of version.
                continue
            if span.start != at:
                break
            exact.append(VersionSpan(version=self.version_of(span.version), start=at, end=end))
            at = end
        if at != self.held:
            raise self.broken(f"sent weight_versions that do not cover its {self.held} tokens")
        return tuple(exact)

    def _top_rows(
        self, companion: Companion, rows: Sequence[Sequence[tuple[float | None, int]]], tokens: int
    ) -> Rows:
        """The likeliest tokens with their log-probabilities in the place of each of `tokens`. A log
        of 0, of an id that a grammar forbids, arrives as null."""
        n = companion.shape[0]
        if len(rows) != tokens or any(len(row) < n for row in rows):
            raise self.broken(f"sent top_logprobs that are not {n} for each of {tokens} tokens")
        values = [
            [(token_id, -np.inf if logprob is None else logprob) for logprob, token_id in row[:n]]
            for row in rows
        ]
        return Rows(np.array(values, dtype=np.float32).reshape(-1, n, 2))

    def _ragged_rows(self, companion: Companion, rows: Sequence[Sequence[int]]) -> Rows:
        """Rows of whole numbers, of any length."""
        try:
            return Rows.ragged(rows, companion.dtype)
        except Exception as error:
            raise self._no_rows(companion, error) from error

    def _context_rows(
        self,
        companion: Companion,
        values: Callable[[], NDArray[Any]],
        *,
        first: int,
        start: int,
        spare: int | None,
    ) -> Rows:
        """Return the rows from `start` to the last forwarded position.

        That position excludes the last token. `values` reads the server's data, whose rows start at
        position `first`. At most `spare` rows may follow; None allows any number of rows."""
        upto = max(start, self._context + self.held - 1)
        try:
            rows = fitting(values().reshape(-1, *companion.shape), companion.dtype)
            count, positions = len(rows), upto - first
            if spare is not None and not positions <= count <= positions + spare:
                raise ValueError(f"{count} rows for {positions} positions")
        except Exception as error:
            raise self._no_rows(companion, error) from error
        return Rows(rows[start - first : upto - first])

    def _no_rows(self, companion: Companion, error: Exception) -> EngineProtocolError:
        return self.broken(
            f"sent {companion.name} that are not rows of {companion.dtype} "
            f"{list(companion.shape)} ({quote(str(error))}); correct companions"
        )

    def broken(self, what: str) -> EngineProtocolError:
        """The error of an answer that the protocol does not allow."""
        return EngineProtocolError(self.engine, f"request {self.request_id}: {what}.")

    def _rejected(self, message: str, status: int | None) -> EngineRejected:
        # Without the id of the request, so that refusals of one kind have one cause.
        return refusal(self.engine, quote(message), status=status or 400)


def empty_chunk(*, spans_known: bool, busy: EngineBusy | None = None) -> Chunk:
    """Return the last chunk of an aborted request, without tokens."""
    return Chunk(
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        finish="abort",
        spans=() if spans_known else None,
        busy=busy,
    )


async def read_chunks(
    read: Callable[[], Awaitable[bytes]], allowance: Allowance, reader: ResponseReader
) -> AsyncGenerator[Chunk, None]:
    """Yield every chunk of one response, up to the last one, from server-sent events.

    Args:
        read: waits for more bytes, and returns none when the stream has ended.
        allowance: bounds the bytes.
        reader: makes the chunks.

    Raises:
        EngineError: if the stream ends before the response does.
        EngineProtocolError: if the stream contains unexpected data, or too much of it.
    """
    splitter = EventSplitter(allowance)
    try:
        while data := await read():
            payloads = deque(splitter.feed(data))
            # A paused stream is silent for a long time. Thousands of them would keep their last
            # read alive: after a burst, several times the size of all their tokens.
            del data
            while payloads:
                payload = payloads.popleft()
                if payload == DONE:
                    continue
                chunk = reader.feed(payload)
                if chunk is None:
                    continue
                if len(chunk.token_ids):
                    allowance.pay(len(payload), reader.held)
                del payload
                yield chunk
                if chunk.finish is not None:
                    return
    finally:
        allowance.close()
    raise EngineError(
        reader.engine,
        f"request {reader.request_id}: the stream ended after {reader.held} tokens, before "
        "the response was finished.",
    )
