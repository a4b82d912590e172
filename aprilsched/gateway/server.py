"""The gateway from start to stop: the HTTP server, and the scheduler behind it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from aprilsched.core.config import SchedulerConfig
from aprilsched.engines.base import Fleet
from aprilsched.errors import AprilschedError
from aprilsched.gateway.app import make_app
from aprilsched.gateway.service import Service
from aprilsched.gateway.settings import GatewaySettings
from aprilsched.serving.listening import Listener
from aprilsched.telemetry.base import AnyListener

__all__ = ["Gateway"]


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
