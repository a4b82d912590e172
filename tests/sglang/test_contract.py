"""Tests that the real server and the embedded engine keep the engine contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.engine.sim_engine import SimEngine
from aprilsched.testing.contract import ALL_CHECKS, Check, Subject
from tests.sglang.helpers import running
from tests.sglang.server import CpuServer


@pytest.fixture
async def sglang(
    engine: SGLangEngine, clean_server: CpuServer, models: tuple[Path, Path]
) -> Subject:
    """The adapter on a real server."""
    return Subject(engine=engine, weights=models, busy=lambda: running(clean_server.url))


@pytest.fixture
async def sim(tmp_path: Path) -> AsyncIterator[Subject]:
    """The embedded engine, in wall time; its weights are the bytes of the files."""
    engine = SimEngine(config=SimConfig(stream_interval=16, vocab_size=512), time_scale=0.5)
    weights = tmp_path / "first", tmp_path / "second"
    for path in weights:
        path.mkdir()
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_text(path.name)

    async def busy() -> int:
        return engine.batcher.running + engine.batcher.waiting

    await engine.open()
    yield Subject(engine=engine, weights=weights, busy=busy)
    await engine.close()


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
async def test_sglang(sglang: Subject, check: Check) -> None:
    """The real server keeps it."""
    await check(sglang)


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
async def test_sim(sim: Subject, check: Check) -> None:
    """The embedded engine keeps it."""
    await check(sim)
