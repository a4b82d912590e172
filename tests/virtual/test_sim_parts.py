"""Tests adapters, memory and update sessions of the embedded engine, with and without HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from aiohttp import web

from aprilsched.errors import (
    ConfigError,
    EngineError,
    EngineProtocolError,
    EngineRejected,
    EngineUnreachable,
)
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.kernel.weights.lora import LoraPublisher
from aprilsched.simulation.engine import SimEngine, run_virtual
from aprilsched.testing import SimServer
from aprilsched.testing.contract import Stream, whole
from tests.sglang.adapter_contract import (
    ADAPTER_CHECKS,
    AdapterCheck,
    Adapting,
    adapted,
    fake_adapters,
)
from tests.support.publishers import SimAdapterPublisher
from tests.support.sim_http import CONFIG, INTERVAL, Raw, served
from tests.support.table import each_row

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


@each_row("check", ADAPTER_CHECKS, ids=lambda check: check.__name__)
async def test_a_served_engine_takes_adapters_like_a_real_one(tmp_path: Path, check: AdapterCheck):
    async with served() as server:
        engine = SGLangEngine(server.url, stream_interval=INTERVAL)
        await engine.open()
        folder = tmp_path / "versions"
        await check(Adapting(engine=engine, adapters=fake_adapters(tmp_path), folder=folder))
        await engine.close()


async def test_updates_in_parts_have_a_beginning_and_an_end():
    async with served() as server, Raw(server.url) as raw:
        statuses = [
            (await raw.post(path, {}))[0]
            for path in ("/end_weight_update", *["/begin_weight_update"] * 2, "/end_weight_update")
        ]
        assert statuses == [400, 200, 400, 200]
        engine = SGLangEngine(server.url)
        await engine.open()
        await engine.begin_update()
        await engine.begin_update()
        await engine.end_update(7)
        assert await engine.version() == 7
        await engine.close()


async def test_an_engine_that_is_started_again_has_all_its_memory():
    """A new server has all its memory, whatever the previous one had released."""
    async with served() as server:
        engine = SGLangEngine(server.url, stream_interval=INTERVAL)
        await engine.open()
        await engine.pause("retract")
        await engine.release(["kv_cache"])
        server.engine.crash()
        await server.engine.restart()
        with pytest.raises(EngineRejected, match="wake it first"):
            await engine.resume()
        await engine.close()
        await engine.open()
        await engine.resume()
        assert len(await whole(engine, adapted(None, 8))) == 8
        await engine.close()


async def test_what_cannot_be_published_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="keep is 0"):
        LoraPublisher(tmp_path, lambda path: None, keep=0)
    with pytest.raises(ConfigError, match="name is empty"):
        LoraPublisher(tmp_path, lambda path: None, name="")
    publisher = LoraPublisher(tmp_path, lambda path: None)
    with pytest.raises(ConfigError, match=r"needs adapter_config\.json"):
        await publisher.prepare(1)
    assert not publisher.holds(1)
    await LoraPublisher(tmp_path, _fill).prepare(1)
    engine = SimEngine()
    monkeypatch.setattr(SimEngine, "capabilities", replace(engine.capabilities, adapters=False))
    (failure,) = (await publisher.publish(1, [engine])).values()
    assert "does not serve LoRA adapters" in str(failure)


def test_a_publisher_of_simulated_adapters_reports_each_engine():
    async def main() -> None:
        engine = SimEngine()
        await engine.open()
        publisher = SimAdapterPublisher()
        await publisher.prepare(3)
        assert await publisher.publish(3, [engine]) == {"sim-0": None}
        (failure,) = (await publisher.publish(3, [engine])).values()
        assert isinstance(failure, EngineRejected)
        name = publisher.adapter_name(3)
        stream = await Stream(engine, adapted(name, 400)).start().reach(64)
        retiring = asyncio.create_task(publisher.retire(3, engine))
        await stream.end()
        await retiring
        with pytest.raises(EngineRejected, match="not loaded"):
            await whole(engine, adapted(name))
        await publisher.publish(4, [engine])
        stream = Stream(engine, adapted(publisher.adapter_name(4), 4000)).start()
        await stream.reach(64)
        retiring = asyncio.create_task(publisher.retire(4, engine))
        await asyncio.sleep(0)
        engine.crash()
        with pytest.raises(EngineUnreachable):
            await retiring
        with pytest.raises(EngineProtocolError):
            await stream.end()
        await engine.close()

    run_virtual(main(), idle_timeout=1.0)


def _fill(path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (path / name).write_text("{}")


@pytest.mark.lacks(
    "draft refits",
    engine="embedded",
    why="A draft model with a checkpoint of its own is left alone; updates from disk are refused.",
)
@each_row(("algorithm", "selector"), [(None, "all"), ("EAGLE", "all"), ("EAGLE3", "target")])
async def test_an_update_leaves_a_draft_model_of_its_own_alone(
    algorithm: str | None, selector: str, tmp_path: Path
):
    """SGLang loads a tensor into every model that the selector names."""
    bodies: dict[str, Any] = {}

    @web.middleware
    async def drafting(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in ("/begin_weight_update", "/update_weights_from_tensor"):
            # The embedded engine has one model, whatever is selected.
            bodies[request.path] = await request.json()
            return web.json_response({"success": True, "message": ""})
        answer = await handler(request)
        if request.path == "/server_info" and isinstance(answer, web.Response):
            facts = json.loads(answer.text or "") | {"speculative_algorithm": algorithm}
            return web.json_response(facts)
        return answer

    async with SimServer(CONFIG, middlewares=[drafting]) as server:
        engine = SGLangEngine(server.url)
        await engine.open()
        assert engine.facts.drafter == (algorithm or "")
        await engine.begin_update()
        await engine.update_from_tensors(["x"], load_format=None)
        if selector == "target":
            with pytest.raises(EngineError, match="into its draft model too; publish by broadcast"):
                await engine.update_from_disk(tmp_path, 1)
        await engine.close()
    assert bodies["/begin_weight_update"] == {"selector": selector}
    assert bodies["/update_weights_from_tensor"].get("selector", "all") == selector
