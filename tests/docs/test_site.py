"""Tests that the documentation site builds without a warning and agrees with the code.

The build checks every link between pages, every name in the API reference and every directive. The
tests check the rest.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from html import unescape
from pathlib import Path
from typing import get_args

import pytest
from aprildocs.command_line import help_of
from aprildocs.generated import GENERATORS, pages, with_generated_parts
from aprildocs.shown import ADAPTERS, FEATURES, Shown, shown, shown_in
from aprildocs.state_diagram import PLACES, draw, moves_table
from aprildocs.support import support
from aprildocs.tables import (
    fact_lines,
    metrics,
    sampled_figures,
    setting_parts,
    setting_policies,
    settings,
    summary_figures,
    usage_parts,
)
from matplotlib.image import imread

import aprilsched
from aprilsched.__main__ import COMMANDS
from aprilsched.config import SchedulerConfig
from aprilsched.kernel.core.messages.facts import Fact, Order
from aprilsched.kernel.core.state.records import MOVES, Move, State
from aprilsched.observe.figures.engine_time import PARTS
from aprilsched.observe.figures.table import FIGURES
from aprilsched.observe.sampling.sample_log import FIELDS as SAMPLED
from tests.support.table import each_row

ROOT = Path(__file__).parents[2]
TERMINAL = ROOT / "docs" / "images" / "live.png"
"""The picture of a terminal, which is dark in both themes."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", built / "doctrees", "docs", built / "html"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return built / "html"


@each_row(
    "picture",
    [
        p
        for part in ("docs/images", "experiments", "examples")
        for p in (ROOT / part).rglob("*.png")
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_no_picture_is_a_white_slab_on_a_dark_page(picture: Path):
    if picture != TERMINAL:
        alpha = imread(picture)[..., -1]
        assert {alpha[row, column] for row in (0, -1) for column in (0, -1)} == {0}


def page(site: Path, name: str) -> str:
    return unescape((site / f"{name}.html").read_text(encoding="utf-8"))


def test_every_page_is_in_the_site(site: Path):
    pages = {
        path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
        if not {"_build", "adr"} & set(path.parts)
    }
    assert len(pages) > 30
    assert not [name for name in pages if not (site / f"{name}.html").exists()]


@pytest.mark.long
def test_nothing_is_fetched_when_a_page_is_read(site: Path):
    fetched = re.compile(r"""<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=["'](?:https?:)?//""")
    pages = list(site.rglob("*.html"))
    assert pages
    assert not [path.name for path in pages if fetched.search(path.read_text(encoding="utf-8"))]
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert styles
    assert not [style for style in styles if re.search(r"url\(['\"]?(?:https?:)?//", style)]


@pytest.mark.long
def test_the_drawing_has_exactly_the_legal_moves(site: Path):
    edge = r'data-from="(\w+)" data-move="(\w+)" data-to="(\w+)"'
    drawn = re.findall(edge, page(site, "concepts"))
    assert {(State(a), m): State(b) for a, m, b in drawn} == MOVES
    assert len(drawn) == len(MOVES)


def test_every_name_of_a_move_can_be_read_in_the_drawing():
    words = set(re.findall(r"<text[^>]*>([\w ]+)</text>", draw(MOVES)))
    assert words >= {move.replace("_", " ") for move in get_args(Move)}
    assert words >= set(State)


def test_a_state_without_a_place_fails_the_build(monkeypatch: pytest.MonkeyPatch):
    places = {state: place for state, place in PLACES.items() if state is not State.HELD}
    monkeypatch.setattr("aprildocs.state_diagram.PLACES", places)
    with pytest.raises(ValueError, match="no place in the diagram for held"):
        draw(MOVES)


def test_the_table_of_moves_has_as_many_as_there_are():
    assert moves_table(MOVES).count("→") == len(MOVES)


@each_row("page", pages(), ids=lambda path: path.stem)
def test_the_generated_parts_of_a_page_are_those_of_the_code(page: Path):
    text = page.read_text(encoding="utf-8")
    # Pythons break the lines of a command's usage at different places.
    current = with_generated_parts(text).split()
    assert current == text.split(), "run `make docs`, and commit what it writes"


def test_everything_that_is_generated_is_used_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in pages())
    starts = re.findall(r"<!-- generated: (\S+) -->", text)
    assert re.findall(r"<!-- end: (\S+) -->", text) == starts
    assert set(starts) == set(GENERATORS)


def test_the_supported_versions_match_the_pins():
    page = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    assert support() in page, f"put this table into docs/compatibility.md:\n{support()}"


def test_a_mark_has_a_place_for_each_engine_and_adapter():
    marked = """
@pytest.mark.parametrize("rule", ["abort"])
@pytest.mark.shows("abort", "sleep", engine="SGLang", adapter=("slime", "miles"))
@pytest.mark.lacks("LoRA adapters", adapter="miles", why="One model.")
async def test_this(rule): ...
"""
    found = [(e.feature, e.engine, e.adapter, e.why) for e in shown_in(marked, "test_it.py")]
    assert found == [
        ("abort", "SGLang", "slime", ""),
        ("abort", "SGLang", "miles", ""),
        ("sleep", "SGLang", "slime", ""),
        ("sleep", "SGLang", "miles", ""),
        ("LoRA adapters", "", "miles", "One model."),
    ]


@each_row(
    ("mark", "error"),
    [
        ('shows("abroad", engine="vLLM")', "3: feature must be one of .* got 'abroad'"),
        ('shows("abort", engine="vllm")', "3: engine must be one of .* got 'vllm'"),
        ('shows("abort", engine="vLLM", adapter="Verl")', "adapter must be one of .* got 'Verl'"),
        ('shows("abort")', "engine must be one of .* got ''"),
        ('shows("abort", engine="vLLM", why="It works.")', "or `why` one is missing"),
        ('lacks("abort", engine="vLLM")', "or `why` one is missing"),
        ('shows(engine="vLLM")', "must have features"),
        ('shows("abort", engines="vLLM")', "must have features"),
    ],
)
def test_a_mark_without_a_place_in_the_table_is_refused(mark: str, error: str):
    with pytest.raises(ValueError, match=error):
        list(shown_in(f"import pytest\n\n@pytest.mark.{mark}\ndef test_this(): ...", "test_it.py"))


def test_a_mark_of_a_helper_is_refused():
    source = '@pytest.mark.shows("abort", engine="vLLM")\ndef helper(): ...'
    with pytest.raises(ValueError, match="a mark of a test"):
        list(shown_in(source, "test_it.py"))


def test_every_trainer_with_checkpoints_resumes_its_partials():
    (row,) = re.findall(r"^\| checkpoints with partials \|(.*)\|$", shown(), re.MULTILINE)
    cells = dict(zip(("SGLang", "vLLM", *ADAPTERS), row.split(" | "), strict=True))
    # TorchRL has no trainer, so its user has a store.
    assert {name for name, text in cells.items() if "—" in text} == {"vLLM", "TorchRL"}


def test_every_marked_test_is_linked_from_its_feature():
    table, _, lists = shown().partition("## The tests")
    parts = dict(zip(FEATURES, lists.split("### ")[1:], strict=True))
    for path in (ROOT / "tests").rglob("test_*.py"):
        each: Shown
        for each in shown_in(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()):
            assert f"| {each.feature} |" in table
            assert f"`{each.test}`" in parts[each.feature]
            assert f"](../{each.path})" in parts[each.feature]


def rows(table: str) -> set[str]:
    return set(re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE))


def test_the_event_log_is_described_line_by_line():
    table = fact_lines()
    kinds = {*Fact.__subclasses__(), *Order.__subclasses__()} - {Order}
    received = {kind.__name__ for kind in kinds}
    assert rows(table) == received >= {"LogBegun", "LogResumed", "TokensReceived"}
    assert "*token_ids*" in table


def test_every_setting_has_its_default_and_description():
    table = settings()
    assert rows(table) == set(SchedulerConfig.__dataclass_fields__)
    assert '| `refill` | `"wave"` | When new groups start: "wave" starts them once' in table
    assert rows(setting_parts()) >= {"max_in_flight", "interruptions", "stall_s", "refit_s"}
    assert rows(setting_policies()) == {
        *("amount", "together", "until"),
        *("store", "probes", "probe_after", "oldest", "bound", "rule"),
    }


def test_the_figures_are_there_to_the_bottom():
    table = summary_figures()
    assert "### `bias.transient`" in table
    assert {"schema", "efficiency", "reprefilled", "further_batches_to_1_percent"} <= rows(table)


def test_the_parts_of_an_engine_s_time_are_there():
    assert rows(usage_parts()) == set(PARTS)


def test_every_metric_and_every_sampled_figure_is_there():
    assert rows(metrics()) == {each.metric for each in FIGURES.values() if each.exposed}
    found = set(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", sampled_figures(), flags=re.MULTILINE))
    assert found == {(source, name) for source, names in SAMPLED.items() for name in names}


@pytest.mark.long
def test_every_public_name_is_in_the_reference(site: Path):
    pages = [path.read_text(encoding="utf-8") for path in (site / "reference/api").glob("*.html")]
    named = set(re.findall(r'id="aprilsched\.(\w+)"', "".join(pages)))
    assert named >= set(aprilsched.__all__) - {"__version__"}


def test_every_extra_is_in_the_quick_start():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"]) - {"dev", "dev-torch"}
    table = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8").partition("| extra |")[2]
    assert not [extra for extra in extras if f"`{extra}`" not in table]


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_s_help_is_the_same_each_time(name: str, site: Path):
    text = help_of(name)
    assert text.startswith(f"usage: aprilsched {name} ")
    assert all(len(line) <= 80 for line in text.splitlines() if line.startswith(" "))
    assert help_of(name) == text
    assert "\x1b" not in text
    assert f"aprilsched {name}" in page(site, "reference/command_line")
