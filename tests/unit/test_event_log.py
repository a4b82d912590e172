"""Tests events.jsonl: it has counts instead of tokens, and its errors do not reach the run."""

from __future__ import annotations

import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from aprilsched.analysis.lines import read_lines
from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.telemetry.event_log import EventLog, writing
from aprilsched.telemetry.event_log.frequent_lines import FREQUENT
from aprilsched.telemetry.event_log.lines import FIELDS, Lines
from aprilsched.types import Batch, Group, Prompt, Rollout, SamplingParams, Segment, VersionSpan

SECRET = 31_337
TOKENS = np.full(5, SECRET, dtype=np.int32)
LOGPROBS = np.zeros(5, dtype=np.float32)
PROMPT = Prompt(input_ids=TOKENS, key="secret-key")
ROLLOUT = Rollout(
    rollout_id=2,
    group_id=1,
    index=0,
    prompt_ids=TOKENS[:3],
    token_ids=TOKENS,
    logprobs=LOGPROBS,
    versions=np.array([0, 0, 0, 1, 1], dtype=np.int32),
    loss_mask=np.ones(5, dtype=np.bool_),
    segments=(
        Segment(start=0, end=3, version=0, engine="a"),
        Segment(start=3, end=5, version=1, engine="b"),
    ),
    versions_exact=True,
    finish_reason="length",
    reward=0.5,
)
GROUP = Group(group_id=1, prompt=PROMPT, rollouts=(ROLLOUT,))
BATCH = Batch(index=4, version=1, groups=(GROUP,))

EVENTS: list[ev.Event] = [
    ev.Opened(engines=(ev.EngineInfo(name="a", version=0),)),
    ev.EvaluationRequested(evaluation_id=1, prompts=(PROMPT,), group_size=1),
    ev.PromptsArrived(prompts=(PROMPT, PROMPT)),
    ev.Progress(request_id=3, attempt=1, token_ids=TOKENS, logprobs=LOGPROBS),
    ev.Finished(
        request_id=3, attempt=1, reason="stop", spans=(VersionSpan(version=0, start=0, end=5),)
    ),
    ev.TurnRequested(rollout_id=2, input_ids=TOKENS, sampling=SamplingParams()),
    ev.TurnWithdrawn(rollout_id=2),
    ev.TurnKept(rollout_id=2),
    ev.ControlFailed(engine="a", call="pause", cause="slow"),
    ev.EngineJoined(info=ev.EngineInfo(name="a", version=None)),
    ev.Refitted(engine="a", version=None, cause="half of it is missing"),
    ev.Released(engine="a", tags=("kv_cache", "weights")),
]
COMMANDS: list[do.Command] = [
    do.Send(
        engine="a",
        request_id=3,
        attempt=1,
        rollout_id=2,
        group_id=1,
        input_ids=TOKENS,
        sampling=SamplingParams(max_new_tokens=9),
    ),
    do.StartEpisode(rollout_id=2, index=0, prompt=PROMPT, sampling=SamplingParams()),
    do.ResolveTurn(
        rollout_id=2, token_ids=TOKENS, logprobs=LOGPROBS, versions=TOKENS, finish_reason="stop"
    ),
    do.DiscardTokens(rollout_id=2, sampled=3, environment=2, reason="withdrawn"),
    do.Score(rollout=ROLLOUT, prompt=PROMPT),
    do.ScoreGroup(group=GROUP),
    do.Judge(group=GROUP),
    do.Deliver(batch=BATCH),
    do.DeliverEvaluation(evaluation_id=1, batch=BATCH),
    do.Refit(version=2, engines=("a", "b")),
    do.LoseEngine(engine="a", cause="gone", last=False, standby=True),
    do.AdmitEngine(engine="a", version=2),
    do.EndOfPrompts(),
]


def written(path: Path, *, log_tokens: bool = False) -> list[dict[str, Any]]:
    log = EventLog(path, log_tokens=log_tokens)
    log.start()
    for event in EVENTS:
        log.on_event(event, 100.0)
    for command in COMMANDS:
        log.on_command(command, 101.5)
    log.close()
    assert log.error is None
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_kind_has_a_line_and_no_token_is_in_it(tmp_path: Path):
    lines = written(tmp_path / "events.jsonl")
    assert [line["event"] for line in lines if "event" in line] == [
        type(event).__name__ for event in EVENTS
    ]
    assert [line["command"] for line in lines if "command" in line] == [
        type(command).__name__ for command in COMMANDS
    ]
    text = (tmp_path / "events.jsonl").read_text()
    assert str(SECRET) not in text
    assert "secret-key" not in text


@pytest.mark.parametrize(
    "what",
    [
        ev.Progress(request_id=3, attempt=1, token_ids=TOKENS, logprobs=LOGPROBS),
        ev.Progress(request_id=2**40, attempt=9, token_ids=TOKENS[:0], logprobs=LOGPROBS[:0]),
        ev.Finished(request_id=3, attempt=2, reason="length"),
        ev.Finished(request_id=3, attempt=1, reason="stop", spans=()),
        ev.Finished(
            request_id=3,
            attempt=1,
            reason="stop",
            spans=(VersionSpan(version=0, start=0, end=3), VersionSpan(version=1, start=3, end=5)),
        ),
        *(
            do.Send(
                engine="http://a",
                request_id=3,
                attempt=1,
                rollout_id=2,
                group_id=1,
                input_ids=TOKENS,
                sampling=SamplingParams(max_new_tokens=7),
                **more,
            )
            for more in ({}, {"adapter": 4, "cache_version": 5})
        ),
    ],
    ids=lambda what: type(what).__name__,
)
def test_lines_of_frequent_kinds_are_those_of_the_table(what: ev.Event | do.Command):
    frequent, table = Lines(FIELDS), Lines(dict(FIELDS))
    encode = msgspec.json.encode
    assert type(what) in FREQUENT
    assert encode(frequent.lines([what], [1.25])) == encode(table.lines([what], [1.25]))


def test_times_count_from_the_first_event(tmp_path: Path):
    assert {line["t"] for line in written(tmp_path / "events.jsonl")} == {0.0, 1.5}


def test_what_a_delivery_says(tmp_path: Path):
    lines = written(tmp_path / "events.jsonl")
    line = next(line for line in lines if line.get("command") == "Deliver")
    assert (line["batch"], line["version"]) == (4, 1)
    assert line["rollouts"] == [
        {
            "rollout_id": 2,
            "group_id": 1,
            "prompt_tokens": 3,
            "tokens": 5,
            "segments": [[0, 3, 0, "a"], [3, 5, 1, "b"]],
            "reward": 0.5,
            "finish_reason": "length",
            "versions_exact": True,
            "masked": 0,
            "stale_keys": False,
        }
    ]


def test_what_engines_say_of_themselves_can_be_read_again(tmp_path: Path):
    lines = written(tmp_path / "events.jsonl")
    joined = next(line for line in lines if line.get("event") == "EngineJoined")
    assert (joined["engine"], joined["torn"]) == ("a", True)
    read = list(read_lines(tmp_path / "events.jsonl"))
    assert [line.engine for line in read if line.event == "Refitted"] == ["a"]
    assert [line.version for line in read if line.command == "AdmitEngine"] == [2]


def test_progress_is_a_count(tmp_path: Path):
    lines = written(tmp_path / "events.jsonl")
    line = next(line for line in lines if line.get("event") == "Progress")
    assert line == {"t": 0.0, "event": "Progress", "request_id": 3, "attempt": 1, "tokens": 5}


def test_nothing_is_written_before_the_start(tmp_path: Path):
    log = EventLog(tmp_path / "events.jsonl")
    log.on_command(COMMANDS[6], 0.0)
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_the_log_and_not_the_run(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no device that is always full")
    monkeypatch.setattr(writing, "_NEW", "wb")  # the device is there already
    log = EventLog(full)
    log.start()
    with caplog.at_level(logging.WARNING, logger="aprilsched"):
        for _ in range(3):
            log.on_command(do.Deliver(batch=BATCH), 0.0)
        log.close()
    assert log.error is not None
    assert "No space left" in log.error
    assert len(caplog.records) == 1


def test_an_event_that_cannot_be_written_ends_the_log_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    log = EventLog(tmp_path / "events.jsonl")
    log.start()
    with caplog.at_level(logging.WARNING, logger="aprilsched"):
        log.on_event(object(), 0.0)  # type: ignore[arg-type]
        log.on_event(EVENTS[0], 1.0)
        log.close()
    assert log.error is not None
    assert len(caplog.records) == 1


def test_with_tokens_every_line_says_what_it_did_and_the_tokens_too(tmp_path: Path):
    plain = written(tmp_path / "plain.jsonl")
    rich = written(tmp_path / "rich.jsonl", log_tokens=True)
    for before, after in zip(plain, rich, strict=True):
        for name in before.keys() - {"rollouts"}:
            assert after[name] == before[name]
    arrived = next(line for line in rich if line.get("event") == "Progress")
    assert arrived["token_ids"] == TOKENS.tolist()
    assert arrived["logprobs"] == LOGPROBS.tolist()
    sent = next(line for line in rich if line.get("command") == "Send")
    assert (sent["input_ids"], sent["tokens"]) == (TOKENS.tolist(), 5)
    asked = next(line for line in rich if line.get("event") == "PromptsArrived")
    assert asked["asked"] == [{"key": "secret-key", "input_ids": TOKENS.tolist()}] * 2
    (delivered,) = next(line for line in rich if line.get("command") == "Deliver")["rollouts"]
    (counted,) = next(line for line in plain if line.get("command") == "Deliver")["rollouts"]
    assert delivered == counted | {
        "key": "secret-key",
        "input_ids": TOKENS[:3].tolist(),
        "token_ids": TOKENS.tolist(),
        "logprobs": LOGPROBS.tolist(),
    }
    lines = [
        list(read_lines(tmp_path / name, progress=True)) for name in ("plain.jsonl", "rich.jsonl")
    ]
    assert lines[0] == lines[1]


# --- a disk that hangs ---------------------------------------------------------------------------


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that accepts no bytes until something reads it."""
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)
    monkeypatch.setattr(writing, "_NEW", "wb")
    monkeypatch.setattr(writing, "_PENDING_BYTES", 5000)
    return path


def lines_of(content: bytes) -> list[int]:
    """The request numbers of the complete lines."""
    assert content.endswith(b"\n")
    return [json.loads(line)["request_id"] for line in content.splitlines()]


def progress(number: int) -> ev.Progress:
    return ev.Progress(request_id=number, attempt=1, token_ids=TOKENS, logprobs=LOGPROBS)


def test_a_disk_that_hangs_costs_lines_and_no_time(
    pipe: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(writing, "_FLUSH_BYTES", 200)
    monkeypatch.setattr(writing, "_HOLD_LINES", 1)
    log = EventLog(pipe)
    log.start()
    with caplog.at_level(logging.WARNING, logger="aprilsched"):
        for number in range(1000):
            log.on_event(progress(number), 0.0)
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
    assert ["the disk is too slow" in record.getMessage() for record in caplog.records] == [True]


def test_a_disk_that_hangs_does_not_hold_up_the_end(
    pipe: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(writing, "_CLOSE_SECONDS", 0.01)
    log = EventLog(pipe)
    log.start()
    with caplog.at_level(logging.WARNING, logger="aprilsched"):
        log.on_event(EVENTS[0], 0.0)
        log.close()
    assert log.error == "the disk did not take it within 0.01 s"
    assert len(caplog.records) == 1
    pipe.read_bytes()  # the thread ends


def test_a_patient_log_waits_for_the_disk(pipe: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writing, "_FLUSH_BYTES", 200)
    monkeypatch.setattr(writing, "_HOLD_LINES", 1)
    log = EventLog(pipe, patient=True)
    log.start()
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(pipe.read_bytes)
        for number in range(1000):
            log.on_event(progress(number), 0.0)
        log.close()
        assert lines_of(reading.result()) == list(range(1000))
    assert log.error is None
