"""Tests that a real server's retractions limit the sessions on it, and that the limit recovers."""

from __future__ import annotations

from pathlib import Path

import pytest

from aprilsched import SGLangFleet
from tests.sglang.server import CpuServer
from tests.support.session_kv import fall_and_recover

pytestmark = pytest.mark.long

POOL = 1024


async def test_retractions_lower_the_limit_of_sessions_and_it_recovers(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    flags = (
        *("--max-total-tokens", str(POOL), "--enable-metrics"),
        # The server admits requests without room for the tokens that they will generate.
        *("--schedule-conservativeness", "0.01"),
    )
    with CpuServer(models[0], tmp_path / "log.txt", *flags) as server:
        server.wait_ready()
        fleet = SGLangFleet([server.url], stream_interval=16)
        load = await fall_and_recover(fleet)
    assert load.kv_capacity == POOL
