"""Tests ``aprilsched run`` and ``simulate`` on the embedded engine, in virtual time."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aprilsched.__main__ import main
from aprilsched.cli.runs.config_file import read_settings
from aprilsched.cli.runs.settings import RunSettings
from aprilsched.observe.log.over_time import bars, in_flight
from aprilsched.observe.log.run import read_run
from aprilsched.planning.presets import PRESETS
from aprilsched.planning.step_times.model import H200_QWEN3_4B
from aprilsched.planning.step_times.model_file import save_model
from aprilsched.simulation.engine import SimFleet
from tests.support.table import each_row

SHORT = ["--median", "60", "--cap", "600"]
SMALL = ["--batch-groups", "4", "--group-size", "4", "--over-provision", "2", "--quiet", *SHORT]


def run(out: Path, *arguments: str) -> dict[str, Any]:
    """The summary of a run with few short responses."""
    assert main(["run", *SMALL, "--out", str(out), *arguments]) == 0
    return json.loads((out / "summary.json").read_text())


def test_same_seed_same_bytes(tmp_path: Path):
    for name in ("a", "b"):
        run(tmp_path / name, "--batches", "6", "--seed", "3")
    run(tmp_path / "other", "--batches", "6", "--seed", "4")
    for file in ("events.jsonl", "summary.json", "config.toml"):
        first, second = (tmp_path / name / file for name in ("a", "b"))
        assert first.read_bytes() == second.read_bytes()
    events = [(tmp_path / name / "events.jsonl").read_bytes() for name in ("a", "other")]
    assert events[0] != events[1]


def test_what_analysis_reads_agrees_with_the_summary(tmp_path: Path):
    run(tmp_path, "--batches", "4")
    history = read_run(tmp_path)
    summary = history.summary
    assert [d.index for d in history.deliveries] == [0, 1, 2, 3]
    lengths = [r.tokens for d in history.deliveries for r in d.rollouts]
    assert sum(lengths) == summary.tokens.delivered
    assert [update.version for update in history.updates] == [1, 2, 3, 4]
    paused = sum(pause.end - pause.start for pause in history.pauses)
    assert paused == pytest.approx(summary.seconds.pause, abs=1e-4)
    assert len({a.rollout_id for a in history.attempts}) == summary.rollouts.launched
    times, counts = in_flight(history, history.end)
    assert list(times) == sorted(times)
    assert min(counts) >= 0
    assert max(counts) == 2 * 16
    drawn = bars(history, history.end, at_most=10)
    assert len(drawn) == 10
    assert {version for bar in drawn for _, _, version in bar} <= {0, 1, 2, 3, 4}


def test_the_trainer_s_time_is_its_own(tmp_path: Path):
    without = run(tmp_path / "a", "--batches", "4")
    with_trainer = run(tmp_path / "b", "--batches", "4", "--train-seconds", "5")
    assert with_trainer["seconds"]["trainer"] == pytest.approx(20, abs=0.01)
    assert with_trainer["efficiency"] == pytest.approx(without["efficiency"], rel=0.01)
    assert with_trainer["delivered_tokens_per_s"] < without["delivered_tokens_per_s"]


def test_one_version_all_along(tmp_path: Path):
    summary = run(tmp_path, "--batches", "4", "--update-every", "0")
    assert summary["off_policy_token_share"] == 0
    assert {batch["version"] for batch in summary["per_batch"]} == {0}


def test_a_run_folder_s_config_runs_again(tmp_path: Path):
    run(tmp_path / "a", "--batches", "3", "--seed", "9")
    config = tmp_path / "a" / "config.toml"
    again = ["run", "--quiet", "--config", str(config)]
    assert main([*again, "--out", str(tmp_path / "b")]) == 0
    assert (tmp_path / "b" / "config.toml").read_bytes() == config.read_bytes()
    assert main([*again, "--out", str(tmp_path / "c"), "--seed", "8"]) == 0
    changed = tomllib.loads((tmp_path / "c" / "config.toml").read_text())
    assert changed == tomllib.loads(config.read_text()) | {"seed": 8}


def test_a_dry_run_opens_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def opened(*_: Any) -> None:
        raise AssertionError("an engine was opened")

    monkeypatch.setattr(SimFleet, "open", opened)
    monkeypatch.chdir(tmp_path)
    assert main(["run", *SMALL, "--dry-run", "--straggler", "abort"]) == 0
    resolved = tomllib.loads(capsys.readouterr().out)
    assert resolved["scheduler"]["straggler"] == "abort"
    assert resolved["workload"]["median"] == 60
    assert list(tmp_path.iterdir()) == []


def test_prompts_from_a_file(tmp_path: Path):
    sampling = {"max_tokens": 7, "temperature": 0.5, "ignore_eos": True}
    lines = [{"input_ids": [1, 2, i], "key": f"k{i}", "sampling": sampling} for i in range(10)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = run(tmp_path / "out", "--batches", "9", "--prompts", str(file))
    assert summary["rollouts"]["launched"] == summary["rollouts"]["delivered"] == 40
    assert [batch["groups"] for batch in summary["per_batch"]] == [4, 4, 2]
    assert {batch["mean_length"] for batch in summary["per_batch"]} == {7}
    assert summary["bias"]["bias_reference"] == "run_after_burn_in"


def test_prompts_that_are_text(tmp_path: Path):
    pytest.importorskip("transformers")
    import tokenizers

    model = tokenizers.models.WordLevel({"<unk>": 0, "hello": 1, "world": 2}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "hello world", "sampling": {"max_tokens": 5}}\n')
    out = tmp_path / "out"
    run(out, "--prompts", str(file), "--tokenizer", str(tmp_path), "--batches", "1")
    sends = [
        line for line in (out / "events.jsonl").read_text().splitlines() if "AttemptSent" in line
    ]
    assert json.loads(sends[0])["tokens"] == 2


def _lines(path: Path, *lengths: int) -> Path:
    """Write a file of prompts of these lengths, with responses of 7 tokens; returns its path."""
    lines = [json.dumps({"input_ids": [1] * n, "sampling": {"max_tokens": 7}}) for n in lengths]
    path.write_text("\n".join(lines))
    return path


FAILING = ["--batch-groups", "1", "--group-size", "2", "--over-provision", "1", "--quiet"]


@each_row(
    ("lengths", "batches", "code", "text"),
    [
        ([500], 1, 2, "no group was delivered: 1 of 1 failed, most often because "),
        ([5, 500, 5], 3, 2, "2 of 3 batches were delivered, because 1 group failed, "),
        ([5, 5], 10, 0, None),
        ([5, 500, 5], 10, 0, None),
        ([5, 500, 5], 2, 0, None),
    ],
)
def test_a_run_whose_groups_fail_reports_it_and_fails(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lengths: list[int],
    batches: int,
    code: int,
    text: str | None,
):
    path = _lines(tmp_path / "prompts.jsonl", *lengths)
    out = tmp_path / "run"
    arguments = ["--prompts", str(path), "--batches", str(batches), "--sim.kv-tokens", "100"]
    assert main(["run", *FAILING, "--out", str(out), *arguments]) == code
    error = json.loads((out / "summary.json").read_text())["error"]
    errors = capsys.readouterr().err
    if text is None:
        assert error is None
    else:
        assert text in error
        assert errors.splitlines()[-1] == f"aprilsched: {error}"


def test_the_longest_response_is_that_of_the_workload(tmp_path: Path):
    lengths = ["--median", "60", "--sampling.max-new-tokens", "100", "--batches", "2", "--quiet"]
    small = ["--batch-groups", "4", "--group-size", "4"]
    assert main(["run", *small, *lengths, "--out", str(tmp_path / "a")]) == 0
    config = tomllib.loads((tmp_path / "a" / "config.toml").read_text())
    assert config["workload"]["cap"] == 100
    assert "sampling" not in config["scheduler"]
    delivered = read_run(tmp_path / "a").deliveries
    assert max(r.tokens for d in delivered for r in d.rollouts) == 100
    # A file sets it too.
    file = tmp_path / "b.toml"
    file.write_text("[scheduler.sampling]\nmax_new_tokens = 1024\n")
    assert read_settings(file).workload.cap == 1024


REFUSED = {
    "--cap 9 --sampling.max-new-tokens 8": "cap is 9 and sampling.max_new_tokens is 8",
    "--sampling.temperature 0.5": "The built-in workload samples in its own way",
    "--engine http://127.0.0.1:9 --update-every 1": "update_every is 1 and there are no new",
}


@each_row("line", REFUSED)
def test_what_would_do_nothing_is_refused(line: str, capsys: pytest.CaptureFixture[str]):
    assert main(["run", "--dry-run", *line.split()]) == 2
    assert REFUSED[line] in capsys.readouterr().err


def test_servers_without_new_weights_have_one_version():
    settings = RunSettings(engine=("http://127.0.0.1:9",))
    assert settings.updates_every == 0
    assert replace(settings, weights="model").updates_every == 1
    assert RunSettings().updates_every == 1


def test_json_leaves_stdout_to_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = [argument for argument in SMALL if argument != "--quiet"]
    assert main(["run", *arguments, "--batches", "2", "--json", "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads((tmp_path / "summary.json").read_text())
    assert "2 of 2 delivered" in captured.err


def test_simulate_compares_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    arguments = ["--batches", "6", "--batch-groups", "4", "--group-size", "4", *SHORT]
    out = tmp_path / "out"
    assert main(["simulate", "--policy", "sync,april", *arguments, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    text = " ".join(captured.out.split())
    assert "Fastest: april. No policy within 1% of it has a lower mean staleness (" in text
    assert re.search(
        r"\). april delivers \+\d+\.\d% tokens/s over sync in the steady state\.", text
    )
    assert re.search(r"│ april +│ +[\d,]+ │ +\d\.\d\d │ +\d │ +\d+\.\d% │ +\d+\.\d │", captured.out)
    assert str(out) in captured.err
    done = r"^sync: [\d,]+ tokens/s at a mean staleness of 0\.00\napril: "
    assert re.search(done, captured.err, re.MULTILINE)
    comparison = json.loads((out / "comparison.json").read_text())
    assert comparison["best"] == "april"
    for row in comparison["policies"]:
        assert row["step_p10"] < row["step_s"] < row["step_p90"]
    sync, april = comparison["policies"]
    assert sync["policy"] == "sync"
    assert sync["speedup"] == 1
    assert sync["off_policy_share"] == 0
    assert april["generated_tokens_per_s"] > 0
    for policy in ("sync", "april"):
        files = {path.name for path in (out / policy).iterdir()}
        assert files >= {"config.toml", "events.jsonl", "summary.json"}
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_simulate_takes_a_file_of_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The longest is the cap, the run's folder has it, and another distribution is refused."""
    file = tmp_path / "lengths.txt"
    file.write_text("40\n55, 70\n900\n")
    shape = ["--batches", "4", "--batch-groups", "2", "--group-size", "4", "--quiet"]
    out = tmp_path / "o"
    command = ["simulate", "--policy", "sync", *shape, "--json", "--lengths", str(file)]
    assert main([*command, "--out", str(out)]) == 0
    lengths = [r.tokens for d in read_run(out / "sync").deliveries for r in d.rollouts]
    assert set(lengths) == {40, 55, 70, 900}
    (out / "sync" / "summary.json").unlink()
    shown = tomllib.loads((out / "sync" / "config.toml").read_text())["workload"]
    assert shown["cap"] == 900
    assert not {"median", "sigma"} & shown.keys()
    mean = read_run(out / "sync").summary.bias.workload_mean_length
    assert mean == pytest.approx((40 + 55 + 70 + 900) / 4, rel=0.02)
    file.rename(tmp_path / "elsewhere.txt")
    assert read_run(out / "sync").summary.bias.workload_mean_length is None


def test_simulate_takes_the_lengths_of_a_run(tmp_path: Path):
    """Responses that a run did not finish are censored, so they count as longer."""
    shape = ["--batches", "3", "--batch-groups", "2", "--group-size", "4", "--quiet", "--json"]
    file, first, second = tmp_path / "lengths.txt", tmp_path / "first", tmp_path / "second"
    file.write_text("40 55 70 900")
    lengths = ["--lengths", str(file), "--out", str(first)]
    assert main(["simulate", "--policy", "april", *shape, *lengths]) == 0
    lengths = ["--lengths", str(first / "april"), "--out", str(second)]
    assert main(["simulate", "--policy", "sync", *shape, *lengths]) == 0
    found = {r.tokens for d in read_run(second / "sync").deliveries for r in d.rollouts}
    assert found <= {40, 55, 70, 900}
    assert 900 in found
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["simulate", "--lengths", str(empty), "--out", str(tmp_path / "third")]) == 2


def test_simulate_prints_a_list_of_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--batches", "6", "--batch-groups", "4", "--group-size", "4", *SHORT]
    policies = ["--policy", "sync,april:over_provision=1.5|2,auto", "--kv", "keep", "--json"]
    out = str(tmp_path / "o")
    assert main(["simulate", "--quiet", *policies, *arguments, "--out", out]) == 0
    rows = json.loads(capsys.readouterr().out)
    names = [row["policy"] for row in rows]
    assert names == ["sync", "april@1.5", "april@2", "auto"]
    # The last schedule has another forecast than the earlier ones that the figures cover.
    assert rows[-1]["schedule"]
    assert "expected" not in rows[-1]["schedule"]
    contract = {
        "policy", "efficiency", "delivered_tokens_per_s", "generated_tokens_per_s",
        "off_policy_share", "staleness_mean", "staleness_max", "length_bias", "wall_s", "batches",
    }  # fmt: skip
    for row in rows:
        assert contract <= row.keys()
        assert row["batches"] == 6
        assert 0 < row["efficiency"] < 1.2


def test_simulate_takes_calibrated_step_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    slow = replace(H200_QWEN3_4B, t0=10 * H200_QWEN3_4B.t0)
    save_model(slow, tmp_path / "model.toml")
    arguments = ["--policy", "sync", "--batches", "3", "--batch-groups", "2", "--group-size", "2"]
    seconds: list[float] = []
    for place, model in enumerate(([], ["--model", str(tmp_path / "model.toml")])):
        out = ["--json", "--quiet", "--out", str(tmp_path / str(place))]
        assert main(["simulate", *arguments, *SHORT, *model, *out]) == 0
        seconds.append(json.loads(capsys.readouterr().out)[0]["wall_s"])
    assert seconds[1] > 5 * seconds[0]
    assert main(["simulate", *arguments, "--model", str(tmp_path / "none.toml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_simulate_delivers_samples_where_it_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The policies that cannot deliver samples are left out, each with its reason."""
    arguments = ["--batches", "6", "--batch-groups", "4", "--group-size", "4", *SHORT]
    delivery = ["--delivery", "samples:2", "--policy", ",".join(PRESETS), "--json", "--quiet"]
    assert main(["simulate", *delivery, *arguments, "--out", str(tmp_path / "o")]) == 0
    captured = capsys.readouterr()
    rows = {row["policy"]: row for row in json.loads(captured.out)}
    assert rows.keys() >= {"sync", "april", "slime", "areal", "copris", "pool"}
    assert rows["april"]["delivered_tokens_per_s"] > rows["sync"]["delivered_tokens_per_s"]
    for name in PRESETS.keys() - rows.keys():
        assert re.search(rf"^{name} is left out: [^.]+", captured.err, re.MULTILINE)
    assert "on_policy" not in rows
    config = tomllib.loads((tmp_path / "o" / "april" / "config.toml").read_text())["scheduler"]
    assert (config["delivery"], config["siblings"]) == ("samples", 2)


def test_simulate_describes_the_settings_of_a_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["--batches", "3", "--batch-groups", "2", "--group-size", "4", "--quiet", *SHORT]
    policies = ["--policy", "april,april:over_provision=1.25,samples:2+pool@1.5"]
    assert main(["simulate", *policies, *arguments, "--out", str(tmp_path / "n")]) == 0
    printed = capsys.readouterr().out
    assert "april@1.25: Waves of 1.25 batches.\n" in printed  # no pace if nothing is trained
    assert "Modelled engines: SGLang on one H200 with a 4B model.\n" in printed
    arguments += ["--train-seconds", "1"]
    assert main(["simulate", *policies, *arguments, "--out", str(tmp_path / "o")]) == 0
    printed = capsys.readouterr().out
    assert "april: Launch twice the batch" in printed
    assert "april@1.25: Waves of 1.25 batches. Engines wait while the trainer trains.\n" in printed
    pool = "samples:2+pool@1.5: A pool of 1.5 batches, refilled 4 groups together."
    assert f"{pool} It delivers single samples with 2 siblings. Engines wait" in printed


def test_simulate_has_means_over_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--policy", "sync,april", "--batches", "6", "--batch-groups", "4", "--group-size",
                 "4", "--json", "--quiet", *SHORT]  # fmt: skip

    def rows(name: str, *more: str) -> list[dict[str, Any]]:
        assert main(["simulate", *arguments, *more, "--out", str(tmp_path / name)]) == 0
        return json.loads(capsys.readouterr().out)

    both = rows("both", "--seed", "3", "--seeds", "2")
    single = [rows(str(seed), "--seed", str(seed)) for seed in (3, 4)]
    for place, row in enumerate(both):
        pair = [each[place] for each in single]
        speeds = [each["delivered_tokens_per_s"] for each in pair]
        assert row["seeds"] == 2
        assert row["delivered_tokens_per_s"] == pytest.approx(sum(speeds) / 2)
        assert row["delivered_tokens_per_s_range"] == [min(speeds), max(speeds)]
        assert row["by_seed"]["delivered_tokens_per_s"] == speeds
        assert row["staleness_max"] == max(each["staleness_max"] for each in pair)
        assert pair[0]["delivered_tokens_per_s_range"] is None
    settings = read_settings(tmp_path / "both" / "april" / "config.toml")
    assert settings.workload.cap is not None
    interval = json.loads((tmp_path / "both" / "comparison.json").read_text())["interval"]
    assert interval == "smallest and largest of the seeds"
    assert both[1]["speedup"] == pytest.approx(
        both[1]["delivered_tokens_per_s"] / both[0]["delivered_tokens_per_s"]
    )


def test_simulate_divides_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Colocated engines idle while all GPUs train; a faster trainer leaves fewer engines."""
    arguments = ["--policy", "april", "--batches", "6", "--batch-groups", "4", "--group-size", "4",
                 "--kv", "keep", "--quiet", *SHORT]  # fmt: skip
    gpus = ["--gpus", "3", "--train-gpu-seconds", "6"]
    out = tmp_path / "o"
    assert main(["simulate", *arguments, *gpus, "--json", "--out", str(out)]) == 0
    rows = {row["policy"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["april colocated", "april 1:2", "april 2:1"]
    configs = {
        name: tomllib.loads((out / f"april_{name}" / "config.toml").read_text())
        for name in ("colocated", "1_2", "2_1")
    }
    assert [each["train_seconds"] for each in configs.values()] == [2.0, 3.0, 6.0]
    assert [each.get("sim", {}).get("engines", 1) for each in configs.values()] == [3, 1, 2]
    assert configs["colocated"]["scheduler"]["straggler"] == "retract"
    assert configs["1_2"]["scheduler"]["straggler"] == "in_place"
    paces = [each["scheduler"]["pace"] for each in configs.values()]
    assert paces == ["synchronous", "asynchronous", "asynchronous"]
    assert all(row["step_s"] > 2 for row in rows.values())
    for wrong, message in (
        (["--gpus", "1", "--train-gpu-seconds", "6"], "gpus is 1; give 2 or more"),
        (["--gpus", "3"], "train_gpu_seconds must be above 0"),
        ([*gpus, "--split", "3:1"], "split must be all, or some of colocated, 1:2, 2:1, got '3:1'"),
        ([*gpus, "--train-seconds", "1"], "gpus sets train_seconds and sim.engines"),
        ([*gpus, "--split", "1:2,1:2"], "split names 1:2 twice"),
        (["--split", "1:2"], "set gpus too"),
        (["--seeds", "0"], "seeds is 0; give 1 or more"),
    ):
        assert main(["simulate", *arguments, *wrong, "--out", str(tmp_path / "w")]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_policy_names_its_own_pace(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A refusal is printed once for all divisions, with the ones that it concerns."""
    policies = "sync,april:pace=synchronous,samples:2@1.5:pace=asynchronous,samples:9@2"
    arguments = ["--policy", policies, "--batches", "4", "--batch-groups", "2", "--group-size", "4",
                 "--gpus", "3", "--train-gpu-seconds", "6", "--quiet", *SHORT]  # fmt: skip
    assert main(["simulate", *arguments, "--out", str(tmp_path / "o")]) == 0
    output = capsys.readouterr()
    printed, messages = " ".join(output.out.split()), " ".join(output.err.split())
    waits, generates = "Engines wait while the", "Engines generate while the"
    every = "colocated, 1:2, 2:1"
    assert f"sync {every}: Wait for every last response. {waits}" in printed
    assert f"april pace=synchronous {every}: Waves of 2 batches. {waits}" in printed
    assert f"with 2 siblings. {generates}" in printed
    assert "samples:2@1.5 pace=asynchronous colocated is left out: pace must be" in messages
    assert "samples:9@2 colocated, 1:2, 2:1 is left out: siblings must be below" in messages
    assert messages.count("left out") == 2


def test_simulate_leaves_out_divisions_that_a_policy_cannot_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    policies = ["--policy", "areal:refit=rolling:straggler=run,sync", "--gpus", "2"]
    arguments = [*policies, "--train-gpu-seconds", "6", "--batches", "3", "--batch-groups", "2",
                 "--group-size", "2", "--cap", "100", "--quiet", "--json"]  # fmt: skip
    assert main(["simulate", *arguments, "--out", str(tmp_path / "o")]) == 0
    output = capsys.readouterr()
    own = "areal refit=rolling straggler=run"
    names = [row["policy"] for row in json.loads(output.out)]
    assert names == ["sync colocated", f"{own} 1:1", "sync 1:1"]
    messages = " ".join(output.err.split())
    assert f"{own} colocated is left out: refit=" in messages
    assert messages.count("Warning:") == 1
