"""Tests everything that shows a run, on a run of eight embedded engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from aprilsched.__main__ import main
from tests.support.chain import check_chain


@pytest.mark.long
def test_eight_embedded_engines_can_be_seen_in_every_way(tmp_path: Path):
    arguments = ["run", "--batches", "4", "--sim.engines", "8", "--update-every", "1"]
    arguments += ["--sim.refit-seconds", "1", "--train-seconds", "3", "--over-provision", "2"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    check_chain(tmp_path, [f"sim-{index}" for index in range(8)])
