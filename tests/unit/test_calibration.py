"""Tests reading server logs and fitting step times: known models are found, noise is ignored."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aprilsched.__main__ import main
from aprilsched.errors import ConfigError
from aprilsched.planning.step_times import (
    LogLine,
    fit,
    load_model,
    read_log,
    save_model,
    windows_of,
)
from aprilsched.planning.step_times.least_squares import nonnegative
from aprilsched.planning.step_times.model import H200_QWEN3_4B, StepTimeModel
from tests.support.table import each_row

LOG = """\
[2025-11-02 19:50:38] server_args=ServerArgs(model_path='m', decode_log_interval=40)
[2025-11-02 19:50:40] Prefill batch, #new-seq: 1, #new-token: 70, #cached-token: 2, \
token usage: 0.00, #running-req: 0, #queue-req: 511, cuda graph: False, \
input throughput (token/s): 9.1
[2025-11-02 19:50:41] Prefill batch. #new-seq: 16, #new-token: 1024, #cached-token: 0, \
token usage: 0.01, #running-req: 1, #queue-req: 0,
[2025-11-02 19:50:41] Decode batch. #running-req: 64, #token: 2432, token usage: 0.00, \
cuda graph: True, gen throughput (token/s): 5292.08, #queue-req: 3,
[2025-11-02 19:50:41] INFO:     127.0.0.1:41822 - "POST /generate HTTP/1.1" 200 OK
[2025-11-02 19:50:42.137 TP0] Decode batch [120], #running-req: 64, #token: 4992, \
token usage: 0.01, cuda graph: True, gen throughput (token/s): 15144.05, #queue-req: 0
[2025-11-02 19:50:42 DP1 TP0] Decode batch, #running-req: 7, #full token: 900, \
full token usage: 0.01, #swa token: 3, swa token usage: 0.00, npu graph: True, \
gen throughput (token/s): 812.50, #queue-req: 0
"""

TRUE = StepTimeModel(t0=5e-3, t1=2e-5, t2=6e-8, prefill_pass=11e-3, prefill_rate=40_000.0)


def synthetic(model: StepTimeModel, count: int, noise: float, seed: int = 0) -> list[LogLine]:
    """Log lines of an engine with this model; one window in five has prefill passes."""
    rng = np.random.default_rng(seed)
    lines: list[LogLine] = []
    for number in range(count):
        running = int(512 ** rng.uniform(0, 1))
        if number % 2:
            running = int(rng.integers(1, 513))
        kv = running * int(rng.uniform(100, 6000)) + 40 * running
        for window in range(5):
            passes = int(rng.integers(1, 12)) if window == 2 else 0
            prefilled = passes * int(rng.integers(10, 8000))
            seconds = model.decode_seconds(running, kv - 39 * running, 40)
            seconds += passes * model.prefill_pass + prefilled / model.prefill_rate
            seconds *= 1 + noise * rng.standard_normal()
            lines.append(
                LogLine(
                    engine="",
                    time="",
                    running=running,
                    kv=kv,
                    tokens_per_s=40 * running / seconds,
                    passes=passes,
                    prefilled=prefilled,
                )
            )
            kv += 40 * running
    return lines


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_text(LOG, encoding="utf-8")
    return path


def test_server_log_lines_of_both_versions(log: Path) -> None:
    first, second, other = read_log(log)
    assert (first.running, first.kv, first.tokens_per_s) == (64, 2432, 5292.08)
    assert (first.passes, first.prefilled, first.time) == (2, 1094, "19:50:41")
    assert (second.running, second.kv, second.passes) == (64, 4992, 0)
    assert second.engine == first.engine == ""
    assert (other.engine, other.running, other.kv, other.passes) == ("DP1", 7, 900, 0)


def test_a_window_is_what_lies_between_two_lines_of_one_engine(log: Path) -> None:
    windows = windows_of(read_log(log))
    assert len(windows) == 1
    assert windows.seconds[0] == pytest.approx(40 * 64 / 15144.05)
    assert windows.kv[0] == pytest.approx(2432 + 64 * 20.5)
    assert windows.steady.tolist() == [True]


def test_a_shrinking_batch_counts_with_its_mean_and_a_changed_one_not_at_all() -> None:
    rows = [(100, 50_000), (96, 52_000), (40, 30_000), (40, 0)]
    lines = [LogLine(engine="", time="", running=b, kv=kv, tokens_per_s=9800.0) for b, kv in rows]
    windows = windows_of(lines)
    assert windows.running.tolist() == [98, 68]
    assert windows.kv[0] == 51_000
    assert windows.seconds[0] == pytest.approx(0.4)
    assert windows.steady.tolist() == [True, False]
    assert not windows.stalled.any()


def test_a_table_reads_like_a_log(tmp_path: Path) -> None:
    path = tmp_path / "decode.csv"
    path.write_text(
        "run,time,running_requests,kv_tokens,decode_tokens_per_s,queued_requests,"
        "prefill_batches_since,prefill_tokens_since,cached_tokens_since\n"
        "run1,19:34:46,83,3818,10821.53,0,5,2656,0\n"
        "run1,19:34:46,83,7138,17715.09,0,0,0,0\n",
        encoding="utf-8",
    )
    first, second = read_log(path)
    assert first == LogLine(
        engine="run1",
        time="19:34:46",
        running=83,
        kv=3818,
        tokens_per_s=10821.53,
        passes=5,
        prefilled=2656,
    )
    assert second.passes == 0


@each_row(
    ("text", "message"),
    [
        ("", "no decode lines"),
        ("hello\n" * 3, "no decode lines"),
        ("running_requests,kv_tokens,decode_tokens_per_s\n1,2,fast\n", "Line 2 of the table"),
        ("running_requests,kv_tokens,decode_tokens_per_s\n1\n", "Line 2 of the table"),
    ],
)
def test_a_file_that_is_not_a_log_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.log"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_log(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_log(tmp_path / "none.log")


def test_too_many_lines_are_refused(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aprilsched.planning.step_times.server_log.MAX_LINES", 2)
    with pytest.raises(ConfigError, match="more than 2"):
        read_log(log)


def test_a_line_without_end_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    path.write_text("x" * 5000 + LOG.splitlines()[-1] + "\n" + LOG, encoding="utf-8")
    assert [line.running for line in read_log(path)] == [64, 64, 7]


def test_where_every_coefficient_would_be_negative_all_are_0() -> None:
    assert nonnegative(np.eye(2), np.array([-1.0, -2.0])).tolist() == [0, 0]


def test_a_linear_model_comes_back_within_its_errors() -> None:
    found = fit(windows_of(synthetic(TRUE, 80, 0.01)))
    assert (found.model.fill, found.model.t0_wide) == (0.0, 0.0)
    for name, error in found.errors.items():
        true = getattr(TRUE, name)
        assert abs(getattr(found.model, name) - true) < 4 * error
        assert error < 0.06 * true
    assert set(found.errors) == {"t0", "t1", "t2", "prefill_pass", "prefill_rate"}
    assert found.steady.median < 0.01
    assert found.steady.total == pytest.approx(1, abs=0.01)
    assert found.stalled is not None
    assert found.steady.windows >= 240
    assert found.stalled.windows == 80


def test_the_further_terms_come_back_where_they_are() -> None:
    found = fit(windows_of(synthetic(H200_QWEN3_4B, 120, 0.005)), replicates=2).model
    assert found.fill == pytest.approx(9, abs=1)
    assert found.wide_from == 256
    assert found.t0_wide == pytest.approx(1.301e-3, rel=0.25)
    linear = fit(windows_of(synthetic(H200_QWEN3_4B, 120, 0.005)), linear=True, replicates=2)
    assert linear.model.fill == 0
    assert linear.steady.median > 0.01


def test_the_experts_of_a_mixture_come_back() -> None:
    true = replace(TRUE, t0=6.4e-3, t0_experts=10.8e-3, expert_share=1 / 16)
    found = fit(windows_of(synthetic(true, 120, 0.005)), replicates=2)
    assert found.model.expert_share == 1 / 16
    assert found.model.t0_experts == pytest.approx(10.8e-3, rel=0.05)
    assert {"t0", "t0_experts"} <= set(found.errors)


def test_what_the_windows_do_not_tell_is_assumed() -> None:
    lines = [line for line in synthetic(TRUE, 60, 0.01) if not line.passes]
    found = fit(windows_of(lines), replicates=2)
    assert found.assumed == ("prefill_pass", "prefill_rate")
    assert found.model.prefill_rate == H200_QWEN3_4B.prefill_rate
    assert found.stalled is None
    assert "prefill_rate" not in found.errors


def test_too_few_windows_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 20"):
        fit(windows_of(synthetic(TRUE, 4, 0.01)))


@each_row("model", [TRUE, H200_QWEN3_4B, replace(TRUE, t1=1 / 3)])
def test_a_model_is_read_back_equal(tmp_path: Path, model: StepTimeModel) -> None:
    save_model(model, tmp_path / "model.toml", ("made by a test",))
    assert load_model(tmp_path / "model.toml") == model


@each_row(
    ("change", "message"),
    [
        ({"t2": "t2 = -1e-9"}, "t2 is -1e-09; give a finite number, 0 or more"),
        ({"t0": "t0 = true"}, "t0 is True; give a finite number, 0"),
        ({"t0": "t0 = nan"}, "t0 is nan; give a finite number"),
        ({"prefill_rate": "prefill_rate = 0"}, "above 0"),
        ({"prefill_chunk": "prefill_chunk = 1.5"}, "whole number"),
        ({"t1": ""}, "has no t1"),
        ({"t1": "t9 = 1"}, "'t9', which is not a field of a model"),
        ({"[timing]": "[other]"}, "no table"),
        ({"t0": "t0 ="}, "not valid TOML"),
    ],
)
def test_a_wrong_model_file_is_refused(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    path = tmp_path / "model.toml"
    save_model(TRUE, path)
    lines = path.read_text(encoding="utf-8").splitlines()
    ((start, new),) = change.items()
    changed = [new if line.split(" = ")[0] == start else line for line in lines]
    assert changed != lines
    path.write_text("\n".join(changed), encoding="utf-8")
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        load_model(path)


def test_the_command_prints_a_model_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "decode.csv"
    rows = [
        f"{line.running},{line.kv},{line.tokens_per_s},{line.passes},{line.prefilled}"
        for line in synthetic(TRUE, 30, 0.01)
    ]
    header = (
        "running_requests,kv_tokens,decode_tokens_per_s,prefill_batches_since,prefill_tokens_since"
    )
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    out = tmp_path / "model.toml"
    assert main(["calibrate", str(path), "--json", "--linear", "--out", str(out)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["model"]["t0"] == load_model(out).t0 == pytest.approx(TRUE.t0, rel=0.1)
    assert "Assumed" not in out.read_text()
    bare = [line.rsplit(",", 2)[0] for line in [header, *rows]]  # no columns of prefill
    (tmp_path / "bare.csv").write_text("\n".join(bare) + "\n", encoding="utf-8")
    assert main(["calibrate", str(tmp_path / "bare.csv"), "--out", str(out), "--json"]) == 0
    capsys.readouterr()
    assert "# Assumed, of Qwen3-4B on an H200: prefill_pass, prefill_rate.\n" in out.read_text()
    assert main(["calibrate", str(path), "--linear"]) == 0
    assert "ns a context token" in capsys.readouterr().out
    assert main(["calibrate", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def engine_log(
    prefix: str, *, seed: int, tag: str = "TP0", accepted: float = 1.0, stamps: str = ""
) -> list[tuple[float, str]]:
    """Lines of an engine of the model `TRUE`, with their seconds, as a process prints them."""
    t, lines = 0.0, list[tuple[float, str]]()
    for line in synthetic(TRUE, 60, 0.0, seed):
        clock = f"{10 + int(t) // 3600}:{int(t) // 60 % 60:02}:{int(t) % 60:02}"
        stamp = f"[2026-03-22 {clock} {tag}]"
        for _ in range(line.passes):
            new = line.prefilled // line.passes
            lines.append((t, f"{prefix}{stamp} Prefill batch, #new-seq: 1, #new-token: {new}"))
        t += 40 * line.running / line.tokens_per_s
        clock = f"{10 + int(t) // 3600}:{int(t) // 60 % 60:02}:{int(t) % 60:02}"
        stamp = f"[2026-03-22 {clock} {tag}]"
        speculated = "" if accepted == 1 else f"accept len: {accepted:.2f}, accept rate: 0.7, "
        text = f"Decode batch, #running-req: {line.running}, #token: {line.kv}, {speculated}"
        text += f"gen throughput (token/s): {accepted * line.tokens_per_s:.4f}, #queue-req: 0"
        at = f"2026-03-22T10:00:{len(lines) % 60:02}.1{seed}Z " if stamps else ""
        lines.append((t, f"{at}{prefix}{stamp} {text}"))
    return lines


def written(path: Path, *logs: list[tuple[float, str]]) -> Path:
    lines = sorted([line for log in logs for line in log], key=lambda line: line[0])
    path.write_text("".join(f"{text}\n" for _, text in lines), encoding="utf-8")
    return path


RAY = "\x1b[36m(SGLangEngine pid=4182{}, ip=10.0.0.{})\x1b[0m "


@each_row(
    "logs",
    [
        [engine_log(RAY.format(n, n), seed=n) for n in range(3)],
        [engine_log("", seed=n, tag=f"DP{n} TP{n}") for n in range(2)],
        [engine_log(f"sglang-{n}  | ", seed=n, stamps="docker") for n in range(2)],
    ],
    ids=["Ray", "data parallel", "compose"],
)
def test_engines_of_one_log_are_distinguished(
    tmp_path: Path, logs: list[list[tuple[float, str]]]
) -> None:
    windows = windows_of(read_log(written(tmp_path / "all.log", *logs)))
    assert len(set(windows.engine)) == len(logs)
    found = fit(windows, linear=True, replicates=2).model
    for name in ("t0", "t1", "t2", "prefill_pass"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.05)


def test_engines_without_a_name_are_refused(tmp_path: Path) -> None:
    log = written(tmp_path / "all.log", *(engine_log("", seed=n) for n in range(2)))
    with pytest.raises(ConfigError, match=r"give the log of each engine alone, or correct --steps"):
        windows_of(read_log(log))
    alone = written(tmp_path / "one.log", engine_log("", seed=0))
    with pytest.raises(ConfigError, match=r"correct --steps \(it is 80\)"):
        windows_of(read_log(alone), steps=80)


def test_logs_one_after_the_other_are_no_mixture(tmp_path: Path) -> None:
    parts = [written(tmp_path / f"{n}.log", engine_log("", seed=n)) for n in range(2)]
    (tmp_path / "all.log").write_text("".join(part.read_text() for part in parts))
    assert len(windows_of(read_log(tmp_path / "all.log"))) == 2 * 300 - 1


def test_lines_that_ray_has_left_out_are_refused(tmp_path: Path) -> None:
    (_, last), *_ = reversed(engine_log(RAY.format(1, 1), seed=0))
    log = tmp_path / "ray.log"
    log.write_text(f"{last}\x1b[32m [repeated 7x across cluster]\x1b[0m\n")
    with pytest.raises(ConfigError, match="set RAY_DEDUP_LOGS=0"):
        read_log(log)


def test_steps_of_speculative_decoding_give_several_tokens(tmp_path: Path) -> None:
    log = written(tmp_path / "spec.log", engine_log("", seed=0, accepted=3.0))
    windows = windows_of(read_log(log))
    assert windows.steps.tolist() == [120.0] * len(windows)
    found = fit(windows, linear=True, replicates=2).model
    for name in ("t0", "t1", "t2"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.15)
    assert found.tokens_per_step == ((1.0, 3.0),)
    assert found.step_seconds(8, 900) == pytest.approx(TRUE.step_seconds(8, 900) / 3, rel=0.15)
    assert found.prefill_pass == pytest.approx(TRUE.prefill_pass, rel=0.15)


def test_the_acceptance_of_a_log_depends_on_the_batch(tmp_path: Path) -> None:
    """The log of a server that drafts less for a wide batch, and the file of its model."""
    true = replace(TRUE, tokens_per_step=((1, 4.0), (40, 2.5), (512, 1.2)))
    rows: list[tuple[float, str]] = []
    for at, text in engine_log("", seed=0):
        if line := re.search(r"#running-req: (\d+), (?=#token)", text):
            accepted = round(true.tokens(int(line[1])), 2)
            rate = float(text.split("(token/s): ")[1].split(",")[0])
            faster = f"accept len: {accepted:.2f}, gen throughput (token/s): {accepted * rate:.4f}"
            text = re.sub(r"gen throughput.*?(?=, #queue)", faster, text)
        rows.append((at, text))
    found = fit(windows_of(read_log(written(tmp_path / "spec.log", rows))), replicates=2).model
    for name in ("t0", "t1", "t2"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.05)
    for batch in (1, 4, 20, 100, 400):
        seconds = found.step_seconds(batch, 1000 * batch)
        assert seconds == pytest.approx(true.step_seconds(batch, 1000 * batch), rel=0.1)
    save_model(found, tmp_path / "model.toml")
    assert load_model(tmp_path / "model.toml") == found


def test_numbers_that_are_none_end_no_window(tmp_path: Path) -> None:
    log = tmp_path / "odd.log"
    good = engine_log("", seed=0)[-1][1]
    log.write_text(f"{good}\n{good.replace('#token: ', '#token: ' + '9' * 400)}\n{good}\n")
    assert len(windows_of(read_log(log))) <= 2
