"""The file that adapters write into a trainer's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aprilsched import SchedulerConfig
from aprilsched.errors import ConfigError, StoreError
from aprilsched.trainers.adapter import read_state, write_state
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
