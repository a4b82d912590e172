"""Tests that metrics follow Prometheus' conventions, and that the dashboard uses only these."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from aprilsched import observe
from aprilsched.observe.figures.figures import (
    BatchFigures,
    Figure,
    Figures,
    SteadyState,
    figures_in,
)
from aprilsched.observe.figures.metrics import Histogram
from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.observe.figures.table import FIGURES
from tests.support.table import each_row

RESERVED = ("_bucket", "_count", "_sum", "_created", "_info")
NOT_BASE = ("ms", "milliseconds", "us", "ns", "minutes", "min", "hours", "percent", "kb", "mb")
KINDS = ("counter", "gauge", "histogram", "summary")
PANELS: list[dict[str, Any]] = json.loads(
    Path(observe.__path__[0], "grafana.json").read_text(encoding="utf-8")
)["panels"]


EXPOSED = {figure.metric: figure for figure in FIGURES.values() if figure.exposed}


def faults(figure: Figure) -> list[str]:
    """Violations of the rules of `promtool check metrics` and of the conventions' page."""
    words = figure.metric.split("_")
    bare = figure.metric.removesuffix("_total")
    found = [
        (
            not re.fullmatch(r"(run|batch|engines|gateway)/[a-z]+(_[a-z]+)*", figure.name),
            "no name of ours",
        ),
        (bare.endswith("_total") or figure.name.endswith("_total"), "has a _total of its own"),
        (figure.metric.endswith(RESERVED), "ends with what histograms use"),
        (any(kind in words for kind in KINDS), "has its kind in its name"),
        (any(word in words for word in NOT_BASE), "has a unit that is not a base unit"),
        (not figure.unit and bare.endswith(("_seconds", "_ratio")), "does not declare its unit"),
        (not re.fullmatch(r"[A-Z0-9].*\.", figure.help), "has a help that is not a sentence"),
        (not all(re.fullmatch(r"[a-z]+", label) for label in figure.labels), "has an odd label"),
        (bool({"le", "quantile", "job", "instance"} & set(figure.labels)), "takes a reserved one"),
        (
            any(label in words[:-1] and label != "engine" for label in figure.labels),
            "repeats a label in its name",
        ),
        (bool(figure.buckets) != (figure.kind == "histogram"), "has buckets, or lacks them"),
        (list(figure.buckets) != sorted(set(figure.buckets)), "has buckets out of order"),
    ]
    return [what for wrong, what in found if wrong]


@each_row("figure", FIGURES.values(), ids=FIGURES.keys())
def test_names_follow_the_convention(figure: Figure):
    assert faults(figure) == []
    assert (figure.of is None) == (figure.kind == "histogram")
    assert figure.exposed or figure.tracked


def test_a_figure_of_batches_is_everywhere():
    for name, figure in figures_in(Figures).items():
        for kind in (BatchFigures, SteadyState, RunSummary):
            assert figures_in(kind)[name] is figure
        if figure.exposed or figure.tracked:
            assert FIGURES[f"batch/{name}"].help == figure.help


def test_metrics_have_their_unit_at_the_end():
    assert len(EXPOSED) == sum(figure.exposed for figure in FIGURES.values())
    named = {
        "batch/seconds": "aprilsched_batch_seconds",
        "batch/efficiency": "aprilsched_batch_efficiency_ratio",
        "batch/off_policy_token_share": "aprilsched_batch_off_policy_token_share",
        "batch/mean_length": "aprilsched_batch_mean_length_tokens",
        "batch/staleness_max": "aprilsched_batch_staleness_max_versions",
        "run/policy_version": "aprilsched_policy_version",
        "run/tokens_generated": "aprilsched_tokens_generated_total",
        "run/engine_seconds": "aprilsched_engine_seconds_total",
    }
    assert {name: FIGURES[name].metric for name in named} == named


@each_row(
    ("changes", "fault"),
    [
        ({"name": "run/updates_total"}, "a _total of its own"),
        ({"name": "updates"}, "no name of ours"),
        ({"name": "run/wait_ms"}, "not a base unit"),
        ({"name": "run/wait_seconds"}, "does not declare its unit"),
        ({"help": "updates"}, "not a sentence"),
        ({"labels": ("le",)}, "reserved"),
        ({"buckets": (1.0,)}, "buckets"),
    ],
)
def test_the_rules_find_what_is_wrong(changes: dict[str, object], fault: str):
    broken = replace(FIGURES["run/updates"], **changes)  # type: ignore[arg-type]
    assert any(fault in found for found in faults(broken))


def test_the_dashboard_s_queries_name_what_there_is():
    asked = [query for panel in PANELS for query in panel.get("targets", ())]
    assert len(asked) > 20
    for query in asked:
        expression, legend = query["expr"], query["legendFormat"]
        names = re.findall(r"aprilsched_\w+", expression)
        assert names, query
        for name in names:
            histogram = re.sub(r"_(bucket|sum|count)$", "", name)
            declared = EXPOSED.get(histogram if histogram != name else name)
            assert declared is not None, name
            assert (histogram != name) == (declared.kind == "histogram")
            # A panel must show a counter's rate, except for the number of batches.
            if declared.kind == "counter" and name != "aprilsched_batches_delivered_total":
                assert re.search(rf"(rate|increase)\({name}", expression)
            used = {*re.findall(r"by \((\w+)\)", expression)} - {"le"}
            used |= {*re.findall(r"{{(\w+)}}", legend)}
            used |= {*re.findall(r"[{,](\w+)=", expression)} - {"job"}
            assert used <= {label for n in names for label in EXPOSED.get(n, declared).labels}


def test_every_metric_that_has_no_panel_is_a_detail_of_one_that_has():
    text = json.dumps(PANELS)
    left_out = {name for name in EXPOSED if name not in text}
    of_batches = {each.metric for each in EXPOSED.values() if each.name.startswith("batch/")}
    assert len(of_batches - left_out) > 5
    assert left_out - of_batches == {
        "aprilsched_engine_slots",
        "aprilsched_engine_state",
        "aprilsched_engine_version",
        "aprilsched_rollouts_delivered_total",
        "aprilsched_rollouts_launched_total",
        "aprilsched_rollouts_regenerated_total",
        "aprilsched_teardowns_failed_total",
        "aprilsched_tokens_masked_total",
        "aprilsched_turns_refused_total",
    }


def test_panels_do_not_overlap():
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_a_histogram_counts_what_is_not_above_an_edge():
    histogram = Histogram((1.0, 2.0))
    histogram.observe([0.5, 1.0, 1.5, 2.0, 9.0])
    histogram.observe(2.5)
    held = histogram.held()
    assert held.counts == [("1.0", 2), ("2.0", 4), ("+Inf", 6)]
    assert held.sum == 16.5


def test_the_alerts_use_metrics_that_exist():
    text = (Path(__file__).parents[2] / "deploy/alerts.yaml").read_text(encoding="utf-8")
    names = set(re.findall(r"aprilsched_[a-z_]+(?=\{)", text))
    assert len(names) == 4
    assert names <= EXPOSED.keys()
    assert text.count("- alert: ") == 6
