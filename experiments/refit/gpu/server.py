"""Starts the measured server: SGLang with dummy weights on the first GPU, or a tiny CPU server."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Protocol

__all__ = ["GpuServer", "Server", "tiny_server"]

_POLL_SECONDS = 0.5
_TAIL_CHARACTERS = 2500
_PORTS = range(20_000, 32_000)


class Server(Protocol):
    """One server."""

    @property
    def url(self) -> str: ...

    def start(self, seconds: float) -> None:
        """Start it and wait until it generates, at most so long."""
        ...

    def generates(self) -> bool:
        """Whether it still does."""
        ...

    def stop(self) -> None: ...


class _Process:
    """A server in a process group of its own; only that group is signalled."""

    def __init__(self, command: list[str], env: dict[str, str], port: int, log: Path) -> None:
        self._command = command
        self._env = env
        self._log = log
        self.url = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, seconds: float) -> None:
        """Start the process and wait for its first token."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server exited while it booted: {self._tail()}")
            if self._status("/health", None, 5.0) == 200 and self.generates():
                return
            time.sleep(_POLL_SECONDS)
        raise RuntimeError(f"the server was not up after {seconds:.0f} s: {self._tail()}")

    def generates(self) -> bool:
        """Whether a token comes within 15 seconds, after a continue."""
        self._status("/continue_generation", {}, 5.0)
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1}}
        return self._status("/generate", body, 15.0) == 200

    def stop(self) -> None:
        """End the group."""
        if self._process is None:
            return
        for kind in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, kind)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(4)
        self._process = None

    def _status(self, path: str, body: object, seconds: float) -> int | None:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:  # noqa: S310
                answer.read()
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except (OSError, ValueError):
            return None

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-_TAIL_CHARACTERS:]


class GpuServer(_Process):
    """Half of the first GPU; the other half is for a trainer beside it."""

    def __init__(self, model: Path, log: Path, *extra: str) -> None:
        port = _free_port()
        settings = {
            "--model-path": str(model),
            "--load-format": "dummy",
            "--dtype": "bfloat16",
            "--host": "127.0.0.1",
            "--port": str(port),
            "--attention-backend": "triton",
            "--sampling-backend": "pytorch",
            "--grammar-backend": "none",
            "--cuda-graph-max-bs-decode": "64",
            "--cuda-graph-backend-prefill": "disabled",
            "--mem-fraction-static": "0.45",
            "--max-running-requests": "128",
            "--stream-interval": "16",
            "--random-seed": "1",
        }
        command = [
            sys.executable,
            "-m",
            "sglang.launch_server",
            *(part for pair in settings.items() for part in pair),
            "--skip-tokenizer-init",
            "--incremental-streaming-output",
            *extra,
        ]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
        super().__init__(command, env, port, log)


def tiny_server(model: Path, log: Path) -> Server:
    """The tests' CPU server, for a dry run of all this without a GPU."""
    root = Path(__file__).resolve().parents[3]
    python = os.environ.get("APRILSCHED_SGLANG_PYTHON", str(root / ".venv-sglang/bin/python"))
    port = _free_port()
    command = [
        python, str(root / "tests/sglang/launch_cpu_server.py"),
        "--model-path", str(model), "--host", "127.0.0.1", "--port", str(port),
        "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native",
        "--max-total-tokens", "65536", "--max-running-requests", "128",
        "--mem-fraction-static", "0.3", "--stream-interval", "16", "--load-format", "dummy",
        "--skip-tokenizer-init", "--disable-overlap-schedule", "--incremental-streaming-output",
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    env.pop("PYTHONPATH", None)
    return _Process(command, env, port, log)


def _free_port() -> int:
    """A port below the ephemeral range: one of that range may be taken while the server boots."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("there is no free port for the server")
