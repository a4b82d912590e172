"""Real servers as fixtures: all tests share them, and the first test that needs one boots it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from aprilsched.kernel.engines.sglang import SGLangEngine
from tests.sglang.helpers import reset
from tests.sglang.server import CpuServer, server_python, write_model

ADMIN_KEY = "an-admin-key-of-the-tests"
INTERVAL = 16


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one shape with very different weights; servers start with the first."""
    try:
        server_python()
    except RuntimeError as error:
        pytest.fail(str(error), pytrace=False)
    folder = tmp_path_factory.mktemp("models")
    return write_model(folder / "first", seed=0), write_model(folder / "second", seed=1)


@pytest.fixture(scope="session")
def sglang_server(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CpuServer]:
    """A server without keys."""
    with CpuServer(models[0], tmp_path_factory.mktemp("server") / "log.txt") as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="session")
def second_server(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CpuServer]:
    """A server with metrics that needs :data:`ADMIN_KEY` for control; it may not be ready yet."""
    log = tmp_path_factory.mktemp("second") / "log.txt"
    with CpuServer(models[0], log, "--admin-api-key", ADMIN_KEY, "--enable-metrics") as server:
        yield server


@pytest.fixture(scope="session")
def sglang_pair(second_server: CpuServer, sglang_server: CpuServer) -> tuple[CpuServer, CpuServer]:
    """A server without keys and one with keys, which boot at the same time."""
    second_server.wait_ready()
    return sglang_server, second_server


@pytest.fixture
async def clean_server(
    sglang_server: CpuServer, models: tuple[Path, Path]
) -> AsyncIterator[CpuServer]:
    """The server, reset to its initial state before and after the test."""
    await reset(sglang_server.url, models[0])
    yield sglang_server
    assert sglang_server.alive(), f"The test killed the server:\n{sglang_server.tail()}"
    await reset(sglang_server.url, models[0])


@pytest.fixture
async def clean_pair(
    clean_server: CpuServer, sglang_pair: tuple[CpuServer, CpuServer], models: tuple[Path, Path]
) -> AsyncIterator[tuple[CpuServer, CpuServer]]:
    """Both servers, reset to their initial state before and after the test."""
    await reset(sglang_pair[1].url, models[0], ADMIN_KEY)
    yield sglang_pair
    await reset(sglang_pair[1].url, models[0], ADMIN_KEY)


@pytest.fixture
async def engine(clean_server: CpuServer) -> AsyncIterator[SGLangEngine]:
    """An open engine on the server."""
    opened = SGLangEngine(clean_server.url, stream_interval=INTERVAL)
    await opened.open()
    yield opened
    await opened.close()
