"""Examines one server: opens it, runs the scenarios, and applies the checks."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from aprilsched.doctor import scenarios
from aprilsched.doctor.checks import CHECKS
from aprilsched.doctor.client import Client
from aprilsched.doctor.findings import Finding, Notes
from aprilsched.engines.http.address import ServerAddress
from aprilsched.engines.http.limits import HttpLimits
from aprilsched.engines.http.transport import Transport
from aprilsched.engines.sglang import SGLangEngine
from aprilsched.engines.sglang.calls import despite_cancellation
from aprilsched.engines.sglang.probe import release
from aprilsched.errors import EngineError

__all__ = ["examine"]

SCENARIO_SECONDS = 40.0
LAST_SECONDS = 30.0
_LIMITS = HttpLimits(control_timeout=10.0)


async def examine(
    url: str, *, admin_key: str | None = None, api_key: str | None = None
) -> list[Finding]:
    """Run every check on the server at `url`; the findings are in the order of the table.

    Raises:
        EngineError: if it cannot be reached, is not SGLang, or does not accept the key.
        ConfigError: if `url` or a key is not valid.
    """
    engine = SGLangEngine(url, admin_key=admin_key, api_key=api_key, limits=_LIMITS)
    await engine.open()
    await engine.close()
    notes = Notes(facts=engine.facts, version=_version(engine))
    address = ServerAddress.parse(url)
    transport = Transport(
        address.name, address.url, admin_key=admin_key, api_key=api_key, limits=_LIMITS
    )
    await transport.open()
    client = Client(address.name, transport, _LIMITS, engine.facts)
    try:
        try:
            await scenarios.run(client, notes, SCENARIO_SECONDS)
        finally:
            await despite_cancellation(_last(client, notes))
    finally:
        await transport.close()
    return [check.finding(notes) for check in CHECKS]


def _version(engine: SGLangEngine) -> tuple[int, int, int]:
    return release(engine.facts.capabilities.server.removeprefix("SGLang "))


async def _last(client: Client, notes: Notes) -> None:
    """Restore the server in bounded time without raising; a failure shows as a finding."""
    with contextlib.suppress(EngineError, TimeoutError, msgspec.DecodeError):
        async with asyncio.timeout(LAST_SECONDS):
            await scenarios.afterwards(client, notes)
