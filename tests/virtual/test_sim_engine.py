"""Tests the embedded engine in virtual time: the protocol, and SGLang's behaviour at edge cases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched.errors import ConfigError, EngineProtocolError, EngineRejected, EngineUnreachable
from aprilsched.kernel.engines.base import Chunk, Engine, GenerationRequest
from aprilsched.simulation.engine import SimEngine, SimFleet, SimPublisher, run_virtual
from aprilsched.simulation.workload import LongTailWorkload
from tests.support.loop import PatientLoop
from tests.support.sim_batcher import Outcome, request
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time


@asynccontextmanager
async def opened(**settings: Any) -> AsyncGenerator[tuple[SimFleet, SimEngine]]:
    """An open fleet of one engine, and the engine."""
    fleet = SimFleet(**settings)
    await fleet.open()
    try:
        yield fleet, fleet.engines[0]
    finally:
        await fleet.close()


async def collect(engine: Engine, sent: GenerationRequest) -> Outcome:
    outcome = Outcome()
    async for chunk in engine.generate(sent):
        outcome.chunks.append(chunk)
    outcome.ended_at = asyncio.get_running_loop().time()
    return outcome


async def test_refit_takes_its_time_and_wants_a_pause() -> None:
    async with opened(refit_seconds=0.25) as (_, engine):
        loop = asyncio.get_running_loop()
        await engine.refit(1)
        task = asyncio.create_task(collect(engine, request("a", 300)))
        await asyncio.sleep(0.1)
        with pytest.raises(EngineRejected) as refused:
            await engine.refit(2)
        assert refused.value.status == 409
        with pytest.raises(EngineRejected, match="retract"):
            await engine.flush()
        await engine.pause("in_place")
        asked = loop.time()
        await engine.refit(2)
        assert loop.time() - asked == pytest.approx(0.25)
        await engine.resume()
        await task


async def test_weights_from_disk_are_known_by_their_content(tmp_path: Path) -> None:
    for name, content in (("one", b"weights"), ("copy", b"weights"), ("other", b"other")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content * 1000)
    (tmp_path / "empty").mkdir()

    async with opened() as (_, engine):
        tokens: dict[str, np.ndarray] = {}
        for version, name in enumerate(("one", "copy", "other"), 1):
            await engine.update_from_disk(tmp_path / name, version)
            assert await engine.version() == version
            tokens[name] = (await collect(engine, request("a", 50, greedy=True))).ids
        assert np.array_equal(tokens["one"], tokens["copy"])
        assert not np.array_equal(tokens["one"], tokens["other"])
        with pytest.raises(EngineRejected, match="safetensors"):
            await engine.update_from_disk(tmp_path / "empty", 4)
        with pytest.raises(EngineRejected, match="safetensors"):
            await engine.update_from_disk(tmp_path / "nowhere", 4)
        assert await engine.version() == 3


def test_calls_need_an_open_engine_and_closing_breaks_streams() -> None:
    async def main() -> None:
        engine = SimEngine()
        with pytest.raises(EngineUnreachable):
            await collect(engine, request("a", 10))
        with pytest.raises(EngineUnreachable):
            await engine.version()
        await engine.open()
        await engine.open()
        task = asyncio.create_task(collect(engine, request("a", 1000)))
        await asyncio.sleep(1)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineProtocolError, match="closed"):
            await task
        await asyncio.sleep(5)
        await engine.open()
        assert (await collect(engine, request("a", 10))).last.finish == "length"
        assert engine.batcher.running == 0
        await engine.close()

    run_virtual(main(), idle_timeout=1.0)


def test_an_engine_survives_its_event_loop() -> None:
    fleet = SimFleet()

    async def main(version: int) -> None:
        await fleet.open()
        engine = fleet.engines[0]
        await engine.pause("retract")
        await engine.refit(version)
        await engine.resume()
        assert (await collect(engine, request("a", 10))).spans == [(version, 0, 10)]
        await fleet.close()

    run_virtual(main(1))
    run_virtual(main(2))


async def test_a_crash_breaks_streams_and_a_restart_works() -> None:
    async with opened() as (_, engine):
        await engine.refit(3)
        task = asyncio.create_task(collect(engine, request("a", 1000)))
        await asyncio.sleep(1)
        engine.crash()
        with pytest.raises(EngineProtocolError, match="broke"):
            await task
        with pytest.raises(EngineUnreachable):
            await engine.abort("a")
        await engine.restart()
        assert await engine.version() == 0
        assert (await collect(engine, request("a", 10))).last.finish == "length"


@each_row(
    "bad",
    [
        *({name: 0} for name in ("max_running", "kv_tokens", "stream_interval", "vocab_size")),
        *({"engines": 0}, {"time_scale": 0.0}, {"refit_seconds": -1.0}),
    ],
)
def test_bad_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        SimFleet(**bad)  # pyright: ignore[reportArgumentType]


def chunk_key(chunk: Chunk) -> tuple[bytes, bytes, str | None]:
    return chunk.token_ids.tobytes(), chunk.logprobs.tobytes(), chunk.finish


async def workload_run() -> list[tuple[str, float, list[tuple[bytes, bytes, str | None]]]]:
    """All chunks, in order, of a workload on two engines with retracts and refits."""
    fleet = SimFleet(engines=2, max_running=64)
    await fleet.open()
    log: list[tuple[str, float, list[tuple[bytes, bytes, str | None]]]] = []

    async def one(engine: SimEngine, sent: GenerationRequest) -> None:
        outcome = await collect(engine, sent)
        keys = [chunk_key(c) for c in outcome.chunks]
        log.append((sent.request_id, outcome.ended_at or 0.0, keys))

    async def control() -> None:
        for version in range(1, 6):
            await asyncio.sleep(1.0)
            await asyncio.gather(*(e.pause("retract") for e in fleet.engines))
            await asyncio.gather(*(e.flush() for e in fleet.engines))
            await SimPublisher().publish(version, fleet.engines)
            await asyncio.gather(*(e.resume() for e in fleet.engines))

    async with asyncio.TaskGroup() as tasks:
        for prompt in LongTailWorkload(count=25, median=200, cap=1500):
            assert isinstance(prompt.sampling, tuple)
            for i, sampling in enumerate(prompt.sampling):
                name = f"{prompt.key}-{i}"
                sent = GenerationRequest(
                    request_id=name, input_ids=prompt.input_ids, sampling=sampling
                )
                tasks.create_task(one(fleet.engines[i % 2], sent))
        tasks.create_task(control())
    await fleet.close()
    return log


def test_runs_on_a_virtual_clock_repeat_exactly() -> None:
    first, second = run_virtual(workload_run()), run_virtual(workload_run())
    assert len(first) == 200
    assert first == second


def test_a_time_scale_makes_wall_time_shorter() -> None:
    async def main() -> float:
        fleet = SimFleet(time_scale=0.01)
        await fleet.open()
        outcome = await collect(fleet.engines[0], request("a", 500))
        modelled = fleet.engines[0].counters.decode_seconds
        await fleet.close()
        assert len(outcome.ids) == 500
        return modelled

    with asyncio.Runner(loop_factory=PatientLoop) as runner:
        start = runner.get_loop().time()
        modelled = runner.get_loop().run_until_complete(main())
        took = runner.get_loop().time() - start
    assert modelled > 1.8
    assert took < modelled


def test_the_virtual_clock_starts_at_zero_and_jumps() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.sleep(86_400)
        return start, loop.time()

    assert run_virtual(main()) == (0.0, pytest.approx(86_400))


def test_a_deadlock_on_the_virtual_clock_ends() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        run_virtual(main(), idle_timeout=0.05)
