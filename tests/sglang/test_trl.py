"""TRL's own trainer on a real server: broadcasts, versions, staleness, and a resumed run."""

# pyright: basic
# The packages have no complete types.
from __future__ import annotations

import asyncio
import functools
import importlib.util
import itertools
import runpy
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from aprilsched import SGLangFleet
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.types import Sample
from tests.sglang.conftest import ADMIN_KEY
from tests.sglang.server import CpuServer
from tests.support.tiny_tokenizer import calling_tokenizer
from tests.support.trl_run import (
    CARRYING,
    STEP,
    TOLERANCE,
    Run,
    check_staleness,
    check_versions,
    hold_one,
    train_and_resume,
    trl_without_a_gpu,
    with_tokenizer,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="could not import 'trl'"
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_async_grpo.py"


sglang = functools.partial(SGLangFleet, admin_key=ADMIN_KEY)


@pytest.fixture(scope="module")
def torch() -> Iterator[Any]:
    with trl_without_a_gpu() as torch:
        yield torch


@pytest.fixture
def model(torch: Any, models: tuple[Path, Path], tmp_path: Path) -> Path:
    return with_tokenizer(models[0], tmp_path / "model")


@pytest.mark.shows(
    "retract", "weights by broadcast", "checkpoints with partials", engine="SGLang", adapter="TRL"
)
@pytest.mark.long
def test_twenty_steps_on_a_real_server_with_a_resume_between(
    torch: Any, clean_server: CpuServer, model: Path, tmp_path: Path
) -> None:
    """The first trainer ends after step 12, and the second one continues from the checkpoint of
    step 10."""
    folder = tmp_path / "run"

    def train(**steps: Any) -> Run:
        return Run(sglang([clean_server.url]), model, folder, **steps)

    train_and_resume(torch, model, folder, train, saved=10, ended=12, last=20)


@pytest.mark.shows("single samples", "checkpoints with partials", engine="SGLang", adapter="TRL")
@pytest.mark.long
def test_single_samples_on_a_real_server_with_a_resume_between(
    torch: Any, clean_server: CpuServer, model: Path, tmp_path: Path
) -> None:
    """The first group is split over the end of the first trainer."""
    folder, runs = tmp_path / "run", list[Run]()
    config = replace(CARRYING, delivery="samples", siblings=2, group_size=4)

    def train(**steps: Any) -> Run:
        given: dict[str, Any] = (
            {"config": config} if runs else {"config": config, "accept": hold_one}
        )
        runs.append(Run(sglang([clean_server.url]), model, folder, **given, **steps))
        return runs[-1]

    train_and_resume(torch, model, folder, train, saved=10, ended=12, last=20)
    for run in runs:
        for sample, unit in zip(run.samples, run.units, strict=False):
            assert isinstance(unit, Sample)
            own, first, second = (each.reward or 0.0 for each in (unit, *unit.siblings))
            if sample.completion_mask.sum() > 1:
                assert sample.advantage == pytest.approx(own - (first + second) / 2)
    before, after = (
        {unit.group_id for unit in units} for units in (runs[0].units[: 10 * STEP], runs[1].units)
    )
    assert before & after


async def look(where: str, days: int) -> str:
    """Looks at the weather.

    Args:
        where: a place.
        days: number of days.
    """
    return "w9"


@pytest.mark.shows("sessions and agents", engine="SGLang", adapter="TRL")
@pytest.mark.long
def test_a_trainer_with_tools_gets_the_tokens_of_its_sessions(
    torch: Any, clean_server: CpuServer, models: tuple[Path, Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(models[0], model)
    calling_tokenizer(model, every=9)
    run = Run(sglang([clean_server.url]), model, tmp_path / "run", steps=3, tools=[look])
    run.trainer.train()
    assert run.trainer.state.global_step == 3
    assert max(run.logged("tools/call_frequency")) > 0
    check_versions(torch, model, run)


@pytest.mark.shows("weights by broadcast", "lost engines", engine="SGLang", adapter="TRL")
@pytest.mark.long
def test_a_server_that_dies_in_a_broadcast_does_not_end_the_training(
    torch: Any, clean_pair: tuple[CpuServer, CpuServer], model: Path, tmp_path: Path
) -> None:
    """The other one gets the same weights once more."""
    stays, victim = clean_pair
    killed: list[int] = []

    def kill(version: int) -> None:
        if version == 3 and not killed:
            victim.kill()
            killed.append(version)

    run = Run(sglang([s.url for s in clean_pair]), model, tmp_path / "run", steps=8, amid=kill)
    try:
        run.trainer.train()
    finally:
        if killed:
            victim.start()
            victim.wait_ready()
    assert killed
    assert run.trainer.state.global_step == 8
    assert run.engines == [stays.url.removeprefix("http://")]
    check_versions(torch, model, run)
    check_staleness(run, since=0)
    seen = {rollout.rollout_id for rollout in run.rollouts}
    assert len(seen | run.in_flight) == run.launched


@pytest.mark.long
def test_a_streamed_trainer_begins_while_the_last_response_of_its_batch_is_to_come(
    torch: Any,
    clean_server: CpuServer,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last response of every batch is generated after the trainer's first forward of the step,
    and all are of the weights that are trained: the ratio is 1 at every step."""
    steps = 3
    changed = threading.Condition()
    events: list[str] = []
    numbers = itertools.count()
    generate = SGLangEngine.generate

    def note(event: str) -> None:
        with changed:
            events.append(event)
            changed.notify_all()

    def await_forward(step: int) -> None:
        with changed:
            # A step has two micro-batches.
            assert changed.wait_for(lambda: events.count("forward") > 2 * step, 120)

    async def held(engine: Any, request: Any) -> Any:
        step, place = divmod(next(numbers), STEP)
        if place == STEP - 1:
            await asyncio.to_thread(await_forward, step)
            note("sent")
        async for chunk in generate(engine, request):
            if place == STEP - 1 and chunk.finish is not None:
                note("ended")
            yield chunk

    monkeypatch.setattr(SGLangEngine, "generate", held)
    run = Run(sglang([clean_server.url]), model, tmp_path / "run", steps=steps, streamed=True)
    assert run.trainer.model is not None
    run.trainer.model.register_forward_pre_hook(lambda *_: note("forward"))
    run.trainer.train()
    assert run.trainer.state.global_step == steps
    assert events == ["forward", "sent", "ended", "forward"] * steps
    ratios = run.logged("ratio")
    assert len(ratios) == steps
    assert max(abs(ratio - 1) for ratio in ratios) < TOLERANCE
    assert len(run.samples) == steps * STEP
    for number, sample in enumerate(run.samples):
        versions = run.rollouts[number].versions
        assert sample.group_id == run.rollouts[number].group_id
        assert set(versions.tolist()) == {number // STEP + 1}
    # The weights change at every step, or the ratio would say nothing.
    for before, after in pairwise(run.weights.values()):
        assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.long
def test_the_example_trains(
    torch: Any,
    clean_server: CpuServer,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ["--engine", clean_server.url, "--model", str(model), "--steps", "2"]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *options, "--out", str(tmp_path / "run")])
    names = runpy.run_path(str(EXAMPLE), run_name="example")
    assert names["main"]().state.global_step == 2
    assert (tmp_path / "run" / "checkpoint-2" / "aprilsched.checkpoint").is_file()
