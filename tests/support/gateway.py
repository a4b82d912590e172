"""A gateway in front of embedded engines behind SGLang's HTTP API, and clients of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from aprilsched import SchedulerConfig, SGLangFleet
from aprilsched.agents.gateway import Gateway, GatewaySettings
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.testing import SimServer
from aprilsched.testing.contract import until
from tests.support.sim_http import INTERVAL, Raw, asked, served

__all__ = ["LONG", "Front", "Reader", "front", "spans"]

LONG = 1500
"""Tokens of a response that is still running when a test looks at it."""


class Front:
    """A gateway, its servers, and a client."""

    def __init__(self, gateway: Gateway, servers: list[SimServer], raw: Raw) -> None:
        self.gateway, self.servers, self.raw = gateway, servers, raw

    @property
    def state(self) -> SchedulerState:
        return self.gateway.service._scheduler.state  # pyright: ignore[reportPrivateUsage]

    async def idle(self) -> None:
        """Wait until nothing is left, in the gateway and on its servers."""
        batchers = [server.engine.batcher for server in self.servers]
        await until(
            lambda: (
                len(self.gateway.service.responses) == 0
                and not self.state.in_flight.groups
                and not any(batcher.running + batcher.waiting for batcher in batchers)
            )
        )

    def stream(self, tokens: int, **body: Any) -> Reader:
        return Reader(self.raw, {**asked(tokens, **body), "stream": True, "return_logprob": True})

    async def reference(self, tokens: int) -> list[int]:
        """The tokens without an interruption."""
        status, answer = await self.raw.post("/generate", asked(tokens))
        assert status == 200
        return answer["output_ids"]


class Reader:
    """A streamed response that a task reads; the events that have come so far."""

    def __init__(self, raw: Raw, body: dict[str, Any]) -> None:
        self.events: list[dict[str, Any]] = []
        self.done = False
        self.task = asyncio.create_task(self._read(raw, body))

    async def _read(self, raw: Raw, body: dict[str, Any]) -> None:
        async with raw.session.post("/generate", json=body) as answer:
            assert answer.status == 200
            async for line in answer.content:
                if line.startswith(b"data: [DONE]"):
                    self.done = True
                elif line.startswith(b"data: "):
                    self.events.append(msgspec.json.decode(line.removeprefix(b"data: ")))

    @property
    def ids(self) -> list[int]:
        return [i for event in self.events for i in event["output_ids"]]

    @property
    def last(self) -> dict[str, Any]:
        return self.events[-1]["meta_info"]

    async def reach(self, tokens: int) -> Reader:
        await until(lambda: len(self.ids) >= tokens or self.task.done())
        assert not self.done, "the response was over too soon; ask for more tokens"
        return self

    async def end(self) -> Reader:
        await self.task
        assert self.done
        return self


@asynccontextmanager
async def front(
    engines: int = 1,
    config: SchedulerConfig | None = None,
    *,
    api_key: str | None = None,
    admin_key: str | None = None,
    refit_seconds: float = 0.0,
    **settings: Any,
) -> AsyncGenerator[Front]:
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(served(refit_seconds=refit_seconds))
            for _ in range(engines)
        ]
        made: dict[str, Any] = {"port": 0, "drain_s": 0, **settings}
        gateway = Gateway(
            SGLangFleet([server.url for server in servers], stream_interval=INTERVAL),
            settings=GatewaySettings(**made),
            config=config,
            api_key=api_key,
            admin_key=admin_key,
        )
        await stack.enter_async_context(gateway)
        raw = await stack.enter_async_context(Raw(gateway.url, admin_key))
        yield Front(gateway, servers, raw)


def spans(meta: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
