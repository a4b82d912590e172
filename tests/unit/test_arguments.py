"""Tests how the arguments of every command are parsed: lists, and errors of one sentence."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from aprilsched.__main__ import COMMANDS, main
from aprilsched.agents.gateway import GatewaySettings
from aprilsched.cli.arguments import values_of
from aprilsched.cli.commands import frontier, run, simulate
from aprilsched.cli.commands.gateway import command_of
from aprilsched.cli.commands.run import RunCommand
from aprilsched.cli.runs.keys import key_from
from aprilsched.errors import ConfigError


def test_the_flag_of_a_list_takes_every_form() -> None:
    for flag, commas in (("--engine", False), ("--track", True)):
        forms = [
            (flag, "1", "2", "3"),
            (flag, "1", flag, "2", flag, "3"),
            (f"{flag}=1", flag, "2", "3"),
            *([(flag, "1,2,3"), (flag, "1,2", f"{flag}=3")] if commas else []),
        ]
        for form in forms:
            (found,) = values_of(RunCommand, form, "run").values()
            assert found == ("1,2,3" if commas else ("1", "2", "3"))


SENTENCES = {
    "run --enginee x": "--enginee is not an option of aprilsched run; did you mean --engine?",
    "run --batches 1 2": "2 is not an option of aprilsched run; ",
    "run --batches x": "argument --batches: invalid int value: 'x'; ",
    "run --stop foo": "argument --stop: invalid groups|samples|tokens value: 'foo'; ",
    "run --refill.together x": "argument --refill.together: invalid int value: 'x'; ",
    "run --over-provision x": "argument --over-provision: invalid float or auto value: 'x'; ",
    "run --sampling.stop-token-ids 1 x": "--sampling.stop-token-ids: invalid int value: 'x'; ",
    "run --sampling.extra x": "argument --sampling.extra: invalid dict value: 'x'; ",
    "run --max-staleness=1.5": "argument --max-staleness: invalid int or auto value: '1.5'; ",
    "run --resume x --seed 1": "--seed cannot be used with --resume, ",
    "run --cap 8 --sampling.max-new-tokens 9": "cap is 8 and sampling.max_new_tokens is 9, ",
    "frontier --arms wvae@2": "delivery must be groups, samples or samples:SIBLINGS, got 'wvae'.",
    "frontier --arms wave": "'wave' is no policy; the nearest known one is wave@2.",
    "frontier --arms wave@x": "over_provision is 'x'; choose one of auto, a ratio from 1 ",
    "frontier --arms samples:8@2": "siblings must be below group_size=8, got 8; a rollout ",
    "frontier --arms april,april": "The policy april is named twice; name each once.",
    "frontier --model none.toml": "none.toml cannot be read (No such file or directory); ",
    "frontier --seeds 0": "seeds is 0; give 1 or more.",
    "frontier --out frontier.jpg": "A picture must end in .png, .svg, .pdf, got frontier.jpg.",
    "simulate --delivery sample": "delivery must be groups, samples or samples:SIBLINGS, got ",
    "simulate --delivery samples:8": "siblings must be below group_size=8, got 8; a rollout ",
    "simulate --delivery samples --policy on_policy": 'refill="buckets" runs or defers a whole ',
    "gateway": "--engine is missing.",
    "serve-sim --port": "argument --port: expected one argument; ",
    "gateway --engine http://a:1 --port 99999": "--port is 99999; give 0 (any free port)",
    "gateway --engine http://a:1 --reclaim-s=-1": "--reclaim-s is -1.0; give 0 or more.",
    "gateway --engine http://a:1 --per-version 3": "matters to --max-staleness alone; set --max-s",
    "run --max-staleness -3": "--max-staleness is -3; give 0 or more.",
    "run --retries.attempts 0": "--retries.attempts is 0; give 1 or more.",
    "gateway --engine http://a:1 --client-fields rid": "request holds rid, which the scheduler ",
}


@pytest.mark.parametrize("line", SENTENCES)
def test_an_error_is_one_sentence(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith("aprilsched: ")
    assert SENTENCES[line] in err


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_lists_the_flags(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")

    def shown(flag: str) -> set[str]:
        with pytest.raises(SystemExit) as ended:
            main([command, flag])
        assert not ended.value.code
        lines = capsys.readouterr().out.split("\n  ")
        return {line.split()[0].rstrip(",") for line in lines if line.startswith(("-h, --", "--"))}

    assert "-h" in shown("--help")
    everyday = getattr(
        {"run": run, "simulate": simulate, "frontier": frontier}.get(command), "EVERYDAY", None
    )
    if everyday is not None:
        flags = {f"--{flag}" for flag in everyday.split()}
        assert flags <= shown("--help") < shown("--help-all")


def test_a_gateway_s_settings_are_in_a_file_by_the_names_of_its_flags(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(
        'engine = ["http://a:1", "http://b:2"]\nmax_requests = 7\ndrain_s = 5\n'
        'tokenizer = "models/x"\nclient_fields = ["priority"]\nstream_interval = 4\n'
    )
    found = command_of(["--config", str(file), "--max-requests", "9", "--live"])
    assert found.engine == ("http://a:1", "http://b:2")
    assert (found.stream_interval, found.live) == (4, True)
    settings: dict[str, Any] = {"max_requests": 9, "drain_s": 5.0, "client_fields": ("priority",)}
    assert found.gateway == GatewaySettings(**settings, tokenizer=Path("models/x"))
    assert command_of([f"--config={file}", "--engine", "http://c:3"]).engine == ("http://c:3",)
    for text, words in (
        (
            "max_request = 1",
            "does not fit: unknown key max_request; the nearest known one is max_re",
        ),
        ('port = "x"', "does not fit: port has a wrong value"),
        ("port = -1", "does not fit: port is -1"),
        ("port =", "is no TOML"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            command_of(["--config", str(file)])


def test_a_key_in_the_place_of_a_name_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    for command, names in {
        "gateway --engine http://127.0.0.1:1": "api admin engine-api engine-admin",
        "doctor http://127.0.0.1:1": "api admin",
        "run --engine http://127.0.0.1:1": "api admin",
        "serve-sim": "admin",
    }.items():
        for name in names.split():
            assert main([*command.split(), f"--{name}-key-env", "client-secret-123"]) == 2
            printed = capsys.readouterr()
            setting = f"{name.replace('-', '_')}_key_env"
            assert f"variable that {setting} names is not set" in printed.err
            assert "secret" not in printed.err + printed.out


def test_the_lists_of_the_examples_take_both_forms() -> None:
    seen = 0
    for file in Path("examples").rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if not isinstance(call, ast.Call) or "add_argument" not in ast.dump(call.func):
                continue
            given = {
                k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)
            }
            if given.keys() & {"nargs", "action"} and given.get("action") != "store_true":
                assert (given.get("action"), given.get("nargs")) == ("extend", "+"), file
                seen += 1
    assert seen >= 5


def test_a_key_has_no_line_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KEY", "secret\r\n")
    assert key_from("KEY", "api_key_env") == "secret"
    for wrong in ("\n", "two words", "schlüssel", "a\nb"):
        monkeypatch.setenv("KEY", wrong)
        with pytest.raises(ConfigError, match="environment variable that api_key_env names"):
            key_from("KEY", "api_key_env")
