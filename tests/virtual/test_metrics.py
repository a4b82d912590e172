"""Tests the metrics of a real run, scraped over HTTP and read by prometheus_client's parser."""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aprilsched import SimFleet
from aprilsched.__main__ import main
from aprilsched.config import Staleness
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.kernel.shell.listener import Listener
from aprilsched.observe.exports.prometheus import serve_metrics
from aprilsched.observe.figures.engine_time import PARTS
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.figures.metrics import Metrics
from aprilsched.observe.figures.table import FIGURES
from aprilsched.observe.log.reading import replay
from aprilsched.observe.log.usage import usage_of
from aprilsched.types import Batch
from tests.support import small

Pace: TypeAlias = Literal["synchronous", "asynchronous"]
Labels = tuple[tuple[str, str], ...]
Samples = dict[tuple[str, Labels], float]
UNKNOWN = {
    "batch/efficiency", "batch/t_bound", "batch/reward", "batch/turns_mean", "batch/tool_share",
    "batch/drift_tokens", "batch/branches",
}  # fmt: skip
"""Metrics that these runs lack: a bound, which only the command line knows, rewards, and
episodes."""


def scraped(url: str) -> tuple[Samples, dict[str, str]]:
    """Samples by name and labels, and the type of each family, by prometheus_client's parser."""
    with urllib.request.urlopen(url, timeout=600) as answer:
        text = answer.read().decode()
    families = list(text_string_to_metric_families(text))
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }
    return samples, {family.name: family.type for family in families}


@dataclass(kw_only=True)
class Scraped:
    samples: Samples
    types: dict[str, str]
    batches: list[Batch]

    def value(self, name: str, **labels: str) -> float:
        return self.samples[f"aprilsched_{name}", tuple(sorted(labels.items()))]

    def total(self, name: str) -> float:
        return sum(v for (n, _), v in self.samples.items() if n == f"aprilsched_{name}")


def driven(listeners: Sequence[Listener], *, pace: Pace = "synchronous") -> list[Batch]:
    """A run on two engines, with an update after each batch; stale rollouts are dropped."""
    evicts = Staleness(1, rule="evict")
    fleet = SimFleet(2, refit_seconds=0.3)
    return small.driven(listeners, fleet=fleet, max_staleness=evicts, pace=pace)


@pytest.fixture(scope="module")
def run() -> Scraped:
    figures = LiveFigures(clock=None)
    metrics = Metrics(figures)
    with serve_metrics(metrics, 0) as server:
        batches = driven([figures, metrics])
        samples, types = scraped(server.url)
    return Scraped(samples=samples, types=types, batches=batches)


def test_everything_declared_is_exposed_and_nothing_else(run: Scraped):
    ours = {name for name in run.types if name.startswith("aprilsched_")}
    exposed = {each.metric: each for each in FIGURES.values() if each.exposed}
    assert ours == {name.removesuffix("_total") for name in exposed}
    for name, figure in exposed.items():
        assert run.types[name.removesuffix("_total")] == figure.kind
        suffix = "_count" if figure.kind == "histogram" else ""
        found = [labels for sample, labels in run.samples if sample == name + suffix]
        absent = figure.name in UNKNOWN or "forecast" in name or "gateway" in name
        assert found or absent, name
        assert all({key for key, _ in labels} == set(figure.labels) for labels in found), name


def test_counts_are_those_of_the_batches(run: Scraped):
    lengths = [len(rollout) for batch in run.batches for rollout in batch.rollouts]
    assert run.value("batches_delivered_total") == len(run.batches) == 4
    assert run.value("rollouts_delivered_total") == len(lengths)
    assert run.value("tokens_delivered_total") == sum(lengths)
    assert run.value("response_length_tokens_count") == len(lengths)
    assert run.value("response_length_tokens_sum") == sum(lengths)
    for edge in (32.0, 128.0):
        short = sum(length <= edge for length in lengths)
        assert run.value("response_length_tokens_bucket", le=str(edge)) == short
    ages = [rollout.staleness(batch.version) for batch in run.batches for rollout in batch.rollouts]
    assert run.value("rollout_staleness_versions_bucket", le="0.0") == ages.count(0)
    assert run.value("rollout_staleness_versions_sum") == sum(ages)
    assert run.value("rollouts_dropped_total", reason="stale") > 0
    assert run.value("rollouts_dropped_total", reason="failed") == 0
    assert run.value("rollouts_launched_total") == (
        run.value("rollouts_delivered_total")
        + run.total("rollouts_dropped_total")
        + run.value("rollouts_in_flight")
    )
    assert run.value("tokens_reprefilled_total") > 0
    assert run.value("tokens_generated_total") == run.total("engine_tokens_generated_total")


def test_updates_are_timed(run: Scraped):
    assert run.value("policy_version") == 4
    assert run.value("updates_total", outcome="succeeded") == 4
    assert run.value("updates_total", outcome="failed") == 0
    # The trainer requests no batch after the last update, so the engines stay paused.
    for name, times in (("update", 4), ("pause", 6), ("refit", 8)):
        assert run.value(f"{name}_duration_seconds_count") == times
        assert run.value(f"{name}_duration_seconds_sum") >= 0.3 * times
    assert run.value("batch_wait_seconds_count") == run.value("batch_duration_seconds_count") == 4


def test_an_engine_s_parts_are_those_of_the_usage(run: Scraped):
    for engine in ("sim-0", "sim-1"):
        assert run.value("engine_up", engine=engine) == 1
        assert run.value("engine_version", engine=engine) == 4
        assert run.value("engine_state", engine=engine, state="paused") == 1
        assert run.value("engine_state", engine=engine, state="generating") == 0
        assert {
            dict(labels)["part"]
            for name, labels in run.samples
            if name == "aprilsched_engine_seconds_total" and ("engine", engine) in labels
        } == set(PARTS)
        assert run.value("engine_seconds_total", engine=engine, part="refit") == pytest.approx(1.2)


def test_counters_never_go_down():
    figures = LiveFigures(clock=None)
    metrics = Metrics(figures)
    counters = [name for name, figure in FIGURES.items() if figure.kind == "counter"]
    before: dict[tuple[str, tuple[str, ...]], float] = {}
    scrapes = 0

    class Looking:
        def on_facts(self, facts: Sequence[Fact], now: float) -> None:
            nonlocal scrapes
            metrics.on_facts(facts, now)
            scrapes += 1
            scraped = metrics.scrape().values
            for name in counters:
                for labels, value in scraped[name].items():
                    assert value >= before.get((name, labels), 0.0), name
                    before[name, labels] = value

    driven([figures, Looking()])
    assert scrapes > 100


def test_a_log_gives_the_same_values_as_the_run(tmp_path: Path):
    arguments = ["--batch-groups", "4", "--group-size", "4", "--median", "60", "--cap", "600"]
    arguments += ["--over-provision", "2", "--batches", "4", "--quiet", "--out", str(tmp_path)]
    assert main(["run", *arguments]) == 0
    figures = LiveFigures(clock=None)
    metrics = Metrics(figures)
    end = replay(tmp_path / "events.jsonl", [figures, metrics])
    values = metrics.scrape().values
    tokens = json.loads((tmp_path / "summary.json").read_text())["tokens"]
    assert {name: values[f"run/tokens_{name}"][()] for name in tokens} == tokens
    seconds = values["run/engine_seconds"]
    assert sum(seconds.values()) == pytest.approx(end, rel=0.05)
    usage = usage_of(tmp_path)
    assert seconds[usage.engines[0], "pause"] == pytest.approx(
        usage.shares["pause"] * usage.wall, abs=1e-6
    )


def test_metrics_listen_on_loopback_and_refuse_bad_ports():
    metrics = Metrics(LiveFigures(clock=None))
    with serve_metrics(metrics, 0) as server:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", server.url)
        with (
            pytest.raises(ConfigError, match=f"on 127.0.0.1:{server.port} .* give another port"),
            serve_metrics(metrics, server.port),
        ):
            pass
    with pytest.raises(urllib.error.URLError), urllib.request.urlopen(server.url, timeout=600):
        pass
    with socket.socket() as again:  # the port is free again
        again.bind(("127.0.0.1", server.port))
    with pytest.raises(ConfigError, match="port is 70000"), serve_metrics(metrics, 70_000):
        pass
