"""Tests that metrics follow Prometheus' conventions, and that the dashboard uses only these."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aprilsched.telemetry import metrics
from aprilsched.telemetry.metrics.histogram import Histogram
from aprilsched.telemetry.metrics.table import METRICS, Metric

RESERVED = ("_bucket", "_count", "_sum", "_created", "_info")
NOT_BASE = ("ms", "milliseconds", "us", "ns", "minutes", "min", "hours", "percent", "kb", "mb")
KINDS = ("counter", "gauge", "histogram", "summary")
PANELS: list[dict[str, Any]] = json.loads(
    Path(metrics.__path__[0], "grafana.json").read_text(encoding="utf-8")
)["panels"]


def faults(metric: Metric) -> list[str]:
    """Violations of the rules of `promtool check metrics` and of the conventions' page."""
    words = metric.name.split("_")
    bare = metric.name.removesuffix("_total")
    found = [
        (not re.fullmatch(r"aprilsched(_[a-z]+)+", metric.name), "is no name of ours"),
        (metric.name.endswith("_total") != (metric.kind == "counter"), "has a wrong _total"),
        (metric.name.endswith(RESERVED), "ends with what histograms use"),
        (any(kind in words for kind in KINDS), "has its kind in its name"),
        (any(word in words for word in NOT_BASE), "has a unit that is no base unit"),
        (bool(metric.unit) and not bare.endswith(f"_{metric.unit}"), "lacks its unit at the end"),
        (not metric.unit and bare.endswith(("_seconds", "_ratio")), "does not say its unit"),
        (not re.fullmatch(r"[A-Z0-9].*\.", metric.help), "has a help that is no sentence"),
        (not all(re.fullmatch(r"[a-z]+", label) for label in metric.labels), "has an odd label"),
        (bool({"le", "quantile", "job", "instance"} & set(metric.labels)), "takes a reserved one"),
        (
            any(label in words[:-1] and label != "engine" for label in metric.labels),
            "says it twice",
        ),
        (bool(metric.buckets) != (metric.kind == "histogram"), "has buckets, or lacks them"),
        (list(metric.buckets) != sorted(set(metric.buckets)), "has buckets out of order"),
    ]
    return [what for wrong, what in found if wrong]


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS.keys())
def test_names_follow_the_convention(metric: Metric):
    assert faults(metric) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"name": "aprilsched_updates"}, "wrong _total"),
        ({"name": "updates_total"}, "no name of ours"),
        ({"name": "aprilsched_wait_ms_total"}, "no base unit"),
        ({"name": "aprilsched_wait_seconds_total"}, "does not say its unit"),
        ({"unit": "seconds"}, "lacks its unit"),
        ({"help": "updates"}, "no sentence"),
        ({"labels": ("le",)}, "reserved"),
        ({"buckets": (1.0,)}, "buckets"),
    ],
)
def test_the_rules_find_what_is_wrong(changes: dict[str, object], fault: str):
    broken = replace(METRICS["aprilsched_updates_total"], **changes)  # type: ignore[arg-type]
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
            declared = METRICS.get(histogram if histogram != name else name)
            assert declared is not None, name
            assert (histogram != name) == (declared.kind == "histogram")
            # A counter as it is says little; its rate does. The number of batches is shown.
            if declared.kind == "counter" and name != "aprilsched_batches_delivered_total":
                assert re.search(rf"(rate|increase)\({name}", expression)
            used = {*re.findall(r"by \((\w+)\)", expression)} - {"le"}
            used |= {*re.findall(r"{{(\w+)}}", legend)}
            used |= {*re.findall(r"[{,](\w+)=", expression)} - {"job"}
            assert used <= {label for n in names for label in METRICS.get(n, declared).labels}


def test_every_metric_that_has_no_panel_is_a_detail_of_one_that_has():
    text = json.dumps(PANELS)
    left_out = {name for name in METRICS if name not in text}
    assert left_out == {
        "aprilsched_batch_duration_seconds",
        "aprilsched_batch_forecast_off_policy_tokens_ratio",
        "aprilsched_batch_forecast_seconds",
        "aprilsched_engine_peak_requests",
        "aprilsched_engine_state",
        "aprilsched_engine_version",
        "aprilsched_rollouts_delivered_total",
        "aprilsched_rollouts_launched_total",
        "aprilsched_tokens_masked_total",
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
    held = histogram.buckets()
    assert held.edges == (1.0, 2.0)
    assert held.counts == (2, 4, 6)
    assert held.sum == 16.5
