"""A fleet of SGLang servers that Ray actors own.

Trainers on Ray start each server inside an actor, and know the actors and not their addresses. An
actor that dies is restarted by Ray, often with a server at another address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from aprilsched.fronts.ray.library import exceptions, named
from aprilsched.kernel.engines.fleet import ServerSettings
from aprilsched.kernel.engines.sglang.http_engine import SGLangListedFleet

FIRST_ANSWER_S = 600.0
"""Seconds that actors have for their answers when the fleet is opened: they may be starting their
servers."""
ANSWER_S = 5.0
"""Seconds that an actor has for its answer later. A busy one, such as one that loads weights, keeps
its last address."""


class RayFleet(SGLangListedFleet):
    """The SGLang servers of Ray actors, as the actors die and are restarted.

    .. code-block:: python

        servers = [Server.options(max_restarts=-1).remote() for _ in range(4)]
        async with RolloutScheduler(RayFleet(servers), prompts) as rollouts: ...

    Every `poll_s` seconds the fleet queries each actor for its server's address. When an actor
    dies, its server leaves the fleet, unless it is the last one, and its rollouts continue on the
    other servers. When Ray has restarted the actor, its server rejoins at its new address. A busy
    actor keeps its address.

    Ray must be connected (``ray.init()``) before the fleet is opened.

    Args:
        actors: handles of actors, or names of named actors. A name is looked up every time, so
            that another actor may replace one that died.
        address: requests an actor's address, ``lambda actor: actor.where.remote()``. By default
            the actor's method ``get_url`` or ``get_server_address`` is called. The result is a
            URL, ``"host:port"``, or a pair of host and port; None if the actor has no server, as
            on the other nodes of a server that spans several. If the actor raises, :meth:`open`
            raises the same error; after that, the fleet retries.
        model_path: reject servers that serve another model; None accepts any one model.
        poll_s: interval at which addresses are polled, in seconds.
        settings: as of :class:`~aprilsched.SGLangFleet`.

    Raises:
        ConfigError: if `poll_s` is not above 0.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        address: Callable[[Any], Any] | None = None,
        model_path: str | None = None,
        poll_s: float = 5.0,
        **settings: Unpack[ServerSettings],
    ) -> None:
        self._actors = tuple(actors)
        self._address = address or _address
        self._known: dict[int, str | None] = {}
        """Address that each actor gave last, by its position; None if it has no server."""
        self._opening = False
        super().__init__(self._urls, model_path=model_path, poll_s=poll_s, **settings)

    async def open(self) -> None:
        """Query the actors' addresses, and open each server.

        It may take minutes while actors start their servers. See
        :meth:`aprilsched.SGLangListedFleet.open`.
        """
        self._known.clear()
        self._opening = True
        try:
            await super().open()
        finally:
            self._opening = False

    async def _urls(self) -> Sequence[str]:
        """Return the URLs of the servers whose actors live."""
        await asyncio.gather(*(self._ask(number) for number in range(len(self._actors))))
        return [url for _, url in sorted(self._known.items()) if url is not None]

    async def _ask(self, number: int) -> None:
        actor = self._actors[number]
        try:
            async with asyncio.timeout(FIRST_ANSWER_S if self._opening else ANSWER_S):
                if isinstance(actor, str):
                    actor = await asyncio.to_thread(named, actor)
                if actor is None:
                    self._known.pop(number, None)
                else:
                    self._known[number] = _url(await self._address(actor))
        except exceptions.RayActorError:  # It has died, or is just being restarted.
            self._known.pop(number, None)
        except (exceptions.RayTaskError, TimeoutError):
            # An actor that was restarted may have no server yet, and raise.
            if self._opening:
                raise


def _address(actor: Any) -> Any:
    """Call slime's method, or else verl's."""
    method = getattr(actor, "get_url", None) or actor.get_server_address
    return method.remote()


def _url(answer: Any) -> str | None:
    """Return the URL in the answer of an actor."""
    if answer is None:
        return None
    if not isinstance(answer, str):
        host, port = answer
        answer = f"[{host}]:{port}" if ":" in host and "[" not in host else f"{host}:{port}"
    return answer if "://" in answer else f"http://{answer}"
