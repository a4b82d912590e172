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
from aprilsched.planning.step_times.model_file import load_model
from tests.support.table import each_row

ROOT = Path(__file__).parents[2]


def test_the_step_times_of_the_simulation_page_are_a_model(tmp_path: Path):
    page = (ROOT / "docs" / "guides" / "simulation.md").read_text()
    path = tmp_path / "model.toml"
    path.write_text(page.split("```toml\n")[1].split("```")[0])
    model = load_model(path)
    assert (model.t0, model.prefill_rate) == (0.012, 59520)
    assert model.decode_seconds(10, 1000, 1) == pytest.approx(0.012 + 10 * 2e-5 + 1000 * 8.5e-8)


@cache
def result(path: str) -> Any:
    return msgspec.json.decode((ROOT / "experiments" / path).read_bytes())


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
             "sync:0:1:moe")  # fmt: skip
    assert set(far) == set(names)
    return [len(cells) - len(far), len(cells), *(f"{100 * abs(far[name]):.0f}" for name in names)]


def point(arm: str, file: str = "result") -> Any:
    return next(row for row in result(f"frontier/{file}.json") if row["policy"] == arm)


def tokens_per_s(arm: str, file: str = "result") -> float:
    return point(arm, file)["delivered_tokens_per_s"]


def speed(arm: str, file: str = "result") -> str:
    return f"{tokens_per_s(arm, file):,.0f}"


def staleness(arm: str, file: str = "result") -> float:
    return point(arm, file)["staleness_mean"]


def age(arm: str, file: str = "result") -> str:
    return f"{staleness(arm, file):.2f}"


def fastest_wave() -> list[str]:
    """The ratio, the speed and the staleness of the fastest waves of whole groups."""
    waves = [row for row in result("frontier/result.json") if row["policy"].startswith("wave@")]
    arm = max(waves, key=lambda row: row["delivered_tokens_per_s"])["policy"]
    return [arm.removeprefix("wave@"), speed(arm), age(arm)]


def division(split: str) -> list[str]:
    """Speed of the synchronous schedule, and speed and staleness of both automatic ones."""
    rows = {row["policy"]: row for row in result("frontier/gpus.json")}
    figures = [f"{rows[f'sync {split}']['delivered_tokens_per_s']:,.0f}"]
    for policy in ("auto", "samples:4@auto"):
        row = rows[f"{policy} {split}"]
        figures += [f"{row['delivered_tokens_per_s']:,.0f}", f"{row['staleness_mean']:.2f}"]
    return figures


def measured(cell: str) -> Any:
    return result("h200/frontier.json")["cells"][cell]


def schedule(arm: str) -> list[str]:
    """The speed and the staleness with each seed that was measured, and the oldest token."""
    cells = result("h200/frontier.json")["cells"]
    seeds = [cells[f"{arm}:s{seed}"] for seed in (0, 1) if f"{arm}:s{seed}" in cells]
    staleness = [f"{each['staleness']:.2f}" for each in seeds]
    return [
        "; ".join(f"{each['generated_s']:,.0f}" for each in seeds),
        "; ".join(staleness if len({*staleness}) > 1 else staleness[:1]),
        max(each["oldest"] for each in seeds),
    ]


def ratio(first: str, second: str, key: str = "generated_s") -> str:
    return f"{measured(first)[key] / measured(second)[key]:.2f}"


def mean_gain() -> list[str]:
    """Single samples over groups, over both seeds; at a staleness that is the same within 1 %."""
    cells = result("h200/frontier.json")["cells"]
    speed, staleness = (
        sum(cells[f"samples@2.0:s{seed}"][key] for seed in (0, 1))
        / sum(cells[f"wave@2.0:s{seed}"][key] for seed in (0, 1))
        for key in ("generated_s", "staleness")
    )
    assert abs(staleness - 1) < 0.01
    return [f"{speed:.2f}", "groups"]


def reserve() -> list[str]:
    """The gain of the smaller reserve, and that of samples with it, where refits recompute."""
    samples, groups = "samples@2.0", "wave@2.0"
    return [
        *(ratio(f"{arm}:ratio:s1", f"{arm}:recompute:s1") for arm in (samples, groups)),
        ratio(f"{samples}:ratio:s1", f"{groups}:ratio:s1"),
        ratio(f"{samples}:recompute:s1", f"{groups}:recompute:s1"),
    ]


def learning(arm: str) -> str:
    arms = result("learning/result.json")["arms"]
    return f"{_seconds(arms[arm]) / _seconds(arms['sync']):.2f}"


def larger(kind: str, arm: str) -> list[str]:
    figures = result("learning_moe/result.json")[kind]["arms"][arm]
    share = figures["seconds_to_1_of_sync"]
    return [
        *(f"{share[key]:.2f}" for key in ("mean", "low", "high")),
        f"{figures['off_policy']['mean']:.2f}",
        f"{figures['staleness']['mean']:.1f}",
    ]


def _seconds(arm: Any) -> float:
    return arm["seconds_to_0.7"]["mean"]


STEPS = (
    r"Under (\d+) schedules[\s\S]*?\| dense, full size \| all (\d+) \|[^\n]*\n"
    r"\| dense, [^|]* \| (\d+) of (\d+) \| up to (\d+ %) too short"
)
FIGURES: list[tuple[str, str, Callable[[], Sequence[Any]]]] = [
    *(
        (
            "docs/guides/colocated.md",
            rf"\n\| {split} \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \| ([\d,]+) \| ([\d.]+) \|",
            lambda split=split: division(split),
        )
        for split in ("colocated", "3:5", "4:4", "5:3", "6:2", "7:1")
    ),
    *(
        (
            "docs/frontier.md",
            rf"\n\| `{arm}`[^|]*\| ([\d,]+) \| ([\d.]+) \| (\d+) \|",
            lambda arm=arm: [speed(arm), age(arm), point(arm)["staleness_max"]],
        )
        for arm in (
            "wave@2",
            "wave@3",
            "auto",
            "samples:4@1.5",
            "samples:4@2",
            "samples:2@2",
            "samples:4@auto",
        )
    ),
    (
        "docs/frontier.md",
        r"`samples:4@2` delivers ([\d.]+) times[\s\S]*is as fast as `wave@(\d)`, at ([\d.]+) "
        r"instead of (\d\.\d+)\.[\s\S]*as with groups, at ([\d.]+) of the staleness",
        lambda: [
            f"{tokens_per_s('samples:4@2') / tokens_per_s('wave@2'):.2f}",
            fastest_wave()[0],
            age("samples:4@2"),
            fastest_wave()[2],
            f"{staleness('samples:4@auto') / staleness('auto'):.2f}",
        ],
    ),
    (
        "docs/index.md",
        r"samples are ([\d.]+) times as fast as groups, or ([\d.]+) times",
        lambda: reserve()[:1:-1],
    ),
    *(
        (page, r"generated ([\d.]+) times as many tokens per second as whole (groups)", mean_gain)
        for page in ("README.md", "docs/index.md", "docs/frontier.md")
    ),
    *(
        (
            "README.md",
            rf"\n\| {words} \| ([\d,]+(?:; [\d,]+)?) \| ([\d.]+(?:; [\d.]+)?) \| (\d+) \|",
            lambda cell=cell: schedule(cell),
        )
        for words, cell in (
            ("synchronous", "sync"),
            (r"whole groups, ratio 2.0 \(APRIL\)", "wave@2.0"),
            ("whole groups, ratio 3.5", "wave@3.5"),
            ("whole groups, auto, unbounded", "auto"),
            ("whole groups, auto", "auto@4"),
            ("single samples, ratio 2.0", "samples@2.0"),
            ("single samples, auto, unbounded", "auto-samples"),
            ("single samples, auto", "auto-samples@4"),
        )
    ),
    (
        "README.md",
        r"under the default bound \(last row\), ([\d.]+) times at ([\d.]+) of their staleness",
        lambda: [
            ratio("auto-samples@4:s0", "auto@4:s0", key) for key in ("generated_s", "staleness")
        ],
    ),
    (
        "README.md",
        r"made a schedule ([\d.]+) times as fast\.[^\n]*samples are ([\d.]+) times as fast as "
        r"groups \(ratio 2.0\), or ([\d.]+) times",
        lambda: [ratio("pool@1.75:clip:s1", "pool@1.75:s1"), *reserve()[:1:-1]],
    ),
    (
        "docs/guides/tuning.md",
        r"samples with recompute ([\d.]+) times as fast and groups ([\d.]+) times[\s\S]*"
        r"samples are ([\d.]+) times as fast as groups with it, and ([\d.]+) times without it",
        reserve,
    ),
    (
        "docs/frontier.md",
        r"`pool@1.75` delivers ([\d,]+) instead of ([\d,]+)\.",
        lambda: [speed("pool@1.75", "clip"), speed("pool@1.75")],
    ),
    *(
        (
            "docs/frontier.md",
            rf"the gain is smaller:[\s\S]*?\n\| `{arm}` \| ([\d,]+) \| ([\d.]+) \|\n",
            lambda arm=arm: [speed(arm, "dense_kept"), age(arm, "dense_kept")],
        )
        for arm in ("wave@2", "wave@3", "samples:4@2")
    ),
    (
        "docs/guides/simulation.md",
        STEPS,
        accuracy,
    ),
    (
        "docs/guides/simulation.md",
        r"\| mixture of experts \| (\d) of (\d) \| (\d+), (\d+) and (\d+) % too short under auto, "
        r"(\d+) % too long under the synchronous schedule \|",
        experts,
    ),
    (
        "docs/faq.md",
        r"efficiency is about ([\d.]+) if every response is waited for, and ([\d.]+) for APRIL's",
        lambda: [f"{point(arm, 'dense')['efficiency']:.2f}" for arm in ("sync", "wave@2")],
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
