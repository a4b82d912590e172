"""Tests the folder of a training loop of one's own: a log in a ``with`` block, and its readers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import MemoryStore, RolloutScheduler, SGLangFleet, SimFleet, SimPublisher
from aprilsched.__main__ import main
from aprilsched.errors import EngineUnreachable, RunFolderError
from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.observe.figures.summary import Summary
from aprilsched.observe.log import EventLog
from aprilsched.observe.log.run import read_run
from aprilsched.observe.log.usage import usage_of
from aprilsched.observe.report import batch_charts
from aprilsched.observe.report.gather import run_report
from aprilsched.observe.report.page import write_report
from aprilsched.simulation.engine import run_virtual
from aprilsched.simulation.results import remainder
from tests.support.small import config, driven, workload
from tests.support.table import each_row
from tests.virtual.test_rebuild import differences


async def train(
    path: Path | str,
    *,
    batches: int = 4,
    store: MemoryStore | None = None,
    ends_with: BaseException | None = None,
    **settings: Any,
) -> RunSummary:
    """Train as the documents do, 2 s for each batch; return the summary of a listener."""
    own = Summary()
    with EventLog(path, append=store is not None, patient=True) as log:
        async with RolloutScheduler(
            SimFleet(2, stream_interval=8),
            workload(),
            config=config(**settings),
            listeners=[log, own],
            store=store,
        ) as rollouts:
            if rollouts.state.restored:  # its engines are new
                await rollouts.update_weights(SimPublisher(), version=rollouts.version)
            for _ in range(batches):
                await rollouts.next_batch()
                await asyncio.sleep(2.0)
                await rollouts.update_weights(SimPublisher())
        if ends_with is not None:
            raise ends_with
    assert log.error is None
    return own.result(remainder(rollouts.state), clock="wall")


@each_row("pace", ["synchronous", "asynchronous"])
def test_a_log_alone_gives_every_figure_and_the_report(
    tmp_path: Path, pace: str, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "new" / pace
    own = run_virtual(train(str(folder / "events.jsonl"), pace=pace))
    assert differences(read_run(folder).summary, own) == {}
    assert usage_of(folder).utilization > 0
    figures = run_report(folder).figures
    assert not figures.warnings
    assert figures.ran == ["Engines: 2.", "Batches: 4 delivered."]
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "killed" not in page
    assert "built-in workload" not in page
    assert main(["watch", str(folder)]) == 0
    assert "The run has ended" in capsys.readouterr().out


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@each_row(
    ("error", "note"),
    [
        (ValueError("no\nreward" + "x" * 100_000), "ValueError: no"),
        (OSError(2, "gone", "\udcff"), "FileNotFoundError"),
        (Unspeakable(), "Unspeakable"),
        (KeyboardInterrupt(), "Ctrl-C"),
        (asyncio.CancelledError(), "Ctrl-C"),
    ],
)
def test_the_report_has_the_end_of_a_loop_that_failed(
    tmp_path: Path, error: BaseException, note: str
):
    with pytest.raises(type(error)):
        run_virtual(train(tmp_path / type(error).__name__ / "events.jsonl", ends_with=error))
    warnings = run_report(tmp_path / type(error).__name__).figures.warnings
    assert any(note in each for each in warnings)
    assert not any("killed" in each for each in warnings)


def test_a_log_without_its_last_line_is_of_a_run_that_was_killed(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    run_virtual(train(path))
    lines = path.read_bytes().splitlines(keepends=True)
    assert json.loads(lines[-1])["fact"] == "LogEnded"
    for left in (lines[:-1], [*lines[:-1], lines[-1][:-5]]):
        path.write_bytes(b"".join(left))
        assert any("killed" in each for each in run_report(tmp_path).figures.warnings)


def test_a_resumed_loop_continues_its_log(tmp_path: Path):
    path, store = tmp_path / "events.jsonl", MemoryStore()
    run_virtual(train(path, store=store))
    first = path.read_bytes()
    run_virtual(train(path, store=store, batches=3))
    assert path.read_bytes().startswith(first)
    summary = read_run(tmp_path).summary
    assert (summary.batches, summary.error) == (7, None)
    other = tmp_path / "other" / "events.jsonl"
    run_virtual(train(other, store=store, batches=1))
    assert json.loads(other.read_bytes().splitlines()[0])["fact"] == "LogBegun"


@pytest.mark.parametrize("scored", [True, False])
def test_the_report_of_a_log_has_the_rewards_of_its_batches(scored: bool, tmp_path: Path):
    means: list[float] = []

    async def run() -> None:
        with EventLog(tmp_path / "events.jsonl", patient=True) as log:
            async with RolloutScheduler(
                SimFleet(2, stream_interval=8),
                workload(),
                config=config(),
                reward=(lambda rollout, _: float(rollout.token_ids[0] % 5)) if scored else None,
                listeners=[log],
            ) as rollouts:
                for _ in range(4):
                    batch = await rollouts.next_batch()
                    means.append(float(np.mean([r.reward or 0.0 for r in batch.rollouts])))
                    await rollouts.update_weights(SimPublisher())

    run_virtual(run())
    charts = batch_charts.rewards([run_report(tmp_path)])
    assert len(charts) == scored
    for chart in charts:
        (line,) = chart.series
        assert list(line.x) == [1, 2, 3, 4]
        assert list(line.y) == pytest.approx(means)
        assert len(set(means)) > 1
        write_report(tmp_path)
        assert chart.title in (tmp_path / "report.html").read_text()


def test_a_log_without_its_block_is_written(tmp_path: Path):
    log = EventLog(tmp_path / "events.jsonl", patient=True)
    driven([log])
    log.close()
    assert read_run(tmp_path).summary.batches == 4


def test_a_log_of_another_run_is_left_alone(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    run_virtual(train(path))
    first = path.read_bytes()
    with pytest.raises(RunFolderError, match="must not exist"):
        run_virtual(train(path))
    with pytest.raises(AssertionError):  # the log has an error
        run_virtual(train(path, store=MemoryStore()))
    assert path.read_bytes() == first


def test_a_run_that_does_not_open_leaves_no_log(tmp_path: Path):
    fleet = SGLangFleet(["http://127.0.0.1:1"])

    async def run() -> None:
        with EventLog(tmp_path / "events.jsonl") as log:
            async with RolloutScheduler(fleet, workload(), listeners=[log]):
                pass

    with pytest.raises(EngineUnreachable):
        asyncio.run(run())
    assert not list(tmp_path.iterdir())
