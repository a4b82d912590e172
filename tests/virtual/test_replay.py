"""Tests ``aprilsched replay``: it reproduces a recorded run, and predicts other policies.

Unless stated otherwise, batches are 16 groups of 4 from the default workload. Each test states the
measured error with its bound.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched.__main__ import main
from aprilsched.analysis.lengths_of_run import read_record
from aprilsched.core.messages import facts as of
from aprilsched.core.messages.events import EngineInfo
from aprilsched.core.messages.facts import Fact
from aprilsched.telemetry.event_log import EventLog
from aprilsched.telemetry.figures import RunSummary
from aprilsched.timing import save_model
from aprilsched.timing.model import H200_QWEN3_4B_LINEAR
from aprilsched.workload import LongTailWorkload
from tests.support import facts

GROUP_SIZE = 4
SHAPE = ["--batch-groups", "16", "--group-size", str(GROUP_SIZE)]
BATCHES = 20
FILES = ("config.toml", "events.jsonl", "summary.json")
FIGURES = ("delivered_tokens_per_s", "efficiency", "off_policy_share", "step_s")

Capture = pytest.CaptureFixture[str]


def simulate(out: Path, policy: str, capsys: Capture, *arguments: str) -> dict[str, Any]:
    """The row of `policy`, whose run folder is `out` / `policy`."""
    command = ["simulate", "--policy", policy, *SHAPE, "--batches", str(BATCHES), *arguments]
    assert main([*command, "--quiet", "--json", "--out", str(out)]) == 0
    return json.loads(capsys.readouterr().out)[0]


def replay(run: Path, capsys: Capture, *arguments: str) -> dict[str, Any]:
    """What ``--json`` prints."""
    assert main(["replay", str(run), "--quiet", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: Capture, *arguments: str) -> str:
    """The one sentence of a refused replay."""
    assert main(["replay", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.fixture(scope="module")
def april(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a simulated run of april. Tests do not change it."""
    out = tmp_path_factory.mktemp("april") / "out"
    command = ["simulate", "--policy", "april", *SHAPE, "--batches", str(BATCHES)]
    assert main([*command, "--quiet", "--json", "--out", str(out)]) == 0
    return out / "april"


@pytest.mark.parametrize("policy", ["april", "pool", pytest.param("areal", marks=pytest.mark.long)])
def test_a_simulated_run_gives_back_itself(tmp_path: Path, capsys: Capture, policy: str):
    """The measured error is 0: responses that had not ended in the run do not end in its replay."""
    simulate(tmp_path / "out", policy, capsys)
    found = replay(tmp_path / "out" / policy, capsys, "--policy", "recorded")
    (row,) = found["replayed"]
    assert row["policy"] == "recorded"
    assert row["batches"] == BATCHES
    assert row["step_s"] == pytest.approx(found["recorded"]["step_s"], rel=0.01)
    assert found["prediction_error"]["batches"] == BATCHES - BATCHES // 4
    for name in FIGURES:
        assert abs(found["prediction_error"][name]) < 1e-9


@pytest.mark.long
def test_other_policies_are_predicted(tmp_path: Path, capsys: Capture):
    """Measured: -0.2 % of sync's seconds a batch, +0.5 % of slime's. The lengths that are drawn for
    the last stragglers decide some batches of sync, so batches are larger here: 32 groups of 8."""
    large = ["--batch-groups", "32", "--group-size", "8"]
    simulate(tmp_path / "april", "april", capsys, *large)
    found = replay(tmp_path / "april" / "april", capsys, "--policy", "sync,slime")
    for row in found["replayed"][1:]:
        direct = simulate(tmp_path / row["policy"], row["policy"], capsys, *large)
        assert row["batches"] == BATCHES
        for name in FIGURES:
            assert row[name] == pytest.approx(direct[name], rel=0.03)


@pytest.mark.parametrize(
    "settings",
    [
        ["--pace", "asynchronous", "--refill", "pool", "--train-seconds", "2"],
        ["--straggler", "abort", "--train-seconds", "1"],
        pytest.param(["--over-provision", "2"], marks=pytest.mark.long),
    ],
    ids=["asynchronous", "abort", "wave"],
)
def test_a_run_of_the_coordinator_is_predicted(
    tmp_path: Path, capsys: Capture, settings: list[str]
):
    """Measured: 0.04, 0.04 and 0.08 % of the seconds a batch. The coordinator sends a limited
    number of requests per second, and its pauses do not end with a step."""
    out = tmp_path / "run"
    command = ["run", *SHAPE, "--batches", "12", "--quiet", "--out", str(out)]
    assert main([*command, *settings]) == 0
    found = replay(out, capsys, "--policy", "recorded")
    for name in FIGURES:
        assert abs(found["prediction_error"][name]) < 0.03


def test_recorded_lengths_are_those_of_the_workload(april: Path):
    record = read_record(april)
    summary: RunSummary = record.summary
    assert record.known + record.imputed == summary.rollouts.launched
    assert 0 < record.imputed <= summary.rollouts.in_flight
    workload = LongTailWorkload(group_size=GROUP_SIZE)
    for index, group in enumerate(record.groups):
        drawn = workload.lengths(index)
        known = [place for place in range(GROUP_SIZE) if place not in group.so_far]
        assert [group.lengths[place] for place in known] == drawn[known].tolist()
        assert group.prompt_tokens == workload.prompt_tokens
        for place, so_far in group.so_far.items():
            assert group.lengths[place] > so_far
            assert drawn[place] > so_far
            assert group.lengths[place] <= workload.cap


def test_imputed_lengths_are_neither_short_nor_long(tmp_path: Path, capsys: Capture):
    """Many lengths are imputed, because a pool of three batches leaves them. Measured: half a
    standard error."""
    simulate(tmp_path / "out", "pool:over_provision=3", capsys)
    folder = tmp_path / "out" / "pool_over_provision-3"
    record = read_record(folder)
    places = [(i, place) for i, group in enumerate(record.groups) for place in group.so_far]
    imputed = np.array([record.groups[i].lengths[place] for i, place in places])
    workload = LongTailWorkload(group_size=GROUP_SIZE)
    drawn = np.array([workload.lengths(i)[place] for i, place in places])
    assert len(places) > 100
    spread = float(drawn.std()) / len(places) ** 0.5
    assert abs(float(imputed.mean() - drawn.mean())) < 4 * spread
    other = read_record(folder, seed=1)
    assert other.groups != record.groups
    assert other.imputed == record.imputed


@pytest.mark.parametrize(
    "policies",
    [
        ("sync", "recorded:over_provision=3"),
        pytest.param(("sync", "recorded:over_provision=3", "auto"), marks=pytest.mark.long),
    ],
)
def test_twice_the_same(april: Path, capsys: Capture, policies: tuple[str, ...]):
    arguments = ["--policy", ",".join(policies)]
    first, second = (replay(april, capsys, *arguments) for _ in range(2))
    assert first == second
    assert [row["policy"] for row in first["replayed"]] == ["recorded", *policies]


def test_the_table_begins_with_the_run_itself(april: Path, capsys: Capture):
    assert main(["replay", str(april), "--policy", "sync"]) == 0
    captured = capsys.readouterr()
    rows = [line.split("│")[1].strip() for line in captured.out.splitlines() if "│" in line]
    assert rows == ["the run", "recorded", "sync"]
    assert "Prediction error, replayed against real over 15 batches" in captured.out
    assert "their lengths were drawn" in captured.out
    assert "batch" in captured.err


@pytest.mark.long
def test_the_end_of_the_record_ends_a_replay(tmp_path: Path, capsys: Capture):
    """sync launches just what it delivers, so april lacks groups in its last batch."""
    simulate(tmp_path / "out", "sync", capsys)
    found = replay(tmp_path / "out" / "sync", capsys, "--policy", "april,april:over_provision=4")
    assert [row["batches"] for row in found["replayed"]] == [BATCHES, BATCHES - 1, BATCHES - 3]
    assert found["imputed"] == 0
    assert main(["replay", str(tmp_path / "out" / "sync"), "--policy", "april", "--quiet"]) == 0
    assert f"it has {BATCHES - 1} of {BATCHES} batches" in capsys.readouterr().out


def test_a_run_that_used_all_prompts_is_replayed_to_their_end(tmp_path: Path, capsys: Capture):
    sampling = {"max_tokens": 200, "ignore_eos": True}
    lines = [{"input_ids": [1] * (i + 1), "sampling": sampling} for i in range(10)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--batch-groups", "4", "--group-size", "2", "--batches", "9", "--burn-in", "1"]
    out = tmp_path / "run"
    command = ["run", *arguments, "--prompts", str(prompts), "--over-provision", "2"]
    assert main([*command, "--quiet", "--out", str(out)]) == 0
    record = read_record(out)
    assert [group.prompt_tokens for group in record.groups] == list(range(1, 11))
    assert record.whole
    found = replay(out, capsys, "--policy", "sync")
    assert [row["batches"] for row in found["replayed"]] == [3, 3]


def test_latencies_are_those_of_the_log(tmp_path: Path, capsys: Capture):
    arguments = ["--sim.refit-seconds", "3", "--sim.reward-seconds", "0.5", "--train-seconds", "7"]
    simulate(tmp_path / "out", "april", capsys, *arguments)
    found = replay(tmp_path / "out" / "april", capsys, "--policy", "recorded")
    costs = found["costs"]
    assert costs["refit_seconds"] == pytest.approx(3)
    assert costs["reward_seconds"] == pytest.approx(0.5)
    assert costs["train_seconds"] == pytest.approx(7)
    assert abs(found["prediction_error"]["step_s"]) < 0.01


@pytest.mark.long
def test_out_gets_a_run_folder_of_each(april: Path, tmp_path: Path, capsys: Capture):
    out = tmp_path / "out"
    found = replay(april, capsys, "--policy", "sync", "--out", str(out))
    for name in ("recorded", "sync"):
        assert {path.name for path in (out / name).iterdir()} >= set(FILES)
    assert json.loads((out / "replay.json").read_text()) == found
    again = replay(out / "recorded", capsys, "--policy", "recorded")
    assert abs(again["prediction_error"]["step_s"]) < 1e-9
    assert "not empty" in refusal(capsys, str(april), "--out", str(out))


def test_other_engines(april: Path, tmp_path: Path, capsys: Capture):
    model = tmp_path / "model.toml"
    save_model(H200_QWEN3_4B_LINEAR, model)
    usual = replay(april, capsys, "--policy", "recorded")["prediction_error"]
    arguments = ["--policy", "recorded", "--model", str(model)]
    linear = replay(april, capsys, *arguments)["prediction_error"]
    assert 0.001 < abs(linear["step_s"]) < 0.2
    narrow = replay(april, capsys, "--policy", "recorded", "--max-running", "32")
    assert narrow["prediction_error"]["step_s"] > 0.2
    small = replay(april, capsys, "--policy", "recorded", "--kv-tokens", "40000")
    assert small["prediction_error"]["step_s"] > usual["step_s"]


@pytest.fixture
def folder(april: Path, tmp_path: Path) -> Path:
    """A copy of the run, for a test to change."""
    return Path(shutil.copytree(april, tmp_path / "run"))


@pytest.mark.parametrize("missing", sorted({*FILES} - {"summary.json"}))
def test_a_folder_that_lacks_a_file(folder: Path, capsys: Capture, missing: str):
    (folder / missing).unlink()
    said = refusal(capsys, str(folder))
    assert missing in said
    assert str(folder) in said


def test_a_run_that_was_killed_is_replayed_from_its_log(april: Path, folder: Path, capsys: Capture):
    (folder / "summary.json").unlink()
    whole, left = (replay(run, capsys, "--policy", "recorded") for run in (april, folder))
    assert left["prediction_error"] == pytest.approx(whole["prediction_error"], abs=1e-6)


@pytest.mark.parametrize("file", FILES)
def test_a_corrupt_file(folder: Path, capsys: Capture, file: str):
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: len(content) // 2] + b"\n{]\n")
    assert str(folder) in refusal(capsys, str(folder))


def test_a_log_that_was_cut_off(folder: Path, capsys: Capture):
    lines = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "events.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]))
    assert f"of {BATCHES} batches in its event log" in refusal(capsys, str(folder))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--policy", "aprill"], "no policy"),
        (["--policy", "sync,sync"], "twice"),
        (["--policy", "april:group_size=2"], "leave group_size out"),
        (["--policy", "recorded:no_such=1"], "no setting"),
        (["--batches", "0"], "give 1 or more"),
        (["--seed", "-1"], "give 0 or more"),
        (["--max-running", "0"], "give at least 1"),
        (["--model", "no-such-model.toml"], "cannot be read"),
    ],
)
def test_refused(april: Path, capsys: Capture, arguments: list[str], part: str):
    assert part in refusal(capsys, str(april), *arguments)


def test_no_folder_at_all(tmp_path: Path, capsys: Capture):
    assert f"there is no folder {tmp_path / 'nothing'};" in refusal(
        capsys, str(tmp_path / "nothing")
    )
    said = refusal(capsys, str(tmp_path))
    assert "is not a run folder (it has no config.toml)" in said
    assert "simulate" in said


def test_what_a_log_says_of_groups(folder: Path):
    """Evaluations are left out, a retry begins with the known tokens, and a rollout that was never
    sent has no tokens."""
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"batches": 1, "per_batch": summary["per_batch"][:1]}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "events.jsonl").unlink()
    rows = [
        of.DeliveredRollout(
            rollout_id=rollout, group_id=group, prompt_tokens=9, tokens=5, segments=()
        )
        for rollout, group in ((2, 1), (9, 8))
    ]
    engines = [EngineInfo(name=n, version=0, kv_tokens=kv) for n, kv in (("a", 90), ("b", 70))]
    told: list[Fact] = [
        of.RunOpened(engines=tuple(engines), version=0),
        facts.launched(1, 2, 4, 6, prompt_tokens=9),
        facts.sent(4, 1, tokens=9),
        facts.sent(2, 1, tokens=9),
        facts.sent(9, 8, tokens=3),
        facts.received(4, 6),
        of.AttemptEnded(request_id=4, outcome="failed"),
        facts.sent(4, 1, attempt=2, tokens=13),
        facts.received(4, 3),
        of.BatchDelivered(batch=0, version=0, rollouts=tuple(rows[:1])),
        of.GroupLaunched(group_id=8, rollout_ids=(9,), prompt_tokens=3, evaluation_id=1),
        of.EvaluationDelivered(evaluation_id=1, version=0, rollouts=tuple(rows[1:])),
        *facts.ended(4, 1),
    ]
    log = EventLog(folder / "events.jsonl")
    log.start()
    for number, fact in enumerate(told):
        log.on_facts([fact], float(number))
    log.close()
    record = read_record(folder)
    (group,) = record.groups
    assert group.prompt_tokens == 9
    assert group.lengths[:2] == (5, 7)
    assert group.so_far == {2: 0}
    assert (record.known, record.imputed) == (2, 1)
    assert record.kv_tokens == 70
