"""Tests the run folder: it is never one that is in use, and never has half a file."""

from __future__ import annotations

import json
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from aprilsched.analysis.run import read_run
from aprilsched.errors import RunFolderError
from aprilsched.telemetry.run_folder import RunFolder, default_path, write_json


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


def test_a_folder_that_was_taken_meanwhile_is_refused(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    RunFolder(tmp_path / "run").create({})
    with pytest.raises(RunFolderError, match="not empty"):
        folder.create({})
    assert not folder.created


def test_a_file_is_no_folder(tmp_path: Path):
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


def test_reading_what_is_no_run_folder(tmp_path: Path):
    with pytest.raises(RunFolderError, match="no whole run folder"):
        read_run(tmp_path)
    for name in ("config.toml", "summary.json", "events.jsonl"):
        (tmp_path / name).write_text("{not json")
    with pytest.raises(RunFolderError, match="cannot be understood"):
        read_run(tmp_path)
