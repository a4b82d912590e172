"""Tests events.jsonl: it has counts instead of tokens, and its errors do not reach the run."""

from __future__ import annotations

import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched.config import SchedulerConfig
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.facts import Fact, Order
from aprilsched.observe.log import EventLog, writing
from aprilsched.observe.log.line_format import KINDS, LogBegun, LogEnded, LogResumed
from aprilsched.observe.log.reading import read_facts
from aprilsched.types import Batch, Group, Prompt, Rollout, Segment
from tests.support.driver import Driver
from tests.support.facts import ABLE
from tests.support.table import each_row

SECRET = 31_337
TOKENS = np.full(5, SECRET, dtype=np.int32)
PROMPT = Prompt(input_ids=TOKENS, key="secret-key")
ROLLOUT = Rollout(
    rollout_id=2,
    group_id=1,
    index=0,
    prompt_ids=TOKENS[:3],
    token_ids=TOKENS,
    logprobs=np.zeros(5, dtype=np.float32),
    versions=np.array([0, 0, 0, 1, 1], dtype=np.int32),
    loss_mask=np.array([False, False, False, True, True]),
    segments=(
        Segment(start=0, end=3, version=0, engine="a"),
        Segment(start=3, end=5, version=1, engine="b"),
    ),
    versions_exact=True,
    finish_reason="stop",
    reward=0.5,
)
BATCH = Batch(index=4, version=1, units=(Group(group_id=1, prompt=PROMPT, rollouts=(ROLLOUT,)),))


def delivered(*, tokens: bool = False) -> of.BatchDelivered:
    rollouts = of.delivered_rollouts(BATCH, tokens=tokens)
    return of.BatchDelivered(batch=4, version=1, rollouts=rollouts)


FACTS: list[Fact] = [
    of.RunOpened(engines=(ev.EngineInfo(name="a", version=0, able=ABLE),), version=0),
    of.GroupLaunched(group_id=1, rollout_ids=(2,), prompt_tokens=5),
    of.GroupLaunched(
        group_id=4,
        rollout_ids=(5,),
        prompt_tokens=5,
        restored=of.RestoredLengths(tokens=(7,), sampled=(6,), finished=(False,)),
    ),
    of.TokensReceived(request_id=3, tokens=5),
    of.TokensReceived(request_id=3, tokens=5, recomputed=9, dropped="stale"),
    of.AttemptEnded(request_id=3, outcome="finished", spans=((0, 0, 3), (1, 3, 5))),
    of.EngineJoined(info=ev.EngineInfo(name="a", version=None, able=ABLE)),
    of.EngineRefitted(engine="a", version=None, cause="half of it is missing"),
    of.EngineLost(engine="a", cause="gone", standby=True),
    of.GroupDropped(
        group_id=1,
        reason="stale",
        cause="too old",
        rollouts=(of.DroppedRollout(rollout_id=2, reason="stale", tokens=5),),
    ),
    of.UpdateFinished(version=2, failed=(("a", "no answer"),)),
    delivered(),
    of.LogprobsCompared(
        comparison=ev.LogprobComparison(
            batch=4,
            version=1,
            bound=0.1,
            by_engine={"a": ev.LogprobDifferences(tokens=2, total=-0.5, k3=0.25)},
            by_position=(ev.LogprobDifferences(), ev.LogprobDifferences(tokens=2, beyond=1)),
            by_staleness=(ev.LogprobDifferences(tokens=2, largest=0.5),),
            not_finite=3,
        )
    ),
    of.PromptsEnded(),
]


def written(path: Path) -> list[dict[str, Any]]:
    log = EventLog(path)
    log.start()
    log.on_facts(FACTS[:5], 100.0)
    log.on_facts(FACTS[5:], 101.5)
    log.close()
    assert log.error is None
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_log_starts_with_its_version_and_has_every_fact(tmp_path: Path):
    first, *lines = written(tmp_path / "events.jsonl")
    assert first == {"t": 0.0, "fact": "LogBegun", "version": 1}
    assert [line["fact"] for line in lines] == [type(fact).__name__ for fact in FACTS]
    received = {line["fact"]: line for line in reversed(lines)}
    assert received["TokensReceived"] == {
        "t": 0.0, "fact": "TokensReceived", "request_id": 3, "tokens": 5,
    }  # fmt: skip
    assert (received["BatchDelivered"]["batch"], received["BatchDelivered"]["version"]) == (4, 1)
    assert received["BatchDelivered"]["rollouts"] == [
        {
            "rollout_id": 2,
            "group_id": 1,
            "prompt_tokens": 3,
            "tokens": 5,
            "segments": [[0, 3, 0, "a"], [3, 5, 1, "b"]],
            "finish_reason": "stop",
            "reward": 0.5,
            "masked": 3,
        }
    ]


def test_what_is_written_is_read_as_it_was(tmp_path: Path):
    written(tmp_path / "events.jsonl")
    read = [(fact, at) for facts, at in read_facts(tmp_path / "events.jsonl") for fact in facts]
    times = [0.0] * 5 + [1.5] * (len(FACTS) - 5)
    assert read == list(zip(FACTS, times, strict=True))


def test_sets_of_an_engine_are_written_in_order(tmp_path: Path):
    """The iteration order of a set of strings differs from process to process."""
    names = [f"companion_{number:02}" for number in range(40)]
    able = replace(ABLE, companions=frozenset(names), media=frozenset(names))
    log = EventLog(tmp_path / "events.jsonl")
    log.start()
    log.on_facts([of.EngineJoined(info=ev.EngineInfo(name="a", version=0, able=able))], 0.0)
    log.close()
    line = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert line["info"]["able"]["companions"] == names
    assert line["info"]["able"]["media"] == names


def test_every_fact_of_the_core_can_be_read():
    kinds = {kind for kind in KINDS.values() if kind not in (LogBegun, LogResumed, LogEnded)}
    received = {*Fact.__subclasses__(), *Order.__subclasses__()} - {Order}
    assert kinds == received - {LogBegun, LogResumed, LogEnded}


def test_a_fact_of_a_later_version_is_passed_over(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    written(path)
    with path.open("a") as file:
        file.write('{"t":2.0,"fact":"MoonRisen","phase":3}\n{"t":3.0,"fact":"PromptsEnded"}\n')
    *_, (facts, at), _ = read_facts(path)
    assert (list(facts), at) == ([of.PromptsEnded()], 3.0)


@each_row("reports", [False, True])
def test_facts_have_tokens_only_if_a_listener_wants_them(reports: bool):
    driver = Driver(config=SchedulerConfig(batch_groups=2, group_size=2), takes=True)
    driver.state.tells_tokens = reports
    received: list[Fact] = []
    driver.hears = received.extend
    driver.request_batch()
    driver.finish_each(list(driver.sends))
    kinds: dict[str, Any] = {type(fact).__name__: fact for fact in received}
    with_tokens: list[object] = [
        kinds["PromptsReceived"].asked,
        kinds["GroupLaunched"].input_ids,
        kinds["AttemptSent"].input_ids,
        kinds["TokensReceived"].token_ids,
        kinds["TokensReceived"].logprobs,
        kinds["BatchDelivered"].rollouts[0].token_ids,
    ]
    assert [found is not None for found in with_tokens] == [reports] * 6


def test_nothing_is_written_before_the_start(tmp_path: Path):
    log = EventLog(tmp_path / "events.jsonl")
    log.on_facts([delivered()], 0.0)
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_the_log_and_not_the_run(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no device that is always full")
    monkeypatch.setattr(writing, "_NEW", "wb")  # the device is there already
    monkeypatch.setattr("aprilsched.observe.file_writer.open_private", os.open)
    log = EventLog(full)
    log.start()
    with caplog.at_level(logging.WARNING, logger="aprilsched"):
        for _ in range(3):
            log.on_facts([delivered()], 0.0)
        log.close()
    assert log.error is not None
    assert "No space left" in log.error
    assert len(caplog.records) == 1


def test_a_fact_that_cannot_be_written_ends_the_log_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    log = EventLog(tmp_path / "events.jsonl")
    log.start()
    with caplog.at_level(logging.WARNING, logger="aprilsched"):
        log.on_facts([of.EngineSlow(engine="\udcff", cause="")], 0.0)
        log.on_facts([of.PromptsEnded()], 1.0)
        log.close()
    assert log.error is not None
    assert len(caplog.records) == 1


# --- a disk that hangs ---------------------------------------------------------------------------


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that accepts no bytes until something reads it."""
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)
    monkeypatch.setattr(writing, "_NEW", "wb")
    monkeypatch.setattr("aprilsched.observe.file_writer.open_private", os.open)
    monkeypatch.setattr(writing, "_PENDING_BYTES", 5000)
    return path


def lines_of(content: bytes) -> list[int]:
    """The request numbers of the complete lines."""
    assert content.endswith(b"\n")
    return [json.loads(line)["request_id"] for line in content.splitlines()[1:]]


def progress(number: int) -> list[Fact]:
    return [of.TokensReceived(request_id=number, tokens=5)]


def test_a_disk_that_hangs_costs_lines_and_no_time(
    pipe: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(writing, "_FLUSH_BYTES", 200)
    monkeypatch.setattr(writing, "_HOLD_LINES", 1)
    log = EventLog(pipe)
    log.start()
    with caplog.at_level(logging.WARNING, logger="aprilsched"):
        for number in range(1000):
            log.on_facts(progress(number), 0.0)
        assert log.error is not None
        with ThreadPoolExecutor(1) as threads:
            reading = threads.submit(pipe.read_bytes)
            log.close()
            found = lines_of(reading.result())
    # A stretch is missing; what is there is whole and in order.
    assert found[:50] == list(range(50))
    assert found == sorted(set(found))
    assert 10 < len(found) < 200
    assert log.error.startswith(f"{1000 - len(found)} lines were dropped")
    (record,) = caplog.records
    assert "the disk of events.jsonl is too slow" in record.getMessage()
