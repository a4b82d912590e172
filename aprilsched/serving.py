"""The server side of SGLang's HTTP API: one application, for whatever can answer as a server does.

The gateway and the test server (:mod:`aprilsched.testing`) are its two backends. It knows neither
of them, no engine and no scheduler: it has the calls with their bodies, defaults and answers, the
forms of refusals and of streams, keys, and the address to listen at. ``/generate`` and what only
one of them has are routes of their own.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import os
import re
import resource
import socket
import time
import zlib
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from ipaddress import ip_address
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast

import msgspec
from aiohttp import StreamReader, hdrs, web
from aiohttp.typedefs import Handler, Middleware

from aprilsched.companions import Rows
from aprilsched.errors import AprilschedError, ConfigError
from aprilsched.types import MEDIA, Media

log = logging.getLogger("aprilsched")

# --- refusals ------------------------------------------------------------------------------------

# The ways in which a call is refused, answered in one place: below /v1/ in OpenAI's form, which its
# clients turn into exceptions of their own, and elsewhere in SGLang's.
#
# ::
#
#     Refusal
#     ├── Malformed    400, {"object": "error", …}: the body has not the form that is expected
#     ├── Refused      400, {"error": {"message"}}
#     ├── Unavailable  503, the same content: it may be asked for again later
#     ├── Unauthorized 401, {"error": "Unauthorized"} with a "message" that says which key is wanted
#     └── Crashed      500, plain text: an error that SGLang does not catch itself


class Refusal(Exception):
    """A call that is refused."""

    status = 400

    def answer(self) -> web.Response:
        """The answer that the client gets."""
        return as_json({"error": {"message": str(self)}}, self.status)


class Malformed(Refusal):
    """The body does not have the form that the endpoint expects."""

    def answer(self) -> web.Response:
        content = {
            "object": "error",
            "message": f"1 validation error:\n  {self}",
            "type": "Bad Request",
            "param": None,
            "code": self.status,
        }
        return as_json(content, self.status)


class Refused(Refusal):
    """The body is well-formed, but its content is refused."""


class Unavailable(Refusal):
    """The call cannot be taken now."""

    status = 503


class Unauthorized(Refusal):
    """The key is missing or wrong."""

    status = 401

    def answer(self) -> web.Response:
        return as_json({"error": "Unauthorized", "message": str(self)}, self.status)


class Crashed(Refusal):
    """SGLang's handler fails with an error that it does not catch."""

    status = 500

    def answer(self) -> web.Response:
        return web.Response(status=self.status, text="Internal Server Error")


def error_event(message: str, status: int) -> Event:
    """The error of one response as an event of a stream, whose own status is 200 already."""
    kind = "invalid_request_error" if status == Refused.status else "internal_error"
    retryable = status >= Crashed.status
    return {"error": {"message": message, "type": kind, "code": status, "retryable": retryable}}


def as_json(content: object, status: int = 200) -> web.Response:
    """A JSON answer with `content`."""
    body = msgspec.json.encode(content)
    return web.Response(body=body, status=status, content_type="application/json")


def error_content(message: str, status: int) -> Event:
    """The content of an error in OpenAI's form, as an answer or as an event of a stream."""
    kind = "overloaded_error" if status == Unavailable.status else "server_error"
    kind = "invalid_request_error" if status < Crashed.status else kind
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


@web.middleware
async def answer_refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn refusals and settings that cannot work into answers. Unknown paths are answered as
    FastAPI does, but for those below /v1/."""
    try:
        return await handler(request)
    except Refusal as refusal:
        status, message, answer = refusal.status, str(refusal), refusal.answer()
    except ConfigError as error:
        status, message, answer = Refused.status, str(error), Refused(str(error)).answer()
    except web.HTTPException as error:
        status, message = error.status, error.text or error.reason
        unknown = status in (404, 405)
        answer = as_json(
            {"detail": error.reason} if unknown else {"error": {"message": message}}, status
        )
    except Exception:
        if request.writer.output_size:
            raise  # A stream that has begun has no other status any more.
        # Its path as it was sent may have what belongs in no log.
        route = request.match_info.route.resource
        name = "" if route is None else route.canonical
        log.exception("the call %s %s failed", request.method, name)
        status, message, answer = Crashed.status, "Internal server error.", Crashed().answer()
    return as_json(error_content(message, status), status) if _of_openai(request) else answer


def _of_openai(request: web.Request) -> bool:
    return request.path.startswith("/v1/")


# --- bodies --------------------------------------------------------------------------------------

# Request bodies of SGLang's HTTP API as typed structs. Unknown fields of a body are ignored.
#
# :class:`Bodies` reads them, within bounds on one and on all that are read at a time. Nothing
# reads a body before a handler asks for it, which is after the key is checked.

T = TypeVar("T")
PauseMode: TypeAlias = Literal["abort", "retract", "in_place"]

_PIECE = 2**16
_READ_S = 120.0
"""Seconds for a body to arrive."""
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
"""zlib's value for either header."""
_MOST_VALUES = 2**21
"""Quotes and opening brackets of a body, and half of its commas. At these bounds a body holds the
loop for half a second. 64 MiB of ``[],`` or ``1,`` held it for 6 and 4 s; 8 MiB of code have 1.5
million quotes and brackets."""


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
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    return_indexer_topk: bool = False
    return_sampling_mask: bool = False
    top_logprobs_num: int = 0
    priority: int | None = None
    data_parallel_rank: int | None = None
    custom_logit_processor: str | None = None
    return_hidden_states: bool | Literal["last"] = False
    image_data: str | list[str] | None = None
    video_data: str | list[str] | None = None
    audio_data: str | list[str] | None = None

    @property
    def media(self) -> tuple[Media, ...]:
        """The images, videos and sounds, of each kind in their order."""
        found: list[Media] = []
        for kind in MEDIA:
            given: str | list[str] | None = getattr(self, f"{kind}_data")
            several = [given] if isinstance(given, str) else given or ()
            found += [Media(kind, source) for source in several]
        return tuple(found)


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

    mode: PauseMode = "abort"


class ContinueBody(msgspec.Struct, frozen=True):
    """Body of POST /continue_generation, which is required, even if it is empty."""

    torch_empty_cache: bool = True


class AbortBody(msgspec.Struct, frozen=True):
    """POST /abort_request; the gateway alone knows a `group`."""

    rid: str | None = None
    abort_all: bool = False
    group: str | None = None


class _LoadBody(msgspec.Struct, frozen=True, kw_only=True):
    """What every call that loads weights may say."""

    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class DiskBody(_LoadBody, frozen=True, kw_only=True):
    """POST /update_weights_from_disk."""

    model_path: str


class TensorBody(_LoadBody, frozen=True, kw_only=True):
    """POST /update_weights_from_tensor: one handle or pickled bucket for each rank, as base64. They
    are passed on as they come; nothing here opens them."""

    serialized_named_tensors: list[str]
    load_format: str | None = None


class BroadcastBody(_LoadBody, frozen=True, kw_only=True):
    """POST /update_weights_from_distributed: what the ranks of a group receive next."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    load_format: str | None = None


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


Update = TypeVar("Update", DiskBody, VersionBody, TensorBody, BroadcastBody)


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


# --- keys ----------------------------------------------------------------------------------------

# Asks for bearer tokens: one key for requests and one for control calls, as SGLang has them.


def key_middleware(
    *,
    api_key: str | None,
    admin_key: str | None,
    control: Collection[str],
    free: Collection[str] = (),
) -> Middleware:
    """A middleware that refuses a call without the key that it needs, inside of
    :func:`answer_refusals`.

    Args:
        api_key: bearer token for all calls but the `free` ones; None asks for none.
        admin_key: bearer token for `control` calls, which is also good for the others; None asks
            for `api_key` there too.
        control: paths of the calls that change the server.
        free: paths of the calls that need no key.

    Raises:
        ConfigError: if a key cannot be sent in a header, such as one that ends with a newline.
    """
    named = {"api_key": api_key, "admin_key": admin_key}
    keys = [_bearer(name, key) for name, key in named.items() if key is not None]
    admin = keys if admin_key is None else keys[-1:]

    @web.middleware
    async def ask(request: web.Request, handler: Handler) -> web.StreamResponse:
        wanted = admin if request.path in control else keys if api_key is not None else []
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        good = not wanted or any(hmac.compare_digest(given, key) for key in wanted)
        if not good and request.path not in free:
            key = "admin key" if wanted is admin and admin_key is not None else "API key"
            raise Unauthorized(f"The {key} is missing or wrong; send it as a bearer token.")
        return await handler(request)

    return ask


def _bearer(name: str, key: str) -> bytes:
    if not re.fullmatch("[!-~]+", key):
        raise ConfigError(f"`{name}` must be printable ASCII without blanks; strip its line end.")
    return f"Bearer {key}".encode()


# --- answers -------------------------------------------------------------------------------------

# Parts of answers in SGLang's form: server-sent events and fields of ``meta_info``.
#
# The items of a stream are events, and bytes that are not an event.

Event: TypeAlias = dict[str, Any]
Item: TypeAlias = Event | bytes

DONE = b"data: [DONE]\n\n"
"""The end of every stream."""

STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}


def frame_item(item: Item) -> bytes:
    """The bytes of `item` on the wire."""
    return item if isinstance(item, bytes) else b"data: " + msgspec.json.encode(item) + b"\n\n"


def finish_reason(reason: str | None, *, tokens: int, last: int) -> dict[str, Any] | None:
    """The field ``finish_reason`` of a response that has `tokens` tokens, of which `last` is the
    last; None while it goes on."""
    match reason:
        case None:
            return None
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        case "stop":
            return {"type": "stop", "matched": last}
        case _:
            return {"type": reason, "length": tokens}


def token_logprobs(ids: Sequence[int], logprobs: Sequence[float]) -> list[tuple[float, int, None]]:
    """The field ``output_token_logprobs``: for each token its logprob, its id, and no text."""
    return [(p, i, None) for p, i in zip(logprobs, ids, strict=True)]


def likely_triples(rows: Rows, n: int) -> list[list[tuple[float, int, None]]]:
    """The field ``output_top_logprobs``: for each token the `n` likeliest in its place, each with
    its logprob, its id, and no text. A row that is not known is empty."""
    return [
        [(float(p), int(i), None) for i, p in row[:n] if p == p] for row in rows.values.tolist()
    ]


def labelled(
    spans: Iterable[tuple[int, int, int]], label_of: Callable[[int], str]
) -> list[dict[str, str | int]]:
    """The field ``weight_versions``: the label of each token, where adjacent tokens of one label
    are one span.

    Args:
        spans: the version, the first token and the end of each span, in order.
        label_of: the label of a version.
    """
    found: list[dict[str, str | int]] = []
    for version, start, end in spans:
        label = label_of(version)
        if found and found[-1]["version"] == label:
            found[-1]["end"] = end
        elif start < end:
            found.append({"version": label, "start": start, "end": end})
    return found


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T]]:
    """What all streams give as it comes, each with the index of its stream."""
    waiting = {asyncio.ensure_future(anext(each)): index for index, each in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield index, item
                waiting[asyncio.ensure_future(anext(streams[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.gather(*(each.aclose() for each in streams), return_exceptions=True)


async def send_stream(request: web.Request, items: AsyncGenerator[Item]) -> web.StreamResponse:
    """The answer that streams `items`, which are closed when it ends or the client is gone."""
    stream = web.StreamResponse(headers=STREAM_HEADERS)
    try:
        await stream.prepare(request)
        async with aclosing(items):
            async for item in items:
                await stream.write(frame_item(item))
    except ConnectionResetError:  # The client is gone.
        pass
    return stream


# --- app -----------------------------------------------------------------------------------------

# The calls that both backends have, with SGLang's names, defaults and answers.

_LATE = (
    "An engine has not answered in time; the call goes on, and GET /server_info shows the modes."
)
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
_NOT_FLUSHED = "Flush cache failed.\n"
_FLUSH_AGAIN_S = 0.05
_SCHEMAS: Mapping[str, type[msgspec.Struct]] = {
    "AbortReq": AbortBody,
    "ContinueGenerationReqInput": ContinueBody,
    "PauseGenerationReqInput": PauseBody,
    "UpdateWeightFromDiskReqInput": DiskBody,
    "UpdateWeightVersionReqInput": VersionBody,
}
"""SGLang's names of the bodies whose fields and defaults clients look up."""


class Backend(Protocol):
    """What answers the calls: one engine, or a scheduler in front of several.

    A call that cannot be carried out raises an :class:`~aprilsched.errors.AprilschedError`. Updates
    return what their answer says beside the success, or nothing.
    """

    model_path: str

    @property
    def generate_body(self) -> type[msgspec.Struct]:
        """The body of POST /generate."""
        ...

    @property
    def label(self) -> str:
        """The label of the weights."""
        ...

    @property
    def ready(self) -> bool:
        """Whether a request would be generated now."""
        ...

    async def alive(self) -> bool:
        """Whether the process can do its work, now or later."""
        ...

    async def healthy(self) -> bool:
        """Whether there is anything that generates."""
        ...

    def model_facts(self) -> Event:
        """What /model_info tells beside the model and its weights."""
        ...

    def server_facts(self) -> Event:
        """What /server_info tells beside the model and its weights; it has a ``version``."""
        ...

    def rank_loads(self) -> Event:
        """The figures of /v1/loads."""
        ...

    async def abort(self, rid: str) -> None: ...
    async def abort_group(self, name: str) -> None: ...
    async def abort_all(self) -> None: ...
    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def flush(self) -> bool:
        """Drop the cached KV; returns False while it is in use."""
        ...

    async def load(self, body: DiskBody) -> str: ...
    async def relabel(self, label: str) -> str: ...
    async def begin_update(self) -> None: ...
    async def end_update(self) -> None: ...
    async def take_tensors(self, body: TensorBody) -> str: ...
    async def take_broadcast(self, body: BroadcastBody) -> str: ...
    async def join_group(self, body: JoinBody) -> None: ...
    async def leave_group(self, name: str) -> None: ...


BACKEND: web.AppKey[Backend] = web.AppKey("backend", Backend)
"""The key under which the handlers find what answers."""

Route: TypeAlias = tuple[str, str, Handler]


async def _pause(request: web.Request) -> web.Response:
    body = await body_of(request, PauseBody)
    return await _answer_steering(request.app[BACKEND].pause(body.mode), "paused")


async def _resume(request: web.Request) -> web.Response:
    await body_of(request, ContinueBody)
    return await _answer_steering(request.app[BACKEND].resume(), "continued")


async def _answer_steering(call: Awaitable[None], done: str) -> web.Response:
    try:
        await call
    except TimeoutError:
        return as_json({"message": _LATE, "status": "error"}, 504)
    except AprilschedError as error:
        return as_json({"message": str(error), "status": "error"}, 400)
    return as_json({"message": f"Generation {done} successfully.", "status": "ok"})


async def _abort(request: web.Request) -> web.Response:
    """POST /abort_request; answers 200 whether or not the request exists."""
    body, backend = await body_of(request, AbortBody), request.app[BACKEND]
    if body.abort_all:
        await backend.abort_all()
    elif body.rid:
        await backend.abort(body.rid)
    elif body.group:
        await backend.abort_group(body.group)
    return web.Response()


async def _flush(request: web.Request) -> web.Response:
    """GET or POST /flush_cache; 400 if the cache is still in use after so many seconds."""
    try:
        seconds = float(request.query.get("timeout", "0"))
    except ValueError as error:
        raise Malformed("timeout: Input should be a valid number") from error
    if not 0 <= seconds < float("inf"):
        raise Malformed("timeout: Input should be greater than or equal to 0")
    clock = asyncio.get_running_loop()
    until = clock.time() + seconds
    try:
        while True:
            done = await request.app[BACKEND].flush()
            if done or clock.time() >= until:
                break
            await asyncio.sleep(_FLUSH_AGAIN_S)
    except (AprilschedError, TimeoutError) as error:
        return web.Response(status=400, text=f"{_NOT_FLUSHED}{error}\n")
    return web.Response(status=200 if done else 400, text=_FLUSHED if done else _NOT_FLUSHED)


async def _update_from_disk(request: web.Request) -> web.Response:
    body = await _update_of(request, DiskBody)
    done = "Succeeded to update model weights."
    if body.weight_version is not None:
        done += f" Weight version updated to {body.weight_version}."
    return await _answer_update(request.app[BACKEND].load(body), done, num_paused_requests=0)


async def _update_version(request: web.Request) -> web.Response:
    body = await _update_of(request, VersionBody)
    label = body.new_version
    call = request.app[BACKEND].relabel(label)
    return await _answer_update(call, f"Weight version updated to {label}", new_version=label)


async def _update_from_tensor(request: web.Request) -> web.Response:
    body = await _update_of(request, TensorBody)
    return await _answer_update(request.app[BACKEND].take_tensors(body))


async def _update_from_distributed(request: web.Request) -> web.Response:
    body = await _update_of(request, BroadcastBody)
    return await _answer_update(request.app[BACKEND].take_broadcast(body))


async def _update_of(request: web.Request, kind: type[Update]) -> Update:
    """The body of an update, for which every request ends first if it says so."""
    body = await body_of(request, kind)
    if body.abort_all_requests:
        await request.app[BACKEND].abort_all()
    return body


async def _answer_update(
    call: Awaitable[str], done: str = "Succeeded to update model weights.", **more: object
) -> web.Response:
    try:
        told = await call
    except AprilschedError as error:
        content = {"success": False, "message": f"Failed to update weights: {error}"}
        return as_json({**content, **more}, 400)
    return as_json({"success": True, "message": f"{done}{told}", **more})


async def _begin_update(request: web.Request) -> web.Response:
    await body_of(request, dict[str, Any])
    return await _answer_call(request.app[BACKEND].begin_update())


async def _end_update(request: web.Request) -> web.Response:
    await body_of(request, dict[str, Any])
    return await _answer_call(request.app[BACKEND].end_update())


async def _join_group(request: web.Request) -> web.Response:
    return await _answer_call(request.app[BACKEND].join_group(await body_of(request, JoinBody)))


async def _leave_group(request: web.Request) -> web.Response:
    body = await body_of(request, LeaveBody)
    return await _answer_call(request.app[BACKEND].leave_group(body.group_name))


async def _answer_call(call: Awaitable[None]) -> web.Response:
    try:
        await call
    except AprilschedError as error:
        return as_json({"success": False, "message": str(error)}, 400)
    return as_json({"success": True, "message": "Success"})


async def _alive(request: web.Request) -> web.Response:
    return web.Response(status=200 if await request.app[BACKEND].alive() else 503)


async def _health(request: web.Request) -> web.Response:
    return web.Response(status=200 if await request.app[BACKEND].healthy() else 503)


async def _ready(request: web.Request) -> web.Response:
    return web.Response(status=200 if request.app[BACKEND].ready else 503)


async def _model_info(request: web.Request) -> web.Response:
    backend = request.app[BACKEND]
    told = {
        "model_path": backend.model_path,
        "served_model_name": backend.model_path,
        "tokenizer_path": backend.model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": backend.label,
    }
    return as_json({**told, **backend.model_facts()})


async def _server_info(request: web.Request) -> web.Response:
    backend = request.app[BACKEND]
    told = {
        "model_path": backend.model_path,
        "tokenizer_path": backend.model_path,
        "incremental_streaming_output": True,
        "pp_size": 1,
        "dp_size": 1,
        "weight_version": backend.label,
        "status": "ready",
    }
    return as_json({**told, **backend.server_facts()})


async def _loads(request: web.Request) -> web.Response:
    """GET /v1/loads: the part that SGLang calls core, whatever is asked for."""
    backend = request.app[BACKEND]
    told = {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": backend.server_facts()["version"],
        "accelerator": None,
        "num_accelerators": 1,
        "loads": [{"dp_rank": 0, **backend.rank_loads()}],
    }
    return as_json(told)


async def _models(request: web.Request) -> web.Response:
    backend = request.app[BACKEND]
    path = backend.model_path
    name = backend.model_facts().get("served_model_name", path)
    model = {"id": name, "object": "model", "owned_by": "sglang", "root": path, "parent": None}
    return as_json({"object": "list", "data": [{**model, "created": int(time.time())}]})


async def _openapi(request: web.Request) -> web.Response:
    """GET /openapi.json: the paths of the application, and the bodies that clients look up."""
    paths: dict[str, Event] = {}
    for route in request.app.router.routes():
        if route.resource is not None:
            paths.setdefault(route.resource.canonical, {})[route.method.lower()] = {}
    bodies = {**_SCHEMAS, "GenerateReqInput": request.app[BACKEND].generate_body}
    _, known = msgspec.json.schema_components(bodies.values())
    return as_json(
        {
            "openapi": "3.1.0",
            "info": {"title": "FastAPI", "version": "0.1.0"},
            "paths": paths,
            "components": {"schemas": {n: known[kind.__name__] for n, kind in bodies.items()}},
        }
    )


_FREE: Sequence[Route] = (
    ("GET", "/health", _alive),
    ("GET", "/health_generate", _health),
    ("GET", "/ready", _ready),
)
_INFO: Sequence[Route] = (
    ("GET", "/model_info", _model_info),
    ("GET", "/get_model_info", _model_info),
    ("GET", "/server_info", _server_info),
    ("GET", "/get_server_info", _server_info),
    ("GET", "/openapi.json", _openapi),
    ("GET", "/v1/loads", _loads),
    ("GET", "/v1/models", _models),
)
_CONTROL: Sequence[Route] = (
    ("POST", "/pause_generation", _pause),
    ("POST", "/continue_generation", _resume),
    ("POST", "/abort_request", _abort),
    ("GET", "/flush_cache", _flush),
    ("POST", "/flush_cache", _flush),
    ("POST", "/update_weights_from_disk", _update_from_disk),
    ("POST", "/update_weight_version", _update_version),
    ("POST", "/begin_weight_update", _begin_update),
    ("POST", "/end_weight_update", _end_update),
    ("POST", "/update_weights_from_tensor", _update_from_tensor),
    ("POST", "/update_weights_from_distributed", _update_from_distributed),
    ("POST", "/init_weights_update_group", _join_group),
    ("POST", "/destroy_weights_update_group", _leave_group),
)
INFO = tuple(path for _, path, _ in (*_INFO, *_FREE))
"""Paths of the calls that only read."""
CONTROL = tuple(dict.fromkeys(path for _, path, _ in _CONTROL))
"""Paths of the calls that change the server."""


def make_app(
    backend: Backend,
    bodies: Bodies,
    *,
    requests: Sequence[Route],
    control: Sequence[Route] = (),
    api_key: str | None = None,
    admin_key: str | None = None,
    outermost: Sequence[Middleware] = (),
) -> web.Application:
    """The web application of a backend.

    Args:
        backend: what answers.
        bodies: reads the bodies of requests.
        requests: routes that only this backend has.
        control: those of them that change it.
        api_key: bearer token for all calls but those for health; None asks for none.
        admin_key: bearer token for control calls, which is also good for the others; None asks for
            `api_key` there too.
        outermost: middlewares that see all calls and answers.
    """
    keys = key_middleware(
        api_key=api_key,
        admin_key=admin_key,
        control={path for _, path, _ in (*_CONTROL, *control)},
        free={path for _, path, _ in _FREE},
    )
    app = web.Application(middlewares=[*outermost, answer_refusals, keys])
    app[BODIES] = bodies
    app[BACKEND] = backend
    for method, path, handler in (*_FREE, *_INFO, *_CONTROL, *requests, *control):
        app.router.add_route(method, path, handler, expect_handler=expect_later)
    return app


# --- listening -----------------------------------------------------------------------------------

# Listens at one address with an aiohttp application. Connections are accepted here rather than by
# asyncio, whose accept loop logs a traceback for each of `backlog` tries when there are no file
# descriptors left, 10,000 a second (CPython 3.11).

_LARGEST_PORT = 2**16 - 1
_BACKLOG = 4096
"""Connections that may wait to be accepted, as many as Linux grants by default. With asyncio's 100
a burst of 1,000 clients waited for their second and third try."""
_CLOSE_S = 1.0
"""Seconds that open connections have when the listener closes."""
_IDLE_S = 120.0
"""Seconds after which a connection without a complete request head is closed. It is longer than
clients keep idle connections (httpx 5 s, aiohttp 15 s, Go 90 s), so few send into a closed one."""
_SPARED_S = 0.5
"""Seconds for which a connection without a request is spared if others wait for its place."""
_RETRY_S = 1.0
"""Seconds after which accepting is tried again without file descriptors."""
_WARNING_INTERVAL_S = 60.0
_MOST_DESCRIPTORS = 2**20
"""The limit of file descriptors where the system sets none."""
_SPARE_DESCRIPTORS = 16
"""File descriptors that connections leave for the log, the store and control calls."""


def check_port(port: int) -> None:
    """Refuse a port that there is not.

    Raises:
        ConfigError: if `port` is not from 0 (any) to 65535.
    """
    if not 0 <= port <= _LARGEST_PORT:
        raise ConfigError(f"port is {port}; give one from 0 (any) to {_LARGEST_PORT}.")


class _Connection(web.RequestHandler):
    """One connection. What its client sends is in no log line and no error, because it may be a
    key.

    Attributes:
        idle_since: when it was made, or when its latest answer was sent.
    """

    __slots__ = ("_acceptor", "idle_since")

    def __init__(self, acceptor: _Acceptor, server: web.Server, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._acceptor = acceptor
        self.idle_since = self._loop.time()

    @property
    def idle(self) -> bool:
        """Whether it has no request, and its client has the last answer."""
        if self._request_in_progress or self.transport is None:
            return False
        return not self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._acceptor.connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._acceptor.left(self)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; the connection is closed behind it if others wait for its place."""
        if self._acceptor.full:
            resp.force_close()
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self.idle_since = self._loop.time()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is not HTTP, and errors that no handler has caught."""
        if status >= Crashed.status:
            super().handle_error(request, status, exc, message)
            answer = as_json({"error": {"message": "Internal server error."}}, status)
        else:
            # Both aiohttp's error and its message quote the bytes.
            kind = type(exc).__name__
            log.warning("a request is not valid HTTP peer=%s error=%s", request.remote, kind)
            message = f"The request is not valid HTTP ({kind}); check its first line and headers."
            answer = as_json({"error": {"message": message}}, status)
        answer.force_close()
        return answer


class _Acceptor:
    """Accepts the connections of listening sockets, up to a bound.

    At the bound an idle connection makes place for a new one, and if none is idle, new ones wait in
    the sockets' backlog.

    Args:
        server: makes the connections' handlers.
        sockets: the listening sockets, which are closed with it.
        most: largest number of connections.
        options: of aiohttp's handler of a connection.

    Attributes:
        connections: the open connections.
    """

    def __init__(
        self, server: web.Server, sockets: Sequence[socket.socket], most: int, **options: Any
    ) -> None:
        self.connections: set[_Connection] = set()
        self._sockets = sockets
        self._most = most
        self._make = partial(_Connection, self, server, **options)
        self._loop = asyncio.get_running_loop()
        self._making: set[asyncio.Task[Any]] = set()
        """Connections that are accepted and not made yet."""
        self._retry: asyncio.TimerHandle | None = None
        """Accepts again; None while connections are accepted."""
        self._warned, self._pauses = -math.inf, 0
        self._accept_more()

    @property
    def full(self) -> bool:
        """Whether there may be no more connections."""
        return len(self.connections) + len(self._making) >= self._most

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """The listening sockets."""
        return self._sockets

    def left(self, connection: _Connection) -> None:
        """Note that a connection has ended."""
        self.connections.discard(connection)
        self._resume()

    async def close(self) -> None:
        """Accept no more connections, and wait until the accepted ones are made: one that is made
        later would stay open forever, because nothing knows of it."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        for each in self._sockets:
            self._loop.remove_reader(each)
            each.close()
        await asyncio.gather(*self._making, return_exceptions=True)

    def _resume(self) -> None:
        if self._retry is not None and not self.full:
            self._retry.cancel()
            self._accept_more()

    def _accept_more(self) -> None:
        self._retry = None
        for each in self._sockets:
            self._loop.add_reader(each, self._accept, each)

    def _accept(self, listening: socket.socket) -> None:
        if self.full:
            self._pause(_SPARED_S, f"{self._most} are open")
            return
        try:
            accepted, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause(_RETRY_S, os.strerror(error.errno or 0))
            return
        accepted.setblocking(False)
        making = self._loop.create_task(self._loop.connect_accepted_socket(self._make, accepted))
        self._making.add(making)
        making.add_done_callback(partial(self._made, accepted))

    def _made(self, accepted: socket.socket, making: asyncio.Task[Any]) -> None:
        self._making.discard(making)
        if making.cancelled() or making.exception() is not None:
            accepted.close()
        self._resume()

    def _pause(self, seconds: float, why: str) -> None:
        """Accept none for `seconds` or until a connection ends, and end the longest idle one."""
        for each in self._sockets:
            self._loop.remove_reader(each)
        self._retry = self._loop.call_later(seconds, self._accept_more)
        now, self._pauses = self._loop.time(), self._pauses + 1
        idle = [each for each in self.connections if each.idle]
        oldest = min(idle, key=lambda each: each.idle_since, default=None)
        if oldest is not None and oldest.idle_since + _SPARED_S <= now:
            oldest.force_close()
        if self._warned + _WARNING_INTERVAL_S <= now:
            log.warning(
                "new connections wait and idle ones are closed (%s); raise `ulimit -n` pauses=%d",
                why,
                self._pauses,
            )
            self._warned, self._pauses = now, 0


class Listener:
    """An address, and the server that listens there while it is open.

    Args:
        host: address to listen at; any address but loopback lets other machines connect.
        port: port to listen at; 0 for any free one.
        descriptors: file descriptors that a client needs, its connection included.

    Raises:
        ConfigError: if the port is out of its range.
    """

    def __init__(self, host: str, port: int, *, descriptors: int = 2) -> None:
        check_port(port)
        self._host = host
        self._port = port
        self._descriptors = descriptors
        self._bound: int | None = None
        self._open: tuple[web.AppRunner, _Acceptor] | None = None

    @property
    def url(self) -> str:
        """The URL of the server; with port 0 its port is known once it has listened."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port if self._bound is None else self._bound}"

    @property
    def listening(self) -> bool:
        return self._open is not None

    @property
    def reachable(self) -> bool:
        """Whether it listens at an address that other machines may reach."""
        sockets = () if self._open is None else self._open[1].sockets
        return not all(ip_address(each.getsockname()[0]).is_loopback for each in sockets)

    @property
    def connections(self) -> list[web.RequestHandler]:
        """The open connections."""
        return [] if self._open is None else list(self._open[1].connections)

    async def open(self, app: web.Application) -> None:
        """Start to listen. A handler whose client leaves is cancelled.

        Raises:
            ConfigError: if the address cannot be used.
        """
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_CLOSE_S)
        port = self._port if self._bound is None else self._bound
        try:
            await runner.setup()
            sockets = await self._bind(port)
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                f"Cannot listen on {self._host}:{port} ({os.strerror(error.errno or 0)}); give "
                "another host or port."
            ) from error
        except BaseException:
            await runner.cleanup()
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = _MOST_DESCRIPTORS if limit == resource.RLIM_INFINITY else limit
        acceptor = _Acceptor(
            cast(web.Server, runner.server),
            sockets,
            max(1, limit // self._descriptors - _SPARE_DESCRIPTORS),
            access_log=None,
            keepalive_timeout=_IDLE_S,
            # A body is uncompressed where it is read, which is bounded.
            auto_decompress=False,
        )
        self._open = runner, acceptor
        self._bound = sockets[0].getsockname()[1]

    async def _bind(self, port: int) -> list[socket.socket]:
        """The listening sockets of the address, which asyncio looks up and binds."""
        loop = asyncio.get_running_loop()
        found = await loop.create_server(asyncio.Protocol, self._host, port, start_serving=False)
        sockets = [socket.socket(fileno=os.dup(each.fileno())) for each in found.sockets]
        found.close()
        for each in sockets:
            each.setblocking(False)
            each.listen(_BACKLOG)
        return sockets

    async def close(self, *, keep_port: bool = False) -> None:
        """Stop to listen, and break what is still open after a second.

        With `keep_port` the next :meth:`open` listens at the same port, also where any was asked
        for.
        """
        if self._open is not None:
            (runner, acceptor), self._open = self._open, None
            await acceptor.close()
            transports = [connection.transport for connection in acceptor.connections]
            await runner.cleanup()
            # What the peer has not read keeps a connection open that was closed, also after the
            # loop has ended.
            for transport in transports:
                if transport is not None:
                    transport.abort()
            await asyncio.sleep(0)
        if not keep_port:
            self._bound = None
