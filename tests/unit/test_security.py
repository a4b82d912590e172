"""Tests SECURITY.md: no open ports, no key is shown."""

from __future__ import annotations

import base64
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aprilsched import RolloutScheduler, SGLangFleet, SGLangListedFleet, workers_of_router
from aprilsched.agents.chat import tokenizer
from aprilsched.agents.dialects import values
from aprilsched.agents.gateway import server
from aprilsched.agents.serving import bodies, calls, listener
from aprilsched.cli.commands.serve_sim import ServeSimCommand
from aprilsched.cli.runs.settings import RunSettings
from aprilsched.cli.runs.setup import prepare
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.kernel.weights.process_group import LOOPBACK, TrainerGroup, address_towards
from aprilsched.testing import SimServer


def listening() -> dict[str, str]:
    """The sockets on which this process listens over TCP, with their addresses; IPv6 as it is
    written there."""
    own = set[str]()
    for number in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the one of the listing itself
            continue
    found: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            parts = line.split()
            socket = f"socket:[{parts[9]}]"
            if parts[3] == "0A" and socket in own:
                address = bytes.fromhex(parts[1].split(":")[0])
                dotted = ".".join(map(str, reversed(address)))
                found[socket] = dotted if table == "tcp" else parts[1]
    return found


def opened_since(before: dict[str, str]) -> set[str]:
    """The addresses of new sockets. Others in this process, such as a trainer's process group that
    an earlier test made, may still listen."""
    return {address for socket, address in listening().items() if socket not in before}


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/net/tcp").exists(), reason="only Linux lists the listening sockets"
)


@needs_proc
async def test_the_served_engine_listens_on_loopback_by_default():
    assert ServeSimCommand().host == LOOPBACK
    before = listening()
    async with SimServer():
        assert opened_since(before) == {LOOPBACK}
    async with SimServer(host="0.0.0.0"):
        assert opened_since(before) == {"0.0.0.0"}


@needs_proc
def test_the_trainer_s_group_listens_where_its_engines_reach_it_and_nowhere_else():
    """Both its rendezvous and gloo listen only there. Without the setting, gloo would choose an
    address by the machine's name."""
    pytest.importorskip("torch")
    addresses = {
        LOOPBACK: address_towards(["127.0.0.1:30000", "localhost:30001", "sim"]),
        "another": address_towards(["198.51.100.1:30000"]),  # no such host; nothing is sent
    }
    assert addresses[LOOPBACK] == LOOPBACK
    before = listening()
    for address in addresses.values():
        group = TrainerGroup(
            "alone", address=address, port=0, world_size=1, backend="gloo", timeout_s=20.0
        )
        group.join()
        assert opened_since(before) == {address}
        group.close()
        del group


# --- keys --------------------------------------------------------------------------------------

ADMIN_KEY = "admin-key-4f1d9c"
API_KEY = "api-key-7be202"
KEYS = {"ADMIN": ADMIN_KEY, "API": API_KEY, "WRONG": "wrong-key-93ac11"}


def received(text: str | bytes) -> list[str]:
    """The keys that appear in the text."""
    raw = text.encode("utf-8", "replace") if isinstance(text, str) else text
    forms: list[Callable[[bytes], bytes]] = [
        bytes,
        base64.b64encode,
        lambda key: key.hex().encode(),
    ]
    return [name for name, key in KEYS.items() if any(form(key.encode()) in raw for form in forms)]


def test_a_key_is_found_in_every_form():
    for name, key in KEYS.items():
        for form in (key, key.encode(), base64.b64encode(key.encode()), key.encode().hex()):
            assert received(form) == [name]


def ours(*roots: object) -> Iterator[object]:
    """Every object of the package that can be reached from the roots."""
    seen = set[int]()
    todo: list[object] = list(roots)
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type | ModuleType):
            continue
        seen.add(id(thing))
        kind = type(thing).__module__
        if kind.split(".")[0] == "aprilsched":
            yield thing
        if callable(thing) and hasattr(thing, "__globals__"):
            todo.extend(getattr(thing, "__closure__", None) or ())
        else:
            todo.extend(gc.get_referents(thing))


def test_no_repr_shows_a_key(monkeypatch: pytest.MonkeyPatch):
    for name in ("ADMIN", "API"):
        monkeypatch.setenv(name, KEYS[name])
    settings = RunSettings(engine=("http://127.0.0.1:1",), admin_key_env="ADMIN", api_key_env="API")
    url = "http://127.0.0.1:30000"
    fleets = (
        SGLangFleet([url, f"{url}/a"], admin_key=ADMIN_KEY, api_key=API_KEY),
        SGLangListedFleet(workers_of_router(url, api_key=API_KEY), admin_key=ADMIN_KEY),
    )
    engine = SGLangEngine(url, admin_key=ADMIN_KEY, api_key=API_KEY)
    schedulers = [RolloutScheduler(fleet, []) for fleet in fleets]
    found = list(ours(*schedulers, engine, settings, prepare(settings)))
    assert {"RolloutScheduler", "SGLangEngine", "Transport", "Setup"} <= {
        type(thing).__name__ for thing in found
    }
    for thing in found:
        assert received(repr(thing) + str(thing)) == [], type(thing)


def command(*arguments: str) -> list[str]:
    """The command line with every debug message there is."""
    script = (
        "import logging, sys; logging.basicConfig(level=logging.DEBUG);"
        "from aprilsched.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    return [sys.executable, "-X", "dev", "-c", script, *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, **KEYS, "PYTHONASYNCIODEBUG": "1"}


ENDLESS = [
    "--batches", "1000000", "--batch-groups", "4", "--group-size", "4", "--over-provision", "2",
    "--median", "60", "--cap", "600", "--pace", "asynchronous", "--log-tokens",
]  # fmt: skip


@contextmanager
def served(log: Path) -> Generator[tuple[str, subprocess.Popen[str]]]:
    """The URL of a served engine with the admin key, and its process."""
    with (
        log.open("w") as file,
        _started(
            command("serve-sim", "--port", "0", "--admin-key-env", "ADMIN", "--time-scale", "0.2"),
            stdout=file,
            stderr=file,
        ) as process,
    ):
        mark = "listens at "
        while mark not in (text := log.read_text()):
            assert process.poll() is None, text
            time.sleep(0.02)
        yield text.partition(mark)[2].split()[0], process


@contextmanager
def _started(arguments: list[str], **streams: Any) -> Generator[subprocess.Popen[str]]:
    with subprocess.Popen(arguments, env=environment(), text=True, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


def _said(arguments: list[str], code: int) -> str:
    done = subprocess.run(
        command(*arguments),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_a_run_neither_logs_nor_stores_a_key(tmp_path: Path):
    """The run has all debug messages, a wrong key, and an engine that dies in the middle."""
    folder = tmp_path / "run"
    with (
        served(tmp_path / "first.txt") as (first, _),
        served(tmp_path / "second.txt") as (second, victim),
    ):
        engines = ["--engine", first, second]
        wrong = ["--admin-key-env", "WRONG"]
        right = ["--admin-key-env", "ADMIN", "--api-key-env", "API"]
        refused = _said(["run", *engines, *wrong, "--out", str(tmp_path / "refused")], 2)
        assert "401" in refused
        printed = refused + _said(["doctor", first, *wrong], 2)
        with _started(
            command("run", *engines, *right, *ENDLESS, "--out", str(folder)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A test runner in the background ignores Ctrl-C, and its child processes inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        ) as running:
            _await_fact("BatchDelivered", folder / "events.jsonl", running)
            victim.kill()
            _await_fact("EngineLost", folder / "events.jsonl", running)
            running.send_signal(signal.SIGINT)
            out, err = running.communicate(timeout=600)
            assert running.returncode == 130, err
        assert "is out of use" in err
        printed += out + err
    assert len(printed) > 10_000
    assert received(printed) == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.toml", "events.jsonl", "summary.json"} <= {path.name for path in files}
    assert [
        (path.name, received(path.read_bytes())) for path in files if received(path.read_bytes())
    ] == []


def _await_fact(name: str, events: Path, process: subprocess.Popen[str]) -> None:
    while not (events.exists() and f'"fact":"{name}"'.encode() in events.read_bytes()):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


def test_the_bounds_that_are_promised_are_those_of_the_code():
    text = (Path(__file__).parents[2] / "SECURITY.md").read_text(encoding="utf-8")
    largest, together = server._LARGEST_BODY >> 20, server._ALL_BODIES >> 20
    assert f"| {largest} MiB a body after decompression and {together} MiB of all bodies;" in text
    assert bodies._READ_S == 120
    assert "; two minutes to send one;" in text
    stops, characters = values._MOST_STOPS, values._STOP_CHARACTERS
    assert f"at most {tokenizer._MOST_TEXT >> 20}·2^20 characters of text a request" in text
    assert f"without a request {listener._IDLE_S:.0f} s;" in text
    assert f"| {stops} stop strings of {characters:,} characters in all;" in text
    assert "abort_request" in "".join(calls.CONTROL), "a client ends no other client's response"
