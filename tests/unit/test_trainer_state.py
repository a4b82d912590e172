"""The file that adapters write into a trainer's checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aprilsched import Prompt, SamplingParams, SchedulerConfig, Score, SimFleet
from aprilsched.config import Retries
from aprilsched.errors import ConfigError, StoreError
from aprilsched.kernel.shell import Turn
from aprilsched.simulation.engine.publisher import SimPublisher
from aprilsched.trainers import areal, skyrl, verl
from aprilsched.trainers.adapter import read_state, write_state
from aprilsched.trainers.pushed import NOT_TOKENIZED, PushedRollouts, as_pushed
from tests.support.table import each_row

SETTINGS: dict[str, Any] = {"group_size": 8, "delivery": "samples", "siblings": 4}


def write(folder: Path, content: object = "rows") -> Path:
    (folder / "scheduler").write_bytes(b"a checkpoint")
    path = folder / "step-5" / "state"
    write_state(path, folder / "scheduler", SchedulerConfig(**SETTINGS), content)
    return path


def unread(path: Path) -> None:
    raise AssertionError("a refused checkpoint must not be restored")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path, found = write(tmp_path, {3: "row"}), list[bytes]()
    # The number of groups in a batch may change. Half of a group are its siblings by default.
    changed: dict[str, Any] = {**SETTINGS, "batch_groups": 4, "siblings": None}
    config = SchedulerConfig(**changed)
    content = read_state(path, config, lambda file: found.append(file.read_bytes()))
    assert content == {3: "row"}
    assert found == [b"a checkpoint"]


@each_row(
    ("changes", "error"),
    [
        ({"group_size": 16}, r"group_size must be 8 as in the checkpoint .*, got 16; restore the"),
        ({"siblings": 2}, "siblings must be 4"),
        ({"delivery": "groups", "siblings": None}, "delivery must be 'samples'"),
    ],
)
def test_state_of_other_groups_is_refused(
    changes: dict[str, Any], error: str, tmp_path: Path
) -> None:
    path = write(tmp_path)
    with pytest.raises(ConfigError, match=error):
        read_state(path, SchedulerConfig(**{**SETTINGS, **changes}), unread)


def test_state_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(StoreError, match=r"cannot be read .* resume from another checkpoint"):
        read_state(path, SchedulerConfig(**SETTINGS), unread)


def test_failed_write_leaves_the_previous_state(tmp_path: Path) -> None:
    path = write(tmp_path)
    before = path.read_bytes()
    with pytest.raises(Exception, match="pickle"):
        write(tmp_path, lambda: None)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == ["state"]


def test_areal_keeps_tasks_of_prompts_that_leave_while_it_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(areal.RolloutEngine):
        async def _episode(self, turn: Turn, prompt: Prompt) -> Score:
            await turn.generate([5, 6, 7], SamplingParams(max_new_tokens=4))
            await fails.wait()
            raise ValueError("this episode never works")

    fails = asyncio.Event()
    numbers = range(4)
    own: Any = {"use_lora": False, "max_concurrent_rollouts": None, "consumer_batch_size": 1}
    engine = Failing(
        SimFleet(1),
        config=SimpleNamespace(**own, max_head_offpolicyness=3),
        gconfig=SimpleNamespace(n_samples=2),
        settings=SchedulerConfig(
            pace="asynchronous", retries=Retries(member="drop_group", failed_groups=100)
        ),
    )
    engine.initialize()
    scheduler, flight = engine.scheduler, engine.scheduler.state.in_flight
    for number in numbers:
        engine._tasks[number] = areal._Task(f"item {number}")
        engine._queue.put(engine._prompt(number))
    launched: set[object] = set()
    real = scheduler.checkpoint

    def checkpoint(path: Path) -> None:
        real(path)
        launched.update(group.prompt.key for group in flight.groups.values())
        scheduler.on_loop(all_fail)

    async def all_fail() -> None:
        fails.set()
        while flight.groups or scheduler.state.prompts.cursor < len(numbers):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def some_launched() -> None:
        while not flight.groups:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    scheduler.on_loop(some_launched)
    monkeypatch.setattr(scheduler, "checkpoint", checkpoint)
    (tmp_path / "aprilsched-9.bak").touch()
    engine._save({}, tmp_path)
    engine.destroy()
    (path,) = (each for each in tmp_path.iterdir() if each.suffix != ".bak")
    tasks, *_ = read_state(path, engine.settings, lambda file: None)
    assert launched
    assert launched <= tasks.keys()


async def test_skyrl_keeps_groups_that_are_dropped_while_it_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Theirs:
        inference_engine_client = None

        async def agent_loop(self) -> None:
            await asyncio.Event().wait()

        async def generate(self, batch: Any, disable_tqdm: bool) -> None:
            await asyncio.gather(*(self.agent_loop() for _ in batch["prompts"]))

    def generator() -> skyrl.Generator:
        config = as_pushed(SchedulerConfig(), group_size=2)
        return skyrl.Generator(Theirs(), SimFleet(1), config, [])

    first = generator()
    await first.update_weights(SimPublisher())
    batch = {"trajectory_ids": [SimpleNamespace(instance_id="one")], "prompts": [0, 0]}
    generating = asyncio.create_task(first.generate(batch))
    while not first.scheduler.state.in_flight.groups:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    real = first.scheduler.checkpoint

    async def checkpoint(path: Path, *, acknowledge: bool) -> None:
        await real(path, acknowledge=acknowledge)
        first.trained(["one"])

    monkeypatch.setattr(first.scheduler, "checkpoint", checkpoint)
    await first.save(tmp_path / "state")
    generating.cancel()
    await first.close()
    second = generator()
    second.restore(tmp_path / "state")
    await second.update_weights(SimPublisher())
    live = [each.prompt.key for each in second.scheduler.state.in_flight.training_groups()]
    assert live == ["one"]
    assert second._groups.keys() == {"one"}
    await second.close()


async def test_verl_restores_groups_of_the_same_size_and_counts_evictions_anew(
    tmp_path: Path,
) -> None:
    async def episode(turn: Turn, prompt: Prompt) -> Score:
        if prompt.key == "raises":
            raise ValueError("this episode never works")
        await turn.generate([5, 6, 7])
        await asyncio.Event().wait()
        return Score(reward=1.0)

    def worker(**changes: Any) -> Any:
        given: dict[str, Any] = {"group_size": 2, "pace": "asynchronous", **changes}
        made: Any = verl._Scheduler.__new__(verl._Scheduler)
        made._settings = SchedulerConfig(
            batch_groups=2, retries=Retries(member="drop_group", failed_groups=100), **given
        )
        made._restored, made._counted = {}, dict.fromkeys(verl._EVICTED, 0)
        made._rollouts = PushedRollouts(
            SimFleet(1),
            episode=episode,
            config=made._settings,
            listeners=[],
            ended=lambda prompt, error: asyncio.sleep(0),
            batches=True,
        )
        return made

    first = worker()
    await first._open()
    for key in ("raises", "one", "two"):
        prompt = Prompt(input_ids=NOT_TOKENIZED, key=key, metadata={"global_steps": 3})
        first._rollouts.push(prompt)
    flight = first._rollouts.scheduler.state.in_flight
    while len(flight.groups) < 2 or not flight.ledger.rollouts.total():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert sum(first._evicted().values()) == 2
    await first.save(tmp_path / "step" / "state")
    await first.close()
    with pytest.raises(ConfigError, match="group_size must be 2"):
        worker(group_size=3).restore(tmp_path / "step" / "state")
    second = worker()
    second.restore(tmp_path / "step" / "state")
    await second._open()
    assert second._restored == {"one": 3, "two": 3}
    assert sum(second._evicted().values()) == 0
    await second.close()
