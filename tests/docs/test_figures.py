"""Tests that the figures on the first pages are those of result files.

A figure that is repeated in prose grows old when its experiment is run again. Each line of FIGURES
is a page, a pattern with a group for each figure, and what the result files say they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aprilsched.__main__ import main
from tests.support.table import each_row

ROOT = Path(__file__).parents[2]


@cache
def result(path: str) -> Any:
    return msgspec.json.decode((ROOT / "experiments" / path).read_bytes())


def h200(cell: str, figure: str) -> float:
    cells = result("h200/result.json")["cells"]
    return next(own for own in cells if own["cell"] == cell)[figure]


def times(first: str, second: str) -> str:
    """Throughput of the second cell, as a multiple of the first."""
    return f"{h200(second, 'tokens_s') / h200(first, 'tokens_s'):.2f}"


def step_ratios(*, whole: bool) -> list[float]:
    """Simulated over measured mean steps of the cells in full size, or of the others."""
    cells = [cell for cell in result("h200/result.json")["cells"]
             if "predicted_step_s" in cell and "moe" not in cell["cell"]]  # fmt: skip
    chosen = [cell for cell in cells if (cell["cell"].split(":")[2] == "1") is whole]
    return [cell["predicted_step_s"] / cell["step_s"] for cell in chosen]


def accuracy() -> list[Any]:
    whole, rest = step_ratios(whole=True), step_ratios(whole=False)
    near = sum(abs(ratio - 1) <= 0.05 for ratio in rest)
    assert all(abs(ratio - 1) <= 0.05 for ratio in whole)
    share = f"{1 - min(rest):.0%}".replace("%", " %")
    return [len(whole) + len(rest), len(whole), near, len(rest), share]


def experts() -> list[Any]:
    """Cells of the mixture of experts, those within 5 %, and by how much the others are off."""
    cells = [cell for cell in result("h200/result.json")["cells"] if "moe" in cell["cell"]]
    ratios = {cell["cell"]: cell["predicted_step_s"] / cell["step_s"] - 1 for cell in cells}
    far = {name: ratio for name, ratio in ratios.items() if abs(ratio) > 0.05}
    names = ("auto-kept-default:0:1:moe", "auto-kept-default:0:1:moe:s2", "auto-default:0:1:moe",
             "waiting:0:1:moe")  # fmt: skip
    assert set(far) == set(names)
    return [len(cells) - len(far), len(cells), *(f"{100 * abs(far[name]):.0f}" for name in names)]


def frontier(kv: str, name: str, figure: str = "efficiency") -> float:
    return next(row for row in result("frontier/result.json")[kv] if row["name"] == name)[figure]


def learning(arm: str) -> str:
    arms = result("learning/result.json")["arms"]
    return f"{_seconds(arms[arm]) / _seconds(arms['waiting']):.2f}"


def larger(kind: str, arm: str) -> list[str]:
    figures = result("learning_moe/result.json")[kind]["arms"][arm]
    share = figures["seconds_to_1_of_waiting"]
    return [
        *(f"{share[key]:.2f}" for key in ("mean", "low", "high")),
        f"{figures['off_policy']['mean']:.2f}",
        f"{figures['age']['mean']:.1f}",
    ]


def _seconds(arm: Any) -> float:
    return arm["seconds_to_0.7"]["mean"]


STEPS = (
    r"Under (\d+) schedules[\s\S]*?\| dense, full size \| all (\d+) \|[^\n]*\n"
    r"\| dense, [^|]* \| (\d+) of (\d+) \| up to (\d+ %) too short"
)
FIGURES: list[tuple[str, str, Callable[[], Sequence[Any]]]] = [
    (
        "README.md",
        r"delivers ([\d.]+) times the tokens of APRIL's schedule on the mixture of experts with KV "
        r"kept \(([\d.]+) and ([\d.]+) times with two other sets of prompts\), ([\d.]+) times with "
        r"recompute, and ([\d.]+) times on the dense model with KV kept \(([\d.]+) and ([\d.]+) "
        r"times\)",
        lambda: [
            times("april-kept:0:1:moe", "auto-kept-default:0:1:moe"),
            times("april-kept:0:1:moe:s1", "auto-kept-default:0:1:moe:s1"),
            times("april-kept:0:1:moe:s2", "auto-kept-default:0:1:moe:s2"),
            times("april:0:1:moe", "auto-default:0:1:moe"),
            times("april-kept:0:1", "auto-kept-default:0:1"),
            times("april-kept:0:1:s1", "auto-kept-default:0:1:s1"),
            times("april-kept:0:1:s2", "auto-kept-default:0:1:s2"),
        ],
    ),
    *(
        (
            "README.md",
            rf"\n\| {words} \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d,]+)[^|]* "
            r"\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|",
            lambda schedule=schedule: [
                shown
                for cell in (f"{schedule}:0:1:moe", f"{schedule}:0:1")
                for shown in (
                    f"{h200(cell, 'tokens_s'):,.0f}",
                    f"{h200(cell, 'step_s'):.1f}",
                    f"{h200(cell, 'off_policy'):.2f}",
                    f"{h200(cell, 'age'):.1f}",
                )
            ],
        )
        for schedule, words in (
            ("waiting", "waiting"),
            ("april", "APRIL, recompute"),
            ("auto-default", "auto, recompute"),
            ("april-kept", "APRIL, KV kept"),
            ("auto-kept-default", "auto, KV kept"),
        )
    ),
    (
        "docs/index.md",
        r"delivers ([\d.]+) times the tokens of APRIL's on a mixture of experts \(([\d.]+) and "
        r"([\d.]+) times with other prompts\), of ([\d.]+) instead of ([\d.]+) versions of age, "
        r"and ([\d.]+) times on a dense",
        lambda: [
            times("april-kept:0:1:moe", "auto-kept-default:0:1:moe"),
            times("april-kept:0:1:moe:s1", "auto-kept-default:0:1:moe:s1"),
            times("april-kept:0:1:moe:s2", "auto-kept-default:0:1:moe:s2"),
            f"{h200('auto-kept-default:0:1:moe', 'age'):.1f}",
            f"{h200('april-kept:0:1:moe', 'age'):.1f}",
            times("april-kept:0:1", "auto-kept-default:0:1"),
        ],
    ),
    (
        "docs/limits.md",
        STEPS,
        accuracy,
    ),
    (
        "docs/limits.md",
        r"\| mixture of experts \| (\d) of (\d) \| (\d+), (\d+) and (\d+) % too short under auto, "
        r"(\d+) % too long while waiting \|",
        experts,
    ),
    (
        "docs/faq.md",
        r"efficiency is about ([\d.]+) if every response is waited for, ([\d.]+) for APRIL's "
        r"schedule with recompute, and ([\d.]+) for auto with KV kept",
        lambda: [
            f"{frontier('recompute', 'sync'):.2f}",
            f"{frontier('recompute', 'april'):.2f}",
            f"{frontier('kv_kept', 'auto'):.2f}",
        ],
    ),
    *(
        (
            "docs/learning.md",
            rf"\n\| ({words}) \| ([\d.]+) \|",
            lambda words=words, arm=arm: [words, learning(arm)],
        )
        for words, arm in (
            ("auto, recompute", "auto"),
            ("APRIL", "april"),
            ("auto, KV kept", "auto-kept"),
        )
    ),
    *(
        (
            "docs/learning.md",
            rf"\| {words} \| {policy} \| ([\d.]+) \(([\d.]+) to ([\d.]+)\) "
            r"\| ([\d.]+) \| ([\d.]+) \|",
            lambda kind=kind, arm=arm: larger(kind, arm),
        )
        for words, policy, kind, arm in (
            ("APRIL, recompute", "mixture", "moe-d", "april"),
            ("APRIL, KV kept", "mixture", "moe-d", "april-kept"),
            ("AReaL's recipe", "mixture", "moe-d", "areal"),
            ("auto, KV kept", "mixture", "moe-d", "auto-kept"),
            ("auto, KV kept, `max_staleness=4`", "mixture", "moe-d", "auto-kept-4"),
            ("auto, KV kept, clip", "mixture", "moe-d", "auto-kept-clip"),
            ("auto, KV kept, half the rate", "mixture", "moe-d", "auto-kept-half"),
            ("auto, KV kept", "dense", "dense-a", "auto-kept"),
        )
    ),
]


@each_row(("page", "pattern", "wanted"), FIGURES)
def test_a_page_agrees_with_the_result_files(
    page: str, pattern: str, wanted: Callable[[], Sequence[Any]]
) -> None:
    found = re.findall(pattern, (ROOT / page).read_text())
    assert found, f"{page} has no sentence like {pattern!r}; change FIGURES with the page"
    for figures in found:
        assert list(figures) == [str(figure) for figure in wanted()]


def test_the_run_of_the_quick_start_prints_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/quickstart.md").read_text()
    shown = page.partition("--out first\n")[2].partition("```")[0].splitlines()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--batches", "4", "--no-report", "--out", "first"]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().err.splitlines()]
    assert printed[: len(shown)] == shown
