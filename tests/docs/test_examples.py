"""Tests the programs on the pages of the site: some are run, all must be valid Python.

The blocks of a page are one program, which is run from top to bottom. The embedded engine replaces
SGLang's servers, and the reader's own names (`trainer`, `dataset`, a run folder) are given.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import aprilsched
from aprilsched import DiskPublisher, SimFleet
from aprilsched.__main__ import main
from aprilsched.observe.log.line_format import KINDS
from tests.support.table import each_row

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
RUN = (
    "quickstart",
    "frontier",
    "guides/trainer",
    "engines",
    "guides/colocated",
    "guides/engine",
    "guides/tuning",
    "observe",
    "off_policy",
)
PAGES = sorted(
    page.relative_to(DOCS).with_suffix("").as_posix()
    for page in DOCS.rglob("*.md")
    if "_build" not in page.parts and BLOCK.search(page.read_text())
)


class Trainer:
    """Records the number of rows of each step."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def step(self, tensors: Any) -> None:
        self.rows.append(len(tensors.input_ids))

    def save_pretrained(self, path: Path) -> None:
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_bytes(bytes(len(self.rows)))


def embedded(urls: Sequence[str], **keys: str | None) -> SimFleet:
    assert set(keys) <= {"admin_key", "api_key"}
    # Responses of many lengths, as with a stop token.
    return SimFleet(len(urls), time_scale=0.001, vocab_size=64, eos_token_id=0)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two small batches."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    sizes = ["--batches", "2", "--batch-groups", "4", "--group-size", "2"]
    assert main(["run", "--out", str(folder), "--quiet", *sizes]) == 0
    return folder


def blocks(page: str) -> list[str]:
    return BLOCK.findall((DOCS / f"{page}.md").read_text())


def compiled(block: str, page: str) -> Any:
    return compile(block, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", RUN)
def test_the_programs_of_a_page_run(
    page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_folder: Path
):
    if any(".to_torch(" in block for block in blocks(page)):
        pytest.importorskip("torch")
    if any("safetensors" in block for block in blocks(page)):
        pytest.importorskip("safetensors")
    monkeypatch.setattr(aprilsched, "SGLangFleet", embedded)
    trainer = Trainer()
    names: dict[str, Any] = {
        "dataset": [[index + 1, 2, 3] for index in range(12)],
        "model": None,
        "run_folder": run_folder,
        "publisher": DiskPublisher(tmp_path / "given", save=trainer.save_pretrained),
        "trainer": trainer,
    }
    for block in blocks(page):
        code = compiled(block.replace("/shared", str(tmp_path)), page)
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(code, names))  # noqa: S307
        else:
            exec(code, names)  # noqa: S102
    asks = sum("trainer.step" in block for block in blocks(page))
    # The page trains on three batches of 4 groups of 4 each time.
    assert trainer.rows == [16, 16, 16] * asks


@each_row("page", PAGES)
def test_a_page_s_programs_are_python_and_import_what_there_is(page: str):
    for block in blocks(page):
        compiled(block, page)
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aprilsched"):
                assert node.module is not None
                # A name may be a module that is available only once imported.
                names = [name.name for name in node.names]
                module = __import__(node.module, fromlist=names)
                missing = [name for name in names if not hasattr(module, name)]
                assert not missing, f"{node.module} has no {', '.join(missing)}"


def test_the_pages_that_run_are_there():
    assert set(RUN) <= set(PAGES)


def test_every_json_line_of_the_event_log_page_is_exact():
    page = (DOCS / "reference" / "events.md").read_text()
    lines = re.findall(r'^\{"t".*\}$', page, flags=re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        found = msgspec.json.decode(line)
        kind = KINDS[found.pop("fact")]
        assert found.pop("t") == 0.0
        needed = {field.name for field in msgspec.structs.fields(kind) if field.required}
        assert needed <= set(found) <= set(kind.__struct_fields__)
