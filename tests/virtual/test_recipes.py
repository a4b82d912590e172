"""Tests the images and recipes of deploy: their commands run, in front of embedded engines.

Only what a test cannot have is replaced: addresses, ports, folders and the number of batches.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aprildocs.support import ROWS, pinned

import aprilsched
from aprilsched.testing import SimServer
from tests.support.recipes import DEPLOY, ROOT, containers, entrypoint, skypilot
from tests.support.sim_http import Raw, asked, served
from tests.support.tiny_tokenizer import bytes_tokenizer

KEYS = {"CLIENT_KEY": "clients", "CONTROL_KEY": "control", "ENGINES_ADMIN_KEY": "admin"}


def replaced(text: str, by: Mapping[str, str]) -> str:
    """Return `text` with each key of `by` replaced; every key must occur."""
    for old, new in by.items():
        assert old in text, f"{old} is not in {text!r}"
        text = text.replace(old, new)
    return text


@pytest.mark.long
async def test_the_gateway_of_the_manifest_answers_its_probes(tmp_path: Path):
    container = containers("gateway.yaml")["gateway"]
    assert {each["name"] for each in container["env"]} == {*KEYS, "HOME"}
    kinds = ("startupProbe", "readinessProbe", "livenessProbe")
    probes = {container[kind]["httpGet"]["path"] for kind in kinds}
    tokenizer = bytes_tokenizer(tmp_path / "model")
    async with served(admin_key="admin") as one, served(admin_key="admin") as two:
        line = replaced(
            "\n".join([*entrypoint("gateway.Containerfile")[1:], *container["args"]]),
            {
                "http://engines-0.engines:30000": one.url,
                "http://engines-1.engines:30000": two.url,
                "/data": str(tmp_path),
                "/weights/model": str(tokenizer),
                "0.0.0.0": "127.0.0.1",
                "--port\n30000": "--port\n0",
            },
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "aprilsched", *line.split("\n")),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **KEYS, "HOME": str(tmp_path)},
            cwd=ROOT,
        )
        try:
            assert process.stdout is not None
            url = (await process.stdout.readline()).decode().rpartition(" ")[2].strip()
            async with Raw(url) as anonymous, Raw(url, "clients") as client:
                for path in probes:
                    assert (await anonymous.get(path))[0] == 200
                assert (await anonymous.post("/generate", asked(4)))[0] == 401
                assert (await client.post("/generate", asked(4)))[0] == 200
                printed = {"model": "any", "prompt": "a", "max_tokens": 4}
                assert (await client.post("/v1/completions", printed))[0] == 200
                assert (await client.post("/pause_generation", {"mode": "in_place"}))[0] == 401
            async with Raw(url, "control") as control:
                assert (await control.post("/pause_generation", {"mode": "in_place"}))[0] == 200
                for path in probes:
                    assert (await control.get(path))[0] == 200, "a pause disconnects no client"
                assert (await control.post("/continue_generation", {}))[0] == 200
                # A request notices a lost server, and then waits.
                await one.crash()
                await two.crash()
                waiting = asyncio.create_task(control.post("/generate", asked(4)))
                while (await control.get("/ready"))[0] == 200:  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(0.05)
                for path in probes:
                    assert (await control.get(path))[0] == 200, (
                        "a restart of the gateway would not help"
                    )
                await one.restart()
                assert (await waiting)[0] == 200
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert (tmp_path / "gateway.sqlite").is_file()


async def test_a_server_answers_its_probes_in_a_pause():
    container = containers("engines.yaml")["sglang"]
    assert containers("scheduler.yaml")["sglang"]["startupProbe"]["exec"]["command"][-1].endswith(
        container["startupProbe"]["httpGet"]["path"]
    )
    async with served() as server, Raw(server.url) as raw:
        await raw.post("/pause_generation", {"mode": "in_place"})
        for probe in ("startupProbe", "livenessProbe"):
            assert (await raw.get(container[probe]["httpGet"]["path"]))[0] == 200


def run_script(shell: str, script: str, folder: Path) -> str:
    """Run a script where `aprilsched` is this one and a server is a process that only waits."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, command in (
        ("aprilsched", f'PYTHONPATH="{ROOT}" exec "{sys.executable}" -m aprilsched "$@"'),
        ("python3", "exec sleep 600"),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{command}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        [shell, "-euc", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": path, "HOME": str(folder), "MODEL": "model"},
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate()
    finally:
        with suppress(ProcessLookupError):  # A server that was started waits on.
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, printed
    return printed


@pytest.fixture
async def engine() -> AsyncIterator[SimServer]:
    async with SimServer(time_scale=0.001) as server:
        yield server


@pytest.mark.long
async def test_the_job_starts_a_run_and_a_second_pod_resumes_it(engine: SimServer, tmp_path: Path):
    shell, flag, script = containers("scheduler.yaml")["scheduler"]["command"]
    assert (shell, flag) == ("sh", "-c")
    script = replaced(
        script,
        {
            "http://127.0.0.1:30000": engine.url,
            "/runs": str(tmp_path / "runs"),
            "--batches 100": "--batches 1",
        },
    )
    await asyncio.to_thread(run_script, shell, script, tmp_path)
    assert (tmp_path / "runs" / "first" / "summary.json").is_file()
    # As a killed pod leaves it: with a store, and without a summary.
    (tmp_path / "runs" / "first" / "summary.json").unlink()
    printed = await asyncio.to_thread(run_script, shell, script, tmp_path)
    assert (tmp_path / "runs" / "first" / "summary.json").is_file(), printed


@pytest.mark.long
async def test_the_task_of_skypilot_runs(engine: SimServer, tmp_path: Path):
    assert shutil.which("curl"), "the task polls with curl, and would poll forever without it"
    script = replaced(
        skypilot()["run"],
        {"http://127.0.0.1:30000": engine.url, "--batches 20": "--batches 1"},
    )
    await asyncio.to_thread(run_script, "bash", script, tmp_path)
    assert (tmp_path / "run" / "summary.json").is_file()


class Parsed(Exception):
    """The program accepted its arguments."""


def test_the_ray_job_is_valid_and_its_arguments_parse(
    monkeypatch: pytest.MonkeyPatch,
):
    ray = pytest.importorskip("ray")
    from ray.dashboard.modules.job.common import JobSubmitRequest
    from ray.runtime_env import RuntimeEnv

    asked: dict[str, Any] = runpy.run_path(str(DEPLOY / "ray_job.py"))["JOB"]
    job = JobSubmitRequest(**asked)
    assert RuntimeEnv(**asked["runtime_env"]).working_dir() == "."
    python, program, *arguments = job.entrypoint.split()
    assert python == "python"

    def started(**_: Any) -> None:
        raise Parsed

    monkeypatch.setattr(ray, "init", started)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(Parsed):
        runpy.run_path(str(ROOT / program), run_name="__main__")


def test_the_images_are_those_of_this_version_and_of_the_tests():
    sglang = next(row for row in ROWS if row.name == "SGLang")
    found = {file: file.read_text("utf-8") for file in DEPLOY.rglob("*") if file.is_file()}
    images = {
        line.rpartition("sglang:")[2].rstrip()
        for text in found.values()
        for line in text.splitlines()
        if "lmsysorg/sglang:" in line and "TAG" not in line
    }
    assert images == {f"v{pinned(sglang)}"}
    own = aprilsched.__version__
    for file, text in found.items():
        for image in ("aprilsched-gateway:", "aprilsched-sglang:"):
            assert text.count(image) == text.count(f"{image}{own}"), file
