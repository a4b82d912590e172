"""TRL's own trainer on a real vLLM server: weights from a folder, versions, and a resumed run."""

# pyright: basic
# The packages have no complete types.
from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aprilsched import VLLMFleet
from tests.support.trl_run import Run, train_and_resume, trl_without_a_gpu, with_tokenizer
from tests.vllm.server import VLLMServer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="could not import 'trl'"
)


@pytest.fixture(scope="module")
def torch() -> Iterator[Any]:
    with trl_without_a_gpu() as torch:
        yield torch


@pytest.mark.shows(
    "retract", "weights from disk", "checkpoints with partials", engine="vLLM", adapter="TRL"
)
@pytest.mark.long
@pytest.mark.parametrize(
    ("saved", "ended", "last"),
    [
        pytest.param(2, 3, 4, id="four steps"),
        pytest.param(10, 12, 20, id="twenty steps", marks=pytest.mark.long),
    ],
)
def test_a_second_trainer_resumes_from_the_checkpoint(
    torch: Any,
    clean_server: VLLMServer,
    models: tuple[Path, Path],
    tmp_path: Path,
    saved: int,
    ended: int,
    last: int,
) -> None:
    """Each trainer writes its weights into the folder that the server reads."""
    model, folder = with_tokenizer(models[0], tmp_path / "model"), tmp_path / "run"

    def train(**steps: Any) -> Run:
        fleet = VLLMFleet([clean_server.url])
        return Run(fleet, model, folder, weights=tmp_path / "weights", **steps)

    train_and_resume(torch, model, folder, train, saved=saved, ended=ended, last=last)
