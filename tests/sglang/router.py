"""Starts and stops the real router of SGLang for the tests.

Like a server of the tests, it is a process group of its own on a free loopback port. Only that
group is ever signalled.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.sglang.server import (
    BOOT_SECONDS,
    HERE,
    ListeningProcess,
    free_port,
    server_environment,
    server_python,
)


class SGLangRouter(ListeningProcess):
    """One router, from :meth:`start` to :meth:`stop`, with the settings that pauses need."""

    def __init__(self, workers: Sequence[str], log: Path, **settings: Any) -> None:
        super().__init__(log)
        self._workers = list(workers)
        self._settings: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": self.port,
            "worker_urls": self._workers,
            "policy": "consistent_hashing",
            "disable_health_check": True,
            "disable_circuit_breaker": True,
            "disable_retries": True,
            "request_timeout_secs": 86_400,
            "worker_startup_check_interval": 1,
            "shutdown_grace_period_secs": 1,
            "prometheus_host": "127.0.0.1",
            "prometheus_port": free_port(),
            **settings,
        }

    def start(self) -> None:
        """Start the process and return once it lists every worker it was given.

        Raises:
            RuntimeError: with the end of its log, if it exits or takes too long.
        """
        script = str(HERE / "launch_router.py")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(server_python()), script, json.dumps(self._settings)],
                env=server_environment(),
                cwd=self.log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait_listed(self._workers)

    def wait_listed(self, urls: Sequence[str]) -> None:
        """Return once it lists exactly these workers."""
        deadline = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"The router exited:\n{self.tail()}")
            with contextlib.suppress(OSError):
                if {worker["url"] for worker in self.workers()} == set(urls):
                    return
            time.sleep(0.1)
        raise RuntimeError(f"The router did not list {urls}:\n{self.tail()}")

    def workers(self) -> list[dict[str, Any]]:
        """What it lists."""
        return self._ask("GET", "/workers")["workers"]

    def add(self, url: str) -> None:
        """Have it find one more worker."""
        self._ask("POST", "/workers", {"url": url, "disable_health_check": True})

    def remove(self, url: str) -> None:
        """Have it forget a worker."""
        (found,) = [worker["id"] for worker in self.workers() if worker["url"] == url]
        self._ask("DELETE", f"/workers/{found}")

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            return json.loads(connection.getresponse().read() or b"null")
        finally:
            connection.close()
