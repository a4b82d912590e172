"""Starts and stops real SGLang servers on the CPU for the tests.

A server is a process group of its own on a free loopback port. Only that group is ever signalled.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import http.client
import json
import os
import random
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
BOOT_SECONDS = 600.0
STOP_SECONDS = 20.0
TAIL_LINES = 25
_PORTS = range(20_000, 32_000)
ENVIRONMENT = "APRILSCHED_SGLANG_PYTHON"


def server_python() -> Path:
    """The Python that has SGLang.

    Raises:
        RuntimeError: if it does not exist, because a test must not pass without a server.
    """
    default = HERE.parents[1] / ".venv-sglang" / "bin" / "python"
    python = Path(os.environ.get(ENVIRONMENT, default))
    if not python.is_file():
        raise RuntimeError(
            f"{python} must be the Python of a SGLang environment, but does not exist; run "
            f"`make test`, which builds it, or set {ENVIRONMENT} to another one."
        )
    return python


@functools.cache
def _module_runner(
    purpose: str, python: Path, more: tuple[tuple[str, str], ...]
) -> subprocess.Popen[str]:
    """The process of module_runner.py for a purpose, which the first call starts, with `more` in
    its environment.

    It runs as long as this one.
    """
    process = subprocess.Popen(
        [str(python), str(HERE / "module_runner.py")],
        env={**server_environment(), **dict(more), "PYTHONPATH": str(HERE.parents[1])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    atexit.register(process.communicate)
    return process


def run_with_server_packages(
    module: str,
    *arguments: object,
    purpose: str = "models",
    python: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Return what `main` of a module next to module_runner.py returns, which must be valid JSON. It
    has the server's packages and aprilsched.

    Calls of one `purpose`, `python` and `environment` share a process; the default is SGLang's.

    Raises:
        RuntimeError: if it raises.
    """
    more = tuple((environment or {}).items())
    process = _module_runner(purpose, python or server_python(), more)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([module, *map(str, arguments)]) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline() or '["The process of module_runner.py has ended.", null]'
    trouble, returned = json.loads(answer)
    if trouble is not None:
        raise RuntimeError(f"{module} failed:\n{trouble}")
    return returned


def write_model(
    directory: Path, *, seed: int = 0, kind: str = "dense", python: Path | None = None
) -> Path:
    """Write a tiny random model, "dense" or "moe", into `directory` and return it."""
    run_with_server_packages("tiny_model", directory, seed, kind, python=python)
    return directory


class _Forked:
    """A process that another one has forked for this one, as far as Popen has it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._ends: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ends = None

    def poll(self) -> int | None:
        """None while it runs."""
        return 0 if self._ended(0) else None

    def wait(self, timeout: float) -> None:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: if it does not end in time.
        """
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired("a server", timeout)

    def _ended(self, timeout: float) -> bool:
        if self._ends is not None and select.select([self._ends], [], [], timeout)[0]:
            os.close(self._ends)
            self._ends = None
        return self._ends is None


class ListeningProcess:
    """A process group that listens on a free loopback port and writes into `log`."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.port = free_port()
        self._process: _Forked | subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """End the process group, gently first."""
        if self._process is None:
            return
        for kind in (signal.SIGTERM, signal.SIGKILL):  # the group may outlive its leader
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, kind)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self._process = None

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


class CpuServer(ListeningProcess):
    """One server, from :meth:`start` to :meth:`stop`, or for a ``with`` block."""

    ready_path = "/ready"
    """It answers 200 when the server can be used."""
    launcher = "launch_cpu_server"
    """The module that forks it."""

    def __init__(self, model: Path, log: Path, *extra: str) -> None:
        super().__init__(log)
        self.model = model
        self._extra = extra

    def __enter__(self) -> Self:
        """Start; :meth:`wait_ready` waits until it can be used."""
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process; :meth:`wait_ready` waits for it."""
        self.log.write_bytes(b"")
        pid = run_with_server_packages(
            self.launcher,
            self.log,
            *self._arguments(),
            purpose="servers",
            python=self._python(),
            environment=self._environment(),
        )
        self._process = _Forked(pid)

    def wait_ready(self) -> None:
        """Return once it answers.

        Raises:
            RuntimeError: with the end of its log, if it exits or takes too long.
        """
        deadline = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None or self._cannot_bind():
                raise RuntimeError(f"The server exited while it booted:\n{self.tail()}")
            if _answers(self.port, self.ready_path):
                return
            time.sleep(0.25)
        raise RuntimeError(f"The server was not up after {BOOT_SECONDS:g} s:\n{self.tail()}")

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kill the process group, as a power failure does; the server can be started again."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_SECONDS)
            self._process = None

    def freeze(self) -> None:
        """Stop the processes: the sockets stay open, and nothing answers until :meth:`thaw`."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let the stopped processes continue."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGCONT)

    def _cannot_bind(self) -> bool:
        return b"address already in use" in self.log.read_bytes()

    def _python(self) -> Path:
        return server_python()

    def _environment(self) -> dict[str, str]:
        """Variables besides :func:`server_environment`."""
        return {}

    def _arguments(self) -> list[str]:
        settings = {
            "--model-path": str(self.model),
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--device": "cpu",
            "--dtype": "float32",
            "--attention-backend": "torch_native",
            "--max-total-tokens": "65536",
            "--max-running-requests": "128",
            "--mem-fraction-static": "0.3",
            "--stream-interval": "16",
        }
        flags = [
            "--skip-tokenizer-init",
            "--disable-overlap-schedule",
            # An idle scheduler polls with a whole core, which the other servers need.
            "--sleep-on-idle",
            "--incremental-streaming-output",
        ]
        return [*(part for pair in settings.items() for part in pair), *flags, *self._extra]


def server_environment() -> dict[str, str]:
    # One thread each: two servers and the tests share the machine's cores.
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def free_port() -> int:
    """A free port below the ephemeral range.

    A port in that range may become the local end of another connection before the server binds it
    half a minute later. The server would then run without HTTP.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"No free port from {_PORTS.start} to {_PORTS.stop} for the server.")


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
