"""Tests that bad input is refused before a launch: exit code 2, one sentence, no run folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from aprilsched.__main__ import main
from aprilsched.kernel.shell.attempts import Attempts

GOOD = json.dumps({"input_ids": [1, 2, 3]})


@pytest.fixture(autouse=True)
def nothing_is_launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fail the test if a request is sent, and run it in a folder of its own."""

    def send(*_: Any) -> None:
        raise AssertionError("a request was sent")

    monkeypatch.setattr(Attempts, "send", send)
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error sentence of a refused `aprilsched run`."""
    before = set(Path.cwd().rglob("*"))
    assert main(["run", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("aprilsched: ")
    assert set(Path.cwd().rglob("*")) == before
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("--over-provision -1", "--over-provision is -1.0; give a ratio from 1"),
        ("--max-staleness none --max-staleness.rule evict", "without a bound; set --max-staleness"),
        ("--sampling.temperature -1", "temperature is -1.0"),
        ("--within-group 2", "within_group is 2.0"),
        ("--sim.engines 0", "engines is 0"),
        ("--sim.engines 99999999999999999999", "give 1 to 65,536"),
        ("--group-size 99999999999999999999", "give 1 to 65,536"),
        ("--batch-groups 99999999999999999999", "--batch-groups must be at most 2**53"),
        ("--cap 99999999999999999999", "give 1 to 2**31 - 1"),
        (
            "--sampling.max-new-tokens 99999999999999999999",
            "max_new_tokens must be at most 2147483647",
        ),
        ("--train-seconds 1e20", "train_seconds must be at most 1e9"),
        ("--batches 0", "batches is 0; give 1 or more"),
        ("--seed -1", "seed is -1"),
        ("--train-seconds -1", "train_seconds is -1.0"),
        ("--engine sim http://10.0.0.1:30000", "give one or the other"),
        ("--engine nonsense", "give one like http://10.0.0.1:30000"),
        ("--engine http://127.0.0.1:1", "cannot connect"),
        ("--engine http://127.0.0.1:1 --admin-key-env NO_SUCH_VARIABLE", "is not set"),
        ("--weights /checkpoint", "weights is for servers"),
        ("--tokenizer /model", "give prompts too"),
        ("--prompts missing.jsonl", "missing.jsonl cannot be read"),
        ("--config missing.toml", "missing.toml cannot be read"),
        ("--config", "argument --config: expected one argument"),
    ],
)
def test_flags(capsys: pytest.CaptureFixture[str], arguments: str, part: str):
    assert part in refused(capsys, *arguments.split())


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('{"input_ids": []}', "give at least one token id"),
        ('{"input_ids": [1, 2', "this is no JSON"),
        ("[1, 2]", "this is no object"),
        ('{"input_ids": [1.5]}', "input_ids is no list of whole numbers"),
        ('{"input_ids": [-1]}', "give valid token ids"),
        (
            '{"prompt": [{"role": "user", "content": "a"}]}',
            "the prompt has messages",
        ),
        ('{"prompt": "a"}', "name the model's tokenizer folder (--tokenizer)"),
        ('{"input_id": [1]}', "got the keys input_id; name the key"),
        ('{"key": 1}', "there must be one of input_ids, prompt, text"),
        (
            '{"input_ids": [1], "text": "a"}',
            "there must be one of input_ids, prompt, text",
        ),
        ('{"text": "hello"}', "--tokenizer"),
        ('{"input_ids": [1], "key": [1]}', "key is neither"),
        ('{"input_ids": [1], "samplng": {}}', "write sampling, or rename it"),
        ('{"input_ids": [1], "sampling": {"n": 4}}', "set group_size"),
        ('{"input_ids": [1], "sampling": 3}', "give a mapping"),
    ],
)
def test_prompts(capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, part: str):
    (tmp_path / "prompts.jsonl").write_text(f"{GOOD}\n\n{line}\n")
    sentence = refused(capsys, "--prompts", "prompts.jsonl")
    assert "prompts.jsonl, line 3: " in sentence
    assert part in sentence


def test_a_file_without_prompts(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "prompts.jsonl").write_text("\n")
    assert "has no prompts" in refused(capsys, "--prompts", "prompts.jsonl")


def test_a_folder_without_tokenizer(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    pytest.importorskip("transformers")
    (tmp_path / "prompts.jsonl").write_text('{"text": "hello"}\n')
    arguments = ("--prompts", "prompts.jsonl", "--tokenizer", ".")
    assert "tokenizer.json" in refused(capsys, *arguments)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "cannot be loaded" in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("batch_groups = 3", "batch_groups is a setting of scheduler; write it below [scheduler]"),
        ("engines = 3", "engines is a setting of sim; write it below [sim]"),
        ("batchs = 3", "unknown key batchs; the nearest known one is batches"),
        (
            "[scheduler]\nover_provison = 2.0",
            "scheduler.over_provison; the nearest known one is scheduler.over_provision",
        ),
        ("[scheduler.sampling]\ntop = 2", "unknown key scheduler.sampling.top"),
        ("batches = 'many'", "does not fit"),
        (
            "[scheduler]\nrefill = 'often'",
            "refill is 'often'; choose one of wave, pool, buckets, tail",
        ),
        ("batches = ", "is no TOML"),
    ],
)
def test_config_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, part: str):
    (tmp_path / "bad.toml").write_text(text)
    assert part in refused(capsys, "--config", "bad.toml")


def test_a_taken_run_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("precious")
    assert "not empty" in refused(capsys, "--out", "taken")


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<html>It works!</html>")

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def web_server() -> Generator[str]:
    """A web server that answers every path with a page."""
    with HTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_other_than_sglang_is_refused(capsys: pytest.CaptureFixture[str], web_server: str):
    sentence = refused(capsys, "--engine", web_server)
    assert web_server.removeprefix("http://") in sentence
    assert "SGLang" in sentence


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]):
    assert main(["simulat"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "aprilsched: 'simulat' is not a command; did you mean simulate?\n"


def test_an_unknown_policy(capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", "--policy", "sync,aprl"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "aprilsched: 'aprl' is no policy; the nearest known one is april.\n"


@pytest.mark.parametrize(
    ("policy", "part"),
    [
        ("april:over_provison=2", "the nearest one is over_provision"),
        ("april:over_provision", "sets nothing"),
        ("april:over_provision=0.5", "give a ratio from 1"),
        ("april,april", "named twice"),
        (",", "names nothing"),
    ],
)
def test_a_policy_with_wrong_settings(policy: str, part: str, capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", "--policy", policy]) == 2
    captured = capsys.readouterr()
    assert part in captured.err
    assert captured.err.count("\n") == 1
