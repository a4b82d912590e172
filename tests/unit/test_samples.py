"""Tests samples.jsonl: rates of counters, appending to a file, and reading it."""

from __future__ import annotations

import json
import logging
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from aprilsched.errors import RunFolderError
from aprilsched.kernel.engines.load import EngineLoad
from aprilsched.observe.log.samples import DeviceSamples, EngineSamples, read_samples
from aprilsched.observe.sampling.labels import NVML_UTILIZATION
from aprilsched.observe.sampling.rates import Rates
from aprilsched.observe.sampling.sample_log import (
    FIELDS,
    DeviceLine,
    EngineLine,
    GpuLine,
    SampleLine,
    SampleLog,
)
from tests.support.table import each_row


def load(
    generated: int,
    decoded: float = 0.0,
    prefilled: float = 0.0,
    *,
    running: int = 1,
    age: float = 0,
) -> EngineLoad:
    return EngineLoad(
        running=running,
        queued=0,
        generated=generated,
        decode_seconds=decoded,
        prefill_seconds=prefilled,
        kv_tokens=30,
        kv_capacity=120,
        age_s=age,
    )


def rates(*samples: tuple[float, EngineLoad]) -> list[tuple[float | None, float | None]]:
    of = Rates()
    lines = [of.line("e", t, received) for t, received in samples]
    assert all(line.kv_share == 0.25 for line in lines)
    return [(line.tokens_per_s, line.step_share) for line in lines]


def test_rates_are_over_the_time_between_two_samples():
    found = rates((1.0, load(100)), (3.0, load(300, 1.0, 0.5)), (4.0, load(300, 2.5, 0.5)))
    assert found == [(None, None), (100.0, 0.75), (0.0, 1.0)]


def test_figures_that_stand_still_in_a_pause_have_no_rate():
    """The rates after the pause are over the whole time since the last rate."""
    found = rates((1.0, load(0)), (2.0, load(0, age=1.0)), (3.0, load(100, 0.4, age=0.5)))
    assert found[1] == (None, None)
    assert found[2] == (pytest.approx(100 / 1.5, abs=1e-3), pytest.approx(0.4 / 1.5, abs=1e-3))


def test_an_idle_engine_s_old_figures_are_still_true():
    before, idle = load(100), load(100, running=0, age=5.0)
    found = rates((1.0, before), (2.0, load(100, running=0)), (7.0, idle), (8.0, load(300, 0.5)))
    assert found[1:] == [(0.0, 0.0), (0.0, 0.0), (200.0, 0.5)]


def test_counters_of_a_restarted_server_restart():
    found = rates((1.0, load(500, 9.0)), (2.0, load(10, 0.1)), (3.0, load(40, 0.6)))
    assert found == [(None, None), (None, None), (30.0, 0.5)]


def test_an_engine_s_own_rate_counts_where_it_has_no_counters():
    received = EngineLoad(running=1, queued=0, tokens_per_s=77.0)
    assert Rates().line("e", 1.0, received).tokens_per_s == 77.0


@each_row(("kind", "line"), [("engine", EngineLine), ("device", DeviceLine), ("nvml", GpuLine)])
def test_every_field_is_described(kind: str, line: type[EngineLine | DeviceLine | GpuLine]):
    assert tuple(FIELDS[kind]) == line.__struct_fields__[1:]
    assert line.__struct_fields__[0] == "t"


def test_every_figure_of_a_line_can_be_read():
    read = {field.name for kind in (EngineSamples, DeviceSamples) for field in fields(kind)}
    received = {name for kind in FIELDS.values() for name in kind}
    assert received - read == {"engine", "device", "series", "error", "processes"}


def written(folder: Path, *parts: tuple[float, list[SampleLine]]) -> None:
    """Write each part by its own process, which starts at that time."""
    for t, lines in parts:
        log = SampleLog(folder / "samples.jsonl", interval=1.0)
        log.start(t)
        log.write(lines)
        log.close()


def test_a_file_starts_with_the_meaning_of_its_fields(tmp_path: Path):
    written(tmp_path, (0.0, [EngineLine(t=1.0, engine="a", running=2)]))
    first, second = (tmp_path / "samples.jsonl").read_text().splitlines()
    head = json.loads(first)
    assert head["source"] == "description"
    assert head["fields"] == FIELDS
    assert head["labels"]["utilization"] == NVML_UTILIZATION
    assert json.loads(second) == {"source": "engine", "t": 1.0, "engine": "a", "running": 2}


def test_a_resumed_run_appends(tmp_path: Path):
    """Samples after the end of the event log are not valid, and a partial line is cut off."""
    one = [EngineLine(t=float(t), engine="a", running=t) for t in range(5)]
    written(tmp_path, (0.0, list(one)))
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(b'{"source":"engine","t":5.0,"eng')
    written(tmp_path, (2.5, [EngineLine(t=3.5, engine="a", running=9)]))
    figures = read_samples(tmp_path).engines["a"]
    assert figures.t.tolist() == [0, 1, 2, 3.5]
    assert figures.running.tolist() == [0, 1, 2, 9]
    assert np.isnan(figures.kv_tokens).all()


def test_a_folder_that_was_not_sampled_has_no_samples(tmp_path: Path):
    samples = read_samples(tmp_path)
    assert not samples.engines
    assert not samples.devices


def test_a_damaged_file_is_named(tmp_path: Path):
    written(tmp_path, (0.0, [EngineLine(t=1.0, engine="a")]))
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(b"what\n")
    with pytest.raises(RunFolderError, match="damaged in line 3"):
        read_samples(tmp_path)


def test_lines_of_a_later_version_are_passed_over(tmp_path: Path):
    written(tmp_path, (0.0, [EngineLine(t=1.0, engine="a")]))
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(
            b'{"source":"network","t":1.0}\n{"source":"engine","t":2.0,"engine":"a","x":1}\n'
        )
    assert read_samples(tmp_path).engines["a"].t.tolist() == [1.0, 2.0]


def test_the_samples_of_gpus_have_what_describes_them(tmp_path: Path):
    lines: list[SampleLine] = [
        DeviceLine(t=0.0, device=1, name="H100", memory_total=80),
        GpuLine(t=0.0, device=1, utilization=1.0, power_w=100.0),
        GpuLine(t=1.0, device=1),
    ]
    written(tmp_path, (0.0, lines))
    ((index, gpu),) = read_samples(tmp_path).devices.items()
    assert (index, gpu.name, gpu.memory_total) == (1, "H100", 80)
    assert gpu.t.tolist() == [0.0, 1.0]
    assert np.isnan(gpu.utilization).tolist() == [False, True]


def test_a_file_that_cannot_be_written_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    log = SampleLog(tmp_path / "nowhere" / "samples.jsonl", interval=1.0)
    with caplog.at_level(logging.WARNING):
        log.start(0.0)
        for t in range(20):
            log.write([EngineLine(t=float(t), engine="a")])
        log.close()
        log.write([EngineLine(t=99.0, engine="a")])
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "samples.jsonl is not complete, the run continues"
    ]
