"""Compares a trainer's log-probabilities with those of real servers, as the alignment ledger does.

The trainer is transformers with the weights that the servers have, in float32. One server computes
in float32 too, and one in bfloat16.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from aprilsched import Batch, DiskPublisher, RolloutScheduler, SchedulerConfig, SGLangFleet
from aprilsched.cli.runs.config_file import as_toml
from aprilsched.cli.runs.settings import RunSettings
from aprilsched.config import Dispatch
from aprilsched.observe.figures.run_figures import AlignmentFigures
from aprilsched.observe.figures.summary import Summary
from aprilsched.observe.log import EventLog
from aprilsched.observe.report.gather import run_report
from aprilsched.observe.report.page import page
from aprilsched.simulation.results import remainder
from tests.sglang.helpers import opened
from tests.sglang.recorded import TOLERANCE, long_tail, scores, try_until
from tests.sglang.server import CpuServer

BATCHES = 3


@pytest.fixture(scope="module")
def rounding_server(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CpuServer]:
    """A server that computes in bfloat16."""
    log = tmp_path_factory.mktemp("rounding") / "log.txt"
    with CpuServer(models[0], log, "--dtype", "bfloat16") as server:
        server.wait_ready()
        yield server


def perturbed(model: Path, folder: Path) -> Path:
    """A copy of the model whose last norm is 5 % larger, which makes its policy sharper."""
    copy = Path(shutil.copytree(model, folder / f"perturbed-{model.name}"))
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    low = 8 + int.from_bytes(data[:8], "little")
    first, last = json.loads(data[8:low])["model.norm.weight"]["data_offsets"]
    row = np.frombuffer(data, dtype=np.float32, offset=low + first, count=(last - first) // 4)
    row *= 1.05
    file.write_bytes(data)
    return copy


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def run(
    servers: Sequence[CpuServer],
    models: Sequence[Path],
    folder: Path,
    *,
    trainer: Sequence[Path] | None = None,
) -> tuple[list[Batch], AlignmentFigures]:
    """Take batches, report the log-probabilities of `trainer` for each (by default of the servers'
    own `models`), and update. Leaves the log of the run in `folder`."""
    summary, log = Summary(), EventLog(folder / "events.jsonl")
    log.start()
    config = SchedulerConfig(
        batch_groups=4, group_size=4, over_provision=2.0, dispatch=Dispatch(placement="spread")
    )
    urls = [server.url for server in servers]
    settings = as_toml(RunSettings(engine=tuple(urls), scheduler=config))
    (folder / "config.toml").write_text(tomli_w.dumps(settings))
    scheduler = RolloutScheduler(
        SGLangFleet(urls, stream_interval=16),
        long_tail(60, longest=300),
        config=config,
        listeners=[summary, log],
    )
    batches: list[Batch] = []
    async with scheduler as rollouts:
        for _ in range(BATCHES):
            batch = await rollouts.next_batch()
            batches.append(batch)
            model = (trainer or models)[batch.version % 2]
            (trained,) = await asyncio.to_thread(scores, [model], list(batch.rollouts), folder)
            await rollouts.report_logprobs(batch, trained)
            await rollouts.update_weights(DiskPublisher(models[(batch.version + 1) % 2]))
        found = summary.result(remainder(rollouts.state), clock="wall").alignment
    log.close()
    assert found is not None
    return batches, found


@pytest.mark.long
async def test_the_same_weights_agree_and_other_weights_do_not(
    clean_server: CpuServer, models: tuple[Path, Path], tmp_path: Path
):
    async def once(number: int) -> tuple[list[Batch], AlignmentFigures, Path]:
        folder = made(tmp_path / f"same-{number}")
        return *await run([clean_server], models, folder), folder

    def outlived(result: tuple[list[Batch], AlignmentFigures, Path]) -> bool:
        return any(age.tokens for age in result[1].by_staleness[1:2])

    batches, same, folder_of_same = await try_until(
        once, outlived, "no response outlived an update"
    )
    fresh = sum(
        segment.end - segment.start
        for batch in batches
        for rollout in batch.rollouts
        for segment in rollout.segments
        if segment.version == batch.version
    )
    assert same.whole.tokens == fresh > 0
    assert same.skipped == same.not_finite == 0
    assert same.whole.largest is not None
    assert same.whole.mean is not None
    assert same.whole.k3 is not None
    assert same.whole.largest < TOLERANCE
    assert abs(same.whole.mean) < TOLERANCE / 10
    assert same.whole.k3 < TOLERANCE**2
    assert same.whole.beyond_share == 0
    # The tokens that an older version sampled differ, and only they do.
    older = same.by_staleness[1]
    assert older.k3 is not None
    assert older.k3 > 0.1

    trainer = [perturbed(model, tmp_path) for model in models]
    _, off = await run([clean_server], models, made(tmp_path / "off"), trainer=trainer)
    assert off.whole.k3 is not None
    assert off.whole.k3 > 1_000 * same.whole.k3
    assert off.whole.beyond_share is not None
    assert off.whole.beyond_share > 0.01
    for folder, found in ((folder_of_same, same), (tmp_path / "off", off)):
        report = run_report(folder)
        assert report.summary.alignment is not None
        assert report.summary.alignment.whole.k3 == pytest.approx(found.whole.k3)
        assert report.figures.headline("alignment.whole.k3").value == pytest.approx(found.whole.k3)
        assert "engine and trainer differ by" in page([report], library="")


async def first_batch(url: str, folder: Path, trainer: Path, *, publishes: bool) -> Batch:
    """Batch 0 of a fresh run, whose log-probabilities by the `trainer` were reported."""
    config = SchedulerConfig(batch_groups=4, group_size=4)
    prompts = long_tail(8, longest=30)
    async with RolloutScheduler(SGLangFleet([url]), prompts, config=config) as rollouts:
        if publishes:
            await rollouts.update_weights(DiskPublisher(trainer))
        batch = await rollouts.next_batch()
        (trained,) = await asyncio.to_thread(scores, [trainer], list(batch.rollouts), folder)
        await rollouts.report_logprobs(batch, trained)
        return batch


async def test_a_fresh_run_reports_weights_of_an_earlier_run(
    clean_server: CpuServer,
    models: tuple[Path, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    async with opened(clean_server.url) as earlier:
        await earlier.update_from_disk(models[1], 7)
    batch = await first_batch(clean_server.url, tmp_path, models[0], publishes=False)
    assert batch.version == 7
    assert any('has weights labelled "7", of an earlier run' in m for m in caplog.messages)
    assert any("probably have other weights" in m for m in caplog.messages)
    caplog.clear()
    batch = await first_batch(clean_server.url, tmp_path, models[0], publishes=True)
    assert batch.version == 8
    assert all((rollout.versions == 8).all() for rollout in batch.rollouts)
    assert any('labelled "7@' in m for m in caplog.messages)
    assert not any("other weights" in m for m in caplog.messages)


@pytest.mark.long
async def test_a_server_of_another_precision_stands_out(
    clean_server: CpuServer,
    rounding_server: CpuServer,
    models: tuple[Path, Path],
    tmp_path: Path,
):
    _, found = await run([clean_server, rounding_server], models, made(tmp_path / "run"))
    exact, rounded = (
        next(each for name, each in found.by_engine.items() if name.endswith(str(server.port)))
        for server in (clean_server, rounding_server)
    )
    assert exact.largest is not None
    assert exact.largest < TOLERANCE
    assert rounded.tokens > 0
    assert rounded.k3 is not None
    assert exact.k3 is not None
    assert rounded.k3 > 1_000 * exact.k3
    assert rounded.largest is not None
    assert rounded.largest > 10 * TOLERANCE
