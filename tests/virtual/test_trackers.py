"""Tests the figures of a run's batches in real trackers, read with the trackers' own readers."""

from __future__ import annotations

import json
import logging
import sqlite3
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from aprilsched.observe.exports.tracker_writers import TensorBoardWriter, TrackioWriter, WandbWriter
from aprilsched.observe.exports.trackers import StepTracker, Writer
from aprilsched.observe.figures.engine_time import PARTS
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.figures.table import FIGURES
from tests.virtual.test_metrics import UNKNOWN, driven

Steps = dict[int, dict[str, float]]
KNOWN = {
    name
    for name, figure in FIGURES.items()
    if figure.tracked and figure.of is not None and "forecast" not in name
} - UNKNOWN
BLOCK, FULL, LAST = 32_768, 1, 4


class Kept:
    """A writer that records everything."""

    def __init__(self) -> None:
        self.steps: Steps = {}
        self.closed = 0

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self.steps[step] = dict(figures)

    def close(self) -> None:
        self.closed += 1


def tracked(writer: Writer) -> Steps:
    """Send the same run to `writer` and to a recording writer; returns the record."""
    kept, figures = Kept(), LiveFigures(clock=None)
    with StepTracker(writer, figures) as tracker, StepTracker(kept, figures) as keeping:
        driven([figures, tracker, keeping])
    assert tracker.error is keeping.error is None
    return kept.steps


def test_a_step_has_every_figure():
    kept, figures = Kept(), LiveFigures(clock=None)
    with StepTracker(kept, figures) as tracker:
        batches = driven([figures, tracker])
    assert kept.closed == 1
    assert sorted(kept.steps) == [0, 1, 2, 3]
    generated = 0.0
    for batch in batches:
        step = kept.steps[batch.index]
        assert set(step) == KNOWN
        lengths = [len(rollout) for rollout in batch.rollouts]
        assert step["batch/tokens"] == sum(lengths)
        assert step["batch/max_length"] == max(lengths)
        assert step["batch/version"] == batch.version
        assert step["batch/delivered_tokens_per_s"] == pytest.approx(
            sum(lengths) / (step["batch/seconds"] + step["batch/trainer_seconds"])
        )
        assert sum(step[f"engines/{part}"] for part in PARTS) == pytest.approx(1, abs=0.01)
        assert step["run/tokens_generated"] > generated
        generated = step["run/tokens_generated"]
    assert kept.steps[3]["run/rollouts_dropped"] > 0


def test_a_tracker_that_fails_does_not_end_the_run(caplog: pytest.LogCaptureFixture):
    class Refusing(Kept):
        def write(self, step: int, figures: Mapping[str, float]) -> None:
            raise OSError("no route")

    figures = LiveFigures(clock=None)
    with (
        caplog.at_level(logging.ERROR, logger="aprilsched"),
        StepTracker(Refusing(), figures) as tracker,
    ):
        assert len(driven([figures, tracker])) == 4
    assert isinstance(tracker.error, OSError)
    assert "the tracker test_a_tracker" in caplog.text


def test_a_tracker_is_closed_though_no_batch_came():
    kept = Kept()
    with StepTracker(kept, LiveFigures(clock=None)):
        pass
    assert (kept.steps, kept.closed) == ({}, 1)


def test_a_tracker_whose_closing_hangs_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture):
    class Hanging(Kept):
        def close(self) -> None:
            may_go_on.wait()
            super().close()

    may_go_on, hanging = threading.Event(), Hanging()
    with caplog.at_level(logging.WARNING, logger="aprilsched"):
        with StepTracker(hanging, LiveFigures(clock=None), close_seconds=0.01):
            pass
        assert hanging.closed == 0
    assert "not done after 0.01 s" in caplog.text
    may_go_on.set()


def test_tensorboard(tmp_path: Path):
    from tensorboard.backend.event_processing import (  # pyright: ignore[reportMissingTypeStubs]
        event_accumulator,
    )

    steps = tracked(TensorBoardWriter(tmp_path))
    read: Any = event_accumulator.EventAccumulator(str(tmp_path))
    read.Reload()
    assert set(read.Tags()["scalars"]) == KNOWN
    for name in KNOWN:
        values = {event.step: event.value for event in read.Scalars(name)}
        assert values == {
            step: pytest.approx(figures[name], rel=1e-6) for step, figures in steps.items()
        }


def records(file: Path) -> Iterator[bytes]:
    """The records of wandb's log on disk, which has LevelDB's format after a header of 7 bytes.
    wandb has no reader for it."""
    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if place % BLOCK > BLOCK - 7:  # the end of a block, too short for another header
            place += BLOCK - place % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (FULL, LAST):
            yield whole
            whole = b""


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import wandb
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    writer = WandbWriter(tmp_path, project="rollouts", name="one", config={"seed": 3})
    steps = tracked(writer)
    wandb.teardown()  # its service writes the last block after the run has finished
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    found: Steps = {}
    config: dict[str, Any] = {}
    internal: Any = wandb_internal_pb2
    for data in records(file):
        record = internal.Record.FromString(data)
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        figures: dict[str, float] = {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        if figures:
            found[record.history.step.num] = {k: v for k, v in figures.items() if k in KNOWN}
    assert found == steps
    assert config["seed"] == 3


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # read when it is imported
    pytest.importorskip("trackio")

    steps = tracked(TrackioWriter(project="rollouts", name="one", config={"seed": 3}))
    with sqlite3.connect(tmp_path / "rollouts.db") as base:
        rows = base.execute("SELECT step, metrics FROM metrics").fetchall()
    base.close()
    found = {step: json.loads(metrics) for step, metrics in rows}
    assert {s: {k: v for k, v in m.items() if k in KNOWN} for s, m in found.items()} == steps
