"""One SGLang server over HTTP, and fleets of such servers."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from aprilsched.kernel.engines.address import ServerAddress
from aprilsched.kernel.engines.base import CLAIM_S, GenerationRequest
from aprilsched.kernel.engines.control import Questions
from aprilsched.kernel.engines.fleet import ListedFleet, UrlFleet
from aprilsched.kernel.engines.http import HttpLimits
from aprilsched.kernel.engines.sglang.batched_stream import SharingEngine
from aprilsched.kernel.engines.sglang.control import ServerControl
from aprilsched.kernel.engines.sglang.dp_ranks import DpRanks
from aprilsched.kernel.engines.sglang.probe import ServerFacts, probe
from aprilsched.kernel.engines.transport import Transport

_CLAIMS = ("aprilsched-claim-0", "aprilsched-claim-1")
"""Names of the two sessions that are a claim on a server. Opening a session that exists is refused,
and only its timeout ends it, so that no client ends the claim of another by renewing its own. They
expire half of ``CLAIM_S`` apart: while one is opened again, the other is valid."""
_REAP_S = 1.2
"""Seconds after which SGLang has closed a session that has expired, if it is asked for it (0.5.23
looks once a second)."""
_REFUSED = 400

_log = logging.getLogger(__name__)


class SGLangEngine(SharingEngine, ServerControl):
    """One SGLang server.

    Args:
        url: URL where the server listens, as ``http://host:port``.
        admin_key: the server's ``--admin-api-key``, for control calls.
        api_key: the server's ``--api-key``, for generation.
        stream_interval: tokens between two events of a stream. A request that is lost with
            its server, or aborted after a retract, loses at most this number of tokens.
        limits: timeouts and sizes.
        first_version: version of the weights that the server labels "0". It is for a trainer that
            labels its weights from 1 again in each process, while the versions of a resumed run
            continue from the previous run's. With it, a resumed run takes decimal numbers for its
            versions.

    Raises:
        ConfigError: if `url`, a key or `stream_interval` cannot be used.
    """

    _claims: Mapping[str, float] = {}
    """When each session of the claim expires at the latest; empty without a claim."""

    async def open(self) -> None:
        """Connect and probe; close the connections again if the server cannot be used."""
        self._groups.clear()
        await super().open()
        self._dp_ranks = DpRanks(self.facts.dp_ranks)
        if self.facts.incremental is False:
            _log.warning(
                "%s streams cumulatively, which costs the square of a response's length; start "
                "it with --incremental-streaming-output.",
                self.name,
            )

    async def _probe(self) -> ServerFacts:
        facts = await probe(self._questions)
        if self._facts is None or self._facts.process != facts.process:
            self._claims = {}
        await self._forget_releases_of_prior_run()
        return facts

    async def claim(self) -> bool:
        """See :class:`~aprilsched.kernel.engines.base.Claimable`; a server whose sessions have no
        timeout takes no claims, so any client gets one."""
        if not self.facts.expiring_sessions:
            return True
        if len(self._claims) < len(_CLAIMS):
            return await self._claim_first()
        held = False
        for session, expiry in sorted(self._claims.items(), key=lambda each: each[1]):
            now = time.monotonic()
            if now < expiry + _REAP_S:
                held = True
                continue
            latest = max(now, *self._claims.values())
            held = await self._open_claim(session, latest + CLAIM_S / 2 - now) or held
        return held

    async def _claim_first(self) -> bool:
        self._claims = {}
        for place, session in enumerate(_CLAIMS, start=1):
            if not await self._open_claim(session, place * CLAIM_S / len(_CLAIMS)):
                await self.disclaim()
                return False
        return True

    async def disclaim(self) -> None:
        """See :class:`~aprilsched.kernel.engines.base.Claimable`."""
        claims, self._claims = self._claims, {}
        now = time.monotonic()
        for session, expiry in claims.items():
            # One that has expired may be another client's by now.
            if now < expiry:
                await self._close_claim(session)

    async def _open_claim(self, session: str, timeout: float) -> bool:  # noqa: ASYNC109
        body = {"capacity_of_str_len": 1, "session_id": session, "timeout": timeout}
        try:
            answer = await self._server.call(
                "POST",
                "open_session",
                body,
                # A server that loads weights answers afterwards.
                timeout=self._limits.update_timeout,
                accept=(200, _REFUSED),
                repeatable=False,
                admin=False,
            )
        except BaseException:
            # The server may have opened it all the same.
            self._claims = {**self._claims, session: time.monotonic() + timeout}
            raise
        if answer.status == _REFUSED:
            return False
        self._claims = {**self._claims, session: time.monotonic() + timeout}
        return True

    async def _close_claim(self, session: str) -> None:
        await self._questions.ask("close_session", {"session_id": session})

    def _post(self, request: GenerationRequest) -> tuple[str, dict[str, Any]]:
        body, dp_rank = self._body(request), self._dp_ranks.of(request.request_id)
        return "generate", body if dp_rank is None else {**body, "routed_dp_rank": dp_rank}

    async def _abort(self, request_id: str, timeout: float) -> None:  # noqa: ASYNC109
        await self._server.call("POST", "abort_request", {"rid": request_id}, timeout=timeout)


class SGLangFleet(UrlFleet[SGLangEngine]):
    """The SGLang servers at `urls`.

    Args:
        urls: one URL for each server, as ``http://host:port``.
        model_path: refuse servers that serve another model; None accepts any one model.
        wait_s: seconds to wait for servers that do not answer when the fleet is opened. After that
            it opens if any server answers, and the others join as soon as they answer. None opens
            all servers or none.
        settings: `admin_key`, `api_key`, `stream_interval`, `limits` and `first_version`, for each
            server, as of :class:`~aprilsched.kernel.engines.sglang.http_engine.SGLangEngine`.

    Raises:
        ConfigError: if `urls` is empty or contains a bad or duplicate URL, or if `wait_s` is
            negative.
    """

    _engine_type = SGLangEngine


class SGLangListedFleet(ListedFleet[SGLangEngine]):
    """The SGLang servers that a function lists, as they join and leave.

    The function is asked when the fleet is opened, and again every `poll_s` seconds. A server that
    is listed joins as soon as it answers. A server that is missing in two lists in a row has left,
    unless it is the last one. An empty list, or a function that raises, changes nothing.

    Args:
        list_urls: ``async def list_urls()`` returns the URLs of the servers that run now, as
            ``http://host:port``.
        model_path: refuse servers that serve another model; None accepts any one model.
        poll_s: seconds between two calls of `list_urls`.
        settings: as of :class:`SGLangFleet`.

    Raises:
        ConfigError: if `poll_s` is not above 0.
    """

    _engine_type = SGLangEngine


class _Worker(msgspec.Struct, frozen=True):
    url: str


class _Workers(msgspec.Struct, frozen=True):
    workers: list[_Worker]


def workers_of_router(
    url: str, *, api_key: str | None = None
) -> Callable[[], Awaitable[Sequence[str]]]:
    """Return the `list_urls` of a :class:`SGLangListedFleet` whose servers an SGLang router lists.

    Requests and control calls go to the workers directly, so the router needs no special policy.
    Workers that the router calls unhealthy are included, because a paused server looks unhealthy.

    Args:
        url: URL of an sglang-router, as ``http://host:port``.
        api_key: the router's ``--api-key``.

    Raises:
        ConfigError: if `url` or `api_key` cannot be used.
    """
    address, limits = ServerAddress.parse(url), HttpLimits()
    name = f"router {address.name}"
    router = Transport(name, address.url, admin_key=None, api_key=api_key, limits=limits)
    questions = Questions(name, "SGLang", router, limits.control_timeout)

    async def list_urls() -> Sequence[str]:
        await router.open()
        try:
            return [worker.url for worker in (await questions.get("workers", _Workers)).workers]
        finally:
            await router.close()

    return list_urls
