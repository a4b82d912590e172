"""Tests LoRA adapters on a real server and on the embedded engine.

The real server runs several adapters in one batch; its logprobs are those of the merged weights.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from aprilsched import Batch, LoraPublisher
from aprilsched.kernel.core.messages.commands import Pause
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.engine.sim_engine import SimEngine
from aprilsched.testing.contract import PROMPT, whole
from tests.sglang.adapter_contract import (
    ADAPTER_CHECKS,
    AdapterCheck,
    Adapting,
    adapted,
    fake_adapters,
)
from tests.sglang.conftest import INTERVAL
from tests.sglang.recorded import Recorder, check_greedy, long_tail, scheduled, sequence_scores
from tests.sglang.server import CpuServer, run_with_server_packages
from tests.sglang.tiny_adapter import MODULES, RANK

TOLERANCE = 1e-4
"""Largest difference of a logprob between two products in float32 and one with their sum."""
LORA = (
    *("--enable-lora", "--lora-backend", "torch_native"),
    *("--max-lora-rank", str(RANK), "--lora-target-modules", *MODULES),
    *("--max-loras-per-batch", "4"),
)


@pytest.fixture(scope="module")
def adapters(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[Path, Path], tuple[Path, Path]]:
    """Two adapters, and the model with each of them merged in."""
    folder = tmp_path_factory.mktemp("adapters")
    made = tuple(
        _write(models[0], folder / f"adapter-{seed}", folder / f"merged-{seed}", seed)
        for seed in (0, 1)
    )
    return (made[0][0], made[1][0]), (made[0][1], made[1][1])


@pytest.fixture(scope="module")
def lora_server(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CpuServer]:
    """A server that accepts adapters."""
    with CpuServer(models[0], tmp_path_factory.mktemp("lora") / "log.txt", *LORA) as server:
        server.wait_ready()
        yield server


@pytest.fixture
async def real(
    lora_server: CpuServer, adapters: tuple[tuple[Path, Path], object], tmp_path: Path
) -> AsyncIterator[Adapting]:
    """aprilsched's SGLang engine on a real server."""
    engine = SGLangEngine(lora_server.url, stream_interval=INTERVAL)
    await engine.open()
    yield Adapting(engine=engine, adapters=adapters[0], folder=tmp_path / "versions")
    await engine.close()
    assert lora_server.alive(), f"The test killed the server:\n{lora_server.tail()}"


@pytest.fixture
async def embedded(tmp_path: Path) -> AsyncIterator[Adapting]:
    """The embedded engine; its adapters are the bytes of the files."""
    engine = SimEngine(config=SimConfig(stream_interval=INTERVAL, vocab_size=512), time_scale=0.5)
    await engine.open()
    yield Adapting(engine=engine, adapters=fake_adapters(tmp_path), folder=tmp_path / "versions")
    await engine.close()


@pytest.mark.long
@pytest.mark.parametrize("check", ADAPTER_CHECKS, ids=lambda check: check.__name__)
async def test_sglang(real: Adapting, check: AdapterCheck) -> None:
    """The real server keeps it."""
    await check(real)


@pytest.mark.parametrize("check", ADAPTER_CHECKS, ids=lambda check: check.__name__)
async def test_sim(embedded: Adapting, check: AdapterCheck) -> None:
    """The embedded engine keeps it."""
    await check(embedded)


@pytest.mark.shows("LoRA adapters", engine="SGLang")
@pytest.mark.long
async def test_logprobs_are_those_of_the_merged_weights(
    real: Adapting, adapters: tuple[object, tuple[Path, Path]], tmp_path: Path
) -> None:
    """The logprob of each token is that of the merged weights, and is far from that of the other
    adapter."""
    assert real.engine.capabilities.adapters
    streams = [await whole(real.engine, adapted(await real.load(which), 40)) for which in (0, 1)]
    responses = [(PROMPT, np.array(stream.ids, np.int32)) for stream in streams]
    scored = sequence_scores(adapters[1], responses, tmp_path)
    for which, stream in enumerate(streams):
        own, other = scored[which][which], scored[1 - which][which]
        np.testing.assert_allclose(stream.logprobs, own, atol=TOLERANCE)
        assert np.abs(stream.logprobs - other).max() > 1.0


def _write(model: Path, adapter: Path, merged: Path, seed: int) -> tuple[Path, Path]:
    run_with_server_packages("tiny_adapter", model, adapter, merged, seed)
    return adapter, merged


@pytest.mark.shows("LoRA adapters", engine="SGLang")
@pytest.mark.long
async def test_rollouts_are_of_the_adapters_they_were_sent_under(
    lora_server: CpuServer,
    adapters: tuple[tuple[Path, Path], tuple[Path, Path]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Six versions are loaded without a pause; each response has the scores of its one version."""
    recorder, newest = Recorder(), [0]
    publisher = LoraPublisher(
        tmp_path / "versions",
        lambda path: shutil.copytree(adapters[0][newest[0] % 2], path, dirs_exist_ok=True),
        name="rollouts",
    )
    prompts = long_tail(80, longest=150, temperature=0.0, every=2)
    batches: list[Batch] = []
    async with scheduled(
        [lora_server.url], recorder, prompts=prompts, pace="asynchronous"
    ) as rollouts:
        for version in range(1, 7):
            batches.append(await rollouts.next_batch())
            newest[0] = version
            await rollouts.update_weights(publisher)
        batches.append(await rollouts.next_batch())
        loaded = rollouts.state.weights.adapters[next(iter(rollouts.state.fleet.control.engines))]
        assert len(loaded) < 4, "older adapters are unloaded"
    assert not any(isinstance(command, Pause) for command in recorder.commands)
    # On a busy machine the recorder, a listener, may be stopped in the midst of its work.
    assert not [r for r in caplog.records if "held the event loop up" not in r.getMessage()]
    delivered = [rollout for batch in batches for rollout in batch.rollouts]
    for rollout in delivered:
        assert rollout.versions_exact
        assert len(set(rollout.versions.tolist())) == 1
    under_adapters = [rollout for rollout in delivered if rollout.versions[0] > 0]
    assert len({int(rollout.versions[0]) for rollout in under_adapters}) >= 3
    check_greedy(under_adapters, adapters[1], tmp_path)
