"""Tests that a run whose process died resumes in its own folder: one log, one ledger, one
summary."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aprilsched.__main__ import main
from aprilsched.cli.runs.config_file import read_settings
from aprilsched.cli.runs.drive import Run
from aprilsched.cli.runs.settings import RunSettings, WorkloadSettings
from aprilsched.cli.runs.setup import prepare
from aprilsched.config import SchedulerConfig, Staleness
from aprilsched.errors import ConfigError, RunFolderError
from aprilsched.kernel.core.messages.facts import BatchDelivered, BatchRequested
from aprilsched.kernel.core.policies.staleness import StalenessRule
from aprilsched.kernel.store.sqlite import SqliteStore
from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.observe.log import EventLog
from aprilsched.observe.log.lengths_of_run import known_lengths
from aprilsched.observe.log.reading import read_facts
from aprilsched.observe.log.rebuild import rebuilt_summary
from aprilsched.observe.log.run import read_run
from aprilsched.observe.log.run_folder import CONFIG, EVENTS, SUMMARY, RunFolder
from aprilsched.simulation.engine import SimFleet

BATCHES = 8
STORE = "store"


class DyingFleet(SimFleet):
    """Copies a run's files at some times: the copy is what the run leaves if it dies then.

    The log is written by a thread. Before each copy the fleet stops the virtual clock until the
    log contains the number of deliveries in `logged`.
    """

    def __init__(self, run: Path, times: Sequence[float], logged: Sequence[int]) -> None:
        super().__init__(2, stream_interval=8)
        self._run = run
        self._times = times
        self._logged = logged or [0] * len(times)
        self._copying: asyncio.Task[None] | None = None
        self.remains: list[Path] = []

    async def open(self) -> None:
        await super().open()
        self._copying = asyncio.create_task(self._copy())

    async def close(self) -> None:
        if self._copying is not None:
            self._copying.cancel()
        await super().close()

    async def _copy(self) -> None:
        loop = asyncio.get_running_loop()
        start_run = loop.time()
        for number, (at, logged) in enumerate(zip(self._times, self._logged, strict=True)):
            await asyncio.sleep(start_run + at - loop.time())
            self._wait_for_log(logged)
            self.remains.append(self._run.with_name(f"{self._run.name}-{number}"))
            shutil.copytree(self._run, self.remains[-1])

    def _wait_for_log(self, logged: int) -> None:
        """Block the event loop, so that the log's thread catches up while virtual time stands
        still."""
        while not (self._run / "run" / EVENTS).exists() or deliveries(self._run) < logged:
            time.sleep(0.001)


def start_run(
    run: Path, times: Sequence[float], *, logged: Sequence[int] = (), **changes: Any
) -> list[Path]:
    """Run to the end. Returns copies of what the run had written at each of `times`.

    `logged` holds, for each time, how many deliveries the copied log has at least.
    """
    scheduler = SchedulerConfig(
        batch_groups=4, group_size=4, over_provision=2.0, save_interval_s=0.3, **changes
    )
    settings = RunSettings(
        batches=BATCHES,
        seed=5,
        train_seconds=0.5,
        scheduler=scheduler,
        workload=WorkloadSettings(median=60, cap=600),
    )
    return go(settings, RunFolder(run / "run"), times, logged)


def resume(run: Path, times: Sequence[float] = (), *, batches: int | None = None) -> list[Path]:
    """Resume from the files that a run left."""
    settings = read_settings(run / "run" / CONFIG)
    if batches is not None:
        settings = replace(settings, batches=batches)
    return go(settings, RunFolder.resume(run / "run"), times)


def go(
    settings: RunSettings, folder: RunFolder, times: Sequence[float], logged: Sequence[int] = ()
) -> list[Path]:
    folder.path.parent.mkdir(exist_ok=True)
    fleet = DyingFleet(folder.path.parent, times, logged)
    store = SqliteStore(folder.path.parent / STORE, inline=True)
    Run(replace(prepare(settings), fleet=fleet), folder, None, store=store).execute()
    return fleet.remains


def check_everything(run: Path, *, incarnations: int, batches: int = BATCHES) -> RunSummary:
    """Every batch and every rollout is there once; log, summary and rebuilt summary agree."""
    folder = run / "run"
    whole = read_run(folder)
    assert [delivery.index for delivery in whole.deliveries] == list(range(batches))
    delivered = [r.rollout_id for delivery in whole.deliveries for r in delivery.rollouts]
    assert len(delivered) == len(set(delivered)) == batches * 16
    summary = whole.summary
    assert [figures.index for figures in summary.per_batch] == list(range(batches))
    count = summary.rollouts
    assert count.lost == count.duplicated == 0
    assert count.delivered == len(delivered)
    assert count.launched == count.delivered + count.in_flight + sum(count.dropped.values())
    lines = [json.loads(line) for line in (folder / EVENTS).read_bytes().splitlines()]
    times = [line["t"] for line in lines]
    assert times == sorted(times)
    assert summary.seconds.wall == pytest.approx(times[-1], abs=1e-4)
    resumed = [line["incarnation"] for line in lines if line["fact"] == "LogResumed"]
    assert resumed == list(range(2, incarnations + 1))
    again = rebuilt_summary(folder)
    assert again.rollouts.delivered == count.delivered
    assert again.rollouts.in_flight == count.in_flight
    assert again.bias.censoring.policies == summary.bias.censoring.policies
    for ours, theirs in zip(again.per_batch, summary.per_batch, strict=True):
        timed = {"seconds": 0, "trainer_seconds": 0, "efficiency": 0, "delivered_tokens_per_s": 0}
        # Times are rounded in the log.
        timed |= {"rollout_seconds": {}, "tool_share": 0}
        assert replace(ours, **timed) == replace(theirs, **timed)  # type: ignore[arg-type]
        assert ours.seconds == pytest.approx(theirs.seconds, abs=1e-4)
        assert ours.rollout_seconds == pytest.approx(theirs.rollout_seconds, abs=1e-4)
    return summary


@pytest.mark.parametrize(
    ("pace", "rule"),
    [
        ("synchronous", "mask"),
        ("asynchronous", "evict"),
        pytest.param("synchronous", "evict", marks=pytest.mark.long),
        pytest.param("asynchronous", "mask", marks=pytest.mark.long),
    ],
)
def test_a_run_that_died_resumes(tmp_path: Path, pace: str, rule: StalenessRule):
    settings: dict[str, Any] = {"pace": pace, "max_staleness": Staleness(1, rule=rule)}
    start_run(tmp_path / "whole", [], **settings)
    delivered = [at for at, _ in delivery_times(tmp_path / "whole")]
    times = [0.5, 1.7, 3.3]
    # A batch that is acknowledged in the store is not redelivered, so it must be in the log.
    logged = [sum(at < time for at in delivered) for time in times]
    remains = start_run(tmp_path / "a", times, logged=logged, **settings)
    assert len(remains) == 3
    for left in remains:
        before = read_run(left / "run").summary
        assert before.error is not None
        resume(left)
        after = check_everything(left, incarnations=2)
        assert after.error is None
        assert after.seconds.wall >= before.seconds.wall
        assert after.batches > before.batches
        launched = known_lengths(left / "run")
        assert rule == "evict" or len(launched) * 4 == after.rollouts.launched


def test_it_may_die_again_and_go_further_than_it_was_to(tmp_path: Path):
    (left,) = start_run(tmp_path / "a", [2.0])
    (left,) = resume(left, [0.8])
    (left,) = resume(left, [0.8])
    resume(left)
    check_everything(left, incarnations=4)
    (left / "run" / SUMMARY).unlink()
    resume(left)
    check_everything(left, incarnations=5)
    with pytest.raises(ConfigError, match="has all its 8 batches; give more with --batches"):
        resume(left)
    resume(left, batches=10)
    check_everything(left, incarnations=6, batches=10)
    assert read_settings(left / "run" / CONFIG).batches == 10


def test_what_was_not_saved_does_not_count(tmp_path: Path):
    early, late = start_run(tmp_path / "a", [1.0, 4.0], logged=[0, 3], pace="asynchronous")
    shutil.copy(late / "run" / EVENTS, early / "run" / EVENTS)
    known = deliveries(early)
    resume(early)
    assert deliveries(early) > BATCHES, "some were delivered again"
    check_everything(early, incarnations=2)
    assert known > 2


def test_a_truncated_delivery_is_logged_as_a_redelivery(tmp_path: Path):
    start_run(tmp_path / "a", [])
    delivered = [at for at, batch in delivery_times(tmp_path / "a") if batch == 3]
    (left,) = start_run(tmp_path / "b", [delivered[0] + 0.1], logged=[4])
    log = left / "run" / EVENTS
    cut = log.read_bytes().rindex(b'"fact":"BatchDelivered"') + 10
    log.write_bytes(log.read_bytes()[:cut])
    assert deliveries(left) == 3
    resume(left)
    assert b'"again":true' in log.read_bytes()
    check_everything(left, incarnations=2)


def delivery_times(run: Path) -> list[tuple[float, int]]:
    """Return the time and the index of each delivered batch."""
    return [
        (at, fact.batch)
        for facts, at in read_facts(run / "run" / EVENTS)
        for fact in facts
        if isinstance(fact, BatchDelivered)
    ]


def deliveries(run: Path) -> int:
    """Return the number of deliveries in the run's log."""
    log = run / "run" / EVENTS
    return log.read_bytes().count(b'"fact":"BatchDelivered"') if log.exists() else 0


# --- the log -----------------------------------------------------------------------------------


def whole_log(tmp_path: Path) -> bytes:
    start_run(tmp_path / "whole", [])
    return (tmp_path / "whole" / "run" / EVENTS).read_bytes()


def test_a_log_is_gone_on_with_wherever_it_was_cut(tmp_path: Path):
    whole, chance = whole_log(tmp_path), random.Random(1)
    path = tmp_path / EVENTS
    for tail in (b"", b"\0" * 4096, b"\0\0\n", b'{"t":1.0,"fact":\n') * 5:
        cut = chance.randrange(len(whole))
        path.write_bytes(whole[:cut] + tail)
        kept = whole[:cut].rpartition(b"\n")[0].splitlines()
        log = EventLog(path, append=True)
        log.on_facts([BatchRequested()], 1000.0)
        assert path.read_bytes() == whole[:cut] + tail, "nothing is cut away before the start"
        log.start(batches=3)
        log.on_facts([BatchRequested()], 1000.5)
        log.close()
        assert log.error is None
        lines = path.read_bytes().splitlines()
        assert lines[: len(kept)] == kept
        end = json.loads(kept[-1])["t"] if kept else 0.0
        assert [json.loads(line) for line in lines[len(kept) :]] == [
            {"t": end, "fact": "LogResumed", "version": 1, "incarnation": 2, "batches": 3},
            {"t": end, "fact": "BatchRequested"},
            {"t": pytest.approx(end + 0.5), "fact": "BatchRequested"},
        ]
        assert list(read_facts(path))


def test_a_log_that_is_damaged_in_the_middle_is_refused(tmp_path: Path):
    first, second, rest = whole_log(tmp_path).split(b"\n", 2)
    folder = tmp_path / "whole" / "run"
    (folder / EVENTS).write_bytes(b"\n".join([first, second[:-9], rest]))
    with pytest.raises(RunFolderError, match="damaged in line 2"):
        RunFolder.resume(folder)
    with pytest.raises(RunFolderError, match="damaged in line 2"):
        read_run(folder)


# --- what is refused ---------------------------------------------------------------------------


def test_only_a_run_can_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    start_run(tmp_path / "a", [])
    folder = tmp_path / "a" / "run"
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    for arguments, what in (
        ([str(tmp_path)], "has no run that can be resumed (it has no config.toml)"),
        ([], "--resume: expected one argument"),
        ([str(folder), "--seed", "3"], "--seed cannot be used with --resume"),
        ([str(folder), "--out=x"], "--out cannot be used with --resume"),
        ([str(folder), "--dry-run"], "--dry-run cannot be used with --resume"),
    ):
        assert main(["run", "--quiet", "--resume", *arguments]) == 2
        error = capsys.readouterr().err
        assert what in error
        assert error.count("\n") == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_a_run_of_which_nothing_was_saved_cannot_go_on(tmp_path: Path):
    (left,) = start_run(tmp_path / "a", [2.0])
    for file in left.glob(f"{STORE}*"):
        file.unlink()
    with pytest.raises(RunFolderError, match="nothing saved that could be resumed"):
        resume(left)
    assert not (left / "run" / SUMMARY).exists()
