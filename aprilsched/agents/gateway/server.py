"""The gateway from start to stop: the HTTP server, and the scheduler behind it."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from aprilsched.agents.dialects.openai import Chats, Completions
from aprilsched.agents.dialects.sglang import Generate
from aprilsched.agents.gateway.requests import REQUEST_ID, answer_in
from aprilsched.agents.gateway.service import SERVICE, Service, UnknownModel
from aprilsched.agents.gateway.settings import GatewaySettings
from aprilsched.agents.serving.bodies import Bodies, body_of
from aprilsched.agents.serving.calls import FREE, Route, make_app
from aprilsched.agents.serving.listener import Listener
from aprilsched.agents.serving.refusals import Refused, as_json
from aprilsched.agents.serving.streams import DISCONNECTED, STREAM_STATUS
from aprilsched.errors import AprilschedError, MissingExtra
from aprilsched.kernel.core.config import SchedulerConfig
from aprilsched.kernel.engines.base import Fleet
from aprilsched.kernel.shell.listener import AnyListener

log = logging.getLogger("aprilsched")


class Gateway:
    """One address in front of a fleet; an async context manager.

    Each response is a rollout in a group of one, and the scheduler is the same as in training. It
    sends the rollout to an engine, and pauses and refits the engines for new weights. If an engine
    is lost, it sends the rollout again with its tokens. What a client aborts is entered in the
    ledger.

    Args:
        fleet: the engines; they are opened and closed with the gateway.
        settings: its address and limits.
        config: settings of the scheduler; settings for a trainer's batches are replaced.
        api_key: bearer token for all calls except health checks; None requires none.
        admin_key: bearer token for control calls; None requires `api_key` there too.
        listeners: telemetry of the run behind the gateway.

    Raises:
        ConfigError: if a setting cannot work.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        settings: GatewaySettings | None = None,
        config: SchedulerConfig | None = None,
        api_key: str | None = None,
        admin_key: str | None = None,
        listeners: Sequence[AnyListener] = (),
    ) -> None:
        settings = settings or GatewaySettings()
        self.service = Service(
            fleet, settings=settings, config=config or SchedulerConfig(), listeners=listeners
        )
        """The scheduler, as the handlers see it."""
        self._listener = Listener(settings.host, settings.port)
        self._keys = (api_key, admin_key)

    @property
    def url(self) -> str:
        """The URL of the gateway; its port is known once the gateway is started."""
        return self._listener.url

    async def start(self) -> None:
        """Open the fleet and listen.

        Raises:
            EngineError: if an engine cannot be used.
            ConfigError: if the engines or the address cannot be used.
        """
        api_key, admin_key = self._keys
        try:
            await self.service.open()
            bodies = Bodies(largest=_LARGEST_BODY, together=_ALL_BODIES)
            app = make_app(
                self.service,
                self.service.controls,
                bodies,
                requests=_REQUESTS,
                api_key=api_key,
                admin_key=admin_key,
                outermost=[_note_request],
            )
            app[SERVICE] = self.service
            app.on_response_prepare.append(_send_id)
            await self._listener.open(app)
            if self._keys == (None, None) and self._listener.reachable:
                log.warning(
                    "everybody who reaches %s may pause the servers and load weights into them; "
                    "ask for a key with admin_key (--admin-key-env), or listen at 127.0.0.1",
                    self.url,
                )
        except BaseException:
            await self.stop()
            raise

    async def wait_failed(self) -> AprilschedError:
        """Wait until the scheduler ends by itself because the fleet is lost; return the cause."""
        return await self.service.wait_failed()

    async def stop(self) -> None:
        """Refuse new requests, let the open responses finish, and close everything.

        A response that is still open after `drain_s` ends as aborted with its tokens and the
        reason; with a store it ends without a result.
        """
        if self._listener.listening:
            await self.service.admission.drain()
            await self._listener.close()
        await self.service.close()

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


_LARGEST_BODY = 2**26
"""Maximum bytes of a request; a prompt of a million token ids needs a tenth of them."""
_ALL_BODIES = 2**28
"""Maximum bytes of all requests that are read at a time."""
_LARGEST_ID = 2**31 - 1
_LOGGED_ID = 64
"""Number of characters of a request's id in the log."""


@web.middleware
async def _note_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count and log each request, and add Retry-After to a 503."""
    service, started = request.app[SERVICE], time.monotonic()
    status = DISCONNECTED  # Its handler is cancelled.
    STREAM_STATUS.set(0)
    REQUEST_ID.set(request.headers.get("X-Request-Id", "-"))
    try:
        answer = await _answered(request, handler)
        status = max(answer.status, STREAM_STATUS.get())
        return answer
    finally:
        # The raw path may contain what must not be logged.
        route, seconds = request.match_info.route.resource, time.monotonic() - started
        path = "-" if route is None else route.canonical
        if request.path not in FREE:  # A probe is no request that could fail or be slow.
            service.answered(str(status), seconds)
        log.info(
            "method=%s path=%s status=%s seconds=%.3f id=%r",
            *(request.method, path, status, seconds, REQUEST_ID.get()[:_LOGGED_ID]),
        )


async def _send_id(_: web.BaseRequest, answer: web.StreamResponse) -> None:
    """Send the id that the log has, if it can be a header."""
    if re.fullmatch("[!-~]{2,256}", name := REQUEST_ID.get()):
        answer.headers["X-Request-Id"] = name


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    answer = await handler(request)
    if answer.status == web.HTTPServiceUnavailable.status_code:
        answer.headers["Retry-After"] = str(request.app[SERVICE].admission.retry_s)
    # A readiness probe is not a request that could be refused.
    if answer.status >= web.HTTPBadRequest.status_code and request.path not in FREE:
        request.app[SERVICE].refused(answer.status)
    return answer


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics: the figures of the run and of its clients in Prometheus format."""
    try:
        from aprilsched.observe.exports.prometheus import exposition
    except MissingExtra as error:
        return as_json({"error": {"message": str(error)}}, web.HTTPNotImplemented.status_code)
    text, kind = exposition(request.app[SERVICE].metrics)
    return web.Response(body=text, headers={"Content-Type": kind})


class _TokenizeBody(msgspec.Struct, frozen=True):
    prompt: str | list[str]
    add_special_tokens: bool = True


class _DetokenizeBody(msgspec.Struct, frozen=True):
    tokens: list[int | list[int]]
    skip_special_tokens: bool = True


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: the token ids of one or more texts."""
    service = request.app[SERVICE]
    body = await body_of(request, _TokenizeBody)
    one = isinstance(body.prompt, str)
    texts: Any = [body.prompt] if one else body.prompt
    ids = await service.texts.encode_texts(
        texts, service.context_tokens, special=body.add_special_tokens
    )
    counts = [len(each) for each in ids]
    longest = service.context_tokens
    return as_json(
        {
            "tokens": ids[0] if one else ids,
            "count": counts[0] if one else counts,
            "max_model_len": -1 if longest is None else longest,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: the text of one or more lists of token ids."""
    service = request.app[SERVICE]
    body = await body_of(request, _DetokenizeBody)
    tokenizer = service.texts.tokenizer
    lists = [each for each in body.tokens if isinstance(each, list)]
    if lists and len(lists) < len(body.tokens):
        raise Refused("tokens has ids and lists of ids; give either.")
    several: list[Any] = lists or [body.tokens]
    if not all(0 <= i <= _LARGEST_ID for ids in several for i in ids):
        raise Refused(f"tokens must be in [0, {_LARGEST_ID}].")
    texts = await tokenizer.work_out(
        lambda: [tokenizer.decode(ids, skip_special=body.skip_special_tokens) for ids in several],
        size=sum(map(len, several)),
    )
    return as_json({"text": texts if lists else texts[0]})


async def workers(request: web.Request) -> web.Response:
    """GET /workers: the gateway as the only worker.

    A program that expects SGLang's router therefore sends its control calls to the gateway.
    """
    service = request.app[SERVICE]
    worker = {
        "id": "gateway",
        "url": f"{request.scheme}://{request.host}",
        "model_id": service.model_path,
        "worker_type": "regular",
        "is_healthy": bool(service.in_use),
    }
    return as_json({"workers": [worker], "total": 1})


async def messages(_: web.Request) -> web.Response:
    """POST /v1/messages: refused with the place where Anthropic's API is."""
    raise UnknownModel("Anthropic's API is only in sessions, not here; send /v1/chat/completions.")


_REQUESTS: Sequence[Route] = (
    ("POST", "/generate", answer_in(Generate)),
    ("POST", "/tokenize", tokenize),
    ("POST", "/v1/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("POST", "/v1/detokenize", detokenize),
    ("POST", "/v1/completions", answer_in(Completions)),
    ("POST", "/v1/chat/completions", answer_in(Chats)),
    ("POST", "/v1/messages", messages),
    ("GET", "/workers", workers),
    ("GET", "/metrics", metrics),
)
