"""Tests that the trace of a run, read by Perfetto's trace processor, agrees with the event log."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from aprilsched.__main__ import main
from aprilsched.errors import RunFolderError
from aprilsched.observe.exports.trace_run import write_trace
from aprilsched.observe.log.run import read_run
from aprilsched.observe.log.run_folder import EVENTS, TRACE
from tests.support.table import each_row
from tests.support.trace_processor import TraceProcessor, loaded, rows

ARGUMENTS = (
    *("run", "--quiet", "--batches", "5", "--seed", "5", "--train-seconds", "0.5"),
    *("--batch-groups", "4", "--group-size", "4", "--over-provision", "2"),
    *("--median", "60", "--cap", "600", "--sim.engines", "2", "--sim.refit-seconds", "0.2"),
)
RUNS: dict[str, list[str]] = {
    "retracted": [],
    "aborted": ["--straggler", "abort", "--pace", "asynchronous"],
    "kept in place": ["--straggler", "in_place", "--refill", "pool"],
    "never paused": ["--straggler", "run", "--pace", "asynchronous"],
}
SHOWN = """
    CREATE PERFETTO VIEW shown AS
    SELECT process.name AS engine, thread.name AS track, slice.name, category, track_id, ts, dur,
        depth,
        EXTRACT_ARG(slice.arg_set_id, 'args.rollout_id') AS rollout_id,
        EXTRACT_ARG(slice.arg_set_id, 'args.version') AS version,
        EXTRACT_ARG(slice.arg_set_id, 'args.tokens') AS tokens,
        EXTRACT_ARG(slice.arg_set_id, 'args.carried') AS carried
    FROM slice
    JOIN thread_track ON thread_track.id = slice.track_id
    JOIN thread USING (utid)
    JOIN process USING (upid)
"""
ROLLOUTS = """
    SELECT engine, SUM(tokens), COUNT(DISTINCT track_id) AS slots, MAX(depth) FROM shown
    WHERE category = 'rollout' GROUP BY engine
"""
INSTANTS = "SELECT name FROM shown WHERE track = 'batches and weights' ORDER BY ts"
COUNTERS = """
    SELECT process.name AS engine, track.name AS counter, MAX(value) FROM counter
    JOIN process_counter_track AS track ON track.id = counter.track_id
    JOIN process USING (upid) GROUP BY 1, 2
"""
VERSIONS = """
    SELECT rollout_id, version, SUM(tokens), MAX(carried) FROM shown
    WHERE category = 'rollout' AND tokens > 0 GROUP BY 1, 2
"""


@dataclass(kw_only=True)
class Account:
    """Sums over the lines of a log, by engine."""

    tokens: Counter[str] = field(default_factory=Counter[str])
    most: Counter[str] = field(default_factory=Counter[str])
    """Largest number of requests at the same time on each engine."""
    instants: list[str] = field(default_factory=list[str])


def account_of(folder: Path) -> Account:
    account = Account()
    sent: dict[int, str] = {}
    for line in lines_of(folder):
        key = line.get("request_id", 0)
        match line["fact"]:
            case "LogResumed":
                sent.clear()
                account.instants.append("resumed")
            case "AttemptSent":
                sent[key] = engine = line["engine"]
                account.most[engine] = max(account.most[engine], Counter(sent.values())[engine])
            case "TokensReceived" if key in sent:
                account.tokens[sent[key]] += line["tokens"]
            case "AttemptEnded":
                del sent[key]
            case "BatchDelivered":
                account.instants.append(f"batch {line['batch']}")
            case "UpdateFinished":
                account.instants.append(f"weights v{line['version']}")
            case _:
                pass
    return account


def lines_of(folder: Path) -> Iterator[dict[str, Any]]:
    with (folder / EVENTS).open() as file:
        yield from map(json.loads, file)


def check(processor: TraceProcessor, folder: Path) -> None:
    account = account_of(folder)
    bad = "SELECT name, value FROM stats WHERE severity != 'info' AND value != 0"
    assert rows(processor, bad) == []
    rows(processor, SHOWN)
    assert rows(processor, ROLLOUTS) == [
        (f"engine {name}", account.tokens[name], most, 0)
        for name, most in sorted(account.most.items())
    ]
    assert [name for (name,) in rows(processor, INSTANTS)] == account.instants
    most = {(engine, counter): value for engine, counter, value in rows(processor, COUNTERS)}
    for name, load in account.most.items():
        assert most.pop((f"engine {name}", "in flight requests")) == load
        assert most.pop((f"engine {name}", "KV tokens")) > load
    assert most == {}
    check_versions(processor, folder)


def check_versions(processor: TraceProcessor, folder: Path) -> None:
    """Each delivered rollout has its tokens under the versions that sampled them."""
    grouped = rows(processor, VERSIONS)
    shown = {(rollout, version): tokens for rollout, version, tokens, _ in grouped}
    carried = {(rollout, version) for rollout, version, _, carried in grouped if carried}
    delivered = [r for d in read_run(folder).deliveries for r in d.rollouts]
    sampled: Counter[tuple[int, int]] = Counter()
    for rollout in delivered:
        for start, end, version, _ in rollout.segments:
            sampled[rollout.rollout_id, version] += end - start
    assert {key: shown.get(key) for key in sampled} == dict(sampled)
    for rollout in delivered:
        first, *later = sorted({version for _, _, version, _ in rollout.segments})
        assert (rollout.rollout_id, first) not in carried
        assert {(rollout.rollout_id, version) for version in later} <= carried


@each_row("name", RUNS)
def test_the_trace_agrees_with_the_log(tmp_path: Path, name: str):
    assert main([*ARGUMENTS, *RUNS[name], "--out", str(tmp_path)]) == 0
    path = write_trace(tmp_path)
    assert path == tmp_path / TRACE
    with loaded(path) as processor:
        check(processor, tmp_path)


def test_the_trace_of_a_run_that_went_on_holds_all_its_processes(tmp_path: Path):
    assert main([*ARGUMENTS, "--out", str(tmp_path)]) == 0
    write_trace(tmp_path)
    assert main(["run", "--resume", str(tmp_path), "--batches", "7", "--quiet"]) == 0
    assert not (tmp_path / TRACE).exists(), "the old trace is stale after a resume"
    with loaded(write_trace(tmp_path)) as processor:
        check(processor, tmp_path)
        resumed = rows(processor, "SELECT COUNT(*) FROM slice WHERE name = 'resumed'")
    assert resumed == [(1,)]


# --- what a quiet run does not have ------------------------------------------------------------

LINES = """
{"t":0,"fact":"RunOpened","engines":[{"name":"a","version":0,"able":{"version_spans":true,"flush_while_paused":true}},{"name":"b","version":0,"able":{"version_spans":true,"flush_while_paused":true}}],"version":0}
{"t":0,"fact":"BatchRequested"}
{"t":1,"fact":"AttemptSent","engine":"a","request_id":1,"attempt":1,"rollout_id":7,"group_id":5,"tokens":100,"max_new_tokens":900}
{"t":1,"fact":"AttemptSent","engine":"b","request_id":2,"attempt":1,"rollout_id":8,"group_id":5,"tokens":10,"max_new_tokens":900}
{"t":2,"fact":"TokensReceived","request_id":1,"tokens":30}
{"t":3,"fact":"EngineLost","engine":"a","cause":"reset"}
{"t":3,"fact":"AttemptEnded","request_id":1,"outcome":"engine_lost"}
{"t":3,"fact":"AttemptSent","engine":"b","request_id":1,"attempt":2,"rollout_id":7,"group_id":5,"tokens":130,"max_new_tokens":870}
{"t":4,"fact":"RefitBegun","version":1,"engines":["b"],"adapter":true}
{"t":5,"fact":"EngineRefitted","engine":"b","version":1}
{"t":6,"fact":"TokensReceived","request_id":1,"tokens":20}
{"t":6,"fact":"EngineJoined","info":{"name":"a","version":1,"able":{"version_spans":true,"flush_while_paused":true}}}
{"t":7,"fact":"EngineAdmitted","engine":"a","version":1}
{"t":8,"fact":"EngineModeChanged","engine":"b","start":"running","finish":"pausing","pause":"retract"}
{"t":9,"fact":"EngineModeChanged","engine":"b","start":"pausing","finish":"paused"}
{"t":9,"fact":"TokensReceived","request_id":2,"tokens":3}
{"t":9,"fact":"EngineModeChanged","engine":"b","start":"paused","finish":"flushing"}
{"t":10,"fact":"EngineModeChanged","engine":"b","start":"flushing","finish":"paused"}
{"t":10,"fact":"EngineModeChanged","engine":"b","start":"paused","finish":"releasing","tags":["weights","kv_cache"]}
{"t":10,"fact":"EngineModeChanged","engine":"b","start":"releasing","finish":"paused"}
{"t":11,"fact":"EngineModeChanged","engine":"b","start":"paused","finish":"waking","tags":["weights"]}
{"t":11,"fact":"EngineModeChanged","engine":"b","start":"waking","finish":"paused"}
{"t":12,"fact":"RefitBegun","version":2,"engines":["b"]}
{"t":12,"fact":"EngineModeChanged","engine":"b","start":"paused","finish":"refitting"}
{"t":13,"fact":"EngineRefitted","engine":"b","version":null,"cause":"refused"}
{"t":13,"fact":"EngineModeChanged","engine":"b","start":"refitting","finish":"paused"}
{"t":14,"fact":"EngineModeChanged","engine":"b","start":"paused","finish":"waking","tags":["kv_cache"]}
{"t":14,"fact":"EngineModeChanged","engine":"b","start":"waking","finish":"paused"}
{"t":15,"fact":"EngineModeChanged","engine":"b","start":"paused","finish":"continuing"}
{"t":16,"fact":"EngineModeChanged","engine":"b","start":"continuing","finish":"running"}
{"t":17,"fact":"AttemptEnded","request_id":2,"outcome":"finished"}
{"t":20,"fact":"LogResumed","version":1,"incarnation":2,"batches":0}
{"t":20,"fact":"RunOpened","engines":[{"name":"b","version":2,"able":{"version_spans":true,"flush_while_paused":true}}],"version":2,"resumed":true}
{"t":21,"fact":"AttemptSent","engine":"b","request_id":1,"attempt":3,"rollout_id":7,"group_id":5,"tokens":150,"max_new_tokens":850,"adapter":1}
{"t":22,"fact":"EngineModeChanged","engine":"b","start":"paused","finish":"flushing"}
{"t":23,"fact":"ControlCallFailed","engine":"b","call":"flush","cause":"timeout"}
"""
"""A fleet of two: one engine is lost and returns, the other sleeps, and the process dies."""


def test_engines_that_are_lost_asleep_or_inconsistent(tmp_path: Path):
    log = tmp_path / EVENTS
    log.write_text(LINES.lstrip(), encoding="utf-8")
    with loaded(write_trace(tmp_path, tmp_path / "other.json")) as processor:
        rows(processor, SHOWN)
        pieces = rows(
            processor,
            "SELECT engine, name, ts / 1e9, dur / 1e9, tokens, carried FROM shown"
            " WHERE category = 'rollout' ORDER BY ts, engine, track",
        )
        bands = rows(
            processor,
            "SELECT engine, name, ts / 1e9, dur / 1e9 FROM shown"
            " WHERE category IN ('state', 'trainer') AND dur > 0 ORDER BY ts, engine",
        )
        known = rows(
            processor,
            "SELECT process.name AS engine, ts / 1e9, CAST(value AS INT) FROM counter"
            " JOIN process_counter_track AS track ON track.id = counter.track_id"
            " JOIN process USING (upid) WHERE track.name = 'KV tokens' ORDER BY engine, ts",
        )
    a, b = "engine a", "engine b"
    assert pieces == [
        (a, "rollout 7 v0 mn", 1, 2, 30, False),
        (b, "rollout 8 v0 mn", 1, 4, 0, False),
        (b, "rollout 7 v0 mn", 3, 2, 0, False),
        (b, "rollout 8 v1 eg", 5, 4, 3, True),
        (b, "rollout 7 v1 eg", 5, 4, 20, True),
        (b, "rollout 8 v?", 15, 2, 0, True),
        (b, "rollout 7 v?", 15, 2, 0, True),
        (b, "rollout 7 v1 eg", 21, 2, 0, True),
    ]
    assert bands == [
        ("trainer", "waits for a batch", 0, 17),
        (a, "lost", 3, 4),
        (b, "refit", 4, 1),
        (b, "pause", 8, 8),
        (b, "flush", 9, 1),
        (b, "asleep", 10, 4),
        (b, "refit", 12, 1),
        (b, "flush", 22, 1),
    ]
    assert known == [
        *((a, 1, 100), (a, 2, 130), (a, 3, 0)),
        *((b, 1, 10), (b, 3, 140), (b, 6, 160), (b, 9, 163), (b, 10, 0), (b, 15, 163)),
        *((b, 17, 0), (b, 21, 150), (b, 23, 0)),
    ]


# --- files -------------------------------------------------------------------------------------


def test_an_unreadable_log_is_reported_and_no_trace_written(tmp_path: Path):
    with pytest.raises(RunFolderError, match="is no whole run folder"):
        write_trace(tmp_path)
    (tmp_path / EVENTS).write_text('{"t":"now"}\n{"t":1,"fact":"BatchRequested"}\n')
    with pytest.raises(RunFolderError, match="is damaged in line 1, before its end"):
        write_trace(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [EVENTS]


def test_a_trace_that_cannot_be_written_is_reported(tmp_path: Path):
    (tmp_path / EVENTS).write_text('{"t":0,"fact":"BatchRequested"}\n')
    with pytest.raises(RunFolderError, match=r"missing/t\.json cannot be written .*; name a file"):
        write_trace(tmp_path, tmp_path / "missing" / "t.json")


@pytest.mark.long
def test_a_long_log_is_not_held_in_memory(tmp_path: Path):
    opened, *_ = LINES.split("\n", 2)[1:]
    with (tmp_path / EVENTS).open("w") as file:
        file.write(opened + "\n")
        for n in range(10_000):
            sent = f'"engine":"a","request_id":{n},"attempt":1,"rollout_id":{n},"group_id":1'
            file.write(
                f'{{"t":{n},"fact":"AttemptSent",{sent},"tokens":9,"max_new_tokens":9}}\n'
                f'{{"t":{n},"fact":"TokensReceived","request_id":{n},"tokens":5}}\n'
                f'{{"t":{n + 1},"fact":"AttemptEnded","request_id":{n},"outcome":"finished"}}\n'
            )
            dropped = f'[{{"rollout_id":{n},"reason":"stale","tokens":5}}]'
            why = '"group_id":1,"reason":"stale","cause":""'
            file.write(f'{{"t":{n + 1},"fact":"GroupDropped",{why},"rollouts":{dropped}}}\n')
    tracemalloc.start()
    try:
        path = write_trace(tmp_path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 2_000_000
    assert most < 2_000_000, "of which a buffer of the file is the most"
