"""The router's list of workers, and the position of a worker in it at this moment.

sglang-router 0.3.2 sends a request to the worker whose *position* is in a header. The position
counts from 0 over the healthy workers, in the order of GET /workers (measured). It changes
whenever a worker comes, goes or changes its health, so it is looked up for each request and never
remembered. Only the policy consistent_hashing reads the header.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from aprilsched.engines.http.address import ServerAddress
from aprilsched.engines.http.limits import HttpLimits
from aprilsched.engines.http.transport import Transport
from aprilsched.engines.sglang.probe import decode
from aprilsched.errors import (
    ConfigError,
    ControlTimeout,
    EngineError,
    EngineProtocolError,
    EngineRejected,
)

TARGET = "x-smg-target-worker"
ERROR_CODE = "x-smg-error-code"
"""Header of an answer that comes from the router itself and not from a worker."""
_NOBODY = "none"
_MAX_WORKERS = 4096


class Worker(msgspec.Struct, frozen=True):
    """One worker as the router lists it."""

    url: str
    is_healthy: bool
    worker_type: str = "regular"


class _Listing(msgspec.Struct, frozen=True):
    workers: list[Worker]


class Roster:
    """The list of the router at `url`; its connections belong to one loop from open to close."""

    def __init__(self, url: str, *, api_key: str | None, limits: HttpLimits) -> None:
        address = ServerAddress.parse(url)
        self.url = address.url
        self.name = f"router {address.name}"
        self._timeout = limits.control_timeout
        self._transport = Transport(
            self.name, self.url, admin_key=None, api_key=api_key, limits=limits
        )
        self._running: asyncio.Task[list[Worker]] | None = None
        self._next: asyncio.Task[list[Worker]] | None = None

    async def open(self) -> None:
        """Make the connections; nothing is sent."""
        self._running = self._next = None
        await self._transport.open()

    async def close(self) -> None:
        """Drop the connections."""
        tasks = [task for task in (self._next, self._running) if task is not None]
        self._running = self._next = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._transport.close()

    async def workers(self) -> Sequence[Worker]:
        """List the workers; the listing begins after the call, and concurrent callers share it.

        Raises:
            EngineError: if the router does not answer.
            EngineProtocolError: if a worker is not an HTTP server that generates by itself.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._list(self._running))
            self._next.add_done_callback(_retrieve_error)
        listing = self._next
        await asyncio.wait([listing])
        if listing.cancelled():
            raise EngineError(self.name, "was closed while it was asked for its workers.")
        return listing.result()

    async def position(self, url: str) -> int | None:
        """The position of a worker among the healthy ones now; None if it is not one of them."""
        healthy = [worker.url for worker in await self.workers() if worker.is_healthy]
        return healthy.index(url) if url in healthy else None

    async def check_pins(self) -> None:
        """Refuse a router that does not send a request to the worker in its header.

        The router must refuse a request to a worker that does not exist. If it does not, the
        request costs one token.

        Raises:
            ConfigError: if it does not; the message says with which policy to start the router.
        """
        wrong = ConfigError(
            f"The {self.name} ignores which worker a request is for; start it with the policy "
            "consistent_hashing."
        )
        try:
            answer = await self._transport.call(
                "POST",
                "generate",
                {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}},
                timeout=self._timeout,
                accept=(200, 400, 500, 503),
                repeatable=False,
                admin=False,
                headers={TARGET: _NOBODY},
            )
        except ControlTimeout as error:
            raise wrong from error
        if answer.status != 503 or b"no_available_workers" not in answer.body:
            raise wrong

    async def _list(self, before: asyncio.Task[list[Worker]] | None) -> list[Worker]:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        return await self._ask()

    async def _ask(self) -> list[Worker]:
        try:
            answer = await self._transport.call(
                "GET", "workers", timeout=self._timeout, admin=False
            )
        except EngineRejected as error:
            if error.status != 404:
                raise
            raise EngineProtocolError(
                self.name, "has no GET /workers; give the URL of an sglang-router of 0.3 or later."
            ) from error
        workers = decode(self.name, "/workers", answer.body, _Listing).workers
        if len(workers) > _MAX_WORKERS:
            raise EngineProtocolError(
                self.name, f"lists {len(workers)} workers; use a router of at most {_MAX_WORKERS}."
            )
        for worker in workers:
            self._check(worker)
        return workers

    def _check(self, worker: Worker) -> None:
        if worker.worker_type != "regular":
            raise EngineProtocolError(
                self.name,
                f"lists a {worker.worker_type[:40]} worker; start it without prefill-decode "
                "disaggregation.",
            )
        try:
            ServerAddress.parse(worker.url)
        except ConfigError as error:
            raise EngineProtocolError(
                self.name,
                "lists a worker that is not a plain http(s) URL; start it with HTTP workers and "
                "without --dp-aware.",
            ) from error


def _retrieve_error(task: asyncio.Task[list[Worker]]) -> None:
    """Mark the error of a listing as seen, since all of its waiters may have gone."""
    if not task.cancelled():
        task.exception()
