"""Tests the run folder: it is never one that is in use, and never has half a file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from aprilsched.errors import RunFolderError
from aprilsched.observe.exports.trace_run import write_trace
from aprilsched.observe.log.follow import Follower
from aprilsched.observe.log.lengths_of_run import known_lengths
from aprilsched.observe.log.run import read_run
from aprilsched.observe.log.run_folder import RunFolder, default_path, write_json
from aprilsched.observe.log.samples import read_samples
from aprilsched.observe.report.gather import run_report
from tests.support.table import each_row

RECORDED = Path(__file__).parents[2] / "notebooks" / "data" / "april"


def follow(folder: Path) -> object:
    """As the live view of another process's run does."""
    return Follower(folder / "events.jsonl").poll(10)


def test_nothing_is_made_before_it_is_created(tmp_path: Path):
    folder = RunFolder(tmp_path / "a" / "b")
    assert not folder.created
    assert list(tmp_path.iterdir()) == []
    folder.create({"seed": 3, "scheduler": {"batch_groups": 4}})
    assert folder.created
    content = tomllib.loads((folder.path / "config.toml").read_text())
    assert content == {"seed": 3, "scheduler": {"batch_groups": 4}}


def test_an_empty_folder_may_be_used(tmp_path: Path):
    RunFolder(tmp_path).create({})


def test_a_taken_folder_is_refused_and_not_touched(tmp_path: Path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(RunFolderError, match="not empty"):
        RunFolder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_that_another_run_has_taken_is_refused(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    RunFolder(tmp_path / "run").create({})
    with pytest.raises(RunFolderError, match="not empty"):
        folder.create({})
    assert not folder.created


def test_a_file_is_refused_as_a_folder(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder(tmp_path / "file")


def test_a_folder_below_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="name a folder that can be written"):
        RunFolder(tmp_path / "file" / "run").create({})


def test_two_runs_of_one_second_have_two_folders(tmp_path: Path):
    now = datetime(2026, 3, 1, 12, 30, 5, tzinfo=UTC)
    first = default_path(7, tmp_path, now)
    assert first == tmp_path / "20260301T123005Z-7"
    first.mkdir()
    second = default_path(7, tmp_path, now)
    assert second == tmp_path / "20260301T123005Z-7-2"


def test_json_is_written_whole(tmp_path: Path):
    write_json(tmp_path / "x.json", {"a": [1, None]})
    write_json(tmp_path / "x.json", {"a": 2})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


STARTED = '{"t":0,"fact":"LogBegun","version":%d,"new":1}\n'
RESUMED = '{"t":1,"fact":"LogResumed","version":%d,"incarnation":2,"batches":0}\n'
OF_LOGS = (read_run, known_lengths, run_report, write_trace, RunFolder.resume, follow)
LOGS = (STARTED % 9, STARTED % 1 + RESUMED % 9)
SUMMARY = '{"schema":9,"clock":["another form"]}'
SAMPLES = (
    '{"source":"description","version":9,"t":"now"}\n',
    '{"source":"description","t":0,"interval":1}\n{"source":"resumed","version":9,"t":1}\n',
)
NEWER = [
    *[("events.jsonl", log, read) for log in LOGS for read in OF_LOGS],
    *[("summary.json", SUMMARY, read) for read in (read_run, run_report)],
    *[("samples.jsonl", samples, read_samples) for samples in SAMPLES],
]


@each_row(("file", "content", "read"), NEWER)
def test_a_file_of_a_newer_format_is_refused(
    tmp_path: Path, file: str, content: str, read: Callable[[Path], object]
):
    RunFolder(tmp_path).create(tomllib.loads((RECORDED / "config.toml").read_text()))
    (tmp_path / "events.jsonl").write_text(STARTED % 1)
    (tmp_path / file).write_text(content)
    with pytest.raises(RunFolderError, match=rf"{file} has format 9, .* upgrade aprilsched"):
        read(tmp_path)


def test_reading_a_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(RunFolderError, match="no whole run folder"):
        read_run(tmp_path)
    for name in ("config.toml", "summary.json", "events.jsonl"):
        (tmp_path / name).write_text("{not json")
    with pytest.raises(RunFolderError, match="cannot be understood"):
        read_run(tmp_path)
