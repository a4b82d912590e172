"""Tests that the repository's versions, pins and commands agree with each other."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import aprilsched
from aprilsched.observe.exports.tracker_writers import TRACKERS
from tests.unit.test_arrows import CLI, DEPENDENCIES

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ("README.md", "CONTRIBUTING.md")
PINNED = (
    "constraints.txt",
    "requirements/sglang-cpu.txt",
    "requirements/verl-cpu.txt",
    "requirements/vllm-cpu.txt",
)
PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.]+")

# In pieces, so that this file does not contain what it looks for.
HOSTS = tuple(
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("registry", "npmjs", "org"),
        ("pypi", "nvidia", "com"),
    )
)


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def project() -> dict[str, Any]:
    return tomllib.loads(text("pyproject.toml"))["project"]


def pins(path: str) -> list[str]:
    return [line for line in text(path).splitlines() if line and not line.startswith("#")]


def canonical(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")


def test_the_version_is_the_same_everywhere():
    assert project()["version"] == aprilsched.__version__ == version("aprilsched")


def test_the_changelog_knows_the_version():
    assert f"## [{project()['version']}]" in text("CHANGELOG.md")


@pytest.mark.parametrize("guide", GUIDES)
def test_commands_in_the_guides_exist(guide: str):
    targets = set(re.findall(r"^([.a-z-]+):", text("Makefile"), flags=re.MULTILINE))
    command = r"(?:^|^\$ |`)make (?:[A-Z_]+=\S+ )*([.a-z-]+)"
    used = set(re.findall(command, text(guide), flags=re.MULTILINE))
    assert used
    assert used <= targets


def test_tests_that_a_page_names_exist():
    pages = [ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("aprilsched/**/*.md")]
    named = {
        (page.name, found)
        for page in pages
        if "_build" not in page.parts
        for found in re.findall(r"`(?:tests/)?(\w+/test_\w+\.py)`", page.read_text("utf-8"))
    }
    assert len(named) > 10
    assert [each for each in sorted(named) if not (ROOT / "tests" / each[1]).is_file()] == []


@pytest.mark.parametrize("path", PINNED)
def test_pins_are_pins_and_nothing_else(path: str):
    found = pins(path)
    assert all(PIN.fullmatch(line) for line in found)
    names = [canonical(line) for line in found]
    assert len(names) == len(set(names))


def test_torch_is_pinned_to_the_version_that_sglang_was_resolved_with():
    assert "torch==2.13.0" in pins("constraints.txt")


def test_everything_that_we_ask_for_is_pinned():
    extras = project()["optional-dependencies"]
    asked = list(project()["dependencies"])
    for extra in ("cli", "dev", "dev-torch", "plots", "report", "sim", "torch"):
        asked += extras[extra]
    names = {canonical(requirement) for requirement in asked} - {"aprilsched"}
    assert names <= {canonical(pin) for pin in pins("constraints.txt")}


def test_every_extra_that_an_error_names_exists():
    named = {
        name
        for path in (ROOT / "aprilsched").rglob("*.py")
        for name in re.findall(r"\bextra\(\"([^\"]+)\"\)", path.read_text(encoding="utf-8"))
    } | set(TRACKERS)
    assert {"cli", "sim"} <= named
    assert named <= set(project()["optional-dependencies"])


def test_the_extra_of_the_command_line_brings_what_the_command_line_may_import():
    brought = {canonical(needed) for needed in project()["optional-dependencies"]["cli"]}
    assert brought - {"aprilsched"} == {name.replace("_", "-") for name in CLI - DEPENDENCIES}


def test_the_architecture_allows_exactly_our_dependencies():
    asked = {canonical(requirement) for requirement in project()["dependencies"]}
    assert asked == {name.replace("_", "-") for name in DEPENDENCIES}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_no_tracked_file_names_a_registry():
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    guilty: list[str] = []
    for name in filter(None, listing.stdout.split("\0")):
        path = ROOT / name
        if path.is_file():
            content = path.read_text(encoding="utf-8", errors="ignore")
            guilty += [f"{name}: {host}" for host in HOSTS if host in content]
    assert guilty == []
