"""Tests that a table runs all its rows, names those that fail, and gives each its own fixtures."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.support.table import each_row


def test_each_failing_row_is_named():
    seen: list[int] = []

    @each_row("number", [1, pytest.param(2, id="two"), 3])
    def odd(number: int) -> None:
        seen.append(number)
        assert number != 2
        with pytest.raises(ValueError, match="no"):
            int("7" if number == 3 else "no")

    with pytest.raises(ExceptionGroup) as caught:
        odd()  # pyright: ignore[reportCallIssue]
    assert seen == [1, 2, 3]
    first, second = map(str, caught.value.exceptions)
    assert first.startswith("row two: ")
    assert second.startswith("row {'number': 3}: DID NOT RAISE")


@each_row("flag", [True, False])
@each_row(("name", "size"), [("a", 1), ("b", 2)])
def test_tables_may_be_stacked_and_each_row_has_an_empty_folder(
    flag: bool, name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert (name, size) in [("a", 1), ("b", 2)]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert "APRILSCHED_ROW" not in os.environ
    monkeypatch.setenv("APRILSCHED_ROW", str(flag))


@each_row("number", [1, 2])
async def test_a_row_may_be_awaited(number: int):
    await asyncio.sleep(0)
    assert number in (1, 2)
