"""Tests how the arguments of every command are parsed: lists, and errors of one sentence."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from aprilsched.__main__ import COMMANDS, main
from aprilsched.cli.arguments import flags_of_lists, parsed
from aprilsched.cli.gateway import command_of
from aprilsched.errors import ConfigError
from aprilsched.gateway import GatewaySettings
from aprilsched.runs.settings import key_from


def _kind(command: str) -> Any:
    module = import_module(f"aprilsched.cli.{command.replace('-', '_')}")
    return next(kind for name, kind in vars(module).items() if name.endswith("Command"))


def _lists() -> Iterator[tuple[str, str, bool]]:
    for command in COMMANDS:
        for flag, commas in dict(flags_of_lists(_kind(command))).items():
            if flag.removeprefix("--") not in ("urls", "runs"):  # these have no flag
                yield command, flag, commas


def _value_of(command: str, flag: str, *given: str) -> Any:
    # What has no default is given too.
    needed = {"gateway": ["--engine", "http://127.0.0.1:1"]}.get(command, [])
    needed = [] if flag in needed else needed
    found = parsed(_kind(command), [*needed, *given], f"aprilsched {command}")
    name, _, inner = flag.removeprefix("--").replace("-", "_").rpartition(".")
    parts = [found, *(getattr(found, own.name) for own in fields(found))]
    holder = next(part for part in parts if hasattr(part, name or inner))
    return getattr(getattr(holder, name) if name else holder, inner)


@pytest.mark.parametrize(("command", "flag", "commas"), list(_lists()))
def test_the_flag_of_a_list_takes_every_form(command: str, flag: str, commas: bool) -> None:
    forms = [
        (flag, "1", "2", "3"),
        (flag, "1", flag, "2", flag, "3"),
        (f"{flag}=1", flag, "2", "3"),
        (flag, "1", "2", f"{flag.replace('-', '_').replace('__', '--', 1)}=3"),
    ]
    forms += [(flag, "1,2,3"), (flag, "1,2", f"{flag}=3")] if commas else []
    found = {_value_of(command, flag, *form) for form in forms}
    assert len(found) == 1
    assert "".join(c for c in str(found) if c.isdigit()) == "123"


@pytest.mark.parametrize("command", COMMANDS)
def test_no_flag_of_a_list_is_left_out(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help-all"])
    shown = set(re.findall(r"(--[\w.-]+) \[\w+ \[", capsys.readouterr().out))
    known = dict(flags_of_lists(_kind(command)))
    assert shown == {f for f, commas in known.items() if not commas} - {"--urls", "--runs"}


SENTENCES = {
    "run --enginee x": "--enginee is no option of aprilsched run; did you mean --engine?",
    "run --batches x": "--batches is 'x'; give a whole number.",
    "run --batches 1 2": "2 is no option of aprilsched run; aprilsched run --help lists the "
    "options.",
    "run --stop foo": "--stop is 'foo'; give groups, samples or tokens.",
    "run --refill.together x": "--refill.together is 'x'; give a whole number.",
    "run --over-provision x": "--over-provision is 'x'; give a number or auto.",
    "run --sampling.stop-token-ids 1 x": "--sampling.stop-token-ids is '1 x'; give a whole number.",
    "run --max_staleness=1.5": "--max-staleness is '1.5'; give a whole number.",
    "gateway": "--engine is missing; aprilsched gateway --help says what it is.",
    "serve-sim --port": "--port has no value; give one.",
} | {
    f"gateway --engine http://a:1 {flags}": said
    for flags, said in {
        "--port 99999": "port is 99999; give one from 0 (any) to 65535.",
        "--max-requests -5": "max_requests is -5; give 1 or more.",
        "--drain-s -1": "drain_s is -1.0; give 0 or more.",
        "--reclaim-s=-1": "reclaim_s is -1.0; give 0 or more.",
        "--top-logprobs -1": "top_logprobs is -1; give 0 or more.",
        "--max-staleness -1": "max_staleness is -1; give 0 or more.",
        "--client-fields rid": "request holds rid, which the scheduler sets; leave it out.",
    }.items()
}


@pytest.mark.parametrize("line", SENTENCES)
def test_an_error_is_one_sentence(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert capsys.readouterr().err == f"aprilsched: {SENTENCES[line]}\n"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_an_error_is_one_sentence_on_every_terminal(encoding: str) -> None:
    # With utf-8 the parser draws boxes.
    line = [sys.executable, "-m", "aprilsched", "run", "--refill.together", "x"]
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    ended = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
    assert ended.stderr == f"aprilsched: {SENTENCES['run --refill.together x']}\n"


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


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("gateway --engine http://127.0.0.1:1 --api-key-env", "api_key_env"),
        ("gateway --engine http://127.0.0.1:1 --admin-key-env", "admin_key_env"),
        ("gateway --engine http://127.0.0.1:1 --engine-api-key-env", "engine_api_key_env"),
        ("gateway --engine http://127.0.0.1:1 --engine-admin-key-env", "engine_admin_key_env"),
        ("doctor http://127.0.0.1:1 --admin-key-env", "admin_key_env"),
        ("doctor http://127.0.0.1:1 --api-key-env", "api_key_env"),
        ("run --engine http://127.0.0.1:1 --admin-key-env", "admin_key_env"),
        ("run --engine http://127.0.0.1:1 --api-key-env", "api_key_env"),
        ("serve-sim --admin-key-env", "admin_key_env"),
    ],
)
def test_a_key_in_the_place_of_a_name_is_not_repeated(
    line: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*line.split(), "client-secret-123"]) == 2
    said = capsys.readouterr()
    assert f"variable that {name} names is not set" in said.err
    assert "secret" not in said.err + said.out


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
