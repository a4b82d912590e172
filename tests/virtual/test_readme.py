"""Tests that the program in the README runs unchanged, with a fleet and a trainer filled in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import aprilsched
from aprilsched import SimFleet

README = Path(__file__).parents[2] / "README.md"


class Trainer:
    """A trainer that counts its batches."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def step(self, tensors: Any) -> None:
        self.shapes.append(tuple(tensors.input_ids.shape))

    def save_pretrained(self, path: Path) -> None:
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_bytes(bytes(len(self.shapes)))


def embedded(urls: Sequence[str]) -> SimFleet:
    return SimFleet(len(urls), time_scale=0.001)


def score(*_: object) -> float:
    return 1.0


def test_the_program_in_the_readme_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pytest.importorskip("torch")
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len([line for line in program.splitlines() if line.strip()]) <= 20
    assert ("KV is kept" in README.read_text()) == ('straggler="in_place"' in program)
    monkeypatch.setattr(aprilsched, "SGLangFleet", embedded)
    trainer = Trainer()
    program = program.replace("/shared/weights", str(tmp_path))
    dataset = [[index + 1, 2, 3] for index in range(80)]
    exec(program, {"my_trainer": trainer, "my_dataset": dataset, "my_score": score})  # noqa: S102
    assert [shape[0] for shape in trainer.shapes] == [256, 256, 128]
