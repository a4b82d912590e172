"""Several SGLang servers of one model: opened together or not at all, joined and left at will."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from aprilsched.engines.base import FleetChange
from aprilsched.engines.sglang.address import ServerAddress
from aprilsched.engines.sglang.engine import SGLangEngine
from aprilsched.engines.sglang.limits import SGLangLimits
from aprilsched.engines.sglang.members import Members
from aprilsched.errors import ConfigError

__all__ = ["SGLangFleet"]


class SGLangFleet:
    """The SGLang servers at `urls`.

    Args:
        urls: one for each server, as ``http://host:port``.
        admin_key: the servers' ``--admin-api-key``, where they have one.
        api_key: the servers' ``--api-key``, where they have one.
        model_path: refuse servers that serve another model; None takes any one model.
        stream_interval: tokens between two events of a stream.
        limits: timeouts and sizes, for each server.

    Raises:
        ConfigError: if there is no url, a bad one, or the same one twice.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        admin_key: str | None = None,
        api_key: str | None = None,
        model_path: str | None = None,
        stream_interval: int = 64,
        limits: SGLangLimits | None = None,
    ) -> None:
        if isinstance(urls, str):
            raise ConfigError(f"urls is the string {urls!r}; give a list of URLs.")
        if not urls:
            raise ConfigError("The list of servers is empty; give at least one URL.")
        self._admin_key = admin_key
        self._api_key = api_key
        self._stream_interval = stream_interval
        self._limits = limits
        engines = [self._engine(url) for url in urls]
        names = [engine.name for engine in engines]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"The server {twice} is listed twice; give each server once.")
        self._members = Members(engines, model_path)

    def __repr__(self) -> str:
        return f"SGLangFleet({[engine.name for engine in self.engines]})"

    @property
    def engines(self) -> Sequence[SGLangEngine]:
        """The servers, in the order of their urls; those added later follow."""
        return self._members.engines

    async def open(self) -> None:
        """Open every server and check that they agree; closes all of them if anything is wrong.

        Raises:
            EngineError: if a server cannot be reached or is no SGLang.
            ConfigError: if the servers differ in model or weights.
        """
        await self._members.open()

    async def close(self) -> None:
        """Close every server's connections."""
        await self._members.close()

    async def add(self, url: str) -> None:
        """Take in one more server while the fleet is open; it may have any version's weights.

        Raises:
            EngineError: if it cannot be reached or is no SGLang.
            ConfigError: if the url is bad or there already, or the server has another model.
        """
        await self._members.join(self._engine(url))

    async def remove(self, url: str) -> None:
        """Let a server go; what it generates is lost to the fleet.

        Raises:
            ConfigError: if it is not in the fleet, or is the last one.
        """
        self._members.leave(ServerAddress.parse(url).name)

    async def watch(self) -> AsyncGenerator[FleetChange, None]:
        """What :meth:`add` and :meth:`remove` do.

        See :class:`aprilsched.engines.base.WatchesMembership`.
        """
        while True:
            await self._members.changed()
            change = self._members.take()
            if change is not None:
                yield change

    def _engine(self, url: str) -> SGLangEngine:
        return SGLangEngine(
            url,
            admin_key=self._admin_key,
            api_key=self._api_key,
            stream_interval=self._stream_interval,
            limits=self._limits,
        )
