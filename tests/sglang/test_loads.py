"""Tests the load that real servers report, with and without their own metrics."""

from __future__ import annotations

import aiohttp

from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.kernel.engines.sglang.loads import SERIES
from aprilsched.testing.contract import greedy, whole
from tests.sglang.conftest import ADMIN_KEY
from tests.sglang.loads_contract import check_loads
from tests.sglang.server import CpuServer


async def test_the_answer_has_the_form_that_the_stand_in_has(engine: SGLangEngine):
    await whole(engine, greedy(32))
    async with (
        aiohttp.ClientSession(str(engine._url)) as session,
        session.get("/v1/loads?include=core") as answer,
    ):
        check_loads(await answer.json())


async def test_a_server_that_measures_itself_tells_more(
    clean_pair: tuple[CpuServer, CpuServer],
):
    silent = SGLangEngine(clean_pair[0].url)
    telling = SGLangEngine(clean_pair[1].url, admin_key=ADMIN_KEY)
    for engine in (silent, telling):
        await engine.open()
        try:
            await whole(engine, greedy(200))
            load = await engine.load(metrics=True)
            received = engine is telling
            assert (load.tokens_per_s is not None) == received
            assert load.decode_seconds is not None
            assert load.prefill_seconds is not None
            assert set(load.series) == (set(SERIES) if received else set())
            assert load.generated is not None
            assert load.generated > 0
        finally:
            await engine.close()
