"""Fleets of servers of one model, which join and leave while the fleet is open."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypedDict, TypeVar, Unpack

from aprilsched.errors import (
    ConfigError,
    ControlTimeout,
    EngineError,
    EngineRejected,
    EngineUnreachable,
)
from aprilsched.kernel.engines.address import ServerAddress
from aprilsched.kernel.engines.base import FleetChange
from aprilsched.kernel.engines.control import Facts
from aprilsched.kernel.engines.http import HttpLimits
from aprilsched.kernel.engines.server import HttpEngine
from aprilsched.kernel.engines.stream import version_number
from aprilsched.kernel.values.bounds import ABOVE_0, AT_LEAST_0, check_range

_log = logging.getLogger(__name__)
_LISTINGS_UNTIL_GONE = 2
_AGAIN_S = 1.0
"""Seconds until a server that does not answer is asked again."""
_SAY_AGAIN_S = 10.0
_UNAVAILABLE = 503


EngineT = TypeVar("EngineT", bound=HttpEngine[Any])


class ServerSettings(TypedDict, total=False):
    """How each server of a fleet is asked; see
    :class:`~aprilsched.kernel.engines.server.HttpEngine`."""

    admin_key: str | None
    api_key: str | None
    stream_interval: int
    limits: HttpLimits | None
    first_version: int | None


class HttpFleet(Generic[EngineT]):
    """Servers of one model; the base of all fleets of servers.

    It belongs to one loop from :meth:`open` to :meth:`close`.
    """

    def __init__(self, model_path: str | None, wait_s: float | None = None) -> None:
        self._engines: dict[str, EngineT] = {}
        self._model_path = model_path
        self._wait_s = wait_s
        self._wait_until = 0.0
        self._awaited: dict[str, EngineT] = {}
        """The engines that have not answered yet, by name; the others are open without them."""
        self._warned: dict[str, str] = {}
        self._joined: dict[str, EngineT] = {}
        self._left: list[str] = []
        self._departed: list[EngineT] = []
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self._engines)})"

    @property
    def engines(self) -> Sequence[EngineT]:
        """The servers in the order in which they joined."""
        return tuple(self._engines.values())

    async def _open_all(self, engines: Iterable[EngineT]) -> None:
        """Open every engine and check that they agree; close all of them if anything is wrong."""
        self._joined, self._left, self._changed = {}, [], asyncio.Event()
        self._engines, self._awaited = {engine.name: engine for engine in engines}, {}
        self._wait_until = asyncio.get_running_loop().time() + (self._wait_s or 0)
        try:
            outcomes = await asyncio.gather(*map(self._open, self.engines), return_exceptions=True)
            failures = [outcome for outcome in outcomes if outcome is not None]
            failures.sort(key=_no_answer)
            some = len(failures) < len(outcomes) and all(map(_no_answer, failures))
            if some and self._wait_s is not None:
                pairs = zip(self.engines, outcomes, strict=True)
                self._awaited = {
                    engine.name: engine for engine, error in pairs if error is not None
                }
                failures = []
            for other in failures[1:]:
                failures[0].add_note(f"also {other}")
            if failures:
                raise failures[0]
            self._engines = {n: each for n, each in self._engines.items() if n not in self._awaited}
            check_fleet(self.engines, self._model_path)
        except BaseException:
            await self.close()
            raise
        for name in self._awaited:
            _log.warning("the fleet starts without %s, which joins when it answers", name)

    async def _open(self, engine: EngineT) -> None:
        """Open an engine, and wait for it until there is an answer or the time is over."""
        said_at = -math.inf
        while True:
            try:
                return await engine.open()
            except (EngineError, ConfigError) as error:
                now = asyncio.get_running_loop().time()
                if not _no_answer(error):
                    self._wait_until = now  # The fleet cannot be used, whatever the others answer.
                if now >= self._wait_until:
                    raise
                if now - said_at >= _SAY_AGAIN_S:
                    said_at, left = now, self._wait_until - now
                    _log.warning("waiting up to %.0f s for a server: %s", left, error)
            await asyncio.sleep(_AGAIN_S)

    async def _try_join(self, engine: EngineT) -> None:
        """Let an engine join if it can; a problem is logged once."""
        try:
            await self._join(engine)
        except (EngineError, ConfigError) as error:
            self._warn_once(engine.name, str(error))
        else:
            self._fine(engine.name)

    async def close(self) -> None:
        """Close every engine, including those that left."""
        await asyncio.gather(*(engine.close() for engine in (*self.engines, *self._departed)))
        self._departed = []

    async def _join(self, engine: EngineT) -> None:
        """Open `engine` and add it.

        Raises:
            EngineError: if it cannot be reached or is another program.
            ConfigError: if it serves another model, or is in the fleet already.
        """
        try:
            self._check_new(engine)
            await engine.open()
            self._check_new(engine)
            check_joiner(self.engines[0], engine)
        except BaseException:
            await engine.close()
            raise
        self._engines[engine.name] = self._joined[engine.name] = engine
        self._awaited.pop(engine.name, None)
        self._changed.set()

    def _leave(self, name: str) -> None:
        """Remove the engine `name`.

        Raises:
            ConfigError: if it is unknown, or the last one.
        """
        if self._awaited.pop(name, None) is not None:
            return
        if name not in self._engines:
            raise ConfigError(f"{name} is not in the fleet of {', '.join(self._engines)}.")
        if len(self._engines) == 1:
            raise ConfigError(f"{name} is the last server of the fleet; add another one first.")
        self._departed.append(self._engines.pop(name))
        if self._joined.pop(name, None) is None:
            self._left.append(name)
        self._changed.set()

    def _take(self) -> FleetChange | None:
        """The change since the last call; None if nothing changed."""
        self._changed.clear()
        if not self._left and not self._joined:
            return None
        change = FleetChange(left=tuple(self._left), joined=tuple(self._joined.values()))
        self._left, self._joined = [], {}
        return change

    def _warn_once(self, about: str, what: str) -> None:
        """Log a problem once, not every time that it is met."""
        if self._warned.get(about) != what:
            self._warned[about] = what
            _log.warning("the fleet stays as it is: %s", what)

    def _fine(self, about: str) -> None:
        """Note that a problem is over, so that the next one is logged again."""
        self._warned.pop(about, None)

    def _check_new(self, engine: EngineT) -> None:
        if engine.name in self._engines:
            raise ConfigError(f"The server {engine.name} is in the fleet already.")


class UrlFleet(HttpFleet[EngineT]):
    """The servers at `urls`; the base class of fleets with fixed addresses.

    Args:
        urls: one URL for each server, as ``http://host:port``.
        model_path: refuse servers that serve another model; None accepts any one model.
        wait_s: seconds for which :meth:`open` waits for servers that do not answer yet. After that
            the fleet opens if any server answers, and the others join as soon as they answer. None
            opens all servers or none.
        settings: keys, `stream_interval`, `limits` and `first_version`, as for each engine.

    Raises:
        ConfigError: if `urls` is empty or contains a bad or duplicate URL, or if `wait_s` is
            negative.
    """

    _engine_type: type[EngineT]

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model_path: str | None = None,
        wait_s: float | None = None,
        **settings: Unpack[ServerSettings],
    ) -> None:
        check_range(AT_LEAST_0, wait_s=wait_s)
        if isinstance(urls, str):
            raise ConfigError(f"urls is the string {urls!r}; give a list of URLs.")
        if not urls:
            raise ConfigError("The list of servers is empty; give at least one URL.")
        super().__init__(model_path, wait_s)
        self._engine = partial(self._engine_type, **settings)
        engines = [self._engine(url) for url in urls]
        names = [engine.name for engine in engines]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"The server {twice} is listed twice; give each server once.")
        self._engines = {engine.name: engine for engine in engines}

    @property
    def awaited(self) -> Sequence[str]:
        """Names of the servers that have not answered since the fleet was opened without them."""
        return tuple(self._awaited)

    async def open(self) -> None:
        """Open every server and check that they agree; close all of them if anything is wrong.

        Servers may have different numbered versions, which only a resumed run can use. With
        `wait_s`, servers that do not answer are waited for, and left out after that.

        Raises:
            EngineError: if a server cannot be reached or is another program; with `wait_s`, if none
                can be reached.
            ConfigError: if the servers differ in model, or in their initial weights.
        """
        await self._open_all((*self.engines, *self._awaited.values()))

    async def add(self, url: str) -> None:
        """Add a server while the fleet is open; its weights may be of any version.

        Raises:
            EngineError: if the server cannot be reached or is another program.
            ConfigError: if the URL is bad or in the fleet already, or the model is another one.
        """
        await self._join(self._engine(url))

    async def remove(self, url: str) -> None:
        """Remove a server from the fleet; the generations on it are lost.

        Raises:
            ConfigError: if the server is not in the fleet, or is the last one.
        """
        self._leave(ServerAddress.parse(url).name)

    async def watch(self) -> AsyncGenerator[FleetChange, None]:
        """Yield the changes that :meth:`add` and :meth:`remove` make.

        See :class:`aprilsched.kernel.engines.base.WatchesMembership`.
        """
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S if self.awaited else None):
                    await self._changed.wait()
            await asyncio.gather(*map(self._try_join, self._awaited.values()))
            change = self._take()
            if change is not None:
                yield change


class ListedFleet(HttpFleet[EngineT]):
    """The servers that a function lists, as they join and leave.

    The function is called when the fleet is opened, and again every `poll_s` seconds. A server that
    is listed joins as soon as it answers. A server that is missing in two lists in a row has left,
    unless it is the last one. An empty list, or a function that raises, changes nothing.

    Args:
        list_urls: ``async def list_urls()`` returns the URLs of the servers that run now, as
            ``http://host:port``.
        model_path: refuse servers that serve another model; None accepts any one model.
        poll_s: seconds between two calls of `list_urls`.
        settings: keys, `stream_interval`, `limits` and `first_version`, as of each engine.

    Raises:
        ConfigError: if `poll_s` is not above 0.
    """

    _engine_type: type[EngineT]

    def __init__(
        self,
        list_urls: Callable[[], Awaitable[Sequence[str]]],
        *,
        model_path: str | None = None,
        poll_s: float = 5.0,
        **settings: Unpack[ServerSettings],
    ) -> None:
        check_range(ABOVE_0, poll_s=poll_s)
        super().__init__(model_path)
        self._poll_s = poll_s
        self._list_urls = list_urls
        self._engine = partial(self._engine_type, **settings)
        self._missing: dict[str, int] = {}
        """Number of lists in a row in which an engine was missing, by engine."""
        self._apart: dict[str, EngineT] = {}
        """Engines of :meth:`listed`, by name."""

    async def open(self) -> None:
        """Ask for the list and open each server; close all of them if anything is wrong.

        Raises:
            EngineUnreachable: if the list is empty.
            EngineError: if a server cannot be reached or is another program.
            ConfigError: if a URL is bad, or if the servers differ in model, or in their initial
                weights.
            Exception: any exception of the function that lists the servers.
        """
        self._missing = {}
        await self._open_all([self._engine(url) for url in (await self._list()).values()])

    async def watch(self) -> AsyncGenerator[FleetChange, None]:
        """Yield the servers that are new in the list or missing from it.

        See :class:`aprilsched.kernel.engines.base.WatchesMembership`.
        """
        while True:
            await asyncio.sleep(self._poll_s)
            await self._look()
            change = self._take()
            if change is not None:
                yield change

    async def listed(self) -> Sequence[EngineT]:
        """Ask for the list, and return one engine per server, which the caller opens and closes.

        For users other than the scheduler, such as a publisher in another process. A server that
        is still listed keeps its engine."""
        urls = {ServerAddress.parse(url).name: url for url in await self._list_urls()}
        self._apart = {
            name: self._apart.get(name) or self._engine(url) for name, url in urls.items()
        }
        return tuple(self._apart.values())

    async def _list(self) -> Mapping[str, str]:
        """The URL of each listed server, by name."""
        urls = await self._list_urls()
        if not urls:
            raise EngineUnreachable("the list of servers", "is empty; start the servers first.")
        return {ServerAddress.parse(url).name: url for url in urls}

    async def _look(self) -> None:
        """Add newly listed servers, and drop servers missing from two lists in a row."""
        try:
            listed = await self._list()
        except Exception as error:  # The run continues with the servers that it has.
            what = str(error) if isinstance(error, EngineError) else repr(error)
            self._warn_once("", f"listing the servers failed: {what}")
            return
        self._fine("")
        for name, url in listed.items():
            if name not in self._engines:
                await self._try_join(self._engine(url))
        for engine in self.engines:
            times = 0 if engine.name in listed else self._missing.get(engine.name, 0) + 1
            self._missing[engine.name] = times
            if times >= _LISTINGS_UNTIL_GONE and len(self.engines) > 1:
                del self._missing[engine.name]
                self._leave(engine.name)


def _no_answer(error: BaseException | None) -> bool:
    """Whether a server did not answer, or answered that it is not ready, as while it loads."""
    unavailable = isinstance(error, EngineRejected) and error.status == _UNAVAILABLE
    return unavailable or isinstance(error, EngineUnreachable | ControlTimeout)


Trait = tuple[str, Callable[[Facts], Any], str]


def _model(facts: Facts) -> str | None:
    """Return the model that a server was started with, or None if it does not report it.

    A server that has loaded weights from disk reports their folder, which may differ for each
    version.
    """
    return None if version_number(facts.label) else facts.model_path


_ONE_MODEL: Sequence[Trait] = (
    ("model", lambda facts: _model(facts), "serve one model in the whole fleet"),
    ("vocabulary size", lambda facts: facts.vocab_size, "serve one model in the whole fleet"),
)
_ONE_VERSION: Trait = (
    "weight version",
    # Of servers with numbered versions the scheduler judges: in a resumed run a server may have an
    # older one, or the label that it was started with, because it has been restarted too.
    lambda facts: None if version_number(facts.label) else facts.label,
    "load the same weights everywhere, under the same weight_version, or restart the servers",
)


def check_fleet(engines: Sequence[HttpEngine[Any]], model_path: str | None) -> None:
    """Refuse open engines that differ in model or initial weights, or do not serve `model_path`.

    Raises:
        ConfigError: if they do; it names two that differ, and what to change.
    """
    first, *others = engines
    if model_path is not None and first.facts.model_path != model_path:
        raise ConfigError(
            f"{first.name} serves {first.facts.model_path!r} and not {model_path!r}; "
            "start it with that model or change model_path."
        )
    for other in others:
        _agree(first, other, (*_ONE_MODEL, _ONE_VERSION))


def check_joiner(first: HttpEngine[Any], joiner: HttpEngine[Any]) -> None:
    """Refuse an open engine of another model; its weights may be of any version.

    Raises:
        ConfigError: if the models differ; it names both engines, and what to change.
    """
    _agree(first, joiner, _ONE_MODEL)


def _agree(first: HttpEngine[Any], other: HttpEngine[Any], traits: Sequence[Trait]) -> None:
    for what, of, remedy in traits:
        ours, theirs = of(first.facts), of(other.facts)
        if ours != theirs and ours is not None and theirs is not None:
            raise ConfigError(
                f"{first.name} and {other.name} disagree on the {what} ({ours!r} and "
                f"{theirs!r}); {remedy}."
            )
