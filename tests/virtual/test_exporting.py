"""Tests the exporters of ``aprilsched run``: metrics, trackers and spans, by their flags."""

from __future__ import annotations

import json
import re
import socket
import sys
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aprilsched.__main__ import main
from aprilsched.cli.runs import drive, exports
from aprilsched.kernel.core.messages.facts import BatchDelivered, Fact
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.observe.figures.figures import BatchFigures, figures_in
from tests.support.table import each_row

SHORT = ["--median", "60", "--cap", "600", "--batches", "3"]
SMALL = ["--batch-groups", "4", "--group-size", "4", "--over-provision", "2", "--quiet", *SHORT]


def run(out: Path, *arguments: str) -> int:
    return main(["run", *SMALL, "--out", str(out), *arguments])


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_metrics_are_served_during_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    port, scraped = free_port(), [""]

    class Scraping:
        """Scrapes the metrics in the middle of the run, as Prometheus would."""

        def on_facts(self, facts: Sequence[Fact], now: float) -> None:
            if any(isinstance(fact, BatchDelivered) and fact.batch == 1 for fact in facts):
                url = f"http://127.0.0.1:{port}/metrics"
                with urllib.request.urlopen(url, timeout=600) as answer:
                    scraped.append(answer.read().decode())

    own = exports.exporters

    @contextmanager
    def with_scraping(*run: Any) -> Generator[list[AnyListener]]:
        with own(*run) as listeners:
            yield [*listeners, Scraping()]

    monkeypatch.setattr(drive, "exporters", with_scraping)
    assert run(tmp_path, "--metrics-port", str(port)) == 0
    assert "\naprilsched_batches_delivered_total 2.0\n" in scraped[-1]
    assert "\naprilsched_batch_efficiency_ratio " in scraped[-1]
    assert "\naprilsched_rollouts_delivered_total 32.0\n" in scraped[-1]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_the_tracker_s_figures_are_the_summary_s(tmp_path: Path):
    from tensorboard.backend.event_processing import (  # pyright: ignore[reportMissingTypeStubs]
        event_accumulator,
    )

    assert run(tmp_path, "--track", "tensorboard") == 0
    batches = json.loads((tmp_path / "summary.json").read_text())["per_batch"]
    read: Any = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    for name, figure in figures_in(BatchFigures).items():
        if not figure.tracked:
            continue
        expected = [batch[name] for batch in batches if batch[name] is not None]
        # The figures of episodes are absent here.
        there = f"batch/{name}" in read.Tags()["scalars"]
        assert there is bool(expected), name
        values = [event.value for event in read.Scalars(f"batch/{name}")] if there else []
        assert values == pytest.approx(expected, rel=1e-6), name


def test_a_port_that_is_taken_refuses_the_run_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "run"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert run(out, "--metrics-port", str(taken.getsockname()[1])) == 2
    assert "give another port" in capsys.readouterr().err
    assert not out.exists()


def test_a_run_that_is_refused_leaves_no_tracker_s_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "run"
    unreachable = f"http://127.0.0.1:{free_port()}"
    assert run(out, "--track", "tensorboard", "--engine", unreachable) == 2
    assert unreachable in capsys.readouterr().err
    assert not out.exists()


@each_row(
    ("package", "arguments", "named"),
    [
        ("prometheus_client", ["--metrics-port", "1"], "metrics"),
        ("wandb", ["--track", "wandb"], "wandb"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    arguments: list[str],
    named: str,
):
    monkeypatch.delitem(sys.modules, "aprilsched.observe.exports.prometheus", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    out = tmp_path / "run"
    assert run(out, *arguments) == 2
    error = capsys.readouterr().err
    assert re.search(rf"{package} is not installed; pip install .*\[{named}\]'\.", error)
    assert len(error.splitlines()) == 1
    assert not out.exists()


@each_row(
    ("arguments", "message"),
    [
        (["--track", "wanbd"], "'wanbd'; there are tensorboard, trackio, wandb"),
        (["--track", "wandb,wandb"], "name each tracker once"),
        (["--metrics-port", "-1"], "metrics_port is -1; give 0 or more"),
        (["--metrics-port", "70000"], "port is 70000; give one from 0 to 65535"),
    ],
)
def test_bad_settings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    out = tmp_path / "run"
    assert run(out, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
