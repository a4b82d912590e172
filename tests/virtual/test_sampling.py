"""Tests sampling of engines during runs: the figures are exact, and the run does not wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import RolloutScheduler, SimFleet, SimPublisher
from aprilsched.__main__ import main
from aprilsched.errors import EngineError
from aprilsched.kernel.engines.load import EngineLoad
from aprilsched.observe.log.samples import Samples, read_samples
from aprilsched.observe.log.usage import usage_of
from aprilsched.observe.sampling import Sampler
from aprilsched.simulation.engine import run_virtual
from tests.support.small import config, workload
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time

SMALL = [
    *("run", "--quiet", "--batches", "4", "--batch-groups", "4", "--group-size", "4"),
    *("--median", "60", "--cap", "600", "--sim.engines", "2"),
]


def run(out: Path, *arguments: str) -> Path:
    assert main([*SMALL, *arguments, "--out", str(out)]) == 0
    return out


def test_a_run_samples_its_engines_on_its_own_clock(tmp_path: Path):
    folder = run(tmp_path / "a", "--sample", "0.25")
    engines = read_samples(folder).engines
    wall = usage_of(folder).wall
    assert list(engines) == ["sim-0", "sim-1"]
    for figures in engines.values():
        np.testing.assert_allclose(figures.t, np.arange(len(figures.t)) * 0.25, atol=1e-6)
        assert wall - 0.25 < figures.t[-1] <= wall
        assert figures.running.max() > 0
        assert (figures.max_running == 512).all()
        assert ((figures.kv_share >= 0) & (figures.kv_share < 1)).all()
        assert ((figures.step_share[1:] >= 0) & (figures.step_share[1:] <= 1)).all()
    again = run(tmp_path / "b", "--sample", "0.25")
    assert (again / "samples.jsonl").read_bytes() == (folder / "samples.jsonl").read_bytes()


def test_a_run_is_not_sampled_if_it_shall_not_be(tmp_path: Path):
    folder = run(tmp_path / "a", "--sample", "0")
    assert not (folder / "samples.jsonl").exists()
    assert not read_samples(folder).engines


@each_row(
    ("arguments", "message"),
    [(["--sample", "-1"], "sample is -1"), (["--gpu", "on"], "the embedded engine has none")],
)
def test_settings_that_cannot_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    assert main([*SMALL, *arguments, "--out", str(tmp_path / "a")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_a_resumed_run_is_still_sampled(tmp_path: Path):
    folder = run(tmp_path / "a", "--sample", "0.25")
    before = read_samples(folder).engines["sim-0"].t
    assert main(["run", "--quiet", "--resume", str(folder), "--batches", "6"]) == 0
    after = read_samples(folder).engines["sim-0"].t
    assert after[: len(before)].tolist() == before.tolist()
    assert len(after) > len(before)
    assert (np.diff(after) > 0).all()
    assert after[-1] <= usage_of(folder).wall


class Odd:
    """An engine that fails, hangs, or reports its load, in the order of `answers`."""

    def __init__(self, name: str, answers: Sequence[str]) -> None:
        self.name = name
        self.asked = self.at_once = self.most = 0
        self._answers = answers

    async def load(self, *, metrics: bool = False) -> EngineLoad:
        answer = self._answers[min(self.asked, len(self._answers) - 1)]
        self.asked += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            if answer == "hang":
                await asyncio.Event().wait()
            if answer == "fail":
                raise EngineError(self.name, "is down.")
            if answer == "break":
                raise ZeroDivisionError
        finally:
            self.at_once -= 1
        return EngineLoad(running=1, queued=0)


class Fleet:
    """A fleet of these engines and of one that reports no load."""

    def __init__(self, *engines: Any) -> None:
        self.engines = [*engines, object()]


def sample(folder: Path, fleet: Fleet, seconds: float) -> Samples:
    """Sample during this number of seconds of a virtual clock."""

    async def main() -> None:
        async with Sampler(folder / "samples.jsonl", fleet, interval=1.0, gpu=False) as sampler:
            await asyncio.sleep(seconds)
            assert "" not in sampler.engines

    run_virtual(main())
    return read_samples(folder)


def test_an_engine_without_load_is_logged_once_and_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    engine = Odd("odd", ["fail", "fail", "tell", "break", "tell"])
    with caplog.at_level(logging.WARNING):
        figures = sample(tmp_path, Fleet(engine), 4.5).engines["odd"]
    assert figures.t.tolist() == [0.0, 2.0, 3.0, 4.0]
    assert np.isnan(figures.running).tolist() == [True, False, True, False]
    assert [record.getMessage() for record in caplog.records] == [
        "the load of odd is not sampled for now, the run continues: odd: is down."
    ]
    text = (tmp_path / "samples.jsonl").read_text()
    assert text.count('"error":"odd: is down."') == 1
    assert text.count('"error":"ZeroDivisionError"') == 1


def test_a_hanging_engine_gets_one_call_and_blocks_no_other(tmp_path: Path):
    hangs, well = Odd("hangs", ["hang"]), Odd("well", ["tell"])
    engines = sample(tmp_path, Fleet(hangs, well), 25.5).engines
    assert engines["well"].t.tolist() == list(range(26))
    assert hangs.most == 1
    assert hangs.asked == 3, "one call every 10 s, after the timeout"
    assert hangs.at_once == 0, "the end of the block cancels open calls"
    assert np.isnan(engines["hangs"].running).all()


async def test_engines_that_join_are_sampled_from_then_on(tmp_path: Path):
    fleet = Fleet(Odd("first", ["tell"]))
    async with Sampler(tmp_path / "samples.jsonl", fleet, gpu=False):
        await asyncio.sleep(2.5)
        fleet.engines = [Odd("second", ["tell"])]
        await asyncio.sleep(2.0)
    engines = read_samples(tmp_path).engines
    assert engines["first"].t.tolist() == [0.0, 1.0, 2.0]
    assert engines["second"].t.tolist() == [3.0, 4.0]


async def test_rates_of_the_embedded_engine_add_up_to_its_counters(tmp_path: Path):
    """Samples fall into the middle of steps, while a scheduler uses the engine."""
    fleet = SimFleet(1)
    async with (
        RolloutScheduler(fleet, workload(), config=config()) as rollouts,
        Sampler(tmp_path / "samples.jsonl", fleet, interval=0.1, gpu=False),
    ):
        for _ in range(3):
            await rollouts.next_batch()
            await rollouts.update_weights(SimPublisher())
        await asyncio.sleep(0.1 - asyncio.get_running_loop().time() % 0.1)
        load = await fleet.engines[0].load()
        assert load.generated is not None
        assert load.decode_seconds is not None
        assert load.prefill_seconds is not None
        generated, busy = load.generated, load.decode_seconds + load.prefill_seconds
        await asyncio.sleep(0.05)
    figures = read_samples(tmp_path).engines["sim-0"]
    seconds = np.diff(figures.t)
    tokens = np.sum(figures.tokens_per_s[1:] * seconds)
    assert tokens == pytest.approx(generated, rel=1e-3)
    assert np.sum(figures.step_share[1:] * seconds) == pytest.approx(busy, rel=1e-3)
