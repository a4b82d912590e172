"""Tests ``aprilsched frontier`` and ``simulation.frontier``: values, refusals and the picture."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, fields, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from aprilsched import LongTailWorkload, SchedulerConfig, __version__
from aprilsched.__main__ import main
from aprilsched.cli.commands.frontier import main as frontier_command
from aprilsched.cli.runs.tables import frontier_table
from aprilsched.errors import ConfigError
from aprilsched.simulation import PolicyRow, SimulationResult, compare, frontier, simulate
from tests.support.table import each_row

SMALL = ["--batches", "6", "--batch-groups", "4", "--group-size", "4", "--median", "60", "--cap",
         "600", "--kv", "keep"]  # fmt: skip
BASE: dict[str, Any] = {
    "batch_groups": 4,
    "group_size": 4,
    "straggler": "in_place",
    "max_staleness": None,
}
ARMS = {
    "wave@1": SchedulerConfig(**BASE, over_provision=1.0),
    "wave@2": SchedulerConfig(**BASE, over_provision=2.0),
    "samples:2@2": SchedulerConfig(**BASE, over_provision=2.0, delivery="samples", siblings=2),
    "samples:1+pool@1.5": SchedulerConfig(
        **BASE, over_provision=1.5, refill="pool", delivery="samples", siblings=1
    ),
}


def run(config: SchedulerConfig, seed: int, batches: int = 6) -> SimulationResult:
    workload = LongTailWorkload(median=60, cap=600)
    return simulate(workload, config, batches=batches, seed=seed, usage=False)


@cache
def simulated() -> PolicyRow:
    return compare({"arm": run(ARMS["wave@1"], 0)}).policies[0]


def point(arm: str, age: float, speed: float, spread: float = 0.0) -> PolicyRow:
    samples = re.match(r"samples:(\d+)", arm)
    row = replace(
        simulated(), policy=arm, siblings=int(samples[1]) if samples else None,
        delivered_tokens_per_s=speed, staleness_mean=age,
    )  # fmt: skip
    if not spread:
        return row
    return replace(
        row, seeds=2, staleness_mean_range=(age - spread, age + spread),
        delivered_tokens_per_s_range=(speed * (1 - spread), speed * (1 + spread)),
    )  # fmt: skip


def test_the_command_has_the_points_of_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arms = ["--arms", "wave@1|2,samples:2@2", "samples:1+pool@1.5", "--seeds", "2", "--seed", "3"]
    out = ["--out", "none", "--json", "--quiet"]
    assert main(["frontier", *SMALL, *arms, *out]) == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    points = frontier(ARMS, run, seeds=2, first_seed=3)
    assert captured.err == ""
    assert [row["policy"] for row in rows] == [each.policy for each in points] == list(ARMS)
    for row, each in zip(rows, points, strict=True):
        assert {name: row[name] for name in asdict(each)} == json.loads(json.dumps(asdict(each)))
        ages = row["by_seed"]["staleness_mean"]
        assert [min(ages), max(ages)] == row["staleness_mean_range"]
        assert row["aprilsched"] == __version__
        assert row["settings"]["workload"]["cap"] == 600
        assert row["settings"]["scheduler"]["over_provision"] == float(row["policy"].split("@")[1])


def test_a_point_is_the_mean_of_its_seeds():
    config = ARMS["samples:2@2"]
    (found,) = frontier({"arm": config}, run, seeds=3, first_seed=5)
    steady = [run(config, seed).summary.steady_state for seed in (5, 6, 7)]
    ages = [each.staleness_mean or 0.0 for each in steady]
    assert found.staleness_mean == pytest.approx(np.mean(ages))
    assert found.staleness_mean_range == (min(ages), max(ages))
    speeds = [each or 0.0 for each in found.by_seed["delivered_tokens_per_s"]]
    assert found.delivered_tokens_per_s == pytest.approx(np.mean(speeds))
    assert found.delivered_tokens_per_s_range == (min(speeds), max(speeds))
    assert (found.seeds, found.siblings) == (3, 2)
    assert found.staleness_max == max(each.staleness_max for each in steady)


def test_a_run_without_a_steady_state_is_refused():
    with pytest.raises(ConfigError, match="batches must be above the burn-in of 1, got 1 deliver"):
        frontier(ARMS, lambda config, seed: run(config, seed, batches=1))


def test_an_arm_that_is_impossible_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The other arms are drawn."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "it.svg"
    arms = ["--arms", "samples:2+buckets@2,wave@2,samples:9@2"]
    assert main(["frontier", *SMALL, *arms, "--out", str(picture)]) == 0
    captured = capsys.readouterr()
    assert 'samples:2+buckets@2 is left out: refill="buckets" runs' in captured.err
    assert "samples:9@2 is left out: siblings must be below group_size=4, got 9;" in captured.err
    assert "wave@2" in captured.out
    assert "samples" not in captured.out
    assert picture.read_bytes().startswith(b"<?xml")


def test_the_arms_may_be_lengths_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "lengths.txt").write_text("40 55 70 900")
    lengths = ["--batches", "4", "--batch-groups", "2", "--lengths", str(tmp_path / "lengths.txt")]
    arms = ["--arms", "april:over_provision=1.5|2", "--out", "none", "--json", "--quiet"]
    assert main(["frontier", *lengths, *arms]) == 0
    names: list[str] = [row["policy"] for row in json.loads(capsys.readouterr().out)]
    assert names == ["april@1.5", "april@2"]


def test_the_caption_states_how_groups_of_lengths_are_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "lengths.txt"
    path.write_text("40 55 70 900")
    shape = ["--batches", "4", "--batch-groups", "2", "--arms", "wave@2", "--out", "none", "--json"]
    for more, share in ([], "0.5"), (["--within-group", "0.9"], "0.9"):
        assert main(["frontier", *shape, "--lengths", str(path), *more, "--quiet"]) == 0
        caption = json.loads(capsys.readouterr().out)[0]["caption"]
        assert f"the limit of every request ({path}; within_group={share} is assumed); " in caption


def test_a_stored_frontier_is_redrawn_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The rows and the picture are those of the simulation; only their width differs."""
    plots = pytest.importorskip("aprilsched.observe.plots")
    first, again = tmp_path / "first.svg", tmp_path / "again.svg"
    arms = ["--arms", "wave@2,samples:2@2", "--seeds", "2", "--seed", "3"]
    assert main(["frontier", *SMALL, *arms, "--json", "--out", str(first)]) == 0
    simulated = capsys.readouterr()
    stored = tmp_path / "result.json"
    stored.write_text(simulated.out)
    assert main(["frontier", "--redraw", str(stored), "--json", "--out", str(again)]) == 0
    redrawn = capsys.readouterr()
    assert redrawn.out == simulated.out
    assert again.read_bytes() == first.read_bytes()
    caption = (
        "Simulated: delivered tokens per second against their mean staleness, by over-provisioning "
        "ratio (numbers), means and ranges (bars) of seeds 3 to 4. 6 batches of 4 groups of 4, of "
        "which the first 1 do not count; responses of at most 600 tokens, the limit of every "
        "request (lognormal with median 60 and sigma 0.9; within_group=0.5 is assumed); 1 engine "
        "with step times of Qwen3-4B on an H200, 1,000,000 tokens of KV each, and KV kept at "
        "updates; the trainer takes 0 s for a batch."
    )
    assert {row["caption"] for row in json.loads(simulated.out)} == {caption}
    for captured in (simulated, redrawn):
        picture, last = captured.err.splitlines()[-2:]
        assert (picture.startswith("The picture is"), last) == (True, caption)
        assert "samples:2@2 │" in captured.err, "the table"
    narrow = ["--width", "3.3", "--quiet", "--out", str(first)]
    assert main(["frontier", "--redraw", str(stored), *narrow]) == 0
    assert "samples:2@2" in capsys.readouterr().out
    assert first.read_bytes() != again.read_bytes()
    assert plots


@each_row(
    ("text", "why"),
    [
        (None, "No such file or directory"),
        ("no JSON", "JSON is malformed"),
        ("[]", "Expected `array` of length >= 1"),
        ('[{"arm": "wave@2"}]', "missing required field"),
    ],
)
def test_a_file_that_is_no_frontier_is_refused(text: str | None, why: str, tmp_path: Path):
    path = tmp_path / "result.json"
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"redraw must be a file that .*{re.escape(why)}"):
        frontier_command(["--redraw", str(path), "--out", "none"])


@each_row(
    ("changes", "why"),
    [
        ({"caption": 3}, "Expected `str`, got `int` - at `$[1]`"),
        ({"staleness_max": "x"}, "Expected `int`, got `str`"),
        ({"by_seed": {"staleness_mean": 3}}, "Expected `array`, got `int`"),
    ],
)
def test_a_stored_frontier_with_a_wrong_field_is_refused(
    changes: dict[str, Any], why: str, tmp_path: Path
):
    row = {each.name: 0 for each in fields(PolicyRow)} | {"policy": "wave@2", "schedule": ""}
    row |= {"delivered_tokens_per_s_range": None, "staleness_mean_range": None, "by_seed": {}}
    path = tmp_path / "result.json"
    path.write_text(json.dumps([row, row]))
    assert frontier_command(["--redraw", str(path), "--out", "none"]) == 0
    path.write_text(json.dumps([row, row | changes]))
    with pytest.raises(ConfigError, match=re.escape(why)):
        frontier_command(["--redraw", str(path), "--out", "none"])


def test_the_caption_names_all_settings_of_the_arms(capsys: pytest.CaptureFixture[str]):
    arms = ["--arms", "wave@2,wave@2:group_size=2:straggler=retract", "--sim.engines", "2"]
    more = ["--burn-in", "2", "--sim.kv-tokens", "90000", "--train-seconds", "1.5"]
    more += ["--model", "experiments/frontier/moe.toml"]
    assert main(["frontier", *SMALL, *arms, *more, "--out", "none", "--json", "--quiet"]) == 0
    caption = json.loads(capsys.readouterr().out)[0]["caption"]
    assert "seed 0. 6 batches of 4 groups of 2 or 4 groups of 4, of which the first 2 do" in caption
    assert "tokens, the limit of every request (lognormal with" in caption
    assert caption.endswith(
        "2 engines with step times of experiments/frontier/moe.toml, 90,000 tokens of KV each, and "
        "KV kept or recomputed at updates; the trainer takes 1.5 s for a batch."
    )


def test_a_rule_of_your_own_delivers_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "late_rules.py").write_text(
        "from dataclasses import replace\n"
        "def late(config):\n"
        "    return replace(config, over_provision=3.0, refill='pool')\n"
    )
    monkeypatch.chdir(tmp_path)
    out = ["--out", "none", "--json", "--quiet"]
    assert main(["frontier", *SMALL, "--arms", "samples:2+late_rules.late@1.5|2", *out]) == 0
    rows = json.loads(capsys.readouterr().out)
    names = ["samples:2+late_rules.late@1.5", "samples:2+late_rules.late@2"]
    assert [(row["policy"], row["siblings"]) for row in rows] == [(name, 2) for name in names]
    assert [row["settings"]["scheduler"]["over_provision"] for row in rows] == [1.5, 2.0]
    assert {str(row["settings"]["scheduler"]["refill"]) for row in rows} != {"wave"}
    assert main(["frontier", *SMALL, "--arms", "late_rules.late+samples:2@2", *out]) == 2
    assert "must be groups, samples or samples:SIBLINGS, got 'late_rules" in capsys.readouterr().err


def test_a_line_joins_the_ratios_of_a_rule_with_its_settings():
    """A preset has a line too, "auto" has none, and other settings are another line."""
    plots = pytest.importorskip("aprilsched.observe.plots")
    arms = ["april@1.25", "april@2", "samples:4@1.5", "samples:4@auto", "samples:4@2",
            "samples:4@1.5 max_staleness=4", "samples:4@auto max_staleness=4", "auto"]  # fmt: skip
    points = [point(arm, n / 2, 4000.0 + 500 * n) for n, arm in enumerate(arms)]
    (axes,) = plots.frontier(points).axes
    lines, names = axes.get_legend_handles_labels()
    joined = {
        " ".join(name.split()): [float(x) for x in line.get_xdata()]
        for line, name in zip(lines, names, strict=True)
    }
    assert joined == {
        "whole groups, april": [0.0, 0.5],
        "single samples, 4 siblings": [1.0, 2.0],
        "single samples, 4 siblings, max_staleness=4": [2.5],
    }
    marked = {float(x) for line in axes.lines for x in line.get_xdata()}
    assert marked >= {n / 2 for n in range(len(arms))}
    labels = [text.get_text() for text in axes.texts]
    assert sorted(labels) == ["1.25", "1.5", "1.5", "2", "2", "auto", "auto", "auto"]


def test_the_table_of_a_frontier_fits_into_80_columns():
    points = [point("samples:4@1.25", 1.5, 12345.6, 0.03)]
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(frontier_table(points))
    assert "│ samples:4@1.25 │" in captured.get()


def test_the_table_of_a_frontier_folds_long_names():
    points = [point(f"my_rules.kept_{n}_with_a_long_name@2", 1.5, 12345.6, 0.1) for n in (1, 2)]
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(frontier_table(points))
    cells = [line.split("│")[1].strip() for line in captured.get().splitlines() if "│" in line]
    assert "".join(cells) == "".join(each.policy for each in points)


@each_row(("width", "height"), [(12.0, 6.0), (9.0, 5.6), (4.5, 5.0)])
def test_labels_of_a_frontier_cover_nothing(width: float, height: float):
    plots = pytest.importorskip("aprilsched.observe.plots")
    from matplotlib.text import Text

    rng = np.random.default_rng(0)
    kinds = ("wave", "pool", "samples:2", "samples:4", "a", "b")
    points: list[Any] = [
        point(f"{kind}@{1 + n / 4:g}", n / 2 + rng.normal(0, 0.2), 4000 + 1000 * n, 0.05)
        for kind in kinds for n in range(7)
    ]  # fmt: skip
    figure = plots.frontier([*points, point("auto", 1.0, 6000.0)], width=width, height=height)
    (axes,) = figure.axes
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the lines to points
    places: list[tuple[float, float]] = []
    for each in points:
        (left, right), (low, high) = each.staleness_mean_range, each.delivered_tokens_per_s_range
        for part in range(9):
            x, y = left + (right - left) * part / 8, low + (high - low) * part / 8
            places += [(x, each.delivered_tokens_per_s), (each.staleness_mean, y)]
    spots = axes.transData.transform(places)
    assert len(boxes) > (30 if width > 8 else 9)
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    assert not [box for box in boxes for spot in spots if box.contains(*spot)]
    inside = axes.get_window_extent()
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in boxes)
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert not [spot for spot in spots if box.contains(*spot)]
    assert not [text for text in boxes if text.overlaps(box)]


@each_row("width", [9.0, 7.0, 3.3])
def test_a_frontier_fits_into_its_page(width: float, tmp_path: Path):
    """Letters have 8 points or more, the whole legend is on the page, and speeds start at 0."""
    plots = pytest.importorskip("aprilsched.observe.plots")
    from matplotlib.text import Text

    names = ["wave@1", "wave@1.25", "wave@2", "pool@1", "samples:4@1.5", "areal", "auto"]
    names += [f"my_rules.a_rule_with_a_long_name_{n}@2" for n in range(5)]
    points = [point(name, n / 3, 4000 + 100 * n, 0.02) for n, name in enumerate(names)]
    figure = plots.frontier(points, width=width, title="Mine" if width > 8 else "")
    figure.savefig(tmp_path / "it.pdf")
    assert b"/Type3" not in (tmp_path / "it.pdf").read_bytes()
    assert figure.get_figwidth() == width
    figure.draw_without_rendering()
    (axes,), (legend,), page = figure.axes, figure.legends, figure.bbox
    assert axes.get_title("left") == ("Mine" if width > 8 else "")
    assert axes.get_ylim()[0] == 0
    assert axes.get_window_extent().height > 1.5 * figure.dpi
    shown = [axes.xaxis.label, axes.yaxis.label, *axes.texts, *legend.get_texts()]
    for text in shown:
        box = Text.get_window_extent(text)
        assert page.x0 <= box.x0 < box.x1 <= page.x1, text
        assert page.y0 <= box.y0 < box.y1 <= page.y1, text
        assert text.get_fontsize() >= 8


def test_twenty_kinds_of_arms_differ_in_the_picture():
    plots = pytest.importorskip("aprilsched.observe.plots")
    figure = plots.frontier([point(f"samples:{n}@2", n, 100.0 + n) for n in range(1, 21)])
    lines, names = figure.axes[0].get_legend_handles_labels()
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 20
    for unlike in ([line.get_color() for line in lines], [line.get_marker() for line in lines]):
        assert len(set(unlike[:12])) == 12, "in grey, or to one who cannot see a colour"
    assert names == [f"single samples, {n} siblings" for n in range(1, 21)]


def test_the_legend_names_the_unit_and_the_rule():
    plots = pytest.importorskip("aprilsched.observe.plots")
    points = [point("samples:4@2", 1.0, 5.0), point("wave@2", 1.0, 5.0), point("auto", 2.0, 6.0)]
    points += [point("april@1.5", 3.0, 5.0), point("my_rules.thirds@2", 3.0, 7.0)]
    points.append(point("samples:4+pool@2", 4.0, 5.0))
    points.append(replace(points[-1], policy="a.b.c@2"))
    points.append(replace(points[-1], policy="samples:4+a.b.d@2"))
    figure = plots.frontier(points)
    _, names = figure.axes[0].get_legend_handles_labels()
    groups = ["wave", "april", "thirds"]
    assert [name.replace("\n", " ") for name in names] == [
        *(f"whole groups, {name}" for name in groups),
        *(f"single samples, 4 siblings{name}" for name in ("", ", pool", ", c", ", d")),
    ]


CROWDED = {
    "sync": (0.0, 5107), "wave@1.5": (0.869, 8832), "wave@2": (1.525, 9819),
    "wave@3": (2.696, 10535), "pool@1.75": (4.552, 11080), "auto": (5.171, 11137),
    "samples:4@1.5": (1.055, 10152), "samples:4@2": (1.736, 10705),
    "samples:4@auto": (2.815, 11114), "thirds@2": (1.269, 9249), "kept@2": (1.523, 9651),
    "thirds_samples@2": (1.391, 10357),
}  # fmt: skip
"""Arms of which some are at nearly the same place."""


@each_row("width", [3.3, 4.5, 7.0, 9.0])
def test_a_label_is_read_as_that_of_its_point(width: float):
    """It has the colour of its series, and is nearest to its point or has a line to it, which
    crosses no other marker."""
    plots = pytest.importorskip("aprilsched.observe.plots")
    from matplotlib.colors import same_color
    from matplotlib.text import Text

    points = [point(arm, *where, 0.02) for arm, where in CROWDED.items()]
    figure = plots.frontier(points, width=width)
    (axes,) = figure.axes
    figure.draw_without_rendering()
    lines, names = axes.get_legend_handles_labels()
    families = [" ".join(name.split()).split(", ")[-1] for name in names]
    colours = dict(zip(families, [line.get_color() for line in lines], strict=True))
    assert not {"sync", "auto"} & colours.keys(), "named by their labels"
    colours |= {
        name: line.get_color()
        for name in ("sync", "auto")
        for line in axes.lines
        if CROWDED[name] in map(tuple, line.get_xydata())
    }
    places = {arm: axes.transData.transform(where) for arm, where in CROWDED.items()}
    assert len(axes.texts) == len(points)
    leaders = 0
    for text in axes.texts:
        arm = next(arm for arm, where in CROWDED.items() if where == text.xy)
        assert text.get_text() == arm.split("@")[-1]
        family = "4 siblings" if arm.startswith("samples") else arm.split("@")[0]
        assert same_color(text.get_color(), colours[family])
        box = Text.get_window_extent(text)
        spot, others = places[arm], [place for other, place in places.items() if other != arm]
        if text.arrow_patch.get_visible():
            leaders += 1
            assert same_color(text.arrow_patch.get_edgecolor(), colours[family])
            centre = np.array([(box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2])
            for other in others:
                apart = float(np.hypot(*(other - spot)))
                way = [centre + share * (spot - centre) for share in np.linspace(0, 1, 200)]
                near = min(float(np.hypot(*(each - other))) for each in way)
                assert near >= min(4 * figure.dpi / 72, 0.85 * apart), (arm, text)
        else:
            own, *foreign = (
                np.hypot(max(box.x0 - x, 0, x - box.x1), max(box.y0 - y, 0, y - box.y1))
                for x, y in [spot, *others]
            )
            assert own < min(foreign), arm
    assert leaders <= 4
