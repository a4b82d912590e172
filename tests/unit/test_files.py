"""Tests that files in another user's folder neither block a command nor redirect a write."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from aprilsched.__main__ import main
from aprilsched.agents.sessions.harness import (
    _secret_of,  # pyright: ignore[reportPrivateUsage]
)
from aprilsched.kernel.values.files import open_private, open_regular, read_text, written_whole
from aprilsched.observe.log.run_folder import CONFIG, EVENTS, REPORT, SAMPLES, SUMMARY, TRACE
from tests.support.table import each_row

SMALL = ["--batches", "1", "--batch-groups", "1", "--group-size", "2", "--median", "4"]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    assert main(["run", *SMALL, "--out", str(folder), "--log-tokens", "--json"]) == 0
    return folder


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_text("precious\n")
    return path


def test_a_run_folder_is_for_its_owner_alone(run: Path):
    assert mode(run) == 0o700
    files = [CONFIG, EVENTS, SAMPLES, "store.sqlite", "store.sqlite-last"]
    assert {name: oct(mode(run / name)) for name in files} == dict.fromkeys(files, "0o600")


def test_what_is_no_regular_file_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="regular file"):
            open_regular(path)


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


@each_row("name", [EVENTS, CONFIG, SUMMARY, SAMPLES])
@each_row("replaced", [fifo, endless])
def test_no_command_waits_for_a_file_of_a_run(
    run: Path, name: str, replaced: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
):
    replaced(run / name)
    capsys.readouterr()
    for command in (
        ["report", str(run)],
        ["simulate", "--lengths", str(run), "--batches", "1"],
        ["watch", str(run), "--once"],
    ):
        main(command)
        assert "Traceback" not in capsys.readouterr().err
    assert main(["run", "--resume", str(run)]) in (0, 2)


@each_row("option", ["--prompts", "--config", "--model", "--lengths"])
def test_no_command_waits_for_a_named_file(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
):
    os.mkfifo(tmp_path / "fifo")
    assert main(["run", "--batches", "1", option, str(tmp_path / "fifo")]) == 2
    assert "must be a regular file" in capsys.readouterr().err


def test_calibrate_waits_for_no_fifo(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    os.mkfifo(tmp_path / "fifo")
    assert main(["calibrate", str(tmp_path / "fifo")]) == 2
    assert "must be a regular file" in capsys.readouterr().err


def test_links_in_a_run_folder_redirect_no_write(run: Path, precious: Path):
    for name in (REPORT, TRACE, SUMMARY, CONFIG, SAMPLES, EVENTS):
        content = (run / name).read_bytes()
        (run / name).unlink()
        (run / name).symlink_to(precious)
        (run / f".{name}.writing").symlink_to(precious)
        main(["report", str(run)])
        main(["run", "--resume", str(run), "--batches", "2"])
        assert precious.read_text() == "precious\n"
        (run / name).unlink()
        (run / name).write_bytes(content)


def test_a_whole_file_replaces_a_link_and_leaves_nothing(tmp_path: Path, precious: Path):
    (tmp_path / "new").symlink_to(precious)
    with written_whole(tmp_path / "new") as file:
        file.write(b"content")
    assert (tmp_path / "new").read_bytes() == b"content"
    assert not (tmp_path / "new").is_symlink()
    assert mode(tmp_path / "new") == 0o600
    with pytest.raises(ZeroDivisionError), written_whole(tmp_path / "new") as file:
        file.write(b"half" * (1 // 0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "precious"]


def test_private_files_are_not_links(tmp_path: Path, precious: Path):
    (tmp_path / "link").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic link"):
        open_private(tmp_path / "link", os.O_WRONLY | os.O_CREAT)
    assert len(_secret_of(tmp_path / "secret")) == 32
    assert mode(tmp_path / "secret") == 0o600


def test_a_mark_of_windows_tools_is_no_text(tmp_path: Path):
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfbatches = 3\n")
    assert read_text(tmp_path / "text") == "batches = 3\n"
