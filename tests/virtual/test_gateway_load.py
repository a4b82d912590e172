"""Tests clients of the gateway that read, leave, abort and read slowly, all at once."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from aprilsched import SGLangFleet
from aprilsched.agents.gateway import Gateway, GatewaySettings
from aprilsched.testing.contract import until
from tests.support.gateway_clients import running, trouble
from tests.support.sim_http import INTERVAL, served
from tests.support.tiny_tokenizer import bytes_tokenizer

pytestmark = pytest.mark.long


async def test_leaving_clients_get_whole_answers_and_leave_nothing(tmp_path: Path):
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(served()) for _ in range(2)]
        gateway = Gateway(
            SGLangFleet([server.url for server in servers], stream_interval=INTERVAL),
            settings=GatewaySettings(
                port=0, drain_s=0, tokenizer=bytes_tokenizer(tmp_path, parses=True)
            ),
        )
        await stack.enter_async_context(gateway)
        tally = await running(gateway.url, 30, seed=3, requests=4, slow_s=0.02)
        assert tally.wrong == []
        assert sum(tally.ended.values()) == 120
        ends = {how.rpartition(", ")[2] for how in tally.ended}
        # A response may be over before its abort arrives.
        assert {"read", "left"} <= ends <= {"read", "left", "aborted"}
        for url in (gateway.url, *(server.url for server in servers)):

            async def idle(url: str = url) -> bool:
                return not await trouble(url)

            await until(idle)
        assert len(gateway.service.responses) == 0
