"""The gateway from start to stop: the HTTP server, and the scheduler behind it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from aiohttp import web
from aiohttp.typedefs import Handler

from aprilsched.core.config import SchedulerConfig
from aprilsched.engines.base import Fleet
from aprilsched.errors import AprilschedError
from aprilsched.gateway import control, generate, openai
from aprilsched.gateway.service import SERVICE, Service
from aprilsched.gateway.settings import GatewaySettings
from aprilsched.serving import BODIES, Bodies, Listener, asking_for, expect_later, refusing
from aprilsched.telemetry.base import AnyListener


class Gateway:
    """One address in front of a fleet; an async context manager.

    A request is a rollout of a group of one, and the scheduler is that of any run: it sends the
    rollout to an engine, pauses and refits the engines for new weights, sends the rollout again
    with its tokens if its engine is lost, and enters what a client gives up into its ledger.

    Args:
        fleet: the engines; they are opened and closed with the gateway.
        settings: how it listens, and how much it takes on.
        config: settings of the scheduler; those for batches of a trainer are replaced.
        api_key: bearer token that every call but those for health needs; None leaves them open.
        admin_key: bearer token that control calls need; None asks for `api_key` there too.
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
            await self._listener.open(make_app(self.service, api_key=api_key, admin_key=admin_key))
        except BaseException:
            await self.stop()
            raise

    async def wait_failed(self) -> AprilschedError:
        """Wait until the scheduler has ended by itself, because the fleet is lost; returns why."""
        return await self.service.wait_failed()

    async def stop(self) -> None:
        """Take no new requests, let the open responses end, and close everything.

        A response that is still open after `drain_s` ends as aborted with its tokens.
        """
        if self._listener.listening:
            await self.service.drain()
            await self._listener.close()
        await self.service.close()

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()


# --- app -----------------------------------------------------------------------------------------

# The routes of the gateway, and which of them need which key.

_LARGEST_BODY = 2**26
"""Bytes of a request: a prompt of a million token ids needs a tenth of them."""
_ALL_BODIES = 2**28
"""Bytes of all requests that are read at a time."""

_FREE: Sequence[tuple[str, str, Handler]] = (
    ("GET", "/health", control.health),
    ("GET", "/health_generate", control.health),
    ("GET", "/ready", control.ready),
)
_OPEN: Sequence[tuple[str, str, Handler]] = (
    ("POST", "/generate", generate.generate),
    ("POST", "/tokenize", control.tokenize),
    ("POST", "/v1/tokenize", control.tokenize),
    ("POST", "/detokenize", control.detokenize),
    ("POST", "/v1/detokenize", control.detokenize),
    ("POST", "/v1/completions", openai.completions),
    ("POST", "/v1/chat/completions", openai.chat_completions),
    ("GET", "/model_info", control.model_info),
    ("GET", "/get_model_info", control.model_info),
    ("GET", "/server_info", control.server_info),
    ("GET", "/get_server_info", control.server_info),
    ("GET", "/v1/loads", control.loads),
    ("GET", "/v1/models", control.models),
    ("GET", "/workers", control.workers),
    ("GET", "/openapi.json", control.openapi),
)
_ADMIN: Sequence[tuple[str, str, Handler]] = (
    ("POST", "/pause_generation", control.pause),
    ("POST", "/continue_generation", control.resume),
    ("POST", "/abort_request", control.abort),
    ("GET", "/flush_cache", control.flush),
    ("POST", "/flush_cache", control.flush),
    ("POST", "/update_weights_from_disk", control.update_from_disk),
    ("POST", "/update_weight_version", control.update_version),
    ("POST", "/begin_weight_update", control.begin_update),
    ("POST", "/end_weight_update", control.end_update),
    ("POST", "/update_weights_from_tensor", control.update_from_tensor),
    ("POST", "/update_weights_from_distributed", control.update_from_distributed),
    ("POST", "/init_weights_update_group", control.join_group),
    ("POST", "/destroy_weights_update_group", control.leave_group),
)


def make_app(service: Service, *, api_key: str | None, admin_key: str | None) -> web.Application:
    """The web application of a gateway.

    Args:
        service: what the handlers ask.
        api_key: bearer token for all calls but those for health; None asks for none.
        admin_key: bearer token for control calls, which is also good for the others; None asks for
            `api_key` there too.
    """
    keys = asking_for(
        api_key=api_key,
        admin_key=admin_key,
        control={path for _, path, _ in _ADMIN},
        free={path for _, path, _ in _FREE},
    )
    app = web.Application(middlewares=[keys, refusing])
    app[BODIES] = Bodies(largest=_LARGEST_BODY, together=_ALL_BODIES)
    app[SERVICE] = service
    for method, path, handler in (*_FREE, *_OPEN, *_ADMIN):
        app.router.add_route(method, path, handler, expect_handler=expect_later)
    return app
