"""Tests the errors that name the extra which brings a missing package."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aprilsched.errors import ConfigError, MissingExtra
from aprilsched.kernel.values.extras import SOURCE, extra
from aprilsched.simulation.engine import run_virtual
from tests.support.table import each_row


def without(package: str, program: str) -> subprocess.CompletedProcess[str]:
    """`program` in a process of its own, where `package` is not installed."""
    script = f"import sys; sys.modules[{package!r}] = None\n{program}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


@each_row("package", ["docstring_parser", "rich", "tomli_w"])
def test_the_command_names_the_extra_it_needs(package: str):
    ended = without(
        package, "from aprilsched.__main__ import main; sys.exit(main(['run', '--help']))"
    )
    assert ended.returncode == 2
    wanted = rf"aprilsched: {package}[.\w]* is not installed; pip install .*\[cli\]'\.\n"
    assert re.fullmatch(wanted, ended.stderr)


def test_the_list_of_commands_needs_no_extra():
    ended = without("rich", "from aprilsched.__main__ import main; sys.exit(main(['--help']))")
    assert ended.returncode == 0
    assert "simulate" in ended.stdout


@each_row(
    ("module", "package", "name"),
    [
        ("aprilsched.observe.plots", "matplotlib", "plots"),
        ("aprilsched.fronts.ray", "ray", "ray"),
        ("aprilsched.cli.runs.settings", "tomli_w", "cli"),
        ("aprilsched.observe.live", "rich", "cli"),
    ],
)
def test_a_module_that_is_for_an_extra_names_it(module: str, package: str, name: str):
    ended = without(package, f"import {module}")
    assert ended.returncode == 1
    wanted = rf"MissingExtra: {package}[.\w]* is not installed; pip install .*\[{name}\]'"
    assert re.search(wanted, ended.stderr.splitlines()[-1])


def test_the_virtual_clock_names_the_extra_it_needs(monkeypatch: pytest.MonkeyPatch):
    async def program() -> None: ...

    monkeypatch.setitem(sys.modules, "looptime", None)
    coroutine = program()
    with pytest.raises(MissingExtra, match=r"pip install .*\[sim\]'"):
        run_virtual(coroutine)
    coroutine.close()


def test_a_broken_package_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "half_a_package.py").write_text("from math import nothing_of_the_kind")
    monkeypatch.syspath_prepend(tmp_path)
    broken = pytest.raises(ConfigError, match=r"math cannot be imported \(cannot import name")
    with broken, extra("x"):
        importlib.import_module("half_a_package")


def test_an_own_import_error_is_not_a_missing_extra():
    with pytest.raises(ModuleNotFoundError, match=r"aprilsched\.nowhere"), extra("x"):
        importlib.import_module("aprilsched.nowhere")


def test_documents_install_extras_from_the_same_source():
    root = Path(__file__).parents[2]
    folders = ("docs", "examples", "notebooks", "deploy")
    files = [root / "README.md", *(p for each in folders for p in (root / each).rglob("*"))]
    texts = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in files
        if path.suffix in (".md", ".py", ".ipynb", ".yaml") and "_build" not in path.parts
    }
    line = re.compile(r"pip install '((?:\.|aprilsched)\[[\w,]+\])'")
    found = [(name, extra) for name, text in texts.items() for extra in line.findall(text)]
    assert len(found) > 10
    assert not [each for each in found if not each[1].startswith(f"{SOURCE}[")]


COMMIT = {"vcs": "git", "commit_id": "40fd6775"}


@each_row(
    ("noted", "command"),
    [
        (None, f"pip install '{SOURCE}[x]'"),
        (
            {"dir_info": {"editable": True}, "url": "file:///src/april"},
            "pip install -e '/src/april[x]'",
        ),
        ({"dir_info": {}, "url": "file:///my%20src/april"}, "pip install '/my src/april[x]'"),
        (
            {"archive_info": {}, "url": "file:///dist/aprilsched-0.1.0-py3-none-any.whl"},
            "pip install 'aprilsched[x] @ file:///dist/aprilsched-0.1.0-py3-none-any.whl'",
        ),
        (
            {"vcs_info": COMMIT, "url": "https://git.example/april"},
            "pip install 'aprilsched[x] @ git+https://git.example/april@40fd6775'",
        ),
    ],
)
def test_the_command_is_that_of_the_installation(
    noted: dict[str, Any] | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    about = tmp_path / "aprilsched-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: aprilsched\nVersion: 0.1.0\n")
    if noted is not None:
        (about / "direct_url.json").write_text(json.dumps(noted))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtra) as raised, extra("x"):
        importlib.import_module("not_there")
    assert str(raised.value) == f"not_there is not installed; {command}."
